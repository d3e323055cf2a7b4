"""The accumulation widget in a browser, without a kernel."""

import kind
import kind_accumulation
import pytest

from membudget.widgets import Accumulation, format_bytes


@pytest.fixture
def page(show):
    return show(Accumulation())


def agree(page, **state):
    kind.agree(kind_accumulation.KIND, page, Accumulation(**state))


def micro(page):
    return page.get_by_role("slider", name="Micro-batch", exact=True)


def steps(page):
    return page.get_by_role("slider", name="Accumulation steps", exact=True)


def lock(page):
    return page.get_by_role("checkbox", name="Lock the global batch")


def global_batch(page):
    return page.get_by_role("spinbutton", name="Global batch", exact=True)


def click(slider, share):
    """Click a slider at a share of its width; returns its new value."""
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] * share, "y": box["height"] / 2})
    return int(slider.input_value())


def test_numbers_in_words(show):
    shown = Accumulation(normalisation="no division", steps=25)
    page = show(shown)
    for key in ("peak", "whole_peak"):
        words = page.locator(f'[data-number="{key}"]').inner_text()
        assert words == format_bytes(shown.numbers()[key])
    assert page.get_by_text("× 25").is_visible()


def test_sliders_by_mouse(page):
    size = click(micro(page), 0.6)
    assert 250 < size < 360
    agree(page, micro_batch=size)
    count = click(steps(page), 0.5)
    assert 10 < count < 22
    agree(page, micro_batch=size, steps=count)


def test_lock_by_keyboard(page):
    page.keyboard.press("Tab")
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert lock(page).is_checked()
    assert steps(page).is_disabled()
    micro(page).press("ArrowLeft")
    agree(page, micro_batch=127, global_batch=512)
    assert steps(page).input_value() == "5"
    field = global_batch(page)
    field.fill("500")
    field.press("Enter")
    agree(page, micro_batch=127, global_batch=500)
    field.press("ArrowUp")
    agree(page, micro_batch=127, global_batch=501)


@pytest.mark.parametrize("bad", ["0", "2.5", "", "1e9"])
def test_a_bad_global_batch_is_not_taken(page, bad):
    lock(page).check()
    global_batch(page).fill(bad)
    global_batch(page).press("Tab")
    assert global_batch(page).input_value() == "512"
    agree(page, global_batch=512)
