"""Figures in the page itself."""

import re

import pytest
import site_checks as checks
from project import notebooks

from book._ext import figures

PAGES = [f"{path.parent.name}/{path.stem}" for path in notebooks()]
SVG = """\
<svg width="9pt" viewBox="0 0 300 200" version="1.1"><g>\
<path d="M 0 0 z " style="fill: #ffffff"/></g>\
<path d="M 1 1 z " clip-path="url(#p12)" \
style="fill: #e69f00; stroke: #ffffff"/>\
<path d="M 2 2 z " style="stroke: #000000"/><use xlink:href="#m34"/>\
<text style="font-size: 10px" x="1">a #p12</text>\
<text style="font-size: 9px" x="1">b</text>\
<path id="m34" style="fill: #00618f"/><clipPath id="p12"></clipPath></svg>"""


def test_it_takes_the_colours_of_the_page():
    svg = figures.inline(SVG, "", "f1-")
    assert "M 0 0" not in svg  # the ground
    styles = re.findall(r'<path[^>]*style="([^"]*)"', svg)
    ground = "var(--pst-color-background)"
    assert styles == [
        f"fill: #e69f00; stroke: {ground}",
        "stroke: currentColor",
        "fill: var(--mb-accent)",
    ]


def test_ids_begin_with_its_name():
    svg = figures.inline(SVG, "", "f1-")
    assert re.findall(r' id="([^"]*)"', svg) == ["f1-m34", "f1-p12"]
    assert 'href="#f1-m34"' in svg and "url(#f1-p12)" in svg
    assert ">a #p12<" in svg


def test_its_head_says_what_it_shows_and_how_wide_it_is():
    svg = figures.inline(SVG, 'a "b" \\1 <c>', "f1-")
    head = svg.partition(">")[0]
    assert 'aria-label="a &quot;b&quot; \\1 &lt;c&gt;"' in head
    assert 'role="img"' in head and 'viewBox="0 0 300 200"' in head
    assert "--mb-width: 300; --mb-need: 300px" in head  # 9 points, 9 pixels


@pytest.mark.parametrize("page", PAGES)
def test_each_figure_of_a_notebook_is_in_its_page(site, page):
    html = checks.soup(site, page)
    path = next(p for p in notebooks() if page.endswith(f"/{p.stem}"))
    drawn = path.read_text("utf-8").count('"image/svg+xml": [')
    found = html.select(".mb-figure > svg")
    assert len(found) == drawn
    assert not html.select('.cell_output img:not([src^="data:"])')
    ids = [node["id"] for svg in found for node in svg.select("[id]")]
    assert len(ids) == len(set(ids))
    for svg in found:
        assert len(svg["aria-label"]) > 30
        used = re.findall(r"(?:url\(|href=\")#([\w-]+)", str(svg))
        assert set(used) == {node["id"] for node in svg.select("[id]")}
