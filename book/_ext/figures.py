"""Figures stand in the page itself, where they take its letters and colours.

Matplotlib's SVG has black for the text's colour and white for the ground's,
as `membudget.plotting.use_style` says.
"""

import html
import re
from pathlib import Path

from docutils import nodes

LEGIBLE = 9  # pixels
FONT = re.compile(r'<text style="font-size: ([\d.]+)px')
HEAD = re.compile(r'<svg [^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>')
GROUND = re.compile(r'<path d="[^"]*" style="fill: #ffffff"/>')
ID = re.compile(r'(?<= id="|url\(#|ef="#)(?=\w)')
COLOURS = {
    "#000000": "currentColor",
    "#ffffff": "var(--pst-color-background)",
    "#00618f": "var(--mb-accent)",
}


class Figure(nodes.General, nodes.Element):
    """An SVG with what it says in words."""


def take(app, doctree, docname):
    """Put the figures of a notebook's cells where images were."""
    outputs = (
        image
        for cell in doctree.findall(nodes.container)
        if "cell_output" in cell["classes"]
        for image in cell.findall(nodes.image)
        if image["uri"].endswith(".svg")
    )
    for number, image in enumerate([*outputs]):
        svg = (Path(app.srcdir) / image["uri"]).read_text("utf-8")
        alt = image.get("alt", "")
        image.replace_self(Figure(svg=inline(svg, alt, f"mb-{number}-")))


def inline(svg, alt, name):
    """The SVG for a page; its ids begin with the name.

    Of its smallest letters the style sheet knows how wide they need it.
    """
    svg = GROUND.sub("", svg, count=1)
    for colour, of_page in COLOURS.items():
        svg = svg.replace(colour, of_page)
    svg = ID.sub(name, svg).replace("xlink:href", "href")
    width, height = map(float, HEAD.match(svg).groups())
    need = width / min(map(float, FONT.findall(svg))) * LEGIBLE
    head = (
        f'<svg role="img" aria-label="{html.escape(alt)}" '
        f'viewBox="0 0 {width:g} {height:g}" '
        f'style="--mb-width: {width:g}; --mb-need: {need:.0f}px">'
    )
    return HEAD.sub(lambda _: head, svg, count=1)


def write(translator, node):
    """The theme lets the keyboard scroll an output that is too wide."""
    translator.body.append(
        f'<div class="output mb-figure">{node["svg"]}</div>'
    )
    raise nodes.SkipNode
