"""A link at the top of a page to its lines to copy, "In a hurry?"."""

from docutils import nodes
from language import later, say

WORDS = later("In a hurry?")


def link(app, doctree, docname):
    """Lead from a page's question to its "In a hurry?", if it has both."""
    words = say(WORDS)
    paragraphs = list(doctree.findall(nodes.paragraph))
    for paragraph in paragraphs[1:]:
        if paragraph.astext().startswith(words):
            paragraph["ids"].append("in-a-hurry")
            way = nodes.reference("", words, refid="in-a-hurry", internal=True)
            way["classes"].append("mb-hurry")
            paragraphs[0] += [nodes.Text(" "), way]
            return
