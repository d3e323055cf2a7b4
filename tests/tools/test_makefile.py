"""What make hands on to the commands."""

import os
import shutil
import subprocess

import pytest
from project import ROOT

pytestmark = pytest.mark.skipif(
    not shutil.which("make"), reason="there is no make"
)


@pytest.fixture
def handed_on(tmp_path):
    def handed_on(variable, given):
        """The value that a recipe sees of what the shell gives."""
        rule = tmp_path / "rule"
        rule.write_text(f'show: ; @echo "<$${variable}>"\n')
        return subprocess.run(
            ["make", "-s", "-f", "Makefile", "-f", rule, "show"],
            cwd=ROOT,
            env={**os.environ, variable: given},
            capture_output=True,
            text=True,
        ).stdout.strip("\n")

    return handed_on


def test_a_path_can_have_letters_that_are_not_ascii(handed_on):
    assert handed_on("LC_ALL", "C") == "<>"
    assert handed_on("LC_ALL", "C.UTF-8") == "<C.UTF-8>"


def test_who_has_no_home_gets_one(handed_on, tmp_path):
    assert handed_on("HOME", str(tmp_path)) == f"<{tmp_path}>"
    home = handed_on("HOME", "/no/such/home")
    assert os.access(home.strip("<>"), os.W_OK)


def test_a_test_that_hangs_ends_and_says_where(pytestconfig):
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    assert 60 < float(pytestconfig.getini("faulthandler_timeout")) <= 900


def test_a_broken_build_takes_no_records_along():
    """Without the last build's word its own folders alone are deleted."""
    lines = (ROOT / "Makefile").read_text("utf-8").splitlines()
    (wipe,) = (line for line in lines if "$(WHOLE) ] ||" in line)
    _, _, folders = wipe.partition("rm -rf ")
    assert folders.split() == [
        "$(SITE)",
        "_build/.doctrees",
        "_build/jupyter_execute",
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("accumulation", "tests/exercises/test_accumulation.py"),
        ("accumulation", "labs/lab1_accumulation.ipynb"),
        ("03a_another_gradient", "chapters/03a_another_gradient.ipynb"),
    ],
)
def test_one_subject_is_tested_by_its_name(name, found):
    asked = subprocess.run(
        ["make", "-n", "test", f"NAME={name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    [line] = (part for part in asked.splitlines() if "--nbval " in part)
    tests = line.split("--nbval ")[1].split()
    assert found in tests
    assert all((ROOT / path).exists() for path in tests)


def test_a_name_that_nothing_has():
    asked = subprocess.run(
        ["make", "-n", "test", "NAME=nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert asked.returncode
    assert "nothing is named nonsense: take a room" in asked.stderr
