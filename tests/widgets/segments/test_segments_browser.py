"""The segment-count widget in a browser, without a kernel."""

import kind
import kind_segments
import pytest
import widget_pages as pages
from kind_segments import CHAIN
from widget_pages import control, texts, unfold

from membudget.widgets import Segments


@pytest.fixture
def page(show):
    return show(Segments())


def agree(page, **state):
    kind.agree(kind_segments.KIND, page, Segments(**state))


def picture(page):
    return page.locator(".mb-picture")


def place(page, share, y):
    """On the page, a share of the axis and a height of the picture."""
    box = picture(page).bounding_box()
    left, right = 34, box["width"] - 84
    return box["x"] + left + share * (right - left), box["y"] + y


def drag(page, y, *shares):
    """Press the mouse at a share of the axis, move, release."""
    picture(page).scroll_into_view_if_needed()
    pages.drag(page, *(place(page, share, y) for share in shares))


LAYERS, STEP, CURVE = 34, 160, 335


# What it shows -------------------------------------------------------------


def test_the_picture_says_what_is_where(page):
    found = texts(page)
    assert {"peak", "with k = 0", "forward pass", "R", "backward"} <= set(
        found
    )
    assert found[found.index("peak") + 1] == "8"
    assert found[found.index("with k = 0") + 1] == "17"
    assert found[found.index("k = 4") + 1] == "8"
    assert "√L = 4" in found
    assert "least" not in found  # the one chosen is among them
    assert page.locator(".mb-best").count() == 4
    assert page.locator(".mb-cut").count() == 3
    unfold(page)
    control(page, "checkpoint").press("ArrowLeft")
    control(page, "segments").press("Home")
    found = texts(page)
    assert "√(L·a/c) = 4.1" in found
    assert found[found.index("least") + 1] == "7.75"
    assert "with k = 0" not in found


def test_a_mark_beyond_the_curve(show):
    page = show(Segments(layers=3, checkpoint=0.1), width=320)
    assert "√(L·a/c) = 5.48 →" in texts(page)
    assert page.locator(".mb-mark").count() == 0


def test_a_chain_in_bytes(show):
    page = show(Segments(CHAIN, segments=3, label="12 blocks"))
    agree(page, chain=CHAIN, segments=3)
    assert not control(page, "layers").is_visible()
    found = texts(page)
    assert found.count("MiB") == 2
    assert found[found.index("peak") + 1] == "19.0 MiB"
    assert "√(L·a/c) = 6.93" in found
    unfold(page)
    assert page.get_by_text("In bytes, from the sizes").is_visible()
    control(page, "split").select_option("pytorch")
    agree(page, chain=CHAIN, segments=3, split="pytorch")


# How it is moved -----------------------------------------------------------


def test_the_curve_can_be_dragged(page):
    drag(page, CURVE, 0.5)
    agree(page, segments=8)
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, segments=9)
    drag(page, CURVE, 0.3, 0.6, -0.02)
    agree(page, segments=0)
    page.mouse.move(300, 300)  # without a button nothing moves
    agree(page, segments=0)


def test_checkpoints_can_be_dragged(page):
    drag(page, LAYERS, 4 / 16, 6.2 / 16, 5 / 16)
    agree(page, cuts=[5, 8, 12])
    assert page.locator(".mb-ghost").count() == 1
    drag(page, LAYERS, 12 / 16, 0)
    agree(page, cuts=[5, 8, 9])
    drag(page, LAYERS, 0.9, 0.2)  # no checkpoint is near
    agree(page, cuts=[5, 8, 9])
    control(page, "segments").press("ArrowRight")
    agree(page, segments=5)


def test_a_finger_drags_sideways_and_scrolls_up_and_down(show):
    """In every widget: what looks at fingers is in the kit."""
    page = show(Segments(), has_touch=True, width=390)
    page.evaluate("document.body.style.height = '3000px'")
    touch = page.context.new_cdp_session(page)

    def swipe(kind, x=0, y=0):
        points = [] if kind == "touchEnd" else [{"x": x, "y": y}]
        touch.send(
            "Input.dispatchTouchEvent",
            {"type": kind, "touchPoints": points},
        )

    x, y = place(page, 8 / 16, CURVE)
    swipe("touchStart", x, y)
    agree(page, segments=4)  # not yet
    swipe("touchMove", place(page, 10 / 16, CURVE)[0], y)
    swipe("touchEnd")
    agree(page, segments=10)
    swipe("touchStart", x, y)
    for up in range(10, 120, 10):
        swipe("touchMove", x, y - up)
    swipe("touchEnd")
    page.wait_for_function("scrollY > 50")
    agree(page, segments=10)
    x, y = place(page, 8 / 16, CURVE)
    page.touchscreen.tap(x, y)
    agree(page, segments=8)
    action = picture(page).evaluate("e => getComputedStyle(e).touchAction")
    assert action == "pan-y"


def test_the_step_is_played(show):
    """One moment for each press where less motion is wanted."""
    page = show(Segments(), reduced_motion="reduce")
    play = control(page, "play")
    assert play.inner_text() == "Step"
    assert "24 of 54: layer 16 goes backward" in texts(page)
    play.click()
    assert "1 of 54: layer 1 runs, its tape is not kept" in texts(page)
    play.click()
    assert "2 of 54: layer 2 runs, its tape is not kept" in texts(page)
    drag(page, STEP, 0.999)
    assert "54 of 54: layer 1 goes backward" in texts(page)
    play.click()  # the end leads back to the peak
    assert "24 of 54: layer 16 goes backward" in texts(page)
    agree(page)


@pytest.mark.few(0)
def test_the_same_by_keyboard(page):
    unfold(page)
    control(page, "cuts").fill("5, 9 12-14")
    control(page, "cuts").press("Enter")
    agree(page, cuts=[5, 9, 12, 14])
    control(page, "cuts").fill("9-5")
    control(page, "cuts").press("Enter")
    assert page.get_by_text("use numbers in ascending order").is_visible()
    control(page, "cuts").fill("")
    control(page, "cuts").press("Enter")
    agree(page, segments=5)
    control(page, "moment").press("Home")
    assert "1 of 56: layer 1 runs, its tape is not kept" in texts(page)


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
    unfold(page)
    assert page.get_by_text("Points were measured.").is_visible()


@pytest.mark.few(0)
def test_measured_points_belong_to_their_setting(show):
    state = {"measured": {4: 8.25}}
    page = show(Segments(**state))
    unfold(page)
    control(page, "split").select_option("pytorch")
    agree(page, split="pytorch")
    assert page.locator(".mb-measured").count() == 0
    control(page, "split").select_option("balanced")
    agree(page, **state)
    control(page, "segments").press("ArrowRight")
    agree(page, segments=5, **state)
    assert page.locator(".mb-measured").count() == 1
