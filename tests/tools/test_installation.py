"""The package where there is PyTorch, NumPy and nothing else."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import address
import publish
import pytest
import site_checks
from project import ROOT, notebooks

from tests import environments

MODULES = {path.stem for path in (ROOT / "src/membudget").iterdir()}
ROOMS = {name for name in MODULES if not name.startswith("__")}

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
    """The Python of an environment where the pages' command was given.

    pip has no index here: what the wheel requires is there, or pip fails.
    """
    folder = tmp_path_factory.mktemp("bare")
    packages = environments.needed("torch", "numpy")
    python = environments.make(folder / "environment", packages)
    publish.wheels(folder)
    with (
        site_checks.serve(folder) as served,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("MEMBUDGET_SITE", served)
        m.setenv("PIP_NO_INDEX", "1")
        pip, *command = shlex.split(address.installs()[0])
        pip = [sys.executable, "-m", pip, "--python", python, "-q"]
        subprocess.run([*pip, *command], check=True)
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


@pytest.mark.skipif("__main__" not in MODULES, reason="there is no command")
@pytest.mark.parametrize(
    "start", [["membudget"], ["python", "-m", "membudget"]]
)
def test_the_command_runs_where_there_is_torch_alone(bare, start):
    name, *rest = start
    command = [bare.with_name(name), *rest, "cards"]
    done = subprocess.check_output(
        command, env={**os.environ, "PYTHONPATH": ""}, text=True
    )
    assert "RTX 3060" in done


def imported():
    """What the notebooks import, by the names of what pip installs."""
    pips = {
        "sklearn": "scikit-learn",
        "IPython": "ipywidgets",
        "PIL": "matplotlib",
    }
    for path in notebooks():
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                text = "".join(cell["source"])
                for name in re.findall(r"^(?:import|from) (\w+)", text, re.M):
                    if name not in sys.stdlib_module_names:
                        yield pips.get(name, name)


def test_the_extra_has_what_the_notebooks_import():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]
    extra = project["optional-dependencies"]["course"]
    known = map(environments.plain, project["dependencies"] + extra)
    own = {"membudget", "membudget_experiments"}
    own |= {"fsdp_train", "parallel_train"}
    assert {"peft", "torch"} <= set(imported()) <= own.union(known)
