"""The game of schedules in a browser, without a kernel."""

import random

import kind
import kind_schedules
import pytest
import widget_pages as pages
from kind_schedules import platinum, spans, written
from schedules_cases import random_segments
from widget_pages import control, texts, unfold, walk

from membudget.widgets import Schedules
from membudget.widgets.schedules import BOSS, LEVELS, ONE_LEVEL, level_of
from tests.soak import SOAK


@pytest.fixture
def page(show):
    return show(Schedules(9))


def agree(page, level=9, segments=None):
    game = Schedules(level, segments)
    kind.agree(kind_schedules.KIND, page, game)


def picture(page):
    return page.locator(".mb-picture")


def cells(page, stages, length=9):
    """The middles of cells, on the page."""
    box = picture(page).bounding_box()
    wide = (box["width"] - 4) / length
    x, y = box["x"] + 2, box["y"] + 74
    return [(x + (stage + 0.5) * wide, y) for stage in stages]


def draw(page, *stages, length=9, drop=True):
    """Press the mouse on a cell, move over others, release."""
    pages.drag(page, *cells(page, stages, length), drop=drop)


def click_bar(page, span):
    box = page.locator(f'[data-span="{span}"]').first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.click(x, y)


def said(page):
    return page.locator(".mb-live").inner_text()


def play_through(page, level, segments):
    """A scripted player drags every segment, outer ones first."""
    control(page, "level").select_option(str(level))
    length = len(level_of(level).stages)
    for first, last in spans(segments):
        draw(page, first, last, length=length)


# The moves -----------------------------------------------------------------


def test_segments_are_dragged_nested_and_removed(page):
    assert "Drag across the cells: they become a segment" in texts(page)
    draw(page, 0, 2, 4)
    agree(page, segments=[[0, 1, 2, 3, 4], 5, 6, 7, 8])
    draw(page, 2, 0)  # from right to left, inside the first
    agree(page, segments=[[[0, 1, 2], 3, 4], 5, 6, 7, 8])
    draw(page, 0, 6)  # around both
    agree(page, segments=[[[[0, 1, 2], 3, 4], 5, 6], 7, 8])
    click_bar(page, "0-4")
    agree(page, segments=[[[0, 1, 2], 3, 4, 5, 6], 7, 8])
    draw(page, 8)  # a segment of one
    draw(page, 7)
    draw(page, 8)  # and not any more
    agree(page, segments=[[[0, 1, 2], 3, 4, 5, 6], [7], 8])
    assert page.locator(".mb-ghost").count() >= 1
    for _ in range(3):
        control(page, "undo").click()
    agree(page, segments=[[[0, 1, 2], 3, 4, 5, 6], 7, 8])
    control(page, "clear").click()
    agree(page)
    assert control(page, "clear").is_disabled()
    control(page, "level").select_option("12")
    agree(page, 12)
    for _ in range(2):
        control(page, "undo").click()
    agree(page, segments=[[[0, 1, 2], 3, 4, 5, 6], 7, 8])


def test_what_would_cross_is_refused(page):
    draw(page, 0, 4)
    draw(page, 3, 6, drop=False)
    assert page.locator(".mb-cross").count() == 1
    page.mouse.up()
    assert page.locator(".mb-mark").count() == 0
    refusal = "Stages 3 to 6 would cross the segment 0 to 4"
    page.get_by_text(refusal).nth(1).wait_for()  # for the ear
    words = page.locator(".mb-live.mb-wrong")
    assert refusal in words.inner_text()
    box, strip = words.bounding_box(), picture(page).bounding_box()
    assert 0 <= strip["y"] - box["y"] - box["height"] < 12
    control(page, "undo").click()
    assert words.count() == 0
    agree(page)
    draw(page, 0, 4)
    draw(page, 0, 4)
    assert "are a segment: click its bar" in said(page)
    draw(page, 5, 8)
    agree(page, segments=[[0, 1, 2, 3, 4], [5, 6, 7, 8]])


def test_it_is_shown_while_it_is_dragged(page):
    draw(page, 0, 4, drop=False)
    assert "The peak is 7 units with 5 extra runs" in said(page)
    assert page.locator("path.mb-ghost").count() == 1
    assert control(page, "undo").is_disabled()
    page.mouse.up()
    assert not control(page, "undo").is_disabled()


def test_all_by_keyboard(page):
    picture(page).focus()
    for key in ("Right", "Right", "Shift+Right", "Shift+Right"):
        page.keyboard.press(key.replace("Right", "ArrowRight"))
    assert "Stages 1 to 3: Enter makes a segment" in said(page)
    page.keyboard.press("Enter")
    agree(page, segments=[0, [1, 2, 3], 4, 5, 6, 7, 8])
    page.keyboard.press("Delete")
    agree(page)
    unfold(page)
    control(page, "segments").fill("0-4, 0-2, 5-6")
    control(page, "segments").press("Enter")
    agree(page, segments=kind_schedules.NESTED)
    control(page, "segments").fill("0-4.3-6")
    control(page, "segments").press("Enter")
    assert page.get_by_text("none may cross another").is_visible()
    control(page, "segments").fill("")
    control(page, "segments").press("Enter")
    agree(page)


# The step ------------------------------------------------------------------


def test_the_step_is_played(show):
    game = Schedules(9, kind_schedules.NESTED)
    page = show(game, reduced_motion="reduce")
    control(page, "play").click()
    assert "1 of 30: stage 0 runs, its tape is not kept" in texts(page)
    assert page.locator(".mb-later").count() == 1
    control(page, "play").click()
    assert "2 of 30: stage 1 runs, its tape is not kept" in texts(page)
    box = picture(page).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2 - 15, box["y"] + 300)
    assert "30 of 30: stage 0 goes backward" in texts(page)
    control(page, "play").click()  # the end leads back to the peak
    assert "11 of 30: stage 8 goes backward" in texts(page)
    assert page.locator(".mb-later").count() == 0


@pytest.mark.few(0)
def test_the_strip_does_not_move(show):
    font = ":root { --pst-font-family-base: 'DejaVu Sans'; }"
    page = show(Schedules(BOSS, ONE_LEVEL), width=806, style=font)
    above = set()
    for key in ("play", "play", "clear", "play"):
        above.add(round(picture(page).bounding_box()["y"]))
        control(page, key).click()
    assert control(page, "play").inner_text() == "Pause"
    assert above == {round(picture(page).bounding_box()["y"])}


def test_a_medal_stays_won_until_the_reset(page):
    for first in (0, 3, 6):
        draw(page, first, first + 2)
    had = page.locator("circle.mb-had")
    assert had.count() == 3  # gold is the peak of bronze here
    control(page, "clear").click()
    assert had.count() == 3
    assert "platinum: 5 u" in texts(page)
    assert page.locator("text.mb-won").count() == 0
    control(page, "reset").click()
    assert had.count() == 0


def test_a_link_holds_the_solution(open_page):
    page = open_page(Schedules())
    medals = [page.locator(f"path.mb-{name}") for name in ("silver", "gold")]
    outer, inner = [medal.bounding_box() for medal in medals]
    assert outer["width"] > inner["width"] + 6  # at one place, both are seen
    play_through(page, 12, platinum(12))
    link = f"schedules.level=12&schedules.segments={written(platinum(12))}"
    page.wait_for_url(f"**?{link}")
    page.reload()
    agree(page, 12, platinum(12))


# Whole games ---------------------------------------------------------------


def test_a_player_wins_platinum_on_every_level(page):
    for level in reversed(LEVELS if SOAK else LEVELS[::3]):
        play_through(page, level, platinum(level))
        agree(page, level, platinum(level))
        assert page.locator("circle.mb-platinum.mb-had").count() == 1
        assert page.locator(".mb-reached").count() >= 1


def test_random_games_score_as_in_python(page):
    """Moves that may be refused leave what Python's machine takes."""
    rng = random.Random(0)
    for _ in range(500 if SOAK else 2):
        level = rng.choice(LEVELS)
        control(page, "level").select_option(str(level))
        length = len(level_of(level).stages)
        if rng.random() < 0.5:
            some = random_segments(rng, 0, length)
            unfold(page)
            control(page, "segments").fill(written(some))
            control(page, "segments").press("Enter")
        for _ in range(6):
            draw(page, *rng.choices(range(length), k=2), length=length)
            bars = page.locator("[data-span]")
            if bars.count() and rng.random() < 0.3:
                bar = bars.nth(rng.randrange(bars.count()))
                click_bar(page, bar.get_attribute("data-span"))
        text = control(page, "segments").input_value()
        left = [tuple(map(int, s.split("-"))) for s in text.split(".") if s]
        game = Schedules(level, kind_schedules.nested(length, left))
        (seen,) = walk(page, [[]])
        kind.prints(kind_schedules.KIND, game, seen)
