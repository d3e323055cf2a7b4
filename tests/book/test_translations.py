"""The Chinese catalogues are in step with the English pages."""

import re
import shutil
import tomllib

import pytest
import translations
import yaml
from babel.messages import pofile
from project import ROOT

DOMAINS = sorted(
    path.relative_to(translations.OWN).with_suffix("").as_posix()
    for path in translations.OWN.rglob("*.po")
)
OPEN = yaml.safe_load((ROOT / "book/locale/open.yml").read_text("utf-8")) or {}
"""The pages with messages that are still in English, each with the version
since which they are."""
HOW = "run `make translations`, then fill in what it lists"
TERM = re.compile(r"([^（]+)（.+）")
NO_TERM = "out of memory"  # a host runs out of its own memory, too
QUOTED = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)|\{[\w-]+\}")


def messages(domain):
    with (translations.OWN / f"{domain}.po").open("rb") as file:
        return [m for m in pofile.read_po(file) if m.id]


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """The messages of each page and of the site, as they are now."""
    place = tmp_path_factory.mktemp("gettext")
    translations.templates(place / "pot", place / "doctrees")
    yield place / "pot"
    shutil.rmtree(place)


def test_no_catalogue_is_behind(templates):
    found = {
        path.relative_to(templates).with_suffix("").as_posix(): path
        for path in templates.rglob("*.pot")
    }
    assert sorted(found) == DOMAINS, HOW
    for domain, path in found.items():
        with path.open("rb") as file:
            now = {m.id for m in pofile.read_po(file)}
        behind = now ^ {"", *(m.id for m in messages(domain))}
        assert behind == set(), f"{domain}.po: {HOW}"


def test_the_site_knows_where_its_words_are_asked_for(templates):
    """A page has the words of its own scripts alone."""
    with (templates / "site.pot").open("rb") as file:
        asked = {m.id: sorted(m.locations) for m in pofile.read_po(file)}
    asked.pop("")
    assert {m.id: sorted(m.locations) for m in messages("site")} == asked, HOW


@pytest.mark.parametrize("domain", DOMAINS)
def test_nothing_is_open(domain):
    """A page that says so may wait until the next version."""
    path = translations.OWN / f"{domain}.po"
    waits = [m.id for m in translations.open_messages(path)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    if domain in OPEN:
        assert waits, f"{domain} is done: take it out of book/locale/open.yml"
        assert OPEN[domain] == project["project"]["version"], HOW
    else:
        assert waits == [], f"{HOW}, or add the page to book/locale/open.yml"


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_translation_keeps_figures_formulas_code_and_links(domain):
    assert {
        m.id: found
        for m in messages(domain)
        if m.string and (found := translations.differences(m.id, m.string))
    } == {}


@pytest.mark.parametrize(
    ("english", "chinese", "found"),
    [
        ("It takes 3 GiB.", "要 4 GiB。", ["without the figure 3"]),
        ("Call `f`.", "调用 `g`。", ["without the code f", "with the code g"]),
        ("See [it](a.md).", "看[它](b.md)。", ["without the link a.md"]),
        ("The sum $a+b$.", "和 $a + b$。", []),
        ("{0} of {1}", "{0} / {0}", ["without the place {1}"]),
        ("{doc}`text <a>`", "{doc}`文字 <a>`", []),
    ],
)
def test_a_difference_is_seen(english, chinese, found):
    seen = translations.differences(english, chinese)
    assert seen[: len(found)] == found and bool(seen) == bool(found)


def test_a_term_has_one_translation():
    """Those of two words or more: in a sentence they mean nothing else."""
    terms = {
        m.id: found[1]
        for m in messages("book/glossary")
        if " " in m.id and (found := TERM.fullmatch(m.string))
    }
    del terms[NO_TERM]
    assert len(terms) > 50
    assert [
        (domain, term, m.string)
        for domain in DOMAINS
        for m in messages(domain)
        for term, own in terms.items()
        if m.string
        and re.search(rf"\b{term}", QUOTED.sub("", m.id), re.IGNORECASE)
        and own not in m.string
    ] == []


def test_chinese_has_its_own_marks():
    """Full-width punctuation, and a blank between it and Latin words."""
    wrong = re.compile(
        "[\u4e00-\u9fff](?:[,;:?!]|\\.(?:\\s|$))"
        "|[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9][\u4e00-\u9fff]"
    )
    kept = re.compile(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|\{[^}]*\}|<[^>]*>")
    assert [
        (domain, found[0], m.string)
        for domain in DOMAINS
        for m in messages(domain)
        if (found := wrong.search(kept.sub("\n", m.string)))
    ] == []
