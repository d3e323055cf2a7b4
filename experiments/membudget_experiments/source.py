"""The hash of an experiment's source, docstrings and layout aside."""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path


def source_hash(path: Path, name: str) -> str:
    """SHA-256 of a function's syntax tree and of all that it is made of.

    That is: the function and, transitively, the definitions that it names in
    its own module or imports from another module of the same folder.
    Docstrings, comments and layout do not count, nor does the decorator
    ``@experiment``, whose arguments a record holds as they are, nor the module
    ``runner``.
    """
    texts = sorted(set(_definitions(path, name, set())))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _definitions(path: Path, name: str, seen: set) -> Iterator[str]:
    """Canonical text of what ``name`` refers to and of what that uses."""
    if (path, name) in seen:
        return
    seen.add((path, name))
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            sibling = path.parent / f"{node.module.rpartition('.')[2]}.py"
            package = node.module.rpartition(".")[0].rpartition(".")[2]
            known = sibling.is_file() and sibling.stem != "runner"
            if package == path.parent.name and known:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        yield from _definitions(sibling, alias.name, seen)
        elif name in _defines(node):
            yield f"{name} {_canonical(node)}"
            for other in sorted(_used(node)):
                yield from _definitions(path, other, seen)


def _used(node: ast.stmt) -> set[str]:
    """The names in a statement, less those of ``@experiment``."""
    call = _decorator(node)
    given = set(ast.walk(call)) if call else set()
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and part not in given
    }


def _defines(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = getattr(node, "targets", None) or [node.target]
        return {
            name.id
            for target in targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
    return set()


def _canonical(value: object) -> str:
    """A syntax tree as text, the same in every version of Python.

    Empty fields are left out: newer versions have more of them.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_canonical, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {k: v for k, v in ast.iter_fields(value) if v not in (None, [])}
    for dropped in ("kind", "type_comment"):
        fields.pop(dropped, None)
    if isinstance(value, ast.FunctionDef | ast.ClassDef):
        if ast.get_docstring(value, clean=False) is not None:
            fields["body"] = value.body[1:]
        if (experiment := _decorator(value)) is not None:
            fields["decorator_list"] = [
                node for node in value.decorator_list if node != experiment
            ]
    inner = (f"{key}={_canonical(part)}" for key, part in fields.items())
    return f"{type(value).__name__}({', '.join(inner)})"


def _decorator(node: ast.stmt) -> ast.Call | None:
    """The call of ``@experiment(…)`` on a function, if there is one."""
    for call in getattr(node, "decorator_list", []):
        function = getattr(call, "func", None)
        if getattr(function, "id", None) == "experiment":
            return call
    return None


_tree = functools.lru_cache(maxsize=64)(ast.parse)


def _parse(path: Path) -> ast.Module:
    return _tree(path.read_text("utf-8"))
