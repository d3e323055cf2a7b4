"""What a reader of a page has at hand when an exercise comes."""

import ast
import inspect
import linecache
from contextlib import suppress
from functools import cache
from itertools import takewhile

import nbformat
from project import notebooks

COMPUTE = ast.Call | ast.Subscript
DEFINE = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@cache
def cells(path):
    """The sources of the code cells."""
    found = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in found if cell.cell_type == "code"]


@cache
def page_of(exercise):
    """The notebook that asks for it."""
    call = f"exercises.check_{exercise}("
    (path,) = (p for p in notebooks() if any(call in c for c in cells(p)))
    return path


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
