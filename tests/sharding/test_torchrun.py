"""Scripts under ``torchrun``: few starts, for each takes seconds."""

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


@pytest.fixture(autouse=True, scope="module")
def mark():
    """In the environment of all processes that these tests start."""
    name = f"TORCHRUN_TEST_{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "1")
        yield name
        for number in processes.marked(name):
            os.kill(number, signal.SIGKILL)


@pytest.fixture(autouse=True)
def nobody_is_left(mark):
    """Agents and ranks, which have sessions of their own."""
    yield
    assert processes.marked(mark) == []
    readers = threading.enumerate()
    assert [t for t in readers if t.name.endswith("(read)")] == []


class Shown:
    """The lines, and in which thread they came."""

    def __init__(self, then=None):
        self.said, self.threads, self.then = [], set(), then

    def __call__(self, line):
        self.said.append(json.loads(line))
        self.threads.add(threading.get_ident())
        if len(self.said) == 2 and self.then:
            self.then()

    @property
    def numbers(self):
        return [said["pid"] for said in self.said]


@pytest.fixture(scope="module")
def two_nodes(mark, tmp_path_factory):
    """Two agents with two ranks each; one is killed, all start again."""
    show, sign = Shown(), tmp_path_factory.mktemp("torchrun") / "killed"
    done = torchrun(
        *(SCRIPT, "results", sign),
        ranks=2,
        nodes=2,
        restarts=1,
        show=show,
    )
    assert sign.exists()
    return done, show


def test_the_lines_are_shown_in_the_calling_thread(two_nodes):
    done, show = two_nodes
    assert done.code == 0
    assert list(map(json.loads, done.lines)) == show.said
    assert show.threads == {threading.get_ident()}


def test_two_nodes_are_one_group(two_nodes):
    said = sorted(two_nodes[1].said, key=lambda said: said["rank"])
    assert [s["rank"] for s in said] == [0, 1, 2, 3]
    assert sorted(s["local"] for s in said) == ["0", "0", "1", "1"]
    assert {s["world"] for s in said} == {"4"}
    assert {s["threads"] for s in said} == {"1"}


def test_launch_joins_the_group_and_has_the_results_of_all(two_nodes):
    for said in two_nodes[1].said:
        everyone = [[rank, 4] for rank in range(4)]
        assert said["found"] == everyone
        assert said["again"] == [everyone] * 3


def test_launch_refuses_another_number_of_ranks(two_nodes):
    for said in two_nodes[1].said:
        assert said["refused"] == (
            "ranks is 99, but torchrun started 4: use its --nproc-per-node, "
            "or leave ranks out"
        )


def test_all_start_again_after_one_was_killed(two_nodes):
    assert any("exitcode: -9" in line for line in two_nodes[0].errors)


def test_one_node_fails_and_the_other_one_waits():
    """It is a failure, not a deadline, and the message is that node's."""
    show = Shown()
    with pytest.raises(RuntimeError) as caught:
        torchrun(SCRIPT, "failure", ranks=1, nodes=2, show=show)
    message = str(caught.value)
    assert message.startswith("torchrun_script.py failed with exit code 1:\n")
    assert "\nValueError: boom\n" in message
    assert 'raise ValueError("boom")' in message
    assert len(show.numbers) == 2
    assert not any(map(processes.alive, show.numbers))


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


def test_a_script_that_does_not_end(monkeypatch):
    """The deadline passes when both ranks are there."""
    clock = SimpleNamespace(**vars(launching.time))
    monkeypatch.setattr(launching, "time", clock)
    real = clock.monotonic

    def pass_by():
        clock.monotonic = lambda: real() + 2 * launching.DEADLINE

    show = Shown(then=pass_by)
    with pytest.raises(TimeoutError) as caught:
        torchrun(SCRIPT, "wait", ranks=2, show=show)
    message = str(caught.value)
    assert message.startswith(
        "torchrun_script.py did not end within 600 s: give it a longer "
        "deadline, or see where it waits. It wrote:\n"
    )
    assert all(f'"pid": {number}' in message for number in show.numbers)
    assert not any(map(processes.alive, show.numbers))


def test_an_agent_that_is_killed():
    """Its ranks outlive it, and hold its output open."""

    def kill():
        os.kill(show.said[0]["agent"], signal.SIGKILL)

    show = Shown(then=kill)
    done = torchrun(SCRIPT, "wait", ranks=2, show=show, check=False)
    assert done.code == -9
    assert len(done.lines) == len(show.numbers) == 2
    assert not any(map(processes.alive, show.numbers))


def test_a_deadline_before_the_ranks_are_there():
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        torchrun(SCRIPT, "wait", ranks=2, deadline=0.01)


def test_an_error_in_show(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('here')")

    def show(line):
        raise ZeroDivisionError(line)

    with pytest.raises(ZeroDivisionError, match=r"^here$"):
        torchrun(script, ranks=1, show=show)


def test_a_script_that_is_missing(tmp_path):
    for path in (tmp_path / "none.py", tmp_path):
        message = f"there is no script {path}: give the path of a Python file"
        with pytest.raises(FileNotFoundError, match=re.escape(message)):
            torchrun(path, ranks=2)


@pytest.mark.parametrize(
    ("name", "bad", "least"),
    [
        ("ranks", 0, "from 1 to 1024"),
        ("nodes", 1025, "from 1 to 1024"),
        ("restarts", -1, "of at least 0"),
        ("deadline", 0, "above 0 and up to 1000000.0"),
    ],
)
def test_numbers_that_cannot_be(name, bad, least):
    kind = "finite" if name == "deadline" else "whole"
    message = f"{name} is {bad!r}: use a {kind} number {least}"
    with pytest.raises(ValueError, match=re.escape(message)):
        torchrun(SCRIPT, **{"ranks": 2, name: bad})
