"""The planner in a browser, without a kernel."""

import pytest
from widget_pages import control

from membudget.widgets import Planning


@pytest.fixture
def page(open_page):
    return open_page(Planning("small GPT"))


def place(page, selector):
    box = page.locator(f".mb-picture {selector}").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_budget_is_dragged(page):
    """Less memory, a slower plan; and the address keeps it."""
    verdict = page.locator(".mb-verdict").text_content
    fast = verdict()
    x, y = place(page, ".mb-grip")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 250, y, steps=3)
    page.mouse.up()
    assert verdict() != fast
    assert "budget=" in page.url
    words = page.locator(".mb-live").inner_text()
    page.reload()
    page.wait_for_selector(".mb-grip", state="attached")
    assert page.locator(".mb-live").inner_text() == words


def test_a_point_is_a_plan(page):
    dot = page.locator(".mb-picture .mb-point")
    box = dot.first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    number = page.locator("[data-number=peak]")
    least = page.locator("[data-number=least]")
    assert number.get_attribute("data-value") == least.get_attribute(
        "data-value"
    )
    control(page, "best-0").click()
    assert number.get_attribute("data-value") != least.get_attribute(
        "data-value"
    )


def test_nothing_fits(page):
    control(page, "model").select_option("GPT-2 124M")
    page.get_by_text("More settings").click()
    budget = control(page, "budget")
    budget.fill("1000")
    budget.press("Enter")
    assert "Nothing fits in 1000 MiB" in page.locator(".mb-live").inner_text()
    assert page.locator(".mb-plans button:visible").count() == 0
