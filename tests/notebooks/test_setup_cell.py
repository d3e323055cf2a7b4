"""The set-up cell where there is nothing but the notebook, as on Colab.

A fresh environment sees the packages of this one (torch and the rest, which
Colab has) but not the course's own package. One notebook stands for all,
because they have the same set-up cell.
"""

import os
import subprocess

import address
import nbformat
import publish
import pytest
import setup_cell
import site_checks
from project import ROOT, notebooks

from tests import environments

RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, kernel_name="python3").execute()
"""


@pytest.fixture
def colab(tmp_path):
    """The Python of an environment like Colab's."""
    packages = environments.all_but_the_course()
    return environments.make(tmp_path / "colab", packages)


@pytest.fixture
def clone(tmp_path):
    """The address of a repository with the files of the working tree."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git = ["git", "-C", str(ROOT), f"--git-dir={folder}/.git", "--work-tree=."]
    git += ["-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    return f"git+{folder.as_uri()}"


def run(python, folder, path, requirement, cells):
    """Execute the first cells of the published notebook in a folder."""
    text = setup_cell.fill(path.read_text("utf-8"), requirement)
    notebook = nbformat.reads(text, as_version=4)
    notebook.cells = notebook.cells[:cells]
    nbformat.write(notebook, folder / path.name)
    environment = {
        **os.environ,
        "PYTHONPATH": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's odd way to say: no isolation
    }
    return subprocess.run(
        [python, "-c", RUN, path.name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def second_code_cell(notebook):
    """The first after the set-up cell; the others need no more."""
    _, second, *_ = (
        i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"
    )
    return second


def came_along(python, folder):
    """The package is the environment's own, and has the lab's script."""
    ask = (
        "from membudget.sharding import training_script as path\n"
        "print(path().read_text(), end='')"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    got = subprocess.check_output(
        [python, "-c", ask], cwd=folder, env=environment, text=True
    )
    script = (ROOT / "labs/fsdp_train.py").read_text()
    own = environments.site_packages(python) / "membudget"
    return own.is_dir() and got == script


def test_a_downloaded_page_installs_what_the_site_carries(
    colab, tmp_path, monkeypatch
):
    site = tmp_path / "site"
    site.mkdir()
    publish.wheels(site)
    path = ROOT / "labs/measure_your_card.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert "membudget_experiments" in notebook.cells[3].source
    with site_checks.serve(site) as served:
        monkeypatch.setenv("MEMBUDGET_SITE", served)
        upto = second_code_cell(notebook) + 1
        done = run(colab, tmp_path, path, address.requirement(), upto)
    assert done.returncode == 0, done.stderr
    assert came_along(colab, tmp_path)


@pytest.mark.few(0)  # takes long: where no site is known
def test_a_downloaded_page_installs_the_repository(colab, clone, tmp_path):
    path = notebooks()[0]
    upto = second_code_cell(nbformat.read(path, as_version=4)) + 1
    done = run(colab, tmp_path, path, clone, upto)
    assert done.returncode == 0, done.stderr
    assert came_along(colab, tmp_path)


@pytest.mark.parametrize("sources", [[], ["import torch"]])
def test_a_notebook_without_the_cell_is_refused(sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    with pytest.raises(ValueError, match="begin with\n\nimport membudget"):
        setup_cell.fill(text, "git+https://github.com/o/n")


@pytest.mark.parametrize(
    "requirement",
    [
        "",
        "git+https://github.com/o/n; rm -rf ~",
        "git+https://github.com/o/n\nprint(1)",
        "git+https://github.com/o/n\n",
        'git+https://github.com/o/n"',
        "git+https://github.com/o/n'",
        "git+https://github.com/{o}/n",
        "git+https://github.com/$o/n",
        "git+https://github.com/o/n --index-url=https://x",
        "git+https://github.com/o/n&x",
        "git+https://github.com/o/n`x`",
        "git+ssh://git@github.com/o/n",
        "-r https://example.com/x",
    ],
)
def test_nothing_but_an_address_gets_into_the_cell(requirement):
    with pytest.raises(ValueError, match="nothing that a notebook may insta"):
        setup_cell.fill(notebooks()[0].read_text("utf-8"), requirement)
