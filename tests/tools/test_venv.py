"""The script that makes the environment of a clone."""

import shutil
import subprocess
import sys
import venv

import pytest
from project import PATIENCE, ROOT

SCRIPT = ROOT / "tools/venv.sh"
MADE = "Making .venv with Python"


def start(clone):
    return subprocess.Popen(
        ["sh", SCRIPT, ".venv", sys.executable],
        cwd=clone,
        stdout=subprocess.PIPE,
        text=True,
    )


def make(clone):
    process = start(clone)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return out


def pip(clone):
    python = clone / ".venv/bin/python"
    command = [python, "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder in which an environment was begun, and never done."""
    path = tmp_path_factory.mktemp("venv") / "it's  here"
    venv.create(path / ".venv")
    assert not pip(path)
    return path


def test_two_at_once_make_what_was_half_made_anew(clone):
    both = [start(clone), start(clone)]
    said = [process.communicate(timeout=PATIENCE)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(line.startswith(MADE) for line in said) == [False, True]
    assert pip(clone)
    home = clone / ".venv/home"
    assert home.read_text() == f"{clone.resolve()}\n"
    before = home.stat().st_mtime_ns
    assert make(clone) == ""  # it is kept, and what is in it not older
    assert home.stat().st_mtime_ns == before


def test_one_that_a_reader_made_is_kept(clone):
    """As the README says: without make."""
    (clone / ".venv/home").unlink()
    assert make(clone) == ""
    assert (clone / ".venv/home").exists()


def test_one_that_was_moved_is_made_anew(clone, tmp_path):
    moved = shutil.move(clone, tmp_path / "elsewhere")
    assert make(moved).startswith(MADE)
    assert pip(moved)
