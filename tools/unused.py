"""Names and parameters that nothing but their own tests uses.

``python tools/unused.py`` prints them; the tests keep the list empty, but
for what ``KEPT`` names with a reason. A use is a mention in a page, a lab, a
document, a tool or a module; of a parameter, a call that passes it. The names
are those that a room exports, with their parameters, and functions, classes
and constants of its modules that it does not.
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator

from project import ROOT, notebooks

PACKAGE = ROOT / "src/membudget"
BESIDE = ("experiments", "labs", "tools")

KEPT = {
    "accumulation.Accumulator(reduction)": "a loop whose loss is a sum",
    "planning.LABELS": "the words of its tables, for the Chinese catalogue",
    "records.best(folder)": "a reader's own records",
    "measuring.MemoryMonitor(warning)": "the shares that 1b names",
    "ledger.activations(itemsize)": "that of a 16-bit model",
    "offloading.Offload(ahead)": "a GPU's memory against its time",
    "measuring.MemoryMonitor(critical)": "the shares that 1b names",
    "sharding.Ranks(deadline)": "how long a reader's own ranks may take",
    "sharding.Ranks(show)": "None keeps the ranks silent",
    "sharding.first_rank(rank)": "handed over as Ranks' default `show`",
    "sharding.first_rank(line)": "handed over as Ranks' default `show`",
    "sharding.fsdp_traffic(accumulation_steps)": "the oracle of a plan",
    "sharding.fsdp_traffic(synchronise_last)": "the oracle of a plan",
    "sharding.save_checkpoint(keep)": "how many saves stay",
    "sharding.zero_traffic(reduced)": "gradients reduced in fp32",
    "widgets.Accumulation(footprint)": "a reader's own network",
    "widgets.Schedules(level)": "which puzzle stands first",
    "widgets.YourModel(config)": "a reader's own model",
}
"""What stays without a use, and why."""


def sources() -> Iterator[str]:
    """The Python of all that may use the package, but tests."""
    for folder in (PACKAGE, *map(ROOT.joinpath, BESIDE)):
        for path in folder.rglob("*.py"):
            yield path.read_text("utf-8")
    for path in notebooks():
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            text = "".join(cell["source"])
            yield from [text] if cell["cell_type"] == "code" else fenced(text)
    for path in [ROOT / "README.md", *ROOT.glob("book/*.md")]:
        yield from fenced(path.read_text("utf-8"))


def fenced(markdown: str) -> list[str]:
    """The Python of a document: its blocks, and what stands in backticks."""
    blocks = re.findall(r"```python\n(.*?)```", markdown, re.DOTALL)
    return blocks + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", markdown)


def parsed(text: str) -> ast.Module | None:
    """Its tree, if it is Python."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


class Uses:
    """Who mentions a name, and which arguments its calls pass."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.keywords: dict[str, set[str]] = defaultdict(set)
        self.most: dict[str, int] = defaultdict(int)
        self.passed_on: set[str] = set()  # keys of dictionaries, and dict(…)
        for text in sources():
            if tree := parsed(text):
                for node in ast.walk(tree):
                    self._see(node)

    def _see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node.ctx, ast.Load):
                self.names.add(_last(node))
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


def public() -> Iterator[tuple[str, ast.stmt]]:
    """``(room, definition)`` of what a room's ``__all__`` names."""
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        room = init.parent
        shown = _all(ast.parse(init.read_text("utf-8")))
        for path in sorted(room.glob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if getattr(node, "name", None) in shown:
                    yield room.name, node


def private() -> Iterator[str]:
    """``module.name`` of what no room exports, but for what is decorated."""
    shown = {node.name for _, node in public()}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if not getattr(node, "decorator_list", ()):
                for name in {*_defined(node)} - shown:
                    if not name.startswith("__"):
                        yield f"{path.stem}.{name}"


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                yield name.id


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
    """Names, and ``room.name(parameter)``, without a use."""
    return [name for name in without_use() if name not in KEPT]


def without_use() -> list[str]:
    """The same with what ``KEPT`` names."""
    uses = Uses()
    found = [
        name for name in private() if name.rpartition(".")[2] not in uses.names
    ]
    for room, node in public():
        if node.name not in uses.names:
            found.append(f"{room}.{node.name}")
            continue
        found += [
            f"{room}.{node.name}({name})"
            for place, name in parameters(node)
            if name not in uses.keywords[node.name]
            and name not in uses.passed_on
            and place >= uses.most[node.name]
        ]
    return found


if __name__ == "__main__":
    print(*unused(), sep="\n")
