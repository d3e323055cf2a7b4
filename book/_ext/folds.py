"""Where a page's folded code stands: below what it draws, on one quiet line.

Cells that follow each other, their code folded, share one fold after the last
one's output; in an output that is folded itself it is the last line. The call
of a widget is folded like other code.
"""

import re

from docutils import nodes
from language import later, say
from myst_nb.sphinx_ import HideCodeCellNode

SHOW, HIDE = later("Show the code"), later("Hide the code")


def gather(app, doctree, docname):
    """Move the code of each row of folded cells below its last output."""
    for parent in {id(p): p for p in map(above, cells(doctree))}.values():
        row = []
        for node in [*parent.children, None]:
            if node is not None and is_folded(node):
                row.append(node)
            elif row:
                move(row)
                row = []


def cells(doctree):
    return [
        node
        for node in doctree.findall(nodes.container)
        if node.get("nb_element") == "cell_code"
    ]


def above(node):
    return node.parent


def is_folded(node):
    """Whether this is a cell whose code is folded, or calls a widget."""
    if not isinstance(node, nodes.container) or not node.children:
        return False
    return node.get("nb_element") == "cell_code" and (
        "tag_hide-input" in node["classes"] or shows_widget(node)
    )


def shows_widget(cell):
    """Whether a cell's output is a widget, and its code no definition."""
    found = any(
        'class="mb-widget"' in n.astext() for n in cell.findall(nodes.raw)
    )
    source = cell.children[0].astext()
    return found and not re.search(r"^(def|class|for) ", source, re.M)


def move(row):
    """One fold for the code of these cells, after the last output."""
    fold = HideCodeCellNode(prompt_show=say(SHOW), prompt_hide=say(HIDE))
    fold["classes"] += ["above-input", "mb-code"]
    for cell in row:
        first = cell.children[0]
        cell.remove(first)
        if isinstance(first, HideCodeCellNode):
            fold += first.children
        else:
            fold += first
    last = row[-1]
    place = last.children[-1] if last.children else last
    if not isinstance(place, HideCodeCellNode):
        place = last
    place += fold
    for cell in row[:-1]:
        if not cell.children:
            cell.parent.remove(cell)
