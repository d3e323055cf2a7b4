"""Public names and parameters that nothing but their own tests uses.

``python tools/unused.py`` prints them; the tests keep the list empty, but
for what ``KEPT`` names with a reason. A use is a mention in a page, a lab, a
document, a tool or another module; of a parameter, a call that passes it.
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/membudget"

KEPT: dict[str, str] = {}
"""What stays without a use, and why."""


def sources() -> Iterator[tuple[str, str]]:
    """``(where, Python)`` of all that may use the package, but tests."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
    for path in ROOT.glob("labs/*.py"):
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
    for path in [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("labs/*.ipynb")]:
        where = path.relative_to(ROOT).as_posix()
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                yield where, text
            else:
                yield from ((where, part) for part in fenced(text))
    for path in [ROOT / "README.md", *ROOT.glob("book/*.md")]:
        where = path.relative_to(ROOT).as_posix()
        yield from ((where, t) for t in fenced(path.read_text("utf-8")))


def fenced(markdown: str) -> list[str]:
    """The Python of a document: its blocks, and what stands in backticks."""
    blocks = re.findall(r"```python\n(.*?)```", markdown, re.DOTALL)
    return blocks + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", markdown)


def parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


class Uses:
    """Who mentions a name, and which arguments its calls pass."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = defaultdict(set)
        self.keywords: dict[str, set[str]] = defaultdict(set)
        self.most: dict[str, int] = defaultdict(int)
        self.passed_on: set[str] = set()  # keys of dictionaries, and dict(…)
        for where, text in sources():
            if tree := parsed(text):
                for node in ast.walk(tree):
                    self._see(where, node)

    def _see(self, where: str, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.names[node.id].add(where)
        elif isinstance(node, ast.Attribute):
            self.names[node.attr].add(where)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Dict):
            self.passed_on |= {
                key.value
                for key in node.keys
                if isinstance(key, ast.Constant) and type(key.value) is str
            }

    def _call(self, node: ast.Call) -> None:
        name = _last(node.func)
        passed = {k.arg for k in node.keywords if k.arg}
        count = 99 if _starred(node) else len(node.args)
        if name in ("partial", "dict", "replace"):
            self.passed_on |= passed
            if node.args and name == "partial":
                name, count = _last(node.args[0]), count - 1
        self.keywords[name] |= passed
        self.most[name] = max(self.most[name], count)


def _starred(node: ast.Call) -> bool:
    return any(isinstance(a, ast.Starred) for a in node.args)


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def public() -> Iterator[tuple[str, str, ast.stmt]]:
    """``(room, module, definition)`` of what a room's ``__all__`` names."""
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        room = init.parent
        shown = _all(ast.parse(init.read_text("utf-8")))
        for path in sorted(room.glob("*.py")):
            module = path.relative_to(ROOT).as_posix()
            for node in ast.parse(path.read_text("utf-8")).body:
                if getattr(node, "name", None) in shown:
                    yield room.name, module, node


def _all(tree: ast.Module) -> set[str]:
    for node in tree.body:
        targets = getattr(node, "targets", [])
        if any(getattr(t, "id", "") == "__all__" for t in targets):
            return set(ast.literal_eval(node.value))
    return set()


def parameters(node: ast.stmt) -> list[tuple[int, str]]:
    """Place and name of each parameter of a function or a class's init."""
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if getattr(n, "name", "") == "__init__"]
        if not inits:
            return []
        arguments, first = inits[0].args, 1
    elif isinstance(node, ast.FunctionDef):
        arguments, first = node.args, 0
    else:
        return []
    placed = [*arguments.posonlyargs, *arguments.args][first:]
    rows = [(i, a.arg) for i, a in enumerate(placed)]
    return rows + [(98, a.arg) for a in arguments.kwonlyargs]


def unused() -> list[str]:
    """``room.name`` and ``room.name(parameter)`` without a use."""
    uses, found = Uses(), []
    for room, module, node in public():
        others = uses.names[node.name] - {
            module,
            f"src/membudget/{room}/__init__.py",
        }
        if not others and not _own(uses, module, node.name):
            found.append(f"{room}.{node.name}")
            continue
        found += [
            f"{room}.{node.name}({name})"
            for place, name in parameters(node)
            if name not in uses.keywords[node.name]
            and name not in uses.passed_on
            and place >= uses.most[node.name]
        ]
    return [name for name in found if name not in KEPT]


def _own(uses: Uses, module: str, name: str) -> bool:
    """Whether its own module uses it, as an annotation or a helper."""
    return module in uses.names[name]


if __name__ == "__main__":
    print(*unused(), sep="\n")
