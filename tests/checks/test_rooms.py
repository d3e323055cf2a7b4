"""Imports point one way, from the rooms on top to the ground."""

import ast

import pytest
from project import ROOT

SOURCE = ROOT / "src/membudget"
FLOORS = [
    "cards checks data internals models policy records stories tabletop "
    "stepping",
    "measuring",
    "ledger",
    "accumulation adapters checkpointing offloading precision sharding",
    "schedules parallelism",
    "planning",
    "plotting",
    "__init__ exercises widgets",
    "command",
    "__main__",
]
"""From the ground up. Rooms of one floor do not import each other; the
modules of the ground may."""

LEVEL = {room: n for n, floor in enumerate(FLOORS) for room in floor.split()}


def imported(path):
    """The rooms that a module names in its imports, wherever they stand."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = getattr(node, "module", "")
            for alias in node.names:
                first, *rest = f"{of}.{alias.name}".strip(".").split(".")
                if first == "membudget" and rest and rest[0] in LEVEL:
                    yield rest[0]


@pytest.mark.parametrize("room", LEVEL)
def test_a_room_imports_lower_ones_only(room):
    paths = [SOURCE / f"{room}.py", *(SOURCE / room).rglob("*.py")]
    found = {r for path in paths if path.exists() for r in imported(path)}
    below = {name for name in LEVEL if LEVEL[name] < max(LEVEL[room], 1)}
    assert found <= below | {room}


def test_every_room_has_its_floor():
    modules = {path.stem for path in SOURCE.glob("*.py")}
    packages = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert set(LEVEL) == modules | packages
