"""What a page says: in its head, to a search engine, and on its lines."""

import re

import hurry
from docutils import nodes

ENOUGH = 100  # characters of a description
LABEL = 40  # characters of what is bold but says no sentence
SENTENCE = re.compile(r"(?<=[.?!…])\s+(?=[^\sa-z])")
DEEPER = "Going deeper"
GROUPED = re.compile(r"(?<![\w.,-])\d{1,3}(?: \d{3})+(?!\w)")
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
        and not plain(node).startswith(DEEPER)
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
            whole = sentence[-1:] in ".?!" and not {*sentence} & {*"\\<"}
            if whole and sentence != hurry.WORDS:
                yield sentence


def plain(node):
    """The words of a node, on one line."""
    return " ".join(node.astext().split())


def hold_numbers(app, doctree, docname):
    """Put a narrow blank that does not break into 1 024."""
    for text in list(doctree.findall(nodes.Text)):
        if not isinstance(text.parent, CODE):
            held = GROUPED.sub(lambda n: n[0].replace(" ", "\u202f"), text)
            if held != text:
                text.parent.replace(text, nodes.Text(held))


def mark_chinese(body):
    """Say which words of a page are Chinese."""
    return CHINESE.sub(r'<span lang="zh">\g<0></span>', body)
