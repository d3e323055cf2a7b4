"""The solutions that the notebooks show are the ones that the tests check."""

import re

import nbformat
import pytest
from project import ROOT, notebooks

SHOWN = re.compile(r"^```python\n(def (\w+).*?)\n```", re.M | re.S)
TESTED = (ROOT / "tests/exercises/solutions.py").read_text("utf-8")


def cells(path, kind):
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == kind]


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_shown_solutions_are_tested(path):
    shown = [
        found
        for text in cells(path, "markdown")
        for found in SHOWN.findall(text)
    ]
    assert shown, "a chapter or lab without a folded solution"
    for source, name in shown:
        assert f"\n{source}\n" in TESTED, f"{name} is not the tested solution"


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_every_checked_exercise_has_its_solution(path):
    checked = re.findall(
        r"exercises\.check_\w+\((\w+)[,)]", "\n".join(cells(path, "code"))
    )
    shown = [
        name
        for text in cells(path, "markdown")
        for _, name in SHOWN.findall(text)
    ]
    assert checked == shown
