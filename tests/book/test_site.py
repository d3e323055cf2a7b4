"""Every page of the built book."""

import re

import address
import pytest
import site_checks as checks
from project import pages

from tests.soak import SOAK


@pytest.fixture(scope="module")
def server(site):
    with checks.serve(site) as address:
        yield address


def test_nothing_is_missing(site):
    assert checks.missing_files(site) == []


@pytest.mark.parametrize("page", pages())
@pytest.mark.parametrize("check", checks.STATIC, ids=lambda c: c.__name__)
def test_static(site, page, check):
    assert check(site, page) == []


@pytest.mark.parametrize("page", pages())
def test_static_in_chinese(site, page):
    found = [
        part for check in checks.STATIC for part in check(site / "zh", page)
    ]
    assert found == []


def test_the_buttons_lead_to_the_repository_or_are_not_there(site):
    known = address.repository(), address.colab()
    for page in checks.all_pages(site):
        assert checks.check_addresses(site, page, *known) == []


@pytest.mark.parametrize("page", pages())
def test_live_and_for_everybody(window, site, page):
    """Where there is least room, from the disk; axe-core finds nothing. Then
    the reader makes it dark."""
    address, phone = (site / f"{page}.html").as_uri(), window("phone")
    assert checks.check_live(phone, address) == []
    assert checks.check_access(phone, None) == []
    phone.emulate_media(color_scheme="dark")
    assert checks.check_dark(phone, None) == []
    within = "html" if SOAK else ".mb-widget"
    shown = checks.check_access(phone, None, within, ["color-contrast"])
    phone.emulate_media(color_scheme="light")
    assert shown == []


NAMES = {"autocast", "master", "master-fp32-gradients"}
NAMES |= {"gate", "SiLU(gate)", "1/rms"}
"""What a widget asks for in words and is called so in Chinese, too."""


@pytest.mark.few(6)
@pytest.mark.parametrize("page", pages())
def test_live_in_chinese(window, site, page):
    """As above; no words of a widget are missing in its picture."""
    address, phone = (site / f"zh/{page}.html").as_uri(), window("chinese")
    assert checks.check_live(phone, address) == []
    assert checks.check_access(phone, None) == []
    assert {*phone.evaluate("window.mbMissing")} <= NAMES


OF_EACH_KIND = {page.split("/")[0]: page for page in pages()}.values()


@pytest.mark.parametrize("page", OF_EACH_KIND)
def test_served(window, server, page):
    """Where there is much room."""
    address = f"{server}{page}.html"
    assert checks.check_live(window("desktop"), address) == []


@pytest.mark.parametrize("page", OF_EACH_KIND)
def test_without_javascript(window, site, page):
    """That the words are there is seen without a browser, on every page."""
    address = (site / f"{page}.html").as_uri()
    shown = checks.check_without_javascript(window("no javascript"), address)
    assert shown == []


def test_a_reading_waits_for_its_output(window, site):
    page = window("desktop")
    page.goto((site / "chapters/04_checkpointing.html").as_uri())
    reading = page.locator(".tag_hide-output + p").first
    assert reading.text_content().startswith("Reading.")
    assert not reading.is_visible()
    page.locator(".tag_hide-output summary").first.click()
    reading.wait_for(state="visible")


def test_a_search_shows_text(window, server):
    page = window("desktop")
    page.goto(f"{server}search.html?q=checkpoint_sequential")
    found = page.locator("#search-results .context")
    found.first.wait_for()
    assert not re.search(r"import |=|\{", found.first.text_content())


def test_the_cards_are_all_chapters_and_labs_in_order(site):
    """Each has a picture, the page's title and a question."""
    cards = checks.soup(site, "book/intro").select("ul.mb-cards li > p > a")
    wanted = [page for page in pages() if re.search(r"/(\d\d|lab\d)_", page)]
    assert [f"{card['href']}" for card in cards] == [
        f"../{page}.html" for page in wanted
    ]
    for card in cards:
        assert card.select_one("svg[aria-hidden=true]")
        assert card.strong.text and card.strong.next_sibling.text


def test_the_site_has_few_icons(site):
    style = site / "_static/styles/pydata-sphinx-theme.css"
    text = style.read_text("utf-8")
    assert ".fa-bars:before" in text and ".fa-dharmachakra" not in text
    assert not list(site.glob("_static/**/*fa-*"))


@pytest.mark.few(0)
@pytest.mark.parametrize("page", pages())
def test_for_everybody_where_there_is_room(window, site, page):
    address = (site / f"{page}.html").as_uri()
    assert checks.check_access(window("desktop"), address) == []
