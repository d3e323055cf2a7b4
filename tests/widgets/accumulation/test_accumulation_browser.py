"""The accumulation widget in a browser, without a kernel."""

import kind
import kind_accumulation
import pytest
from widget_pages import control, drag, texts, unfold

from membudget.accumulation import Footprint, PeakLine
from membudget.widgets import Accumulation

FRONT = {"micro_batch": 450, "global_batch": 1024}
MEANS = {"normalisation": "mean of means"}


@pytest.fixture
def page(show):
    return show(Accumulation(**FRONT, **MEANS))


def agree(page, **state):
    kind.agree(kind_accumulation.KIND, page, Accumulation(**state))


def budget(page):
    """Where the budget's line is, and the axis's labels."""
    line = page.locator(".mb-limit").get_attribute("y1")
    return line, page.locator('.mb-picture text[text-anchor="end"]').count()


def test_two_lessons_on_the_first_picture(page):
    """The peak is above the budget, and one click mends the weights."""
    assert {"✗ 623 KiB too much", "6 passes", "124"} <= set(texts(page))
    wrong = page.locator(".mb-broken:not(.mb-verdict)")
    weights = ["0.76 × 1/N", "2.75 × 1/N"]
    assert wrong.all_text_contents() == weights
    said = page.locator(".mb-live").inner_text()
    assert all(weight in said for weight in weights)
    page.get_by_role("radio", name="window").check()
    agree(page, **FRONT)
    assert wrong.count() == 0


@pytest.mark.few(0)
def test_steps_under_a_budget_that_stands_still(page):
    before = budget(page)[0]
    steps = control(page, "steps")
    shown = {}
    for count in range(4, 33):
        steps.press("ArrowRight")
        assert steps.input_value() == str(count)
        shown[count] = texts(page)[0]
        assert budget(page)[0] == before
    assert all(verdict.startswith("✓ fits, ") for verdict in shown.values())
    assert page.locator(".mb-ghost").count() == 1
    steps.press("Home")
    agree(page, micro_batch=1024, global_batch=1024, **MEANS)
    assert texts(page)[0] == "✗ 2.99 MiB too much"


def test_steps_that_cannot_be_reached(show):
    """10 samples cannot be cut in 6 equal parts; the thumb stays."""
    page = show(Accumulation(micro_batch=10, global_batch=10))
    steps = control(page, "steps")
    for asked, size in enumerate((5, 4, 3, 2, 2, 2, 2, 2, 1, 1), 2):
        steps.press("ArrowRight")
        assert steps.input_value() == str(asked)
        assert control(page, "micro_batch").input_value() == str(size)


def places(page, index):
    """Where a cut's mark is, and how far a sample is from the next."""
    box = page.locator(".mb-cut").nth(index).bounding_box()
    cells = page.locator(".mb-cell").all()
    wide = sum(cell.bounding_box()["width"] for cell in cells)
    return box["x"] + box["width"] / 2, box["y"] + 20, wide / 1024


def test_a_cut_is_dragged_with_the_mouse(page):
    x, y, sample = places(page, 1)
    drag(page, *((x - by * sample, y + 5) for by in (0, 200, 300)))
    size = int(control(page, "micro_batch").input_value())
    assert 298 <= size <= 302  # the second cut is at twice as much
    agree(page, micro_batch=size, global_batch=1024, **MEANS)
    page.mouse.move(x, y)  # without a button nothing moves
    agree(page, micro_batch=size, global_batch=1024, **MEANS)


def test_a_size_is_chosen_where_its_time_is(page):
    ends = [page.locator(".mb-measured").nth(i) for i in (0, 6)]
    first, last = (end.bounding_box() for end in ends)
    share = 4 / 6  # of the way from 16 to 1 024: 256
    x = first["x"] + share * (last["x"] - first["x"]) + 3
    page.mouse.click(x, first["y"] + 40)
    agree(page, micro_batch=256, global_batch=1024, **MEANS)


@pytest.mark.few(1)
@pytest.mark.parametrize("bad", ["0", "2.5", "", "99999"])
def test_a_bad_global_batch_is_refused_in_words(page, bad):
    unfold(page)
    field = control(page, "global_batch")
    field.fill(bad)
    field.press("Tab")
    assert page.get_by_text("use a whole number from 1 to 65").is_visible()
    kept = page.locator('[data-number="global_batch"]')
    assert kept.inner_text() == "1\u202f024"
    field.fill("300")
    field.press("Enter")
    agree(page, micro_batch=300, global_batch=300, **MEANS)
    assert page.locator(".mb-wrong").inner_text() == ""


@pytest.mark.few(0)
def test_a_model_whose_time_was_not_measured(show):
    lines = [PeakLine(2100, 7)]
    own = Footprint(1000, 1000, 0, lines, lines)
    page = show(Accumulation(own, budget=2 * 10**5))
    assert "time: not measured" in texts(page)
