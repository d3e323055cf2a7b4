"""Readers without JavaScript see what a widget draws at first."""

import re

import pictures
import pytest
import site_checks as checks
from project import pages

SAID = re.compile(r"<text[^>]*>(.*?)</text>", re.S)
DRAWN = [
    page
    for page in pages()
    if any(pictures.FOLDER.glob(f"{page.rpartition('/')[2]}-?.html"))
]


@pytest.fixture(scope="module")
def still(browser):
    with checks.visitor(browser, **pictures.WINDOW) as page:
        yield page


def test_each_widget_has_a_picture(site):
    paths = {path for page in pages() for path in pictures.paths(site, page)}
    assert set(pictures.FOLDER.glob("*.html")) == paths


@pytest.mark.parametrize("page", DRAWN)
def test_a_picture_says_what_its_widget_says(still, site, page):
    """Else `make pictures` draws it anew."""
    live = pictures.drawn(still, (site / f"{page}.html").as_uri())
    for path, text in zip(pictures.paths(site, page), live, strict=True):
        kept = path.read_text("utf-8")
        assert SAID.findall(kept) == SAID.findall(text)
        assert kept.count("<rect") == text.count("<rect")


def test_without_javascript_a_picture_is_seen(window, site):
    page = window("no javascript")
    page.goto((site / "chapters/04_checkpointing.html").as_uri())
    widget = page.locator(".mb-widget").first
    box = widget.locator("svg").bounding_box()
    assert box["width"] > 500 and box["height"] > 200
    assert "With JavaScript" in widget.inner_text()
