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


def go_to(page, level):
    page.locator(f'[data-key="level"][value="{level}"]').check()


def best_of(page):
    """By level, the medal that its row shows."""
    return page.evaluate("""() => Object.fromEntries(
      [...document.querySelectorAll("[data-medal]")].map((label) =>
        [label.querySelector("input").value, label.dataset.medal]))""")


def said(page):
    return page.locator(".mb-live").inner_text()


def play_through(page, level, segments):
    """A scripted player drags every segment, outer ones first."""
    go_to(page, level)
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
    go_to(page, 12)
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


def test_a_long_strip_moves_under_a_finger(show):
    """On a phone: by the space above it, the bar below it, and by itself
    while a segment is drawn beyond the edge."""
    page = show(Schedules(36), width=390)
    box, cells = picture(page).bounding_box(), page.locator(".mb-cell")

    def middle(stage):
        cell = cells.nth(stage).bounding_box()
        assert cell["width"] >= 20
        return cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2

    def pull(y, start, end):
        pages.drag(page, *((box["x"] + x, box["y"] + y) for x in (start, end)))

    pull(12, 330, 80)
    pages.drag(page, middle(20), middle(22))
    agree(page, 36, kind_schedules.nested(36, [(20, 22)]))
    control(page, "clear").click()
    pull(98, 200, 5)
    assert cells.first.bounding_box()["x"] == box["x"] + 3
    right = box["x"] + box["width"] - 5
    pages.drag(page, middle(2), (right, middle(2)[1]), drop=False)
    page.wait_for_function(
        "document.querySelector('.mb-mark').getBBox().width > 22 * 20"
    )
    page.mouse.up()
    first, last = control(page, "segments").input_value().split("-")
    assert (first, int(last) > 20) == ("2", True)


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


def test_a_medal_stays_until_it_is_forgotten(open_page):
    page = open_page(Schedules())
    for first in (0, 3, 6):
        draw(page, first, first + 2)
    had = page.locator("circle.mb-had")
    mine = page.locator(".mb-reached")
    assert had.count() == 2
    assert mine.count() == 2
    control(page, "clear").click()
    assert page.locator("text.mb-won").count() == 0
    control(page, "reset").click()
    go_to(page, 36)
    assert had.count() == mine.count() == 0
    page.reload()
    go_to(page, 9)
    assert had.count() == 2
    assert mine.count() == 2
    none = dict.fromkeys(map(str, LEVELS), "no medal")
    assert best_of(page) == none | {"9": "silver"}
    name = page.get_by_role("radio", name="9 stages, silver")
    assert name.is_checked()
    unfold(page)
    assert "Your medals, 2 of 28, stay" in page.inner_text(".mb-tally")
    control(page, "forget").click()
    assert control(page, "forget").is_disabled()
    assert mine.count() == 0
    page.reload()
    assert best_of(page) == none
    assert mine.count() == 0


@pytest.mark.parametrize("text", ["7", "null", "[", '{"9": "wood", "x": 1}'])
def test_what_the_browser_kept_may_be_anything(open_page, text):
    page = open_page(Schedules())
    for key in ("mb-medals", "mb-scores"):
        store = "([key, text]) => localStorage.setItem(key, text)"
        page.evaluate(store, [key, text])
    page.reload()
    assert set(best_of(page).values()) == {"no medal"}
    draw(page, 0, 4)
    assert best_of(page)["9"] == "bronze"
    page.evaluate("localStorage.clear()")


def test_a_worse_plan_takes_no_medal_away(page):
    play_through(page, 9, platinum(9))
    assert best_of(page)["9"] == "platinum"
    click_bar(page, "0-4")
    assert "platinum" not in said(page)
    assert best_of(page)["9"] == "platinum"


def test_next_level_leads_to_the_boss(page):
    onward = control(page, "next")
    assert page.locator(".mb-onward").count() == 0
    draw(page, 0, 4)
    assert page.locator(".mb-onward").count() == 1
    for level in LEVELS[1:]:
        onward.click()
        agree(page, level)
    assert onward.is_disabled()


def test_a_link_holds_the_solution(open_page):
    page = open_page(Schedules())
    play_through(page, 12, platinum(12))
    link = f"schedules.level=12&schedules.segments={written(platinum(12))}"
    page.wait_for_url(f"**?{link}")
    page.reload()
    agree(page, 12, platinum(12))
    page.evaluate("localStorage.clear()")


COPY = """() => Object.defineProperty(navigator, "clipboard", {
  value: { writeText: async (text) => { window.copied = text; } } })"""


def test_a_result_is_shared_and_wins_nothing_for_others(open_page):
    page = open_page(Schedules())
    page.evaluate(COPY)
    go_to(page, 16)
    for first, last in ((0, 4), (5, 8), (9, 11), (12, 13)):
        draw(page, first, last, length=16)
    control(page, "share").click()
    page.wait_for_function("window.copied")
    result, link = page.evaluate("copied").rsplit(" ", 1)
    assert result == "16 stages: 7 units, 14 runs, silver"
    assert f"Copied, with a link: {result}." in said(page)
    draw(page, 0, 1, length=16)
    assert "Copied" not in said(page)
    page.evaluate("localStorage.clear()")
    page.goto(link)
    assert f"This plan came with the link. {result}. Clear" in said(page)
    assert page.locator("text.mb-won").count() == 2
    assert page.locator("circle.mb-had").count() == 0
    assert set(best_of(page).values()) == {"no medal"}
    control(page, "clear").click()
    control(page, "undo").click()
    assert "silver" in said(page)
    assert best_of(page)["16"] == "no medal"


def test_without_a_clipboard_a_result_is_shown(page):
    page.evaluate("window.prompt = (...words) => { window.asked = words; }")
    page.evaluate("""Object.defineProperty(navigator, "clipboard", {
      value: undefined })""")
    control(page, "share").click()
    title, words = page.evaluate("asked")
    assert title == "To share:"
    assert words.startswith("9 stages: 10 units, 0 runs about:blank?")


SPARKS = "document.querySelectorAll('.mb-spark').length"


def test_a_new_medal_is_celebrated_once(page):
    draw(page, 0, 4)
    assert page.evaluate(SPARKS) == 10
    page.wait_for_function(f"{SPARKS} === 0")
    control(page, "undo").click()
    draw(page, 0, 4)
    assert page.evaluate(SPARKS) == 0


def test_who_wants_less_motion_sees_none(show):
    page = show(Schedules(), reduced_motion="reduce")
    draw(page, 0, 4)
    assert best_of(page)["9"] == "bronze"
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.evaluate(SPARKS) == 0


# Whole games ---------------------------------------------------------------


def test_a_player_wins_platinum_on_every_level(page):
    levels = LEVELS if SOAK else LEVELS[::3]
    for level in reversed(levels):
        play_through(page, level, platinum(level))
        agree(page, level, platinum(level))
        assert page.locator("circle.mb-had").count() == 4
        assert page.locator(".mb-reached").count() >= 1
    won = dict.fromkeys(map(str, levels), "platinum")
    assert best_of(page).items() >= won.items()


def test_random_games_score_as_in_python(page):
    """Moves that may be refused leave what Python's machine takes."""
    rng = random.Random(0)
    for _ in range(500 if SOAK else 2):
        level = rng.choice(LEVELS)
        go_to(page, level)
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
