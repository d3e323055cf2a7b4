"""How wide a figure has to be, on a phone, for its labels to be legible."""

import re

from docutils import nodes
from sphinx.util.images import get_image_size

LEGIBLE = 9  # pixels
DPI, POINTS = 150, 10  # of `membudget.plotting.use_style`
INCH = 72  # points

FONT = re.compile(r"\bfontsize=([\d.]+)")
SIZED = re.compile(r'(<img [^>]*)class="mb-(\d+)-(\d+)-(\d+)"([^>]*>)')
HTML = (
    r'<div class="output mb-figure">\1width="\3" height="\4"'
    r' style="--mb-need: \2px"\5</div>'
)  # the theme lets the keyboard scroll an output that is too wide


def note_sizes(app, doctree, docname):
    """Give the figures of a notebook a class that says their size, and the
    width where the smallest label has 9 pixels."""
    for cell in doctree.findall(nodes.container):
        if "cell" in cell["classes"]:
            code = cell.next_node(nodes.literal_block)
            found = FONT.findall(code.astext()) if code else []
            points = min([POINTS, *map(float, found)])
            for image in cell.findall(nodes.image):
                width, height = get_image_size(image["uri"])
                need = round(width / DPI * INCH / points * LEGIBLE)
                image["classes"].append(f"mb-{need}-{width}-{height}")


def write_sizes(body):
    """The class of :func:`note_sizes` as what a browser reads."""
    return SIZED.sub(HTML, body)
