"""What a page has of its exercises: the solutions, and names at hand."""

import ast
import inspect
import linecache
import re
from contextlib import suppress
from functools import cache
from itertools import takewhile

import nbformat
from project import notebooks

CHECKED = re.compile(r"exercises\.check_(\w+)\(")
SHOWN = re.compile(r"^```python\n(def (\w+).*?\n)```", re.M | re.S)
COMPUTE = ast.Call | ast.Subscript
DEFINE = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@cache
def cells(path, kind="code"):
    """The sources of a notebook's cells of one kind."""
    found = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in found if cell.cell_type == kind]


@cache
def page_of(exercise):
    """The notebook that asks for it."""
    (path,) = (p for p in notebooks() if exercise in asked(p))
    return path


def asked(path):
    """The exercises of a notebook, in their order."""
    return CHECKED.findall("\n".join(cells(path)))


def shown(path):
    """The folded solutions of a notebook, by name, in their order."""
    text = "\n".join(cells(path, "markdown"))
    return {name: source for source, name in SHOWN.findall(text)}


def defines(node):
    """Whether it gives something a name, and does nothing else."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(n, COMPUTE) for n in ast.walk(node))
    return isinstance(node, DEFINE)


def namespace(exercise):
    """The names that the page imports and defines before the exercise."""
    path, call = page_of(exercise), f"exercises.check_{exercise}("
    found = {"__name__": "__main__"}
    for source in takewhile(lambda cell: call not in cell, cells(path)[1:]):
        for node in filter(defines, ast.parse(source).body):
            with suppress(NameError):  # needs what was computed
                run(ast.unparse(node), found)
    return found


def run(source, names):
    """Execute a piece of code; its source can be asked for."""
    file = f"<page {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), names)


def on_its_page(solution):
    """The function anew, from its source, with the page's names alone."""
    names = namespace(solution.__name__)
    run(inspect.getsource(solution), names)
    return names[solution.__name__]
