"""Execute notebooks in place, from a clean kernel, in one normal form.

    python tools/notebooks.py [notebook …]      (all, if none is named)

A notebook is only written when something in it changed, and not at all when a
cell fails or writes to stderr.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from project import PATIENCE, notebooks

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
SVG = "image/svg+xml"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


def execute(notebook, folder):
    """Run all cells in a fresh kernel; a cell that fails raises."""
    NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        timeout=PATIENCE,
        startup_timeout=PATIENCE,
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
    ).execute()


def normalise(notebook):
    """Keep what is the same on every machine and drop the rest."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.update(kernelspec=KERNEL, language_info=LANGUAGE)
    notebook.nbformat_minor = 5
    seen = set()
    for cell in notebook.cells:
        if cell.get("id") is None or cell.id in seen:
            text = f"{len(seen)}{cell.source}"
            cell["id"] = hashlib.sha256(text.encode()).hexdigest()[:8]
        seen.add(cell.id)
        for key in ("execution", "ExecuteTime", "outputId"):
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)
            output.get("metadata", {}).pop(WIDGET_VIEW, None)
            if SVG in output.get("data", {}):
                output.data[SVG] = smaller(output.data[SVG])


WASTE = {
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->": "",
    r"<defs>\s*<style.*?</style>\s*</defs>": "",
    "<svg (?!font)": '<svg font-family="sans-serif" stroke-linejoin="round" ',
    r"font-family: [^;\"]*(; )?": "",
    r' transform="rotate\(-?0 .*?\)"': "",
    r"(\d\.\d\d)\d+(?=[^<>]*>)": r"\1",  # a hundredth of a point
    r"\s+": " ",
    r" ?(?<=[>\"]) (?=[<\"])| (?=/>)": "",
}
MARKS = re.compile(
    r'<g([^<>]*)>(<use [^<>]*?( style="[^"]*")/>(?:<use [^<>]*?\3/>)*)</g>'
)


STRAIGHT = re.compile(r'(?<= d=")[MLz\d. -]+(?=")')

LINES = re.compile(r"([MLz]) ?([\d.-]*) ?([\d.-]*)")


def smaller(svg):
    """A figure of matplotlib's, half as large, in the reader's letters."""
    for pattern, short in WASTE.items():
        svg = re.sub(pattern, short, svg, flags=re.S)
    svg = STRAIGHT.sub(steps, svg)
    svg = MARKS.sub(one_style, svg)
    used = set(re.findall(r"#([\w-]+)", svg))
    return re.sub(
        r' id="([^"]*)"', lambda name: name[0] * (name[1] in used), svg
    ).strip()


def steps(outline):
    """Straight lines; of those along an axis one number says enough."""
    at, short = (None, None), []
    for letter, x, y in LINES.findall(outline[0]):
        if letter != "L" or (x != at[0] and y != at[1]):
            short.append(f"{letter}{x} {y}".strip())
        elif (x, y) != at:
            short.append(f"V{y}" if x == at[0] else f"H{x}")
        at = x, y
    return "".join(short)


def one_style(marks):
    """Marks that look the same say so once."""
    group, uses, style = marks.groups()
    return f"<g{group}{style}>{uses.replace(style, '')}</g>"


def stderr_text(notebook):
    """What the cells wrote to stderr."""
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    )


def refresh(path):
    """Execute and normalise one notebook; say what happened."""
    before = path.read_text("utf-8")
    notebook = nbformat.reads(before, as_version=4)
    try:
        execute(notebook, path.parent)
    except CellExecutionError as error:
        sys.exit(f"{error}\n{path}: a cell failed; the file is as it was.")
    if text := stderr_text(notebook):
        sys.exit(f"{text}\n{path}: wrote to stderr; the file is as it was.")
    normalise(notebook)
    after = nbformat.writes(notebook).rstrip() + "\n"
    if after != before:
        path.write_text(after, "utf-8")
    print(f"{path}: {'unchanged' if after == before else 'written'}")


if __name__ == "__main__":
    # One thread, as in the tests: sums are then added in one order.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for argument in sys.argv[1:] or notebooks():
        refresh(Path(argument))
