"""The timeline widget in a browser, without a kernel."""

import re
from itertools import pairwise

import kind
import kind_timeline
import pytest
import timeline_cases as cases
import widget_pages as pages
from playwright.sync_api import expect
from widget_pages import control, drag, texts

from membudget.widgets import Timeline, format_bytes
from membudget.widgets.timeline import Step, example_steps

STEPS = list(example_steps())
PER_BYTE = 182 / 1.04 / example_steps()["plain"].peak  # pixels


@pytest.fixture
def page(show):
    """Of a reader who wants less motion: nothing plays by itself."""
    return show(Timeline(), reduced_motion="reduce")


def agree(page, **state):
    kind.agree(kind_timeline.KIND, page, Timeline(**state))


def radio(page, name):
    return page.get_by_role("radio", name=name, exact=True)


def spot(page, share, y=280):
    """A place in the curve, at a share of its width."""
    box = page.locator(".mb-picture").bounding_box()
    left, right = 30, box["width"] - (98 if box["width"] < 480 else 115)
    return box["x"] + left + share * (right - left), box["y"] + y


# What it shows -------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("width", [1000, 390])
@pytest.mark.parametrize("step", STEPS)
def test_the_peak_against_the_end_of_the_forward_pass(show, step, width):
    """Two marked points with their numbers, and by how much they differ;
    none before the reader has been there."""
    page = show(Timeline(step=step), width=width, reduced_motion="reduce")
    n = cases.three(Timeline(step=step))
    end, peak = n["forward_end"]["total"], n["peak"]["total"]
    name = "end of forward" if width > 480 else "forward"
    assert not {name, "peak"} & set(texts(page))
    control(page, "forward_end").click()
    assert name in texts(page) and "peak" not in texts(page)
    control(page, "peak").click()
    control(page, "moment").press("Home")
    found = texts(page)
    assert found[found.index("peak") + 1] == format_bytes(peak)
    assert found[found.index(name) + 1] == format_bytes(end)
    assert f"+{format_bytes(peak - end)}" in found
    ends = page.locator(".mb-rise").evaluate("e => e.getBBox().height")
    assert ends == pytest.approx(PER_BYTE * (peak - end), abs=0.1)


def test_the_picture_says_what_is_where(page):
    control(page, "peak").click()
    found = texts(page)
    assert {"threshold_backward of module 13", "14.0 MiB alive"} <= set(found)
    assert {"operators", "◂ drag ▸", "backward pass", "13"} <= set(found)
    assert page.locator(".mb-runs").count() == 1
    assert page.locator(".mb-born").count() == 1
    assert page.locator(".mb-ghost").count() == 0
    control(page, "moment").press("ArrowRight")
    assert page.locator(".mb-born").count() == 0


def test_the_largest_things_alive(page):
    """Equal storages of like modules stand in one row."""
    pages.unfold(page)
    control(page, "peak").click()
    table = page.locator("table").nth(1).locator("tbody tr")
    rows = [re.split(r"\t+", row) for row in table.all_inner_texts()]
    relus = "activations: relu of modules 1 … 13"
    assert rows[0] == [relus, "7 × 1.00 MiB", "7.00 MiB"]
    assert rows[2][:2] == ["parameters: from before the step", "16"]
    assert rows[4][0] == "temporaries: threshold_backward of module 13"


def test_the_ghost_is_the_step_chosen_before(page):
    ghost = page.locator("path.mb-ghost")
    heights = "all => all.map((e) => e.getBBox().y)"
    grid = page.eval_on_selector_all(".mb-grid", heights)
    assert ghost.count() == 0
    for before, step in pairwise(STEPS):
        radio(page, step).check()
        control(page, "moment").press("ArrowRight")
        found, peak = texts(page), example_steps()[before].peak
        assert found[found.index(before) + 1] == format_bytes(peak)
        (top,) = ghost.evaluate_all(heights)
        assert 350 - top == pytest.approx(PER_BYTE * peak, abs=0.1)
    # the axis stands still
    assert page.eval_on_selector_all(".mb-grid", heights) == grid
    control(page, "reset").click()
    assert ghost.count() == 0


def test_the_name_of_the_step_before_is_whole_on_a_phone(show):
    page = show(Timeline(), width=390, reduced_motion="reduce")
    for before, step in pairwise((*STEPS, STEPS[0])):
        radio(page, step).check()
        assert before in texts(page)


@pytest.mark.parametrize("step", STEPS)
def test_the_whole_curve_is_there_from_the_beginning(show, step):
    """A faint silhouette, as high as the peak."""
    page = show(Timeline(step=step), reduced_motion="reduce")
    tall = page.locator(".mb-silhouette").evaluate("e => e.getBBox().height")
    assert tall == pytest.approx(PER_BYTE * example_steps()[step].peak, abs=1)
    assert page.locator(".mb-peak").count() == 0


@pytest.mark.parametrize("width", [390, 811])
def test_nothing_below_moves(show, width):
    page = show(
        Timeline(), width=width, reduced_motion="reduce", style=pages.BOOK_FONT
    )
    places = [
        [("step", step), ("moment", slot)]
        for step in STEPS
        for slot in (0, 60, 120, 200)
    ]
    assert len(set(pages.walk(page, places, pages.BELOW))) == 1


# How it is moved -----------------------------------------------------------


def test_another_step_goes_to_its_start(page):
    control(page, "peak").click()
    radio(page, "accumulated").click()
    agree(page, step="accumulated")
    control(page, "forward_end").press("Enter")
    end = Step(example_steps()["accumulated"]).forward_end
    agree(page, step="accumulated", moment=end)
    control(page, "peak").click()
    peak = example_steps()["accumulated"].peak_moment
    agree(page, step="accumulated", moment=peak)


def test_the_picture_can_be_dragged(page):
    drag(page, spot(page, 0.5))
    moment = int(control(page, "moment").input_value()) - 1
    assert 60 < moment < 100
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, moment=moment + 1)
    drag(page, spot(page, 0.5), spot(page, -0.03))
    agree(page, moment=-1)
    page.mouse.move(300, 300)  # without a button nothing moves
    page.mouse.click(*spot(page, 0.5, y=60))  # nor does the network
    agree(page, moment=-1)


def test_play_goes_through_the_step(show):
    page = show(Timeline(), width=390)
    page.evaluate(
        "() => { const go = window.setInterval;"
        " window.setInterval = (act) => go(act, 1); }"
    )
    control(page, "play").click()
    page.wait_for_function(
        "document.querySelector('[data-key=moment]').value === '275'"
    )
    page.wait_for_function(
        "document.querySelector('[data-key=play]').innerText === 'Play'"
    )


SEEN = "document.querySelectorAll('.mb-peak').length === 1"


def test_it_plays_once_when_it_comes_into_view(show):
    """The whole curve is drawn and the slider goes along; then both are where
    they began, the state stays, and so does the address."""
    page = show(Timeline(), style=".mb-widget { margin-top: 2000px }")
    page.wait_for_timeout(300)
    cursor = "e => e.getAttribute('x1')"
    start = page.locator(".mb-cursor").evaluate(cursor)
    assert page.locator(".mb-peak").count() == 0
    page.locator(".mb-picture").scroll_into_view_if_needed()
    page.wait_for_function(
        "document.querySelector('[data-key=moment]').value > 200"
    )
    page.wait_for_function(SEEN)
    expect(page.locator(".mb-cursor")).to_have_attribute(
        "x1", start, timeout=30_000
    )
    agree(page)
    assert page.locator(".mb-peak").count() == 1
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(100)
    page.locator(".mb-picture").scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    assert page.locator(".mb-cursor").evaluate(cursor) == start


@pytest.mark.parametrize("touch", ["mouse", "keyboard"])
def test_a_touch_ends_what_plays_by_itself(show, touch):
    """And all stays where it was just then."""
    page = show(Timeline())
    moment = control(page, "moment")
    page.wait_for_function(
        "document.querySelector('[data-key=moment]').value > 9"
    )
    if touch == "mouse":
        page.locator(".mb-title").click()
    else:
        moment.press("Shift")
    there = int(moment.input_value())
    assert 9 < there < 275
    agree(page, moment=there - 1)
    page.wait_for_timeout(300)
    agree(page, moment=there - 1)
    moment.press("ArrowRight")
    agree(page, moment=there)


def test_another_step_ends_it_at_its_own_start(show):
    page = show(Timeline())
    page.wait_for_function(
        "document.querySelector('[data-key=moment]').value > 9"
    )
    radio(page, "checkpointed").check()
    agree(page, step="checkpointed")


def test_it_does_not_play_by_itself_where_a_moment_is_given(open_page):
    page = open_page(Timeline(moment=4))
    page.wait_for_timeout(300)
    assert page.locator(".mb-peak").count() == 0
    agree(page, moment=4)
    page = open_page(Timeline())
    page.goto(page.url + "?timeline.moment=9")
    page.wait_for_timeout(500)
    assert page.locator(".mb-peak").count() == 0
    agree(page, moment=8)


@pytest.mark.few(0)
def test_each_phase_is_said_while_it_plays(show):
    page = show(Timeline())
    control(page, "forward_end").click()
    control(page, "play").click()
    live = page.locator(".mb-live")
    expect(live).to_contain_text("backward pass")
    assert control(page, "play").inner_text() == "Pause"


def test_who_wants_less_motion_gets_single_steps(show):
    page = show(Timeline(), reduced_motion="reduce")
    for moment in (0, 1):
        control(page, "play").click()
        assert control(page, "play").inner_text() == "Step"
        agree(page, moment=moment)
    control(page, "moment").press("End")
    control(page, "play").click()  # it begins anew
    agree(page)
