"""The accumulation widget in a browser, without a kernel."""

import json

import pytest
import widget_pages as pages

from membudget.widgets import Accumulation, bundle, format_bytes


@pytest.fixture
def page(show):
    return show(Accumulation())


def flat(numbers):
    for key, value in numbers.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                yield f"{key}.{inner}", number
        else:
            yield key, value


def agree(page, **state):
    """The page prints the numbers that Python has for this state."""
    widget = Accumulation(**state)
    printed = page.eval_on_selector_all(
        "[data-number]",
        "all => all.map(e => [e.dataset.number, e.dataset.value])",
    )
    printed = {key: json.loads(value) for key, value in printed}
    numbers = dict(flat(widget.numbers()))
    hidden = {"micro_batch", "last_micro_batch", "weight", "last_weight"}
    assert set(printed) == set(numbers) - hidden
    for key, value in printed.items():
        assert value == pytest.approx(numbers[key], rel=1e-12), key
    for key in ("peak", "whole_peak"):
        shown = page.locator(f'[data-number="{key}"]').inner_text()
        assert shown == format_bytes(numbers[key])
    page.wait_for_function(
        "text => document.querySelector('[aria-live=polite]').innerText"
        " === text",
        arg=widget.sentence(),
    )
    picture = page.get_by_role("img").first.get_attribute("aria-label")
    assert picture == widget.sentence()


def micro(page):
    return page.get_by_role("slider", name="Micro-batch", exact=True)


def steps(page):
    return page.get_by_role("slider", name="Accumulation steps", exact=True)


def lock(page):
    return page.get_by_role("checkbox", name="Lock the global batch")


def global_batch(page):
    return page.get_by_role("spinbutton", name="Global batch", exact=True)


def normalisation(page):
    return page.get_by_role("combobox", name="Normalisation", exact=True)


def click(slider, share):
    """Click a slider at a share of its width; returns its new value."""
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] * share, "y": box["height"] / 2})
    return int(slider.input_value())


def test_first_picture(page):
    agree(page)
    title = page.get_by_text("Memory during one window")
    assert title.inner_text().endswith(
        ": an MLP on handwritten digits, with Adam"
    )
    assert page.locator(".mb-fallback").count() == 0


def test_sliders_by_keyboard(page):
    micro(page).press("ArrowRight")
    agree(page, micro_batch=129)
    steps(page).press("ArrowLeft")
    agree(page, micro_batch=129, steps=3)
    steps(page).press("Home")
    agree(page, micro_batch=129, steps=1)
    micro(page).press("Home")
    agree(page, micro_batch=1, steps=1)
    micro(page).press("End")
    agree(page, micro_batch=512, steps=1)


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


def test_lock_by_mouse(page):
    lock(page).click()
    size = click(micro(page), 0.1)
    agree(page, micro_batch=size, global_batch=512)
    page.get_by_text("Lock the global batch").click()
    count = -(-512 // size)
    agree(page, micro_batch=size, steps=count)
    assert steps(page).is_enabled()


@pytest.mark.parametrize("bad", ["0", "-3", "2.5", "", "1e9"])
def test_a_bad_global_batch_is_not_taken(page, bad):
    lock(page).check()
    global_batch(page).fill(bad)
    global_batch(page).press("Tab")
    assert global_batch(page).input_value() == "512"
    agree(page, global_batch=512)


def test_normalisation(show):
    page = show(Accumulation(micro_batch=96, global_batch=500))
    normalisation(page).press("ArrowDown")
    agree(
        page,
        micro_batch=96,
        global_batch=500,
        normalisation="mean of means",
    )
    normalisation(page).select_option("no division")
    agree(page, micro_batch=96, global_batch=500, normalisation="no division")
    assert page.get_by_text("× 25").is_visible()


def test_the_page_shows_the_state_python_gave(show):
    state = {
        "micro_batch": 700,
        "steps": 40,
        "normalisation": "no division",
        "samples": 5,
        "budget": 10,
    }
    page = show(Accumulation(**state))
    agree(page, **state)
    assert micro(page).input_value() == "700"
    assert steps(page).input_value() == "40"


def test_two_widgets_do_not_mix(show):
    page = show(Accumulation(), Accumulation(micro_batch=7, steps=2))
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 10
    micro(page).nth(1).press("ArrowRight")
    values = page.eval_on_selector_all(
        '[data-number="global_batch"]', "all => all.map(e => e.dataset.value)"
    )
    assert values == ["512", "16"]


def test_every_part_has_a_role_and_a_name(page):
    images = page.get_by_role("img").all()
    assert len(images) == 2
    assert all(image.get_attribute("aria-label") for image in images)
    for control in page.locator("input, select").all():
        label = control.evaluate("e => e.labels.length")
        assert label == 1
        # JupyterLab would else take the arrow keys for its shortcuts.
        assert control.get_attribute("data-lm-suppress-shortcuts")
    assert micro(page).get_attribute("aria-valuetext") == "128 samples"
    rows = page.get_by_role("rowheader").all_inner_texts()
    assert {"gradients", "activations and inputs", "peak"} <= set(rows)
    columns = page.get_by_role("columnheader").all_inner_texts()
    assert columns[1:] == ["window", "whole batch"]


def test_focus_is_visible(page):
    page.keyboard.press("Tab")
    style = page.evaluate("getComputedStyle(document.activeElement).outline")
    assert "solid 2px" in style


@pytest.mark.parametrize("width", [320, 390, 1200])
@pytest.mark.parametrize("style", ["", pages.DARK], ids=["light", "dark"])
def test_every_width_and_theme(show, width, style):
    page = show(
        Accumulation(
            micro_batch=96, global_batch=500, normalisation="mean of means"
        ),
        width=width,
        style=style,
    )
    page.wait_for_function(
        "document.querySelector('.mb-root svg').viewBox.baseVal.width !== 640"
    )
    inner = page.evaluate("document.documentElement.scrollWidth")
    assert inner == width
    # No text leaves its picture, and text is as large as it is written.
    outside = page.evaluate(pages.OUTSIDE)
    assert outside == []
    colours = pages.colours(
        page,
        ".mb-root, .mb-root td, .mb-root dd, .mb-root label",
    )
    expected = "rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"
    assert colours == {expected}


@pytest.mark.parametrize("width", [320, 390, 1000])
def test_labels_do_not_overlap(show, width):
    """At none of many states two texts of the picture overlap."""
    page = show(Accumulation(normalisation="mean of means"), width=width)
    lock(page).check()
    values = (1, 3, 40, 100, 130, 255, 256, 400, 511, 512)
    states = [[("micro_batch", value)] for value in values]
    assert pages.misfits(page, states) == []


def test_nothing_moves_by_itself(page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text("accumulation")
    assert "transition" not in style and "animation" not in style


def test_clean_up(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


def test_without_javascript(show):
    widget = Accumulation()
    page = show(widget, java_script_enabled=False, width=390)
    assert page.get_by_role("img").is_visible()
    assert page.get_by_text(widget.sentence()).is_visible()
    box = page.get_by_role("img").bounding_box()
    assert box["x"] + box["width"] <= 390
