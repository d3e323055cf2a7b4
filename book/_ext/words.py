"""What a page says: in its head, to a search engine, and on its lines."""

import re
from itertools import groupby

import hurry
import language
from docutils import nodes
from language import later, say

ENOUGH = 100  # characters of a description
LABEL = 40  # characters of what is bold but says no sentence
SENTENCE = re.compile(r"(?<=[.?!…])\s+(?=[^\sa-z])|(?<=[。？！])\s*")
DEEPER = later("Going deeper")
GROUPED = re.compile(r"(?<![\w.,-])\d{1,3}(?: \d{3})+(?!\w)")
UNIT = "[KMGT]?i?B|%|m?s|µs|min|h"
TOGETHER = re.compile(
    rf"(?<=\d)\s(?=(?:{UNIT})(?![\w/]))"  # 12.5 MiB
    r"|(?<=\d)\s(?=· 10)|(?<=\d ·)\s(?=10)"  # 7.5 · 10⁹
    r"|(?i:\b(?:arxiv|chapter|claim|doi|exercise|lab|page|puzzle|section))"
    r"\s(?=\d)"
)
FORMULA = re.compile(
    r'(\(?)(<span class="math">(?:(?!</span>).)*</span>)([.,;:?!)’”]*)', re.S
)
CHINESE = re.compile("[\u3400-\u9fff](?:[^\x21-\x7f<]*[\u3400-\u9fff])?")
CODE = nodes.literal, nodes.literal_block, nodes.math, nodes.raw


def description(doctree):
    """The question of a page and its message: the first bold sentences, or
    what it says first. A sentence with a formula is left out.

    Returns:
        Whole sentences, until they have about 100 characters.
    """
    first = next(doctree.findall(nodes.section)).next_node(nodes.paragraph)
    opening = [
        node
        for node in first.parent
        if isinstance(node, nodes.paragraph)
        and not plain(node).startswith(say(DEEPER))
    ]
    bold = [
        node
        for paragraph in opening[1:]
        for node in paragraph.findall(nodes.strong)
        if len(plain(node)) > LABEL
    ]
    text = ""
    for sentence in sentences(opening[:1] + bold[:1] + opening[1:]):
        if len(text) >= ENOUGH:
            break
        if sentence not in text:
            text += f" {sentence}"
    return text.strip()


def sentences(parts):
    """Sentences of these nodes, but for those with a formula or HTML."""
    for node in parts:
        for sentence in SENTENCE.split(plain(node)):
            whole = sentence.endswith((*".?!。？！",))
            whole = whole and not {*sentence} & {*"\\<"}
            if whole and sentence != say(hurry.WORDS):
                yield sentence


def plain(node):
    """The words of a node, on one line."""
    return " ".join(node.astext().split())


def hold_numbers(app, doctree, docname):
    """Put blanks that do not break into 1 024, 12.5 MiB and chapter 3; in
    titles and tables into 1 024 alone."""
    narrow = {
        id(element)
        for place in doctree.findall(is_narrow)
        for element in place.findall(nodes.TextElement)
    }
    for element in list(doctree.findall(nodes.TextElement)):
        if isinstance(element, CODE):
            continue
        hold = grouped if id(element) in narrow else held
        inside, element.children = element.children, []
        for is_text, row in groupby(inside, is_words):
            found = list(row)
            if is_text:  # a line's end in the source is one of its own
                found = [nodes.Text(hold("".join(found)))]
            element += found


def is_words(node):
    return isinstance(node, nodes.Text)


def is_narrow(node):
    return isinstance(node, (nodes.title, nodes.entry))


def grouped(text):
    """A text with narrow blanks that do not break in its numbers."""
    return GROUPED.sub(lambda n: n[0].replace(" ", "\u202f"), text)


def held(text):
    """A text with blanks that do not break."""
    return TOGETHER.sub(lambda n: n[0][:-1] + "\u00a0", grouped(text))


def hold_formulas(body):
    """Keep a bracket or a full stop on the line of its formula."""
    return FORMULA.sub(
        lambda f: (
            f'<span class="mb-hold">{f[0]}</span>' if f[1] or f[3] else f[0]
        ),
        body,
    )


def mark_chinese(body):
    """Say which words of an English page are Chinese."""
    if language.language == language.CHINESE:
        return body
    return CHINESE.sub(r'<span lang="zh">\g<0></span>', body)
