"""Every committed notebook keeps the rules of the house."""

import re
from collections import Counter

import hygiene
import prose
import pytest
from project import ROOT, notebooks, pages

TWICE = {"B", "F", "L", "M", "N", "P", "V", "W", "a", "b", "r", "t"}
"""Symbols that still mean two things; their rows say in which chapter."""


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_hygiene(path):
    assert hygiene.problems(path) == []


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_sentences_say_what_the_page_shows(path):
    assert prose.problems(path) == []


def test_links_of_the_other_pages_lead_where_they_say():
    for path in (*(ROOT / "book").glob("*.md"), ROOT / "README.md"):
        assert list(prose.links(path.read_text("utf-8"))) == []


def test_every_notebook_page_exists():
    found = [p.relative_to(ROOT).with_suffix("") for p in notebooks()]
    listed = [p for p in pages() if p.startswith(("chapters/", "labs/"))]
    assert sorted(listed) == sorted(path.as_posix() for path in found)


def test_a_symbol_means_one_thing():
    text = (ROOT / "book/notation.md").read_text("utf-8")
    symbols = re.findall(r"^\| ([^|]*) \|", text.split("## ")[0], re.M)
    found = Counter(re.findall(r"\$([^$]+)\$", " ".join(symbols)))
    assert {symbol for symbol, n in found.items() if n > 1} == TWICE
