"""The test of the tests: plant one fault of each kind in a copy of the book.

The same checks as in test_site.py, which must turn red here.
"""

import re
import shutil

import address
import pytest
import site_checks as checks
from project import pages

HOST = "https://example.com"


@pytest.fixture(scope="module")
def copy(site, tmp_path_factory):
    """A copy of the built book."""
    return shutil.copytree(site, tmp_path_factory.mktemp("planted") / "site")


@pytest.fixture
def short(monkeypatch):
    """What never comes is waited for as long as a busy machine needs."""
    monkeypatch.setattr(checks, "UNTIL_READY", 2_000)


@pytest.fixture
def page(copy):
    """The first page that has a widget; afterwards it is as it was."""
    page = next(
        page
        for page in pages()
        if checks.soup(copy, page).select("article .mb-widget")
    )
    path = copy / f"{page}.html"
    before = path.read_bytes()
    yield page
    path.write_bytes(before)


def plant(copy, page, pattern, text):
    """Replace the first match in a page and open the page."""
    path = copy / f"{page}.html"
    html, count = re.subn(
        pattern, lambda _: text, path.read_text("utf-8"), count=1
    )
    assert count == 1
    path.write_text(html, "utf-8")
    return path.as_uri()


def test_nothing_planted(window, copy, page):
    assert checks.missing_files(copy) == []
    assert [p for check in checks.STATIC for p in check(copy, page)] == []
    address = (copy / f"{page}.html").as_uri()
    assert checks.check_live(window("desktop"), address) == []


def test_a_missing_page(copy, page):
    (copy / f"{page}.html").unlink()
    assert checks.missing_files(copy) == [f"{page}.html is missing"]


def test_a_page_that_no_search_finds(copy, page):
    index = copy / "searchindex.js"
    before = index.read_text("utf-8")
    index.write_text(before.replace(f'"{page}"', '"another"', 1), "utf-8")
    found = checks.missing_files(copy)
    index.write_text(before, "utf-8")
    assert found == [f"{page} is not in the search index"]
    index.unlink()
    assert checks.missing_files(copy) == ["searchindex.js is missing"]
    index.write_text(before, "utf-8")


def test_a_missing_picture(copy, page):
    plant(copy, page, "</article>", '<img alt="x" src="no.svg"></article>')
    folder = page.rpartition("/")[0]
    path = f"{folder}/no.svg" if folder else "no.svg"
    assert f"{page}: {path} is missing" in checks.missing_files(copy)


@pytest.mark.parametrize(
    ("check", "planted"),
    [
        (checks.check_headings, "<h1>Again</h1></article>"),
        (checks.check_images, '<img src="../_static/logo.svg"></article>'),
        (checks.check_links, '<a href="nowhere.html">x</a></article>'),
        (checks.check_links, '<a href="#nowhere">x</a></article>'),
        (checks.check_weight, f"{300_000 * 'x'}</article>"),
        (checks.check_scripts, '<span class="math">x</span></article>'),
        (
            checks.check_widgets,
            f'<script type="text/x-esm">/*{60_000 * "x"}*/</script></article>',
        ),
        (checks.check_words, "<p>1 024</p></article>"),
        (checks.check_words, "<p>\u68af\u5ea6</p></article>"),
        (
            checks.check_scripts,
            '<script src="fontawesome.js"></script></article>',
        ),
    ],
)
def test_a_static_fault(copy, page, check, planted):
    plant(copy, page, "</article>", planted)
    assert len(check(copy, page)) == 1


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ("name=.description.", "Another page in other words, long enough."),
        ("property=.og:image.", "nowhere.png"),
        ("property=.og:title.", "Another page"),
    ],
)
def test_a_head_that_tells_something_else(copy, page, meta, text):
    plant(copy, page, f'(?<=<meta {meta} content=")[^"]*', text)
    assert checks.check_head(copy, page)


@pytest.mark.parametrize("where", ["/issues/new", "/edit/main/x.md", ""])
def test_a_button_that_leads_elsewhere(copy, page, where):
    known = address.repository(), address.colab()
    button = f'<a href="https://github.com/OWNER/x{where}">x</a>'
    plant(copy, page, r'(?<=<div class="article-header-buttons">)', button)
    (problem,) = checks.check_addresses(copy, page, *known)
    assert "a button leads to https://github.com/OWNER/x" in problem


def test_a_button_that_is_not_there(copy, page):
    url = "https://gitlab.com/o/n"
    missing = checks.check_addresses(copy, page, url, False)
    assert sum("no button leads to" in text for text in missing) == 3


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        (f'<img src="{HOST}/a.png"></article>', HOST),
        (f'<script src="{HOST}/a.js"></script></article>', HOST),
        ("<script>console.error('x')</script></article>", "console"),
        ("<script>throw Error('x')</script></article>", "error"),
        ('<div style="width:3000px">x</div></article>', "px wide"),
        ("<style>html { font-size: 16px }</style></article>", "font size"),
        ("<style>h2 { font-size: 5rem }</style></article>", "large h2"),
        (
            '<p style="width: 0"><code><span class="pre" style="display: '
            'block; white-space: normal; width: 2em">--a-flag</span></code>'
            "</p></article>",
            "breaks a flag",
        ),
        (
            "<script>requestAnimationFrame(() => requestAnimationFrame(() => "
            "{ document.body.style.paddingTop = '20rem'; }))"
            "</script></article>",
            "jumps",
        ),
    ],
)
def test_a_live_fault(window, copy, page, planted, problem, short):
    address = plant(copy, page, "</article>", planted)
    assert problem in "\n".join(checks.check_live(window("desktop"), address))


def test_a_dead_widget(window, copy, page, short):
    module = r'(?<=type="text/x-esm">)'
    address = plant(copy, page, module, "throw Error('planted');")
    problems = "\n".join(checks.check_live(window("desktop"), address))
    assert "not live" in problems
    assert "planted" in problems


@pytest.mark.parametrize(
    "planted, rule",
    [
        ('<input type="text">', "label"),
        ("<table><tr><th></th><td>1</td></tr></table>", "empty-table-header"),
        (
            '<details><p style="color: #ccc">pale</p></details>',
            "color-contrast",
        ),
    ],
)
def test_what_not_everybody_can_use(window, copy, page, planted, rule):
    address = plant(copy, page, "</article>", f"{planted}</article>")
    found = checks.check_access(window("desktop"), address)
    assert any(problem.startswith(f"{rule}: ") for problem in found), found


def test_a_widget_without_words(window, copy, page):
    address = plant(copy, page, r'class="mb-fallback"', 'class="lost"')
    assert checks.check_words_of_widgets(copy, page)
    assert checks.check_without_javascript(window("no javascript"), address)


def test_small_labels(window, copy, page):
    size = "--mb-need: 99px; min-width: 9px; width: 9px"
    small = f'<svg role="img" aria-label="x" style="{size}"></svg>'
    planted = f'<div class="mb-figure">{small}</div></article>'
    address = plant(copy, page, "</article>", planted)
    problems = checks.check_live(window("phone"), address)
    assert any("small labels" in problem for problem in problems)


def test_pale_on_paper(window, copy, page):
    pale = "<style>article p { color: #ddd !important }</style></article>"
    address = plant(copy, page, "</article>", pale)
    assert "pale on paper" in "\n".join(
        checks.check_dark(window("dark"), address)
    )


def test_a_light_box_in_the_dark(window, copy, page):
    light = "<style>.mb-widget { background: white }</style></article>"
    address = plant(copy, page, "</article>", light)
    assert checks.check_dark(window("dark"), address)
