"""The directive ``mb-map``: the whole course as one picture.

A line of its content is one of

* ``# stage | sentence``: a band of the picture;
* ``page | needs | gives``: a page without its ending, the keys of the pages
  that it needs (``03``, ``lab1``), and what its reader takes along. A page
  that goes deeper, and a lab, hang under the chapter above them;
* ``route name | keys | sentence``: pages to read in a given time; no keys
  mean all.

Titles and minutes are read from the notebooks. A route is shown by CSS alone;
`_static/opened.js` adds which pages this browser has opened.
"""

import json
import re
from html import escape
from pathlib import Path

from language import Html, of_page, say
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
TIME = re.compile(
    r"(\d+)\s+minutes(?:,\s+and\s+(\d+)\s+for\s+the\s+exercises)?"
)


def first_words(page):
    """A page's title, and its text up to where the time stands."""
    path = ROOT / f"{page}.ipynb"
    if not path.exists():
        text = (ROOT / f"{page}.md").read_text("utf-8")
    else:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        prose = (c["source"] for c in cells if c["cell_type"] == "markdown")
        text = "\n".join(map("".join, prose))
    return text.partition("\n")[0].removeprefix("# "), text


def minutes(page):
    """The minutes that a notebook prints, with its exercises; 0 elsewhere."""
    if not (ROOT / f"{page}.ipynb").exists():
        return 0
    found = TIME.search(first_words(page)[1])
    if not found:
        raise ValueError(f"{page} prints no time, such as '45 minutes'")
    return sum(int(part) for part in found.groups() if part)


def duration(total):
    """Minutes as a reader says them."""
    hours, rest = divmod(total, 60)
    parts = [say("{hours}\u00a0h", hours=hours)] * bool(hours)
    parts += [say("{minutes}\u00a0min", minutes=rest)] * bool(rest)
    return " ".join(parts)


def key(page):
    """What stands before the first underscore: ``03``, ``03a``, ``lab1``."""
    return Path(page).name.partition("_")[0]


def label(page):
    """What other pages call it."""
    number = key(page)
    if number.startswith("lab"):
        return say("lab\u00a0{number}", number=number[3:])
    return say("chapter\u00a0{number}", number=number.lstrip("0"))


def read(content):
    """The table as stages [(name, sentence, pages)], {page: (needs, gives)}
    and routes [(name, keys, sentence)]."""
    stages, pages, routes = [], {}, []
    for line in filter(None, content):
        parts = [part.strip() for part in line.split("|")]
        if line.startswith("# ") and len(parts) == 2:
            stages.append((parts[0][2:], parts[1], []))
        elif line.startswith("route ") and len(parts) == 3:
            routes.append((parts[0][6:], parts[1].split(), parts[2]))
        elif len(parts) == 3 and stages:
            stages[-1][2].append(parts[0])
            pages[parts[0]] = parts[1].split(), parts[2]
        else:
            raise ValueError(f"{line!r} is no stage, page or route")
    return stages, pages, routes


class MapDirective(SphinxDirective):
    """``{mb-map}``: see the module."""

    has_content = True

    def run(self):
        try:
            html = self.html(*read(self.content))
        except ValueError as error:
            raise self.error(str(error)) from error
        said = Html("", html, format="html", messages=self.said)
        self.set_source_info(said)
        return [said]

    def html(self, stages, pages, routes):
        """The routes, then a band for each stage."""
        self.pages, self.said = pages, []
        for page in pages:
            if page not in self.env.found_docs:
                raise ValueError(f"there is no page {page!r}")
            self.env.note_dependency(self.env.doc2path(page))
        self.by_key = {key(page): page for page in pages}
        self.on = {page: [] for page in pages}
        choices = [self.route(*one, n) for n, one in enumerate(routes)]
        bands = [self.band(*stage) for stage in stages]
        legend = say("Show a route")
        return (
            '<div class="mb-map"><fieldset class="mb-routes">'
            f"<legend>{legend}</legend>{''.join(choices)}</fieldset>"
            '<p class="mb-forget" hidden></p>'
            f'<ol class="mb-stages">{"".join(bands)}</ol></div>'
        )

    def route(self, name, keys, sentence, number):
        """A choice of pages, with the sum of their times."""
        chosen = [self.find(k) for k in keys] or list(self.pages)
        for page in chosen:
            self.on[page].append(f"mb-on-{number}")
        total = duration(sum(map(minutes, chosen)))
        name = f"<strong>{self.words(name)}</strong>"
        told = say("{name} ({time}).", name=name, time=total)
        return (
            f'<label><input type="radio" name="mb-route" value="{number}">'
            f" <span>{told} {self.words(sentence)}</span></label>"
        )

    def find(self, k):
        """The page of a key."""
        if k not in self.by_key:
            raise ValueError(f"no page on the map begins with {k!r}")
        return self.by_key[k]

    def band(self, name, sentence, pages):
        """A stage: its chapters, each with what hangs under it."""
        groups = []
        for page in pages:
            hangs = groups and not re.fullmatch(r"\d\d", key(page))
            if hangs and not page.startswith("book/"):
                groups[-1].append(page)
            else:
                groups.append([page])
        items = "".join(self.group(*group) for group in groups)
        stop = say(".")
        return (
            f'<li><p class="mb-stage"><strong>{self.words(name)}{stop}'
            f"</strong> {self.words(sentence)}</p>"
            f'<ul class="mb-pages">{items}</ul></li>'
        )

    def group(self, chapter, *rest):
        """A chapter's card."""
        under = "".join(
            f"<li>{self.page(page, chapter)}</li>" for page in rest
        )
        under = f"<ul>{under}</ul>" if under else ""
        return f"<li>{self.page(chapter)}{under}</li>"

    def page(self, page, under=None):
        """A link, the time, what the page gives and needs besides the
        chapter that it hangs under."""
        needs, gives = self.pages[page]
        needs = [self.find(k) for k in needs if self.find(k) != under]
        time = duration(minutes(page)) if minutes(page) else ""
        time = f' <span class="mb-time">{time}</span>' if time else ""
        need = say(", ").join(
            f'<a href="{self.uri(other)}">{label(other)}</a>'
            for other in needs
        )
        need = say(" Needs {pages}.", pages=need) if need else ""
        return (
            f'<div class="{" ".join(["mb-page", *self.on[page]])}" '
            f'data-page="{page}"><a class="mb-to" href="{self.uri(page)}">'
            f"{escape(of_page(page, first_words(page)[0]))}</a>{time}"
            f"<p>{self.words(gives)}{need}</p></div>"
        )

    def words(self, text):
        """Words of the map's source: a message of its page."""
        self.said.append(escape(text))
        return escape(text)

    def uri(self, page):
        """The address of a page, seen from the map."""
        builder = self.env.app.builder
        return builder.get_relative_uri(self.env.docname, page)
