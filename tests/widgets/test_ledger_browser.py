"""The ledger widget in a browser, without a kernel."""

import kind
import kind_ledger
import pytest
import widget_pages as pages
from widget_pages import control

from membudget.widgets import Ledger, format_bytes
from membudget.widgets.ledger import BARS

GIB = 2**30


@pytest.fixture
def page(show):
    return show(Ledger())


def agree(page, **state):
    kind.agree(kind_ledger.KIND, page, Ledger(**state))


def shape(page):
    """Open the folded part."""
    page.locator("summary").click()
    return page


def enter(page, key, value):
    control(page, key).fill(str(value))
    control(page, key).press("Tab")


# What it shows -------------------------------------------------------------


def test_the_bars_say_what_is_the_peak(page):
    texts = page.locator(".mb-picture text").all_text_contents()
    n = Ledger().numbers()
    for bar in BARS:
        (text,) = [t for t in texts if t.startswith(f"{bar}: ")]
        assert format_bytes(n[bar]["bytes"]) in text
        assert ("peak" in text) == (n[bar] == n["peak"])
    shown = page.locator("output").all_text_contents()
    assert shown == ["8", "1024", "1"]
    assert not control(page, "width").is_visible()  # folded


def test_a_budget_is_a_dashed_line(show):
    page = show(Ledger(budget=15 * GIB))
    agree(page, budget=15 * GIB)
    line = page.locator(".mb-picture .mb-limit")
    assert line.count() == 1
    dashes = line.evaluate("e => getComputedStyle(e).strokeDasharray")
    assert dashes != "none"
    control(page, "budget").select_option("140 GiB (H200)")
    agree(page, budget=140 * GIB)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "budget 140 GiB →" in texts
    assert line.count() == 0
    control(page, "budget").select_option("none")
    agree(page)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert not any("budget" in text for text in texts)


def test_categories_have_their_colours(page):
    colours = page.eval_on_selector_all(
        ".mb-table .mb-swatch rect:first-child",
        "all => all.map((rect) => getComputedStyle(rect).fill)",
    )
    assert colours == [
        *("rgb(0, 114, 178)", "rgb(230, 159, 0)", "rgb(0, 158, 115)"),
        *("rgb(213, 94, 0)", "rgb(86, 180, 233)", "rgb(138, 138, 138)"),
    ]


# How it is moved -----------------------------------------------------------


def test_a_shape_of_its_own(page):
    shape(page)
    enter(page, "depth", 24)
    agree(page, depth=24)
    assert control(page, "preset").input_value() == ""
    control(page, "tied").press("Space")
    agree(page, depth=24, tied=False)
    control(page, "preset").select_option("GPT-2 124M")
    agree(page)
    control(page, "family").select_option("llama")
    agree(page, family="llama")
    enter(page, "hidden", 2000)
    enter(page, "kv_heads", 3)
    agree(page, family="llama", hidden=2000, kv_heads=3)


def test_own_shape_opens_the_fold(page):
    control(page, "preset").select_option("own shape")
    assert control(page, "width").is_visible()


def test_what_cannot_be_is_said_and_the_picture_stays(page):
    shape(page)
    wrong = page.get_by_role("alert")
    picture = page.locator(".mb-picture").inner_html()
    enter(page, "width", 1000)
    assert wrong.inner_text() == (
        "width 1000 is not a multiple of 12 heads: use a number of heads "
        "that divides it"
    )
    assert page.locator(".mb-picture").inner_html() == picture
    assert control(page, "width").input_value() == "1000"
    assert control(page, "width").get_attribute("aria-invalid") == "true"
    assert page.locator(".mb-ledger.mb-stale").count() == 1
    assert control(page, "depth").get_attribute("aria-invalid") == "false"
    enter(page, "heads", 10)  # now both together can be
    assert wrong.count() == 0
    agree(page, width=1000, heads=10)
    assert control(page, "width").get_attribute("aria-invalid") == "false"
    assert page.locator(".mb-stale").count() == 0


@pytest.mark.parametrize("bad", ["-3", "2.5", "", "1e9"])
def test_a_size_that_cannot_be(page, bad):
    shape(page)
    enter(page, "depth", bad)
    said = page.get_by_role("alert").inner_text()
    assert said.startswith(f"depth is {float(bad or 0):.10g}: use ") or (
        said == "depth is 1000000000: use at most 256"
    )
    control(page, "preset").select_option("GPT-2 XL 1.5B")
    assert page.get_by_role("alert").count() == 0
    agree(page, preset="GPT-2 XL 1.5B")


def test_more_tokens_than_positions(page):
    control(page, "tokens").press("ArrowRight")
    said = page.get_by_role("alert").inner_text()
    assert said.startswith("2048 tokens are more than the 1024 learned")
    control(page, "tokens").press("ArrowLeft")
    agree(page)
    control(page, "tokens").press("ArrowRight")
    control(page, "preset").select_option("Mistral 7B")
    agree(page, preset="Mistral 7B", tokens=2048)


def test_whole_shapes_are_sent(page):
    page.evaluate(pages.KERNEL)
    shape(page)
    enter(page, "width", 1000)
    enter(page, "heads", 8)
    sent = page.evaluate("window.sent")
    assert sent == [{"width": 1000, "heads": 8, "preset": ""}]
