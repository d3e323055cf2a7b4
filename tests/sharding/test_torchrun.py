"""Scripts under ``torchrun``: one real start, for each takes seconds.

Where it does not matter what an agent is, a shell script stands in for one:
it does not import PyTorch.
"""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch.distributed as dist

from membudget.sharding import launching, torchrun

SCRIPT = Path(__file__).with_name("torchrun_script.py")

pytestmark = pytest.mark.skipif(
    not dist.is_available()
    or not dist.is_gloo_available()
    or not sys.platform.startswith("linux"),
    reason="this PyTorch has no gloo, or processes cannot be counted",
)


@pytest.fixture(autouse=True)
def nobody_is_left(monkeypatch):
    """Agents and ranks, which have sessions of their own."""
    mark = f"TORCHRUN_TEST_{os.getpid()}"
    monkeypatch.setenv(mark, "1")
    yield
    left = processes.marked(mark)
    for number in left:
        os.kill(number, signal.SIGKILL)
    readers = threading.enumerate()
    assert left == [t for t in readers if t.name.endswith("(read)")] == []


def test_two_ranks(tmp_path):
    """A rank is killed and all start again; then one fails, and the other
    waits: a failure, not a deadline."""
    said = []
    with pytest.raises(RuntimeError) as caught:
        torchrun(
            *(SCRIPT, tmp_path / "killed"),
            ranks=2,
            restarts=1,
            show=lambda line: said.append(json.loads(line)),
        )
    message = str(caught.value)
    assert message.startswith("torchrun_script.py failed with exit code 1:\n")
    assert "exitcode: -9" in message
    assert 'raise ValueError("boom")' in message
    assert "ValueError: boom\n" in message
    assert sorted(s.pop("rank") for s in said) == [0, 1]
    assert sorted(s["found"] for s in said) == [
        [[0, 2]] * 4,
        [[1, 2]] * 4,
    ]


# With a stand-in for the agents -------------------------------------------


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """Makes lines of a shell the agent; its arguments are those of Python."""

    def install(lines):
        script = tmp_path / "agent"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


def test_the_command_and_its_lines_which_are_shown_in_this_thread(agent):
    agent('echo "$@"; echo threads: $OMP_NUM_THREADS >&2')
    seen = []
    done = torchrun(
        *(SCRIPT, "a", 5),
        ranks=2,
        show=lambda line: seen.append((threading.get_ident(), line)),
    )
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node=2 "
        f"--max-restarts=0 {SCRIPT} a 5"
    )
    assert done == launching.Finished([command], ["threads: 1"])
    assert seen == [(threading.get_ident(), command)]


def test_a_script_that_does_not_end(agent, monkeypatch):
    """The deadline passes before it says something, or then."""
    agent("echo here; exec sleep 86400")
    with pytest.raises(TimeoutError, match=r"within 1e-09 s"):
        torchrun(SCRIPT, ranks=2, deadline=1e-9, show=None)
    clock = SimpleNamespace(**vars(launching.time))
    monkeypatch.setattr(launching, "time", clock)
    real = clock.monotonic

    def pass_by(line):
        clock.monotonic = lambda: real() + 2 * launching.DEADLINE

    message = (
        "torchrun_script.py did not end within 600 s: give it a longer "
        "deadline, or see where it waits. It wrote:\nhere"
    )
    with pytest.raises(TimeoutError, match=f"^{re.escape(message)}$"):
        torchrun(SCRIPT, ranks=2, show=pass_by)


def test_an_agent_that_is_killed(agent):
    """Its ranks outlive it, and hold its output open."""
    agent("setsid sleep 86400 & echo $!; kill -9 $$")
    said = []
    with pytest.raises(RuntimeError, match="failed with exit code -9"):
        torchrun(SCRIPT, ranks=2, show=said.append)
    assert not processes.alive(int(*said))


def test_an_error_in_show(agent):
    agent("echo here; exec sleep 86400")

    def show(line):
        raise ZeroDivisionError(line)

    with pytest.raises(ZeroDivisionError, match=r"^here$"):
        torchrun(SCRIPT, ranks=1, show=show)


def test_a_script_that_is_missing(tmp_path):
    for path in (tmp_path / "none.py", tmp_path):
        message = f"there is no script {path}: give the path of a Python file"
        with pytest.raises(FileNotFoundError, match=re.escape(message)):
            torchrun(path, ranks=2)


def test_numbers_that_cannot_be():
    for name, bad, least in (
        ("ranks", 0, "whole number from 1 to 1024"),
        ("restarts", -1, "whole number of at least 0"),
        ("deadline", 0, "finite number above 0 and up to 1000000.0"),
    ):
        message = f"{name} is {bad!r}: use a {least}"
        with pytest.raises(ValueError, match=re.escape(message)):
            torchrun(SCRIPT, **{"ranks": 2, name: bad})
