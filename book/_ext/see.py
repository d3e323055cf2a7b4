"""The role ``mb-see``: a link to a section, by its heading.

``{mb-see}`chapters/03_accumulation # The loop` `` leads to the section whose
heading is, without its number, *The loop*. A heading that is not there is a
warning, so the build fails.
"""

import re

import language
from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

logger = logging.getLogger(__name__)
NUMBER = re.compile(r"^\d+(\.\d+)*\.? ")


class Pending(nodes.Inline, nodes.Element):
    """A link that waits until all pages are read."""


class See(SphinxRole):
    """Leaves a `Pending`, as only the whole book knows its headings."""

    def run(self):
        page, _, heading = map(str.strip, self.text.partition("#"))
        node = Pending(page=page, heading=heading)
        self.set_source_info(node)
        return [node], []


def resolve(app, doctree, docname):
    """Turn each `Pending` into a link with the page's title and heading."""
    env = app.env
    for node in list(doctree.findall(Pending)):
        page = node["page"]
        heading = language.of_page(page, node["heading"])
        found = [""] if not heading and page in env.titles else []
        for link in (
            env.tocs[page].findall(nodes.reference)
            if heading and page in env.tocs
            else ()
        ):
            if NUMBER.sub("", link.astext()) == heading:
                found.append(link["anchorname"])
        if not found:
            text = "no page %r with a section %r"
            logger.warning(text, page, heading, location=node)
            node.replace_self(nodes.Text(heading or page))
            continue
        title = env.titles[page].astext()
        uri = app.builder.get_relative_uri(docname, page) + found[0]
        between = language.say(": ")
        text = f"{title}{between}{heading}" if heading else title
        node.replace_self(nodes.reference("", text, refuri=uri, internal=True))
