"""The way to the same page in the other language."""

import site_checks as checks
from project import pages

PAGE, ANCHOR = "chapters/04_checkpointing.html", "#the-price"


def test_every_page_names_its_counterpart(site):
    for page in pages():
        html = checks.soup(site, page)
        head = html.select('head link[rel="alternate"][hreflang]')
        assert [link["hreflang"] for link in head] == ["en", "zh-CN"]
        own = checks.soup(site / "zh", page)
        assert own.html["lang"] == "zh-CN"
        ids = [
            {tag["id"] for tag in it.select("section[id]")}
            for it in (html, own)
        ]
        assert ids[0] == ids[1]


def test_a_reader_goes_over_and_back(window, site):
    page = window("desktop")
    page.goto((site / PAGE).as_uri() + ANCHOR)
    page.locator(".mb-language").click()
    page.wait_for_url((site / "zh" / PAGE).as_uri() + ANCHOR)
    page.locator(".mb-language").click()
    page.wait_for_url((site / PAGE).as_uri() + ANCHOR)


def test_chinese_is_offered_to_who_asks_for_it(window, site):
    page, place = window("chinese"), (site / PAGE).as_uri() + ANCHOR
    page.goto(place)
    offer = page.locator(".mb-offer")
    offer.wait_for()
    assert page.url == place
    assert checks.check_access(page, None, ".mb-offer") == []
    offer.locator("button").click()
    assert offer.count() == 0
    assert page.evaluate("localStorage['mb-language']") == "en"


def test_nobody_else_is_asked(window, site):
    page = window("desktop")
    page.goto((site / PAGE).as_uri() + ANCHOR)
    page.wait_for_load_state("networkidle")
    assert page.locator(".mb-offer").count() == 0
