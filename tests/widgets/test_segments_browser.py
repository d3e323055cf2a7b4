"""The segment-count widget in a browser, without a kernel."""

import kind
import kind_segments
import pytest
from kind_segments import CHAIN
from widget_pages import control

from membudget.widgets import Segments, format_bytes


@pytest.fixture
def page(show):
    return show(Segments())


def agree(page, **state):
    kind.agree(kind_segments.KIND, page, Segments(**state))


def radio(page, split):
    words = kind_segments.SPLITS[split]
    return page.get_by_role("radio", name=words, exact=True)


def curve(page):
    return page.get_by_role("img").nth(1)


def drag(page, *shares):
    """Press the mouse at a share of the curve's axis, move, release."""
    curve(page).scroll_into_view_if_needed()
    box = curve(page).bounding_box()
    left, right = 34, box["width"] - 84
    y = box["y"] + box["height"] / 2
    for i, share in enumerate(shares):
        page.mouse.move(box["x"] + left + share * (right - left), y)
        if i == 0:
            page.mouse.down()
    page.mouse.up()


# What it shows -------------------------------------------------------------


def test_the_pictures_say_what_is_where(page):
    texts = page.locator(".mb-picture text").all_text_contents()
    assert {"peak", "with k = 0", "forward pass", "R", "backward"} <= set(
        texts
    )
    assert texts[texts.index("peak") + 1] == "8"
    assert page.locator('[data-number="peak"]').inner_text() == "8"
    assert texts[texts.index("with k = 0") + 1] == "17"
    assert texts[texts.index("k = 4") + 1] == "8"
    assert "√L = 4" in texts
    assert "least" not in texts  # the one chosen is among them
    assert page.locator(".mb-best").count() == 4
    control(page, "checkpoint").press("ArrowLeft")
    control(page, "segments").press("Home")
    label = curve(page).get_attribute("aria-label")
    assert label.startswith("Peak for 0 to 16 segments: least at k = ")
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "√(L·a/c) = 4.1" in texts
    assert texts[texts.index("least") + 1] == "7.75"
    assert "with k = 0" not in texts


def test_a_mark_beyond_the_curve(show):
    page = show(Segments(layers=3, checkpoint=0.1), width=320)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "√(L·a/c) = 5.48 →" in texts
    assert page.locator(".mb-mark").count() == 0


def test_recomputation_has_its_colour(page):
    band, *strip = page.locator(".mb-picture .mb-part-recomputed").all()
    assert len(strip) == 4
    purple = "rgb(204, 121, 167)"
    assert band.evaluate("e => getComputedStyle(e).fill") == purple
    control(page, "segments").press("Home")
    assert page.locator(".mb-picture .mb-part-recomputed").count() == 0


def test_a_chain_in_bytes(show):
    page = show(Segments(CHAIN, segments=3, label="12 blocks"))
    agree(page, chain=CHAIN, segments=3)
    assert not control(page, "layers").is_visible()
    assert page.get_by_text("In bytes, from the sizes").is_visible()
    texts = page.locator(".mb-picture text").all_text_contents()
    assert texts.count("MiB") == 2
    assert texts[texts.index("peak") + 1] == "19.0 MiB"
    shown = page.locator('[data-number="peak"]').inner_text()
    assert shown == format_bytes(19 * 2**20)
    assert "√(L·a/c) = 6.93" in texts
    radio(page, "pytorch").check()
    agree(page, chain=CHAIN, segments=3, split="pytorch")


# How it is moved -----------------------------------------------------------


def test_the_curve_can_be_dragged(page):
    drag(page, 0.5)
    agree(page, segments=8)
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, segments=9)
    drag(page, 0.3, 0.6, -0.02)
    agree(page, segments=0)
    drag(page, 0.2, 1.05)
    agree(page, segments=16)
    page.mouse.move(300, 300)  # without a button nothing moves
    agree(page, segments=16)


# What was measured ---------------------------------------------------------


def test_measured_points_stand_where_they_were_measured(show):
    measured = {4: 8, 2: 10}
    page = show(Segments(measured=measured))
    agree(page, measured=measured)
    centres = page.eval_on_selector_all(
        ".mb-measured, .mb-now",
        "all => all.map((e) => [e.cx.baseVal.value, e.cy.baseVal.value])",
    )
    assert len(centres) == 3
    assert centres[1] == centres[2]  # the prediction is right
    assert page.get_by_text("Points were measured.").is_visible()


def test_measured_points_belong_to_their_setting(show):
    state = {"measured": {4: 8.25}}
    page = show(Segments(**state))
    radio(page, "pytorch").check()
    agree(page, split="pytorch")
    assert page.locator(".mb-measured").count() == 0
    assert page.get_by_text("Points were measured.").count() == 0
    radio(page, "balanced").check()
    agree(page, **state)
    control(page, "layers").press("ArrowRight")
    agree(page, layers=17)
    control(page, "layers").press("ArrowLeft")
    control(page, "segments").press("ArrowRight")
    agree(page, segments=5, **state)
    assert page.locator(".mb-measured").count() == 1
