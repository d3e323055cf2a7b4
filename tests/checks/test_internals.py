"""Which versions of PyTorch there may be, and what is used of their inside."""

import ast
import re
import runpy
import sys
import types
import warnings

import pytest
import torch
from packaging.specifiers import SpecifierSet
from project import ROOT
from torch import nn

import membudget
from membudget import TORCH, internals, plotting
from tests.versions import DIFFERENT

SOURCE = ROOT / "src/membudget"
INTERNALS = "internals.py"
OTHERS = {
    "accumulation/_private.py",
    "command/_private.py",
    "parallelism/_private.py",
    "sharding/_private.py",
}
"""The modules that use what is private of PyTorch's process groups and
pipelines, and the one that is imported while a script imports torch."""

NOT_PYTORCHS = {"_asdict", "_getframe", "_replace"}  # tuples, sys
KNOWN = {a for _, names in internals.ATTRIBUTES for a in names.split()}


def private(name):
    return name.startswith("_") and not name.endswith("__")


def defined(tree):
    """The names that a module gives to its own things."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif re.fullmatch(r"(self|cls)\.\w+", ast.unparse(node)):
                yield node.attr


def used(tree, own):
    """What a module uses of PyTorch's inside; no names of operators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            of = getattr(node, "module", "")
            for path in (f"{of}.{alias.name}" for alias in node.names):
                parts = path.strip(".").split(".")
                if parts[0] == "torch" and any(map(private, parts)):
                    yield path
        elif isinstance(node, ast.Attribute) and private(node.attr):
            path = ast.unparse(node)
            known = node.attr in own | KNOWN | NOT_PYTORCHS
            operator = path.startswith(("torch.ops.aten.", "aten."))
            if not operator and (path.startswith("torch.") or not known):
                yield path


def test_what_is_private_of_pytorch_stands_in_one_module():
    trees = {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in SOURCE.rglob("*.py")
    }
    own = {name for tree in trees.values() for name in defined(tree)}
    found = {name: list(used(tree, own)) for name, tree in trees.items()}
    inside = {name: uses for name, uses in found.items() if uses}
    assert inside.keys() == {INTERNALS} | OTHERS, inside


@pytest.mark.parametrize(
    "owner, name",
    [
        (torch._C._autograd, "_get_sequence_nr"),
        (torch.utils._mode_utils, "no_dispatch"),
        (nn.Module, "_compiled_call_impl"),
    ],
)
def test_a_version_that_lacks_a_part_is_refused(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    message = rf"^torch \S+ lacks .*{name}.*: use torch 2.11 to 2.15$"
    with pytest.raises(ImportError, match=message):
        runpy.run_path(SOURCE / INTERNALS)


def test_a_compiler_that_cannot_be_asked_is_refused(monkeypatch):
    name = "torch._dynamo.eval_frame"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    message = rf"lacks .*{name}\._callback_from_stance\): use torch"
    with (
        pytest.raises(RuntimeError, match=message),
        internals.nothing_compiled("of this"),
    ):
        pass


@pytest.mark.parametrize(
    "version, tested",
    [
        ("2.10.1", False),
        ("2.11.0+cpu", True),
        ("2.15.9+cu132", True),
        ("2.16.0.dev20270101", False),
        ("3.0.0", False),
    ],
)
def test_setup_warns_where_nothing_is_tested(monkeypatch, version, tested):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(plotting, "use_style", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        membudget.setup()
    told = [(str(w.message), w.filename) for w in caught]
    sentence = (
        f"The course is tested with torch 2.11 to 2.15, and with torch "
        f"{version} numbers may differ."
    )
    assert told == ([] if tested else [(sentence, __file__)])


def test_setup_tells_of_a_version_that_came_later(monkeypatch):
    monkeypatch.setattr(membudget, "__version__", "0.1.0")
    monkeypatch.setattr(plotting, "use_style", lambda: None)
    with pytest.warns(UserWarning, match=r"0\.1\.0 is running.*restart the"):
        membudget.setup()


@pytest.mark.parametrize(
    "file, text",
    [
        ("pyproject.toml", '"torch>={}"'),
        ("CONTRIBUTING.md", "{}, 2.13 and {} are tested"),
        ("book/start.md", "PyTorch {} or newer"),
        ("book/measurements.md", "PyTorch {} or newer"),
    ],
)
def test_pages_name_the_versions_of_the_package(file, text):
    assert text.format(*TORCH) in (ROOT / file).read_text("utf-8")


@pytest.mark.parametrize("name", DIFFERENT)
def test_somebody_asks_for_each_difference(name):
    """Of some versions that are tested, and not of all."""
    difference = DIFFERENT[name]
    test = ROOT / "tests" / difference.place
    assert f'here("{name}")' in test.read_text("utf-8")
    oldest, newest = (int(text.split(".")[1]) for text in TORCH)
    tested = [f"2.{minor}" for minor in range(oldest, newest + 1)]
    found = [*SpecifierSet(difference.versions).filter(tested)]
    assert found and found != tested
