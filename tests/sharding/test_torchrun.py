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


def test_two_nodes(tmp_path, monkeypatch):
    """A rank is killed and all start again; then one node fails, and the
    other one waits: a failure, not a deadline, and the message is its own."""
    monkeypatch.setattr(launching, "GRACE", 0.1)
    said = []
    with pytest.raises(RuntimeError) as caught:
        torchrun(
            *(SCRIPT, tmp_path / "killed"),
            ranks=1,
            nodes=2,
            restarts=1,
            show=lambda line: said.append(json.loads(line)),
        )
    message = str(caught.value)
    assert message.startswith("torchrun_script.py failed with exit code 1:\n")
    assert "exitcode: -9" in message
    assert 'raise ValueError("boom")' in message
    assert "ValueError: boom\n" in message
    everyone = [[0, 2], [1, 2]]
    refused = (
        "ranks is 99, but torchrun started 2: use its --nproc-per-node, or "
        "leave ranks out"
    )
    assert sorted(s.pop("rank") for s in said) == [0, 1]
    assert said == [{"found": [everyone] * 4, "refused": refused}] * 2


# What agents and ranks write to their error output; `[rank0]` is a rank that
# has joined the group.
OWN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "script.py", line 7, in <module>
[rank1]:     raise ValueError("boom")
[rank1]: ValueError: boom"""
PEER = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "script.py", line 10, in <module>
[rank0]:     dist.all_reduce(x)
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by \
peer [127.0.0.1]:64931."""
AGENT = """\
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.{error}"""
CHILD = AGENT.format(error="elastic.multiprocessing.errors.ChildFailedError: ")
MEETING = AGENT.format(
    error="elastic.rendezvous.api.RendezvousConnectionError: The connection "
    "to the C10d store has failed. See inner exception for details."
)


def agent_saw(code, second=58):
    return (
        f"E1122 10:23:{second}.284000 107 torch/distributed/elastic/"
        f"multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: "
        "0 (pid: 10777) of binary: python"
    )


CAUSES = {
    "an error": (1, f"{OWN}\n{agent_saw(1, 57)}\n{CHILD}"),
    "an error, and a rank beside it": (1, f"{PEER}\n{OWN}\n{agent_saw(1)}"),
    "a rank was killed": (1, agent_saw(-9)),
    "an exit": (1, agent_saw(3)),
    "the agent was killed": (-9, ""),
}
FOLLOW = {
    "the peer is gone": (1, f"{PEER}\n{agent_saw(1)}\n{CHILD}"),
    "and was in the first attempt": (
        1,
        f"{OWN}\n{agent_saw(1, 50)}\n{PEER}\n{agent_saw(1)}\n{CHILD}",
    ),
    "told to end": (1, agent_saw(-15)),
    "the store is gone": (1, MEETING),
    "an error that nobody knows": (1, OWN + "\n" + agent_saw(1, 59)),
}


def begin(code, said):
    return launching.begin_of_failure(code, said.split("\n"))


def test_the_node_with_the_cause_comes_before_those_that_followed():
    follow = {name: begin(*said) for name, said in FOLLOW.items()}
    for cause, said in CAUSES.items():
        for name in follow:
            assert begin(*said) < follow[name], f"{cause}; {name}"
    assert follow["the peer is gone"] < follow["the store is gone"]


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
    assert done == launching.Finished(0, [command], ["threads: 1"])
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
    done = torchrun(SCRIPT, ranks=2, check=False)
    assert done.code == -9
    assert not processes.alive(int(*done.lines))


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
        ("nodes", 1025, "whole number from 1 to 1024"),
        ("restarts", -1, "whole number of at least 0"),
        ("deadline", 0, "finite number above 0 and up to 1000000.0"),
    ):
        message = f"{name} is {bad!r}: use a {least}"
        with pytest.raises(ValueError, match=re.escape(message)):
            torchrun(SCRIPT, **{"ranks": 2, name: bad})
