"""The widget of pipelines: its levels, its orders and its picture."""

from itertools import pairwise

import pytest
from kind_parallelism import BEST
from traitlets import TraitError
from widget_pages import control, drag, fits_a_screen, unfold

from membudget.widgets import Parallelism
from membudget.widgets.parallelism import LEVELS


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_begins_without_a_medal_and_has_gold(level):
    assert Parallelism(level).medals() == []
    best = Parallelism(level, order=BEST[level])
    assert best.medals() == ["bronze", "silver", "gold"]


@pytest.mark.parametrize("level", LEVELS)
def test_medals_ask_for_more_and_for_nothing_less(level):
    limits = [(m.tapes, m.time) for m in LEVELS[level].medals]
    for one, other in pairwise(limits):
        assert other != one
        assert other[0] <= one[0] and other[1] <= one[1]


def test_an_order_that_cannot_be_says_why():
    order = BEST["level 1"]
    with pytest.raises(TraitError, match="rank 0 waits at B0 of stage 0"):
        Parallelism("level 1", order=f"B0{order[:4]}{order[6:]}")
    with pytest.raises(TraitError, match="has not the operations"):
        Parallelism("level 1", order="F0")
    widget = Parallelism("level 1", order=order)
    widget.schedule = "level 2"
    assert widget.order == ""


def test_the_sentence():
    assert Parallelism().sentence() == (
        "1F1B with 8 micro-batches on 4 ranks, which share the blocks of "
        "Llama 2 7B: 27 % of the ranks' time is a bubble. Rank 0 has 48.9 "
        "GiB, with 4 tapes; rank 3 has 30.3 GiB."
    )


def middle(page, n):
    """Of the n-th label of an operation."""
    box = page.locator(".mb-picture :is(.mb-on, .mb-off)").nth(n)
    box = box.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_an_operation_is_dragged_and_what_cannot_run_is_refused(show):
    page = show(Parallelism("level 1"), reduced_motion="reduce")
    unfold(page)
    (x, y), (to, _) = middle(page, 12), middle(page, 11)
    drag(page, (x, y), (to - 8, y))  # B0 before F3 on rank 1
    moved = "F0F1F2F3B0B1B2B3.F0F1F2B0F3B1B2B3"
    assert control(page, "order").input_value() == moved
    x, y = middle(page, 4)
    drag(page, (x, y), (middle(page, 0)[0] - 8, y))  # B0 before F0
    words = page.locator(".mb-live.mb-wrong").inner_text()
    assert "That order cannot run: rank 0 waits at B0" in words
    assert control(page, "order").input_value() == moved
    control(page, "undo").click()
    assert control(page, "order").input_value() == ""


def test_all_by_keyboard(show):
    page = show(Parallelism("level 1"), reduced_motion="reduce")
    unfold(page)
    page.locator(".mb-picture").focus()
    for key in ["ArrowDown"] * 2 + ["ArrowRight"] * 4 + ["Shift+ArrowLeft"]:
        page.keyboard.press(key)
    assert control(page, "order").input_value().endswith(".F0F1F2B0F3B1B2B3")


def test_the_cursor_is_dragged(show):
    page = show(Parallelism(), reduced_motion="reduce")
    unfold(page)
    box = page.locator(".mb-handle").bounding_box()
    x, y = box["x"] + 7, box["y"] + 7
    before = page.locator(".mb-picture").inner_html()
    drag(page, (x, y), (x + 300, y))
    assert int(control(page, "moment").input_value()) > 20
    assert page.locator(".mb-picture").inner_html() != before


@pytest.mark.parametrize("width", [390, 1000])
def test_it_fits_a_screen(show, width):
    assert fits_a_screen(show(Parallelism(), width=width))
