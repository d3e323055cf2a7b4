"""The loss-scale widget: what it counts, and how it is dragged."""

import math
from itertools import product
from math import inf

import kind
import kind_lossscale
import precision_cases as cases
import pytest
import torch
from widget_pages import control, drag, texts

from membudget.precision import FORMATS, best_scale, binades, lost
from membudget.widgets import LossScale
from membudget.widgets.lossscale import MOST_BINADES

GRADIENTS, LARGE = cases.GRADIENTS[0], cases.GRADIENTS[3]


@pytest.mark.parametrize(
    "bad, error, why",
    [
        ([], ValueError, "all numbers are zero"),
        ([torch.tensor([inf])], ValueError, "infinite or NaN"),
        ([torch.ones(2).half()], TypeError, "torch.float16"),
        ([None], TypeError, "NoneType: use tensors in fp32"),
    ],
)
def test_bad_gradients(bad, error, why):
    with pytest.raises(error, match=why):
        LossScale(bad)


def test_a_scale_may_be_what_best_scale_gives():
    best = best_scale(GRADIENTS, "fp8-e5m2")
    widget = LossScale(GRADIENTS, scale=best)
    assert type(widget.scale) is int and widget.scale == best
    widget.scale = 2**-3
    assert widget.scale == 0.125
    assert "At a loss scale of 0.125, fp16 makes zero " in widget.sentence()


def jumps():
    """Where a format's shares jump, and beside it."""
    for form in FORMATS.values():
        tie = form.smallest_normal - form.smallest / 2
        edges = form.underflow, form.smallest_normal, tie, form.overflow
        for x, k in product(edges, (0, 3, 24)):
            at = x * 2.0**-k
            yield from (at, math.nextafter(at, 0), math.nextafter(at, inf))


@pytest.mark.parametrize(
    "gradients",
    [GRADIENTS, torch.tensor(list(jumps()), dtype=torch.float64)],
    ids=["usual", "borders"],
)
def test_what_is_lost_is_the_rooms(gradients):
    widget = LossScale(gradients)
    for name in widget.histogram["lost"]:
        for exponent in range(-12, 25):
            widget.scale = 2.0**exponent
            room = lost(gradients, name, widget.scale)
            shown = cases.shares(widget, name)
            assert shown == [room.below, room.subnormal, room.above]
        best = widget.histogram["best"][name]
        assert 2.0**best == best_scale(gradients, name)


def test_bars_are_the_binades():
    bars = LossScale(GRADIENTS).histogram
    assert (bars["zeros"], bars["merged"]) == (7, False)
    shown = {bars["start"] + i: n for i, n in enumerate(bars["counts"]) if n}
    assert shown == binades(GRADIENTS)


def test_far_smaller_gradients_share_a_bar(show):
    widget = LossScale(torch.tensor([1.0, 2.0**-55, 2.0**-56, 1e-40]))
    bars = widget.histogram
    assert (bars["start"], bars["merged"]) == (-55, True)
    assert len(bars["counts"]) == MOST_BINADES
    assert (bars["counts"][0], bars["counts"][-1]) == (3, 1)
    words = "The first bar holds what is smaller, too."
    assert show(widget).get_by_text(words).count() == 1


# In a browser --------------------------------------------------------------


@pytest.fixture
def page(show):
    return show(kind_lossscale.make(LARGE), width=760)


def agree(page, **state):
    widget = kind_lossscale.make(**({"gradients": LARGE} | state))
    kind.agree(kind_lossscale.KIND, page, widget)


def zones(page):
    """Where the walls and the marks of the axis stand."""
    return page.eval_on_selector_all(
        ".mb-wall, .mb-limit, .mb-grid",
        "all => all.map((e) => e.outerHTML)",
    )


def test_the_bars_are_dragged_into_a_wall(page):
    """By the mouse; the axis and the walls stay, and a ghost is left."""
    before = zones(page)
    box = page.get_by_role("img").bounding_box()
    each = (box["width"] - 42) / 64  # binades from 2^-40 to 2^24
    x, y = box["x"] + 300, box["y"] + 150
    drag(page, *((x + by * each, y) for by in (0, 9, 22)))
    agree(page, scale=2**22)
    assert zones(page) == before
    assert page.locator(".mb-ghost").count() == 1
    assert "overflow: step skipped" in texts(page)
    page.keyboard.press("ArrowLeft")  # the keys go on from there
    agree(page, scale=2**21)
    # to the slider's end, and back
    drag(page, *((x + by * each, y) for by in (0, 20, -20)))
    agree(page, scale=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("given", cases.GRADIENTS[:3])
def test_the_largest_scale_without_overflow(show, given):
    page = show(kind_lossscale.make(given))
    button = page.get_by_role("button", name="Largest scale without overflow")
    for name in ("fp16", "bf16", "fp8-e4m3"):
        control(page, "format").select_option(name)
        best = math.log2(best_scale(given, name))
        if best > 24:
            every = page.get_by_text("No scale here overflows")
            assert every.is_disabled()
            continue
        button.press("Enter")
        scale = 2.0 ** min(max(best, -12), 24)
        agree(page, gradients=given, format=name, scale=scale)
        fits = page.get_by_text("no overflow", exact=True)
        assert fits.count() == (best >= -12)
