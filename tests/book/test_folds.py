"""Folded code stands below what it draws, and pages lead on."""

import re
from itertools import pairwise

import pytest
import site_checks as checks
from project import notebooks, pages

PAGES = [f"{path.parent.name}/{path.stem}" for path in notebooks()]


@pytest.mark.parametrize("page", PAGES)
def test_no_fold_stands_directly_under_another(site, page):
    article = checks.soup(site, page).article
    for cell in article.select("div.cell"):
        bars = cell.find_all("details", recursive=False)
        assert len(bars) <= 1
        after = cell.find_next_sibling()
        follows = after and "cell" in after.get("class", [])
        code = "mb-code"
        if bars and follows and code in bars[0]["class"]:
            assert not after.select(f":scope > details.{code}:first-child")


@pytest.mark.parametrize("page", PAGES)
def test_code_that_draws_stands_below_its_picture(site, page):
    """Nothing of a page's code is lost, and none stands above an output of
    its own cell while it is folded."""
    article = checks.soup(site, page).article
    for fold in article.select("details.mb-code"):
        assert fold.select(".cell_input")
        assert fold.find_next_sibling() is None
        cell = fold.find_parent(class_="cell")
        assert not cell.select(":scope > .cell_input")


def test_a_chapter_leads_to_the_next_chapter(site):
    """And a page that goes deeper back to its chapter."""
    chapters = [page for page in pages() if re.search(r"/\d\d_", page)]
    for page, following in pairwise(chapters):
        link = checks.soup(site, page).select_one("a.right-next")
        assert link["href"] == f"{following.partition('/')[2]}.html"
        link = checks.soup(site, following).select_one("a.left-prev")
        assert link["href"] == f"{page.partition('/')[2]}.html"
    deeper = checks.soup(site, "chapters/04b_what_to_keep")
    assert deeper.select_one("a.left-prev")["href"] == "04_checkpointing.html"
    assert deeper.select_one("a.right-next")["href"] == "04c_my_loop.html"


@pytest.mark.parametrize("page", PAGES)
def test_lines_to_copy_are_one_click_from_the_top(site, page):
    article = checks.soup(site, page).article
    there = [
        p for p in article.find_all("p") if p.text.startswith("In a hurry")
    ]
    assert len(article.select("a.mb-hurry")) == bool(there)
    for paragraph in there[:1]:
        way = article.select_one("a.mb-hurry")
        assert way["href"] == f"#{paragraph['id']}"
        assert way.find_parent("p") is article.find("p")


def test_the_front_page_has_a_door_for_people_in_need(site):
    front = checks.soup(site, "book/intro").article
    start = front.select_one(".mb-start a")
    assert start["href"] == "../chapters/01_measuring.html"
    need = next(p for p in front.select("p") if "Out of memory" in p.text)
    assert "your_script" in need.a["href"]


def test_a_first_picture_is_on_the_first_screen(window, site):
    """It begins there on every chapter, on all but one near its top."""
    page = window("desktop")
    starts = []
    for name in [name for name in PAGES if re.search(r"/\d\d_", name)]:
        page.goto((site / f"{name}.html").as_uri())
        picture = page.locator(".mb-figure, .mb-widget").first
        box = picture.bounding_box()
        starts.append(box["y"])
    assert max(starts) < 750
    assert sum(y > 450 for y in starts) <= 1


def test_a_labs_picture_ends_on_the_first_screen(window, site):
    page = window("desktop")
    for name in [name for name in PAGES if "/lab" in name]:
        page.goto((site / f"{name}.html").as_uri())
        box = page.locator(".mb-figure, .mb-widget").first.bounding_box()
        assert box["y"] + box["height"] < 900, name
