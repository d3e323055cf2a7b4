"""The book in another language than English.

Sphinx translates the text of a page, message by message, from the page's
catalogue in `book/locale`. What else a reader sees (buttons, folds, the map,
widgets) asks `say` for its words: they are in the catalogue `site`.
`tools/translations.py` keeps the catalogues.
"""

import json
import re
from functools import cache
from pathlib import Path

from babel.messages.pofile import read_po
from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[2]
LOCALE = ROOT / "book/locale"
SITE = "site"
CHINESE = "zh_CN"
NAMES = {"en": "English", CHINESE: "中文"}
FOLDERS = {"en": "", CHINESE: "zh/"}
"""Where the pages of a language are within the site."""
NUMBER = re.compile(r"^\d+(\.\d+)*\.? ")
SUMMARY = re.compile(r"(?<=<summary>)([^<]+)(?=</summary>)")
FALLBACK = re.compile(
    r'(?<=<p class="mb-fallback">)(.*?)(?=\s*(?:\(Run this cell|</p>))', re.S
)
WIDGET = re.compile(r'<div class="mb-widget" data-widget="([\w-]+)"')

language = "en"


def use(app, config):
    """Speak the language of this build from now on."""
    global language
    language = config.language or "en"


@cache
def catalogue(language, domain):
    """{English: translation} of a page, or of the `site`; {} in English.

    What is marked as fuzzy, or is empty, is left out.
    """
    path = LOCALE / language / f"LC_MESSAGES/{domain}.po"
    if not path.exists():
        return {}
    return {message.id: message.string for message in translated(path)}


def translated(path):
    """The messages of a catalogue that have a translation that holds."""
    with path.open("rb") as file:
        return [m for m in read_po(file) if m.id and m.string and not m.fuzzy]


@cache
def words_of(language, *names):
    """The `site`'s words that scripts ask for: those of every page, and of
    the widgets with these names.
    """
    every = r"book/_static/.*|.*/widgets/(base|tape)\.\w+"
    own = "|".join(rf".*/widgets/{name}(_rows)?\.\w+" for name in names)
    asks = re.compile(f"{every}|{own}" if own else r"book/_static/.*")
    return {
        message.id: message.string
        for message in translated(LOCALE / language / f"LC_MESSAGES/{SITE}.po")
        if any(asks.fullmatch(path) for path, _ in message.locations)
    }


def say(text, /, **values):
    """Words of the site in the language of this build.

    Args:
        text: in English, as it stands in the catalogue.
        values: what stands in its places in braces.
    """
    text = catalogue(language, SITE).get(text, text)
    return text.format(**values) if values else text


def later(text):
    """Words of the site that are said later: for the catalogue."""
    return text


def of_page(page, text):
    """A message of a page, such as a heading with or without its number."""
    for english, own in catalogue(language, page).items():
        english, own = plain(english), plain(own)
        if english == text:
            return own
        if NUMBER.sub("", english) == text:
            return NUMBER.sub("", own)
    return text


def plain(text):
    """A heading as a page shows it."""
    return re.sub(r"[`*$\\]", "", text).replace("'", "’")


class Sentence(nodes.inline, addnodes.translatable):
    """Words of a directive as a message of its page."""

    @classmethod
    def of(cls, text):
        return cls("", text, message=text)

    def preserve_original_messages(self):
        pass

    def extract_original_messages(self):
        return [self["message"]]

    def apply_translated_message(self, original_message, translated_message):
        self[:] = [nodes.Text(translated_message)]


class Html(nodes.raw, addnodes.translatable):
    """HTML of a directive with words that are messages of its page.

    Its attribute ``messages`` has them as they stand in the HTML.
    """

    def preserve_original_messages(self):
        pass

    def extract_original_messages(self):
        return self["messages"]

    def apply_translated_message(self, original_message, translated_message):
        html = self.astext().replace(original_message, translated_message)
        self[:] = [nodes.Text(html)]


# Docutils finds what writes a node by the name of its class.
Sentence.__name__, Html.__name__ = "inline", "raw"


def translate_html(app, pagename, templatename, context, doctree):
    """Translate the folds of a page, and what its widgets say in words."""
    if language == "en" or "body" not in context:
        return
    for place in SUMMARY, FALLBACK:
        context["body"] = place.sub(
            lambda found: say(" ".join(found[1].split())), context["body"]
        )


def add_words(app, pagename, templatename, context, doctree):
    """Give a page's scripts the words that they ask for with ``t``."""
    if language == "en":
        return
    names = sorted(set(WIDGET.findall(context.get("body") or "")))
    words = json.dumps(words_of(language, *names), ensure_ascii=False)
    words = words.replace("</", r"<\/")
    context["metatags"] = (
        context.get("metatags", "")
        + f"<script>window.mbWords = {words};</script>"
    )


def lead_over(app, pagename, templatename, context, doctree):
    """Tell the templates where the page is in each language."""
    here = FOLDERS.get(language, "")
    up = context["pathto"]("", resource=True) + "../" * bool(here)
    site = app.config.memory_budget_site
    context["languages"] = [
        {
            "code": code.replace("_", "-"),
            "name": NAMES[code],
            "link": f"{up}{folder}{pagename}.html",
            "address": site and f"{site}/{folder}{pagename}.html",
            "here": code == language,
        }
        for code, folder in FOLDERS.items()
    ]
