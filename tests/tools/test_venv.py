"""The script that makes the environment of a clone."""

import shutil
import subprocess
import sys
import venv

import pytest
from project import PATIENCE, ROOT

MADE = "Making .venv with Python"


def start(clone, python=sys.executable):
    return subprocess.Popen(
        ["sh", "tools/venv.sh", ".venv", python],
        cwd=clone,
        stdout=subprocess.PIPE,
        text=True,
    )


def make(clone, python=sys.executable):
    process = start(clone, python)
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
    path = tmp_path_factory.mktemp("venv") / "it's  here – dä"
    venv.create(path / ".venv")
    for name in ("venv.sh", "alone.py"):  # alone: with a lock of their own
        (path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, path / "tools")
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
    """As CONTRIBUTING.md says: without make."""
    (clone / ".venv/home").unlink()
    assert make(clone) == ""
    assert (clone / ".venv/home").exists()


def idle(path, version=""):
    """A Python that says it makes an environment, and does not."""
    path.write_text(f"""#!/bin/sh
    case "$*" in
      *"-m venv "*) exit ;;
      *"print(sys.version)") [ ! "{version}" ] || exec echo "{version}" ;;
    esac
    exec "{sys.executable}" "$@"
    """)
    path.chmod(0o755)
    return path


def test_an_installation_that_was_broken_off_begins_anew(clone, tmp_path):
    """Of the last package there are the metadata, by which pip takes it for
    installed, but no programs."""
    python = idle(tmp_path / "python")
    (done,) = clone.glob(".venv/lib/*/site-packages/pip-*.dist-info")
    last = shutil.copytree(done, done.with_name("last-1.dist-info"))
    assert make(clone, python) == ""
    (last / "INSTALLER").unlink()
    assert make(clone, python).startswith(MADE)
    shutil.rmtree(last)


def test_for_another_python_it_is_made_anew(clone, tmp_path):
    assert make(clone, idle(tmp_path / "same")) == ""
    assert make(clone, idle(tmp_path / "other", "3.99")).startswith(MADE)


def test_one_that_was_moved_is_made_anew(clone, tmp_path):
    moved = shutil.move(clone, tmp_path / "elsewhere")
    assert make(moved).startswith(MADE)
    assert pip(moved)
