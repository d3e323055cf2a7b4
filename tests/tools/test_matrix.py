"""Other versions: what the tool installs and runs."""

import re

import matrix
import pytest
from project import ROOT, read_yaml

from membudget import TORCH

REQUIREMENTS = "requirements.txt", "tools/colab-requirements.txt"


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_environment_has_the_tests_and_the_torch_asked_for(name):
    wanted = matrix.packages(name, "2.15.0")
    assert [line for line in wanted if line.startswith("torch")] == [
        "torch==2.15.0"
    ]
    assert {"nbval", "pytest-xdist", "hypothesis", "transformers"} <= (
        names(wanted)
    )


def names(wanted):
    return {re.split("[<>=]", line)[0] for line in wanted}


def test_colab_has_what_the_tests_import():
    """And what they load of the book."""
    files = [ROOT / "book/_ext/memory_budget.py"]
    for room in matrix.rooms():
        files += (ROOT / room).glob("*.py")
    text = "\n".join(path.read_text("utf-8") for path in files)
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
    ours, colabs = (
        names(matrix.packages(name, "2.15.0")) for name in REQUIREMENTS
    )
    assert ours & imported <= colabs


def test_every_room_is_among_the_tests():
    rooms = {path.parent.name for path in ROOT.glob("src/membudget/*/*.py")}
    assert {f"tests/{room}" for room in rooms} <= set(matrix.rooms())


def test_every_week_the_oldest_and_the_newest_version_are_tried():
    job = read_yaml(".github/workflows/weekly.yml")["jobs"]["versions"]
    runs = job["strategy"]["matrix"]["include"]
    tried = {run["torch"].rpartition(".")[0] for run in runs}
    assert {TORCH[0], TORCH[1]} <= tried
    assert {"3.11", "3.13"} <= {run["python"] for run in runs}
