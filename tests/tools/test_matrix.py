"""Other versions: what the tool installs and runs."""

import matrix
import pytest
from project import ROOT


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
