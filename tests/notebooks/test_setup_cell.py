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
print([c.outputs for c in notebook.cells if c.cell_type == "code"][0])
"""

NOWHERE = "https://127.0.0.1:9/membudget-0.2.0-py3-none-any.whl"


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
    assert done.stdout == "[]\n"  # nothing of pip's
    assert came_along(colab, tmp_path)


@pytest.fixture
def has(tmp_path):
    """An environment that has a version of the package, or (None) none."""

    def has(version):
        packages = environments.needed("pip")
        python = environments.make(tmp_path / "other", packages)
        home = environments.site_packages(python)
        if version:
            (home / "membudget.py").write_text("setup = print")
            name = f"membudget-{version}.dist-info"
            (home / name).mkdir()
            text = (
                f"Metadata-Version: 2.1\nName: membudget\nVersion: {version}"
            )
            (home / name / "METADATA").write_text(text)
            (home / name / "RECORD").write_text("membudget.py,,\n")
        return python

    return has


def alone(python, requirement):
    """What the cell says, by itself."""
    return subprocess.run(
        [python, "-c", setup_cell.long(requirement)],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("version", [None, "0.1.10"])
def test_a_wheel_that_cannot_be_reached_gets_a_sentence(has, version):
    done = alone(has(version), NOWHERE)
    assert done.stdout == "" and "Retry" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"OSError: pip cannot get ['{NOWHERE}']: check the network, try again"
    )


@pytest.mark.parametrize("version", ["current", "10.0.0"])
def test_who_has_the_version_or_a_newer_one_needs_no_network(has, version):
    current = version.replace("current", address.version())
    done = alone(has(current), NOWHERE)
    assert done.returncode == 0, done.stderr


def test_an_older_version_is_replaced(has, tmp_path):
    publish.wheels(tmp_path)
    python = has("0.1.10")
    with site_checks.serve(tmp_path) as served:
        done = alone(python, f"{served}/{address.wheel()}")
    home = environments.site_packages(python)
    assert not (home / "membudget.py").exists()
    assert (home / "membudget/__init__.py").is_file()
    assert "No module named 'torch'" in done.stderr  # which setup imports


def test_a_cell_is_a_cell():
    """Of at most 15 lines, and none is wide but for an address."""
    for experiments in False, True:
        lines = setup_cell.long(NOWHERE, experiments).splitlines()
        assert len(lines) <= 15
        assert all(len(line) < 80 or NOWHERE[:20] in line for line in lines)


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
