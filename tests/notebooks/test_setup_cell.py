"""The set-up cell where there is nothing but the notebook, as on Colab.

A fresh environment sees the packages of this one (torch and the rest, which
Colab has) but not the course's own package. One notebook stands for all,
because another test compares their set-up cells.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest
import repository
from project import ROOT, notebooks

RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, kernel_name="python3").execute()
"""


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The Python of an environment like Colab's."""
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True
    )
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "membudget" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    python = folder / "bin/python"
    (site_packages(python) / "colab.pth").write_text(str(packages))
    return python


def site_packages(python):
    """Where an environment keeps its own packages."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", ask], text=True)[:-1])


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The address of a repository with the files of the working tree."""
    folder = tmp_path_factory.mktemp("published")
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-coz", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    return f"git+{folder.as_uri()}"


def run(python, folder, path, address, cells=None):
    """Execute the notebook alone in a folder, its first cells or all."""
    notebook = nbformat.read(path, as_version=4)
    cell = repository.first_code_cell(notebook)
    cell.source = repository.setup_cell(address)
    notebook.cells = notebook.cells[:cells]
    nbformat.write(notebook, folder / path.name)
    environment = {
        **os.environ,
        "PYTHONPATH": "",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's odd way to say: no isolation
    }
    return subprocess.run(
        [python, "-c", RUN, path.name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def up_to_setup(path):
    """How many cells lead to the end of the set-up cell."""
    notebook = nbformat.read(path, as_version=4)
    cell = repository.first_code_cell(notebook)
    return notebook.cells.index(cell) + 1


def test_unset_says_what_to_do(colab, tmp_path):
    path = notebooks()[0]
    done = run(colab, tmp_path, path, repository.UNSET, up_to_setup(path))
    assert done.returncode != 0
    assert "make repository URL=" in done.stderr


def test_a_chapter_runs_with_nothing_but_itself(colab, clone, tmp_path):
    path = notebooks()[0]
    done = run(colab, tmp_path, path, clone)
    assert done.returncode == 0, done.stderr
    assert (site_packages(colab) / "membudget").is_dir()
    # The script of the lab on FSDP came along.
    ask = (
        "from membudget.sharding import training_script as path\n"
        "print(path().read_text(), end='')"
    )
    got = subprocess.check_output([colab, "-c", ask], cwd=tmp_path, text=True)
    assert got == (ROOT / "labs/fsdp_train.py").read_text()
