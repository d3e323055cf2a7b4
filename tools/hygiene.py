"""What every committed notebook must fulfil, beyond reproducing."""

import re
import sys
from pathlib import Path

import nbformat
import setup_cell
from notebooks import SVG, WIDGET_VIEW
from project import ROOT, notebooks, pages

MAX_BYTES = 300_000
MAX_LINES = 15
MAX_COLUMNS = 79
MAX_TAGS = 3
PRIVATE = re.compile(r"/home/|/Users/|/tmp/|/root/")
MIN_POINTS = 9
IMAGE = re.compile(r"image/(png|jpeg|svg\+xml)")
LETTERS = re.compile(r'<text style="font-size: ([\d.]+)px')


def problems(path, root=ROOT):
    """What is wrong with one notebook, as a list of sentences."""
    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    found = [*of_notebook(notebook, path, root)]
    for number, cell in enumerate(code, start=1):
        found += [f"code cell {number}: {text}" for text in of_code(cell)]
        if cell.execution_count != number:
            found.append(
                f"code cell {number}: executed as {cell.execution_count}: "
                f"`make notebooks NB={path.parent.name}/{path.name}` mends it"
            )
    for cell in cells:
        if cell.cell_type == "markdown" and re.search(r"!\[\]\(", cell.source):
            found.append(f"cell {cell.id}: an image without alt text")
    tags = [tag for cell in code for tag in nbval_tags(cell)]
    if len(tags) > MAX_TAGS:
        found.append(f"{len(tags)} nbval tags (at most {MAX_TAGS})")
    return [f"{path.name}: {text}" for text in found]


def of_notebook(notebook, path, root):
    """Problems of the notebook as a whole."""
    text = path.read_text("utf-8")
    if len(text.encode()) > MAX_BYTES:
        yield f"{len(text.encode())} bytes (at most {MAX_BYTES})"
    if not text.endswith("}\n"):
        yield "no newline at the end"
    if found := PRIVATE.search(text):
        yield f"holds a path of somebody's machine ({found[0]}…)"
    metadata = notebook.metadata
    if metadata.get("kernelspec", {}).get("name") != "python3":
        yield "the kernel's name is not python3"
    if "widgets" in metadata:
        yield "holds metadata.widgets; run `make notebooks`"
    texts = [c for c in notebook.cells if c.cell_type == "markdown"]
    for cell in texts:
        if re.search(r"</details>[^\n]", cell.source):
            yield f"cell {cell.id}: what follows </details> needs a new line"
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "the first cell is not a title"
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "cell ids are missing or not unique"
    page = path.relative_to(root).with_suffix("").as_posix()
    if page not in pages(root):
        yield "is not in _toc.yml"
    cell = setup_cell.first_code_cell(notebook)
    if cell is None or cell.source != setup_cell.SHORT:
        yield "the first code cell is not that of tools/setup_cell.py"


def of_code(cell):
    """Problems of one code cell and its outputs."""
    lines = cell.source.splitlines()
    if not lines:
        yield "is empty"
    if len(lines) > MAX_LINES:
        yield f"has {len(lines)} lines (at most {MAX_LINES})"
    for line in lines:
        if len(line) > MAX_COLUMNS:
            yield f"a line has {len(line)} columns (at most {MAX_COLUMNS})"
        if line.rstrip().endswith(";"):
            yield "a line ends in a semicolon"
    if nbval_tags(cell) and not cell.metadata.get("reason"):
        yield "an nbval tag without a `reason` in the cell's metadata"
    for output in cell.outputs:
        yield from of_output(output, cell)


def of_output(output, cell):
    """Problems of one output."""
    if output.output_type == "error":
        yield "ends in an error"
    if output.get("name") == "stderr":
        yield "writes to stderr"
    data = output.get("data", {})
    if WIDGET_VIEW in data:
        yield "holds a widget view; run `make notebooks`"
    alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
    if any(IMAGE.match(mime) for mime in data) and not alt:
        yield "a figure without alt text (metadata mystnb.image.alt)"
    if any(IMAGE.match(mime) for mime in data) and SVG not in data:
        yield "a figure that is no SVG"
    if any(float(n) < MIN_POINTS for n in LETTERS.findall(data.get(SVG, ""))):
        yield f"a figure with letters of less than {MIN_POINTS} points"
    for image in re.findall(r"<img\b[^>]*>", data.get("text/html", "")):
        if not re.search(r'\balt="[^"]', image):
            yield "an <img> without alt text"


def nbval_tags(cell):
    """The tags that take a cell out of the comparison."""
    tags = cell.metadata.get("tags", [])
    return [tag for tag in tags if tag.startswith(("nbval", "raises-"))]


if __name__ == "__main__":
    found = [text for path in notebooks() for text in problems(path)]
    sys.exit("\n".join(found) or None)
