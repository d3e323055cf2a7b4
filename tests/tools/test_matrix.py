"""Other versions: what the tool installs and runs."""

import matrix
import pytest
from project import ROOT, read_yaml

from membudget import TORCH


@pytest.mark.parametrize(
    "name", ["requirements.txt", "tools/colab-requirements.txt"]
)
def test_every_environment_has_the_tests_and_the_torch_asked_for(name):
    wanted = matrix.packages(name, "2.15.0")
    assert [line for line in wanted if line.startswith("torch")] == [
        "torch==2.15.0"
    ]
    names = {line.partition("=")[0].partition("<")[0] for line in wanted}
    assert {"nbval", "pytest-xdist", "hypothesis", "transformers"} <= names


def test_every_room_is_among_the_tests():
    rooms = {path.parent.name for path in ROOT.glob("src/membudget/*/*.py")}
    assert {f"tests/{room}" for room in rooms} <= set(matrix.rooms())


def test_every_week_the_oldest_and_the_newest_version_are_tried():
    job = read_yaml(".github/workflows/weekly.yml")["jobs"]["versions"]
    runs = job["strategy"]["matrix"]["include"]
    tried = {run["torch"].rpartition(".")[0] for run in runs}
    assert {TORCH[0], TORCH[1]} <= tried
    assert {"3.11", "3.13"} <= {run["python"] for run in runs}
