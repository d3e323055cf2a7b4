"""What is published: the site with its addresses, and the branch for Colab."""

import os
import re
import subprocess
import sys
from pathlib import Path

import address
import nbformat
import publish
import pytest
import setup_cell
import site_checks as checks
from fontTools.ttLib import TTFont
from project import PATIENCE, ROOT, notebooks, pages

URL = "https://github.com/someone/a-fork"
SITE = "https://someone.github.io/a-fork"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The book as `publish.yml` builds it."""
    folder = tmp_path_factory.mktemp("published")
    book = Path(sys.executable).with_name("jupyter-book")
    options = ["-W", "-n", "--keep-going", "-q", "--path-output", folder]
    addresses = {"MEMBUDGET_REPOSITORY": f"{URL}.git", "MEMBUDGET_SITE": SITE}
    done = subprocess.run(
        [book, "build", ROOT, *options],
        env={**os.environ, **addresses},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return folder / "_build/html"


def check_filled(text, path, requirement):
    """The source's notebook, outputs and all, but for the first cell."""
    notebook = nbformat.reads(text, as_version=4)
    cell = setup_cell.first_code_cell(notebook)
    runs = "from membudget_experiments" in text
    assert cell.source == setup_cell.long(requirement, runs)
    cell.source = setup_cell.SHORT
    assert notebook == nbformat.read(path, as_version=4)


def relative(path):
    return path.relative_to(ROOT).as_posix()


def test_every_button_leads_to_the_repository(published):
    assert set(pages()) < set(checks.all_pages(published))
    for page in checks.all_pages(published):
        assert checks.check_addresses(published, page, URL, True) == []


def test_links_inside_of_the_site_are_whole(published):
    """The Chinese pages are not built here."""
    for page in pages():
        found = checks.check_links(published, page)
        assert [problem for problem in found if "/zh/" not in problem] == []


def test_search_engines_hear_where_the_other_language_is(published):
    for page in pages():
        head = checks.soup(published, page).select("head link[hreflang]")
        assert {link["hreflang"]: link["href"] for link in head} == {
            "en": f"{SITE}/{page}.html",
            "zh-CN": f"{SITE}/zh/{page}.html",
        }


def test_how_to_run_it_says_where_it_is(published):
    text = checks.soup(published, "book/start").article.get_text()
    assert f"git clone {URL}\ncd a-fork\n" in text
    for name in "membudget", "membudget[course]":
        wheel = f'pip install "{name} @ {SITE}/{address.wheel()}"\n'
        assert f'{wheel}pip install "{name} @ git+{URL}"\n' in text
    for words in "rocket button", "One line installs", "open an issue":
        assert words in text


def test_without_an_address_nothing_is_said_of_it(site):
    if address.repository():
        pytest.skip("this book has been built with an address")
    text = checks.soup(site, "book/start").article.get_text()
    for words in "git clone", "rocket button", "One line", "issue":
        assert words not in text


def test_pages_and_downloads_have_the_cell_that_installs(published):
    wheel = f"{SITE}/{address.wheel()}"
    for path in notebooks():
        shown = checks.soup(published, relative(path.with_suffix("")))
        text = (published / "_sources" / relative(path)).read_text("utf-8")
        cell = setup_cell.first_code_cell(nbformat.reads(text, 4))
        assert cell.source in shown.article.get_text()
        check_filled(text, path, wheel)


def test_the_site_carries_the_wheels(published, tmp_path):
    """The same bytes again, whatever a new file may be allowed."""
    before = os.umask(0o077)
    try:
        publish.wheels(tmp_path)
    finally:
        os.umask(before)
    built = sorted(path.name for path in tmp_path.iterdir())
    both = [
        address.wheel(),
        setup_cell.of_experiments(f"/{address.wheel()}")[1:],
    ]
    assert built == sorted(both)
    for name in built:
        other = published / name
        assert (tmp_path / name).read_bytes() == other.read_bytes()


def test_the_font_of_formulas_has_their_letters_and_its_licence(published):
    font = TTFont(published / "_static/formulas.woff2")
    shown = {
        character
        for page in checks.all_pages(published)
        for formula in checks.soup(published, page)("math")
        for character in formula.text
    }
    letters = set(map(chr, font.getBestCmap()))
    assert len(shown) > 80 and shown - letters <= {"\N{INVISIBLE TIMES}"}
    slanted = "\N{MATHEMATICAL ITALIC SMALL K}\N{PLANCK CONSTANT}"
    assert letters > {*slanted, "\N{SQUARE ROOT}"}
    told = {name.nameID: str(name) for name in font["name"].names}
    assert "STIX Fonts Project Authors" in told[0]
    assert "SIL Open Font License" in told[13] and told[14]


@pytest.fixture
def branch(monkeypatch):
    """Writes the branch, and gives each file's text by its name."""

    def branch(folder, url, site=""):
        monkeypatch.setenv("MEMBUDGET_REPOSITORY", url)
        monkeypatch.setenv("MEMBUDGET_SITE", site)
        publish.branch(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_text("utf-8")
            for path in folder.rglob("*")
            if path.is_file()
        }

    return branch


@pytest.mark.parametrize("site", ["", SITE])
def test_the_branch_is_the_sources_with_another_first_cell(
    branch, tmp_path, site
):
    """The wheel is what was tested; elsewhere there is the repository."""
    wanted = f"{SITE}/{address.wheel()}" if site else f"git+{URL}"
    for name, text in branch(tmp_path / "x", URL, site).items():
        if name.endswith(".ipynb"):
            check_filled(text, ROOT / name, wanted)
        elif name != "README.md":
            assert text == (ROOT / name).read_text("utf-8")


def test_links_of_the_branch_lead_somewhere(branch, tmp_path):
    for name, text in branch(tmp_path / "x", URL).items():
        if name.endswith(".ipynb"):
            for link in re.findall(r"\]\(([\w./]+\.\w+)", text):
                assert (tmp_path / "x" / name).parent.joinpath(link).is_file()


def test_two_publications_differ_in_their_addresses_alone(branch, tmp_path):
    mine = branch(tmp_path / "mine", URL, SITE)
    other = "https://github.com/other/budget", "https://example.com/x"
    theirs = branch(tmp_path / "theirs", *other)
    for name in theirs:
        for old, new in zip(other, (URL, SITE), strict=True):
            theirs[name] = theirs[name].replace(old, new)
    assert mine == theirs
    notebook = relative(notebooks()[0])
    assert {"README.md", "labs/fsdp_train.py", notebook} <= set(mine)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"MEMBUDGET_REPOSITORY": ""}, "address is not known"),
        ({"MEMBUDGET_REPOSITORY": f"{URL}; x"}, "no repository's address"),
        ({"MEMBUDGET_SITE": "x"}, "no site's address"),
    ],
)
def test_nothing_is_published_without_an_address(
    tmp_path, monkeypatch, given, words
):
    out = tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["publish.py", str(out)])
    for name, value in {"MEMBUDGET_REPOSITORY": URL, **given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=words):
        publish.main()
    assert not out.exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["publish.py", str(tmp_path)])
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", URL)
    with pytest.raises(SystemExit, match="is there already"):
        publish.main()
