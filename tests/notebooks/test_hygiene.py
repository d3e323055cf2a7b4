"""Every committed notebook keeps the rules of the house."""

import hygiene
import prose
import pytest
from project import ROOT, notebooks, pages


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
