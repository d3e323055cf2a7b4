"""The bits widget: its number, and how it is moved in a browser."""

import json
import math
from math import inf

import kind
import kind_bits
import pytest
import widget_pages as pages
from widget_pages import control, drag

from membudget.precision import FORMATS
from membudget.widgets import Bits


@pytest.fixture
def page(show):
    return show(Bits())


def agree(page, *state):
    kind.agree(kind_bits.KIND, page, Bits(*state))


def bit(page, name):
    return page.get_by_role("button", name=name)


@pytest.mark.parametrize("x", [0.1, -0.0, inf, -inf, 5e-324, 1e22, 65520])
def test_a_number_goes_to_the_browser_and_back(x):
    widget = Bits(x)
    state = json.loads(json.dumps(widget.state(), allow_nan=False))
    widget.number = 3
    widget.set_state({"number": state["number"]})
    assert widget.number == x
    assert math.copysign(1, widget.number) == math.copysign(1, x)


def test_the_sentence():
    assert Bits(1e-8).sentence() == (
        "1e-08 in fp16 is 0 00000 0000000000, which is the number 0."
    )


def test_a_bit_is_flipped(page):
    """The number becomes what the bits make."""
    bit(page, "exponent bit 5 of 5: 1").click()
    agree(page, FORMATS["fp16"].round(0.1) / 2)
    bit(page, "sign bit 1 of 1: 0").click()
    agree(page, -FORMATS["fp16"].round(0.1) / 2)
    control(page, "format").select_option("fp8-e4m3")
    bit(page, "fraction bit 1 of 3: 1").click()
    agree(page, -0.03125 - 2**-8, "fp8-e4m3")


def test_the_bits_are_one_stop_of_the_tabulator(page):
    first = bit(page, "sign bit 1 of 1: 0")
    control(page, "format").press("Tab")
    assert first.evaluate("e => e === document.activeElement")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    agree(page, FORMATS["fp16"].round(0.1) - 2**-5)
    page.keyboard.press("ArrowLeft")  # the focus stays on the bit
    page.keyboard.press("Space")
    value = FORMATS["fp16"].value(0, 0b01010, 0b0001100110)
    agree(page, value)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


def test_a_bit_that_would_make_nan_cannot_be_flipped(show):
    page = show(Bits(inf))
    fraction = page.locator(".mb-fraction button").all()
    assert all(one.is_disabled() for one in fraction)
    assert "NaN" in fraction[0].get_attribute("title")
    bit(page, "exponent bit 5 of 5: 1").click()
    agree(page, 2.0**15)
    bit(page, "fraction bit 1 of 10: 0").click()
    last = bit(page, "exponent bit 5 of 5: 0")
    assert last.is_disabled()


def test_the_number_is_dragged(show):
    page = show(Bits(1.0), width=760)
    picture = page.get_by_role("img")
    places = "e => [e.getBoundingClientRect().left + 12 + (e.clientWidth - 24)"
    axis = picture.evaluate(
        f"""{places} * 155 / 290, (e.clientWidth - 24) / 290,
            e.getBoundingClientRect().top + 100]"""
    )
    start, binade, y = axis
    drag(page, (start, y), (start - 20 * binade, y))
    assert page.locator(".mb-ghost").count() == 1
    agree(page, 9.54e-7)  # 2 ** -20, in three digits


def test_the_arrow_keys_double_and_halve(page):
    field = control(page, "number")
    field.press("ArrowDown")
    agree(page, 0.05)
    field.press("ArrowUp")
    field.press("ArrowUp")
    agree(page, 0.2)


@pytest.mark.parametrize("width", [320, 760])
def test_what_may_be_written_has_room(show, width):
    """The whole sentence, below a field that is as wide as it was."""
    page = show(Bits(), width=width)
    field = control(page, "number")
    before = field.bounding_box()["width"]
    field.fill("a half")
    field.press("Enter")
    assert field.bounding_box()["width"] == before > 100
    how = page.get_by_text("Write a number in fp64’s range")
    fits = "e => e.scrollWidth <= e.clientWidth + 1"
    assert how.evaluate(f"e => ({fits})(e.parentElement)")
    assert how.evaluate("e => getComputedStyle(e).whiteSpace") == "normal"


@pytest.mark.few(1)
@pytest.mark.parametrize("typed", ["<b>", "", "1e-400"])
def test_a_text_that_is_no_number(page, typed):
    """The last number stays until there is another."""
    field = control(page, "number")
    for text, wrong in ("2^-3", None), (typed, "true"), ("-inf", None):
        field.fill(text)
        field.press("Enter")
        assert field.get_attribute("aria-invalid") == wrong
        how = page.get_by_text("Write a number in fp64’s range, such as 0.1")
        assert how.count() == bool(wrong)
        if wrong:
            printed = pages.walk(page, [[]])[0]["numbers"]["fp16.value"]
            assert (field.input_value(), printed) == (typed, "0.125")
    agree(page, -inf)
