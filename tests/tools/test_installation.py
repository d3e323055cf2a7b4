"""The package where there is PyTorch, NumPy and nothing else."""

import os
import subprocess
import sys

import publish
import pytest
from project import ROOT

from tests import environments

ROOMS = {path.stem for path in (ROOT / "src/membudget").glob("[a-z]*")}

IMPORTED = f"""
from importlib import import_module
for room in {sorted(ROOMS - {"widgets"})}:
    import_module(f"membudget.{{room}}")
"""

WANTS = {
    "setup()": "a figure needs matplotlib",
    "data.digits()": "data.digits needs sklearn",
    "import_module('membudget.widgets')": "a widget needs anywidget",
    "measuring.read_memory('cpu')": "reading the CPU's memory needs psutil",
    "sharding.torchrun('asked.py', ranks=1)": "torchrun needs psutil",
    "sharding.Ranks(1).run(print)": "sending a function to ranks needs "
    "cloudpickle",
}

ASKED = f"""
from importlib import import_module
from membudget import data, measuring, setup, sharding
for line in {list(WANTS)}:
    try:
        eval(line)
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of an environment into which pip put the package's wheel.

    pip has no index here: what the wheel requires is there, or pip fails.
    """
    folder = tmp_path_factory.mktemp("bare")
    packages = environments.needed("torch", "numpy")
    python = environments.make(folder / "environment", packages)
    publish.wheels(folder)
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    command = [*pip, "-q", "--no-index", *folder.glob("membudget-*.whl")]
    subprocess.run(command, check=True)
    return python


def run(python, folder, text):
    """What an environment's Python prints of a script in a folder."""
    (folder / "asked.py").write_text(text)
    return subprocess.check_output(
        [python, "-W", "error", "asked.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        text=True,
    )


def test_the_rooms_need_torch_and_numpy_alone(bare, tmp_path):
    assert run(bare, tmp_path, IMPORTED) == ""


def test_who_wants_more_is_told_what_to_install(bare, tmp_path):
    get = 'pip install "membudget[course]"'
    said = run(bare, tmp_path, ASKED).splitlines()
    assert said == [f"{what}: {get}" for what in WANTS.values()]
