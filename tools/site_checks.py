"""Checks of the built book: each takes a site and returns what is wrong.

`make book` runs `missing_files`; the tests in tests/book run all of them, and
tests/book/test_planted.py proves that each can turn red.
"""

import contextlib
import functools
import json
import re
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import address
from bs4 import BeautifulSoup
from project import PATIENCE, ROOT, pages

MAX_WEIGHT = 300_000
MAX_WIDGETS = 60_000
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
FALLBACK = ".mb-fallback"
OWN_FILES = ("book.css", "palette.css", "widget-host.js", "logo.svg")
GROUPED = re.compile(r"(?<![\w.,-])\d{1,3}(?: \d{3})+(?!\w)")
CHINESE = re.compile("[\u3400-\u9fff]")
FILES = re.compile(r'<(?:img|script|link)\b[^>]*? (?:src|href)="([^"]*)"')
TIMEOUT = 1000 * PATIENCE  # ms, for a page
UNTIL_READY = TIMEOUT  # then for what it draws; only where something is wrong


def soup(site, page):
    """The parsed page."""
    return parsed((site / f"{page}.html").read_bytes())


@functools.cache
def parsed(content):
    """A page, parsed once for all checks: they only read it."""
    return BeautifulSoup(content, "html.parser")


# Without a browser ---------------------------------------------------------


def missing_files(site):
    """What a build that failed, or was broken off, leaves out."""
    found = missing_pages(site) or missing_in_search(site)
    return found or [m for page in pages() for m in check_files(site, page)]


def missing_pages(site):
    """Every entry of `_toc.yml` has its page: a failed build can exit 0."""
    return [
        f"{page}.html is missing"
        for page in pages()
        if not (site / f"{page}.html").is_file()
    ]


def missing_in_search(site):
    """Every page is in the search index."""
    index = site / "searchindex.js"
    if not index.is_file():
        return ["searchindex.js is missing"]
    names = re.search(r'"docnames": (\[[^]]*\])', index.read_text("utf-8"))
    found = json.loads(names[1]) if names else []
    return [
        f"{page} is not in the search index"
        for page in pages()
        if page not in found
    ]


def check_files(site, page):
    """Each picture, script and style sheet of the page is there."""
    problems = []
    for found in FILES.findall((site / f"{page}.html").read_text("utf-8")):
        address = urlsplit(found)
        if address.scheme or address.netloc or not address.path:
            continue
        path = unquote(urljoin(f"{page}.html", address.path))
        if not (site / path).is_file():
            problems.append(f"{page}: {path} is missing")
    return problems


def check_headings(site, page):
    """One h1 (the theme repeats it for print, outside of the article)."""
    count = len(soup(site, page).select("article h1"))
    return [] if count == 1 else [f"{page}: {count} h1 headings"]


def check_images(site, page):
    """Every image has alt text."""
    return [
        f"{page}: {image.get('src')} has no alt text"
        for image in soup(site, page).find_all("img")
        if not image.get("alt")
    ]


def check_links(site, page):
    """Every link inside the book leads somewhere, anchors included."""
    problems = []
    for link in soup(site, page).find_all("a", href=True):
        address = urlsplit(link["href"])
        if address.scheme or address.netloc:
            continue
        target = site / unquote(urljoin(f"{page}.html", address.path))
        if not address.path:
            target = site / f"{page}.html"
        if not target.is_file():
            problems.append(f"{page}: {link['href']} leads nowhere")
        elif address.fragment and address.fragment not in anchors(target):
            problems.append(f"{page}: {link['href']} has no such anchor")
    return problems


@functools.cache
def anchors(path):
    """All the ids of a page."""
    page = parsed(path.read_bytes())
    return {tag["id"] for tag in page.find_all(id=True)}


def check_weight(site, page):
    """What the page brings beyond the theme and the math renderer."""
    weight = page_weight(site, page)
    if weight <= MAX_WEIGHT:
        return []
    return [f"{page}: {weight} bytes (at most {MAX_WEIGHT})"]


def page_weight(site, page):
    """Bytes of the page, its images and the book's own files."""
    here = site / f"{page}.html"
    weight = here.stat().st_size
    # a picture in a "data:" address is in the page already
    for image in soup(site, page).select('article img:not([src^="data:"])'):
        path = here.parent / unquote(urlsplit(image["src"]).path)
        weight += path.stat().st_size if path.is_file() else 0
    own = [site / "_static" / name for name in OWN_FILES]
    return weight + sum(path.stat().st_size for path in own)


def check_widgets(site, page):
    """The code of a page's widgets, with their style."""
    parts = soup(site, page).select('style, script[type="text/x-esm"]')
    texts = [part.get_text() for part in parts]
    weight = sum(
        len(text.encode())
        for part, text in zip(parts, texts, strict=True)
        if part.name == "script" or ".mb-root" in text
    )
    if weight <= MAX_WIDGETS:
        return []
    return [f"{page}: {weight} bytes of widgets (at most {MAX_WIDGETS})"]


def check_words_of_widgets(site, page):
    """A widget says in words what it shows, for who runs no JavaScript."""
    widgets = soup(site, page).select("article .mb-widget")
    return [
        f"{page}: widget {number} says nothing"
        for number, widget in enumerate(widgets)
        if not any(p.get_text(strip=True) for p in widget.select(FALLBACK))
    ]


def check_head(site, page):
    """A description in the page's own words, and a picture that is there."""
    html = soup(site, page)
    found = {
        tag.get("name") or tag.get("property"): tag["content"]
        for tag in html.find_all("meta", content=True)
    }
    text = " ".join(html.article.get_text().split())
    told = found.get("description", "")
    picture = urlsplit(found.get("og:image", ""))
    file = site / unquote(urljoin(f"{page}.html", picture.path))
    good = {
        "description": len(told.encode()) >= 40
        and all(part in text for part in re.split(r"(?<=[.?!。？！]) ", told)),
        "og:description": found.get("og:description") == told,
        "og:title": found.get("og:title", "-") in text,
        "og:image": bool(picture.netloc) or file.is_file(),
    }
    return [f"{page}: {what}" for what, holds in good.items() if not holds]


def check_words(site, page):
    """Numbers do not break, and Chinese says that it is."""
    problems = []
    for text in soup(site, page).article.find_all(string=True):
        above = {tag.name for tag in text.parents}
        if above & {"pre", "code", "script", "style"}:
            continue
        for number in GROUPED.findall(text):
            problems.append(f"{page}: {number} can break")
        if CHINESE.search(text) and not text.find_parent(
            lang=re.compile("^zh")
        ):
            problems.append(
                f"{page}: {text!r} does not say that it is Chinese"
            )
    return problems


def check_scripts(site, page):
    """No script draws formulas, and none puts pictures in place of icons."""
    html = soup(site, page)
    names = " ".join(tag["src"] for tag in html.select("script[src]"))
    scripts = [name for name in ("mathjax", "fontawesome") if name in names]
    drawn = all(formula.math for formula in html.select(".math"))
    return [
        *[f"{page}: {name}" for name in scripts],
        *([] if drawn else [f"{page}: a formula is no MathML"]),
    ]


def check_addresses(site, page, url, colab):
    """The buttons of a page lead where the book is published, and it has
    none where that is not known.

    Args:
        site: the built book.
        page: one of its pages, also those that Sphinx adds.
        url: the address that it was built with, or "".
        colab: whether Colab finds the notebooks.
    """
    links = soup(site, page).select(".article-header-buttons a[href]")
    found = {link["href"].partition("?")[0] for link in links}
    found = {link for link in found if urlsplit(link).scheme}
    wanted = buttons(page, url, colab)
    return [
        *(f"{page}: no button leads to {link}" for link in wanted - found),
        *(f"{page}: a button leads to {link}" for link in found - wanted),
    ]


PLACES = {
    "github": ("/issues/new", "/edit/"),
    "gitlab": ("/-/issues/new", "/-/edit/"),
    "bitbucket": ("", "/src/"),
}
"""Where a forge has its form for an issue, and a file to edit."""


def buttons(page, url, colab):
    """Where the buttons of a page lead, out of the book."""
    if not url:
        return set()
    issues, edit = PLACES[address.forge(url)]
    path = urlsplit(url).path[1:]
    found = {url, url + issues}
    if page in pages():
        sources = [ROOT / f"{page}{kind}" for kind in (".md", ".ipynb")]
        source = next(path for path in sources if path.is_file())
        place = source.relative_to(ROOT).as_posix()
        found.add(f"{url}{edit}{address.SOURCES}/{place}")
        if source.suffix == ".ipynb" and colab:
            where = f"https://colab.research.google.com/github/{path}"
            found.add(f"{where}/blob/{address.PUBLISHED}/{place}")
    return found


def all_pages(site):
    """Every page of a site, also those that Sphinx adds."""
    found = [path.relative_to(site) for path in sorted(site.rglob("*.html"))]
    return [
        path.with_suffix("").as_posix()
        for path in found
        # The theme's own, what only leads to the first page, other languages.
        if path.parts[0] not in ("_static", "index.html", "zh")
    ]


STATIC = (
    check_headings,
    check_images,
    check_links,
    check_weight,
    check_widgets,
    check_words_of_widgets,
    check_head,
    check_words,
    check_scripts,
)


# In a browser --------------------------------------------------------------


@contextlib.contextmanager
def serve(site):
    """Serve the site on this machine only; gives its address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


LOCAL = r"(file|data|blob):|\w+://(127\.0\.0\.1|localhost)(:\d+)?(/|$)"
FOREIGN = re.compile(rf"^(?!{LOCAL})")
SHIFTS = """window.shifts = 0;
new PerformanceObserver((list) => list.getEntries().forEach((entry) => {
  if (!entry.hadRecentInput) shifts += entry.value;
})).observe({ type: "layout-shift", buffered: true });"""
MAX_SHIFT = 0.05
FORGET = """try { localStorage.clear(); sessionStorage.clear(); }
catch { /* this document may not store anything */ }"""


def is_foreign(address):
    """Whether a request would leave this machine."""
    return bool(FOREIGN.match(address))


@contextlib.contextmanager
def visitor(browser, viewport=DESKTOP, **settings):
    """A window for many pages, one after the other: a new one costs more than
    the page. Each finds nothing stored, and no request leaves the machine.

    Args:
        browser: a running Playwright browser.
        viewport: the size of the window.
        settings: others of Playwright's `new_context`.
    """
    with browser.new_context(viewport=viewport, **settings) as context:
        context.route(FOREIGN, lambda route: route.abort())
        context.add_init_script(FORGET)
        context.add_init_script(SHIFTS)
        context.set_default_timeout(TIMEOUT)
        yield context.new_page()


def check_live(page, address):
    """Open a page: quiet console, no foreign request, all of it alive.

    Args:
        page: a `visitor`.
        address: where the page is, `file:` or `http:`.
    """
    problems = []

    def see_request(request):
        if is_foreign(request.url):
            problems.append(f"requests {request.url}")

    def see_error(error):
        problems.append(f"error: {error}")

    def see_message(message):
        if message.type == "error":
            problems.append(f"console: {message.text}")

    seen = {
        "request": see_request,
        "pageerror": see_error,
        "console": see_message,
    }
    for event, see in seen.items():
        page.on(event, see)
    page.goto(address)
    for what, script in READY.items():
        if not ready(page, script):
            problems.append(what)
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > page.viewport_size["width"]:
        problems.append(
            f"is {width} px wide in a window of "
            f"{page.viewport_size['width']} px"
        )
    problems += page.evaluate(LOOKS, MAX_SHIFT)
    page.evaluate("window.stop()")  # nothing goes on into the next page
    for event, see in seen.items():
        page.remove_listener(event, see)
    name = urlsplit(address).path.rsplit("/", 2)
    return [f"{'/'.join(name[-2:])}: {text}" for text in problems]


LOOKS = """async (most) => {
  const frame = () => new Promise(requestAnimationFrame);
  for (let i = 0; i < 2; i += 1) await frame();
  const all = (selector) => [...document.querySelectorAll(selector)];
  const size = (node) => parseFloat(getComputedStyle(node).fontSize);
  const [h1] = all("article h1").map(size);
  const lines = (node) => node.offsetHeight / size(node);
  const need = ({ style }) => parseFloat(style.getPropertyValue("--mb-need"));
  const narrow = innerWidth < 576;
  return [
    [shifts > most, `jumps by ${shifts}`],
    [size(document.documentElement) !== 17, "has another font size"],
    [all("article h2").some((h2) => size(h2) >= h1), "has a large h2"],
    [all("code .pre").some((flag) => /^--?\\w.{0,20}$/.test(flag.textContent)
      && lines(flag) > 2), "breaks a flag"],
    [narrow && all(".mb-figure svg").some((figure) => figure.clientWidth &&
      figure.clientWidth + 1 < need(figure)), "has small labels"],
  ].filter(([wrong]) => wrong).map(([, words]) => words);
}"""

READY = {
    "a widget is not live": """() =>
        [...document.querySelectorAll(".mb-widget")].every((widget) =>
        widget.querySelector("input") && !widget.querySelector(".mb-fallback"))
        """,
}


def ready(page, script):
    """Wait until the page fulfils the condition; False when it does not."""
    from playwright.sync_api import TimeoutError as Late

    try:
        page.wait_for_function(script, timeout=UNTIL_READY)
    except Late:
        return False
    return True


def check_without_javascript(page, address):
    """With JavaScript off, every widget says in words what it shows.

    Args:
        page: a `visitor` with `java_script_enabled=False`.
        address: where the page is.
    """
    page.goto(address)
    return [
        f"widget {number} says nothing"
        for number, widget in enumerate(page.locator(".mb-widget").all())
        if not widget.locator(FALLBACK).first.is_visible()
    ]


THEIRS = {
    ".logo__image": "the theme's side bar is no landmark",
    ".search-button__button": "the theme names its shortcut in its words only",
    ".theme-switch-button": "the theme's name for its three icons",
}
"""What axe-core does not look at, because it is the theme's, and why."""

AXE = """async ([within, exclude, only]) => {
  if (!document.querySelector(within)) return [];
  document.querySelectorAll("details").forEach((fold) => (fold.open = true));
  const rules = { "label-content-name-mismatch": { enabled: true } };
  const runOnly = only.length ? { runOnly: only } : {};
  const found = await axe.run(
    { include: [[within]], exclude },
    { resultTypes: ["violations"], preload: false, rules, ...runOnly },
  );
  return found.violations.flatMap(({ id, nodes }) =>
    nodes.map(({ html }) => `${id}: ${html.slice(0, 120)}`));
}"""


def check_access(page, address, within="html", only=()):
    """What axe-core finds: what is open, and what is folded.

    Args:
        page: a `visitor`.
        address: where the page is; None where it is open.
        within: a selector of the parts to look at.
        only: the rules to check; by default all.
    """
    import axe_playwright_python

    if address is not None:
        page.goto(address)
        for script in READY.values():
            ready(page, script)
    source = Path(axe_playwright_python.__file__).parent / "axe.min.js"
    page.evaluate(source.read_text("utf-8"))
    exclude = [[selector] for selector in THEIRS]
    return page.evaluate(AXE, [within, exclude, list(only)])


PAPER = """() => {
  if (document.documentElement.dataset.theme === "dark") return null;
  const light = (color) => color.match(/\\d+/g).slice(0, 3)
    .reduce((sum, part) => sum + Number(part), 0) / 3;
  const seen = "article :is(p, li, pre, pre span, .mb-root, .mb-root text)";
  return [...document.querySelectorAll(seen)]
    .filter((node) => light(getComputedStyle(node).color) > 160)
    .map((node) => node.outerHTML.slice(0, 80));
}"""

DARK = """() => [...document.querySelectorAll(".mb-widget")].map((widget) => {
  const ground = (node) => getComputedStyle(node).backgroundColor;
  let node = widget;
  while (node.parentElement && / 0\\)$/.test(ground(node)))
    node = node.parentElement;
  return ground(node);
})"""


def check_dark(page, address):
    """In dark mode every widget stands on a dark ground, and what is printed
    is dark on white.

    Args:
        page: a `visitor` with `color_scheme="dark"`.
        address: where the page is; None: it is open.
    """
    dark = "() => document.documentElement.dataset.theme === 'dark'"
    if address:
        page.goto(address)
    if not ready(page, dark):
        return ["does not get dark"]
    problems = [
        f"widget {number} stands on {color} in dark mode"
        for number, color in enumerate(page.evaluate(DARK))
        if sum(map(int, re.findall(r"\d+", color)[:3])) > 3 * 100
    ]
    page.emulate_media(media="print")
    ready(page, f"() => ({PAPER})() !== null")
    pale = page.evaluate(PAPER)
    page.emulate_media(media="screen")
    if pale is None or not ready(page, dark):
        problems.append("is printed in the colours of the screen")
    return problems + [f"{html} is pale on paper" for html in pale or []]


if __name__ == "__main__":
    sys.exit("\n".join(missing_files(Path(sys.argv[1]))) or None)
