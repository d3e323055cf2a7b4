"""The timeline widget in a browser, without a kernel."""

import re

import kind
import kind_timeline
import pytest
import timeline_cases as cases
import widget_pages as pages

from membudget.widgets import Timeline, format_bytes
from membudget.widgets.timeline import example_steps

STEPS = list(example_steps())


@pytest.fixture
def page(show):
    return show(Timeline())


def agree(page, **state):
    kind.agree(kind_timeline.KIND, page, Timeline(**state))


def slider(page):
    return page.get_by_role("slider", name="Operator")


def radio(page, name):
    return page.get_by_role("radio", name=name, exact=True)


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def picture(page):
    return page.get_by_role("img").first


def drag(page, *shares):
    """Press the mouse at a share of the picture's width, move, release."""
    box = picture(page).bounding_box()
    y = box["y"] + box["height"] / 2
    for i, share in enumerate(shares):
        page.mouse.move(box["x"] + share * box["width"], y)
        if i == 0:
            page.mouse.down()
    page.mouse.up()


# What it shows -------------------------------------------------------------


def test_numbers_in_words(page):
    n = Timeline().numbers()
    found = page.eval_on_selector_all(
        "[data-number]", "all => all.map(e => [e.dataset.number, e.innerText])"
    )
    for key, text in found:
        moment, category = key.split(".")
        count = n[moment][category]
        assert text == (format_bytes(count) if count else "–")
    assert page.locator("output").inner_text() == "49 of 275"
    sizes = page.locator("table").nth(1).locator("td:last-child")
    shown, rest = n["largest"][:7], n["largest"][7:]
    sizes = sizes.all_inner_texts()
    assert sizes[:-1] == [format_bytes(row["bytes"]) for row in shown]
    assert sizes[-1] == format_bytes(sum(row["bytes"] for row in rest))


def test_the_largest_things_alive(page):
    """Equal storages of like modules stand in one row."""
    rows = page.locator("table").nth(1).locator("tbody tr").all_inner_texts()
    rows = [re.split(r"\t+", row) for row in rows]
    assert rows[0] == [
        "activations: relu of modules 1 … 13",
        "7 × 1.00 MiB",
        "7.00 MiB",
    ]
    assert rows[2][:2] == ["parameters: from before the step", "16 storages"]
    assert rows[4][0] == "temporaries: threshold_backward of module 13"
    assert rows[7][0] == "and 3 smaller"
    radio(page, "checkpointed").check()
    names = page.locator("table").nth(1).locator("tbody th")
    assert names.all_inner_texts()[1:3] == [
        "activations: relu of modules 3, 7",
        "recomputed activations: relu of modules 9, 11",
    ]
    radio(page, "accumulated").check()  # what the chapter names is there
    assert names.all_inner_texts()[4:7:2] == [
        "temporaries: mm of module 12",
        "temporaries: threshold_backward of module 13",
    ]
    slider(page).press("Home")
    assert page.get_by_text("nothing else").is_visible()


def test_the_picture_says_what_is_where(page):
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "threshold_backward of module 13: 14.0 MiB" in texts
    assert {"peak", "end of forward pass", "MiB", "backward pass"} <= set(
        texts
    )
    for name, tracker in example_steps().items():
        at = texts.index(name)
        assert texts[at + 1] == format_bytes(tracker.peak)
    assert page.locator(".mb-picture .mb-recomputation").count() == 0
    radio(page, "checkpointed").check()
    band, *strip = page.locator(".mb-picture .mb-recomputation").all()
    assert len(strip) == 4
    purple = "rgb(204, 121, 167)"
    assert band.evaluate("e => getComputedStyle(e).fill") == purple


@pytest.mark.parametrize("step", STEPS)
def test_the_other_steps_reach_their_peaks(show, step):
    page = show(Timeline(step=step), width=390)
    tops = page.eval_on_selector_all(
        ".mb-picture .mb-other",
        "all => all.map((path) => path.getBBox().y)",
    )
    others = [tracker for name, tracker in example_steps().items()]
    others.remove(example_steps()[step])
    most = max(tracker.peak for tracker in example_steps().values())
    heights = [228 / 1.04 * tracker.peak / most for tracker in others]
    assert [268 - top for top in tops] == pytest.approx(heights, abs=0.06)
    looks = page.eval_on_selector_all(
        ".mb-picture .mb-other",
        "all => all.map((path) => getComputedStyle(path).strokeDasharray)",
    )
    assert len(set(looks)) == 2


@pytest.mark.parametrize("name", list(cases.odd_steps()))
def test_odd_steps(show, name):
    page = show(Timeline(cases.odd_steps(), step=name), width=390)
    widget = Timeline(cases.odd_steps(), step=name)
    assert picture(page).get_attribute("aria-label") == widget.sentence()
    slider(page).press("End")
    slider(page).press("ArrowLeft")
    for key in ("End of forward", "Peak"):
        button(page, key).click()
    assert slider(page).input_value() == str(widget.moment + 1)
    assert page.evaluate(pages.OUTSIDE) == []
    assert page.evaluate(pages.OVERLAPPING) == []


# How it is moved -----------------------------------------------------------


def test_another_step_goes_to_its_peak(page):
    radio(page, "accumulated").click()
    agree(page, step="accumulated")
    slider(page).press("End")
    agree(page, step="accumulated", moment=677)
    page.get_by_text("checkpointed", exact=True).first.click()
    agree(page, step="checkpointed")


def test_buttons(show):
    state = {"step": "accumulated"}
    page = show(Timeline(**state, moment=3))
    end = Timeline(**state).numbers()["forward_end_moment"]
    button(page, "End of forward").press("Enter")
    agree(page, **state, moment=end)
    button(page, "Peak").click()
    agree(page, **state)


def test_the_picture_can_be_dragged(page):
    drag(page, 0.5)
    moment = int(slider(page).input_value()) - 1
    assert 60 < moment < 100
    agree(page, moment=moment)
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, moment=moment + 1)
    drag(page, 0.5, 0.3, 0.001)
    agree(page, moment=-1)
    drag(page, 0.1, 0.999)
    agree(page, moment=274)
    page.mouse.move(300, 300)  # without a button nothing moves
    agree(page, moment=274)


# How it looks --------------------------------------------------------------


def test_a_cut_label_keeps_the_bytes(show):
    """Where the operator's name has no room, the number has."""
    page = show(Timeline(moment=36), width=320)
    label = page.locator(".mb-picture g").nth(1).locator("text")
    assert label.text_content() == "_log_softmax_backward_data: 12.1 MiB"
