"""A pool of rank processes: what it returns, how it fails, what it leaves."""

import gc
import linecache
import os
import re
import signal
import subprocess
import sys
from types import CodeType, SimpleNamespace

import cloudpickle
import processes
import psutil
import pytest
import sharding_workers as workers
import torch
import torch.distributed as dist
from project import PATIENCE

from membudget.sharding import (
    DeadlineError,
    RankError,
    Ranks,
    first_rank,
    launching,
    rank_process,
)

pytestmark = pytest.mark.skipif(
    not dist.is_available()
    or not dist.is_gloo_available()
    or not sys.platform.startswith("linux"),
    reason="this PyTorch has no gloo, or processes cannot be counted",
)


@pytest.fixture(scope="module")
def shared():
    with Ranks(2) as pool:
        yield pool


@pytest.fixture
def pool(shared):
    """Two ranks, started by the first test that needs them."""
    shared.show = first_rank
    return shared


@pytest.fixture(autouse=True)
def no_rank_is_left(shared):
    """After every test, also a failing one, but those of the pool."""
    yield
    gc.collect()
    left = set(processes.ranks()) - set(shared.processes)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left


def works(pool):
    """The pool runs something, maybe on new processes."""
    return pool.run(workers.place) == [
        (rank, pool.ranks) for rank in range(pool.ranks)
    ]


# What a run returns ------------------------------------------------------


def test_results_come_in_order_of_ranks():
    """Eight are more than most machines of these tests have cores."""
    everyone = [(rank, 8) for rank in range(8)]
    with Ranks(8) as eight:
        assert eight.run(workers.place) == everyone


def test_what_a_worker_gets(pool):
    x = torch.arange(6.0).reshape(2, 3)
    found = pool.run(workers.echo, 1, [x], kind="a", f=workers.place)
    for rank, (where, args, kwargs) in enumerate(found):
        assert where == rank
        assert args[0] == 1 and torch.equal(args[1][0], x)
        assert kwargs == {"kind": "a", "f": workers.place}
    assert torch.equal(pool.run(workers.total, x)[1], 2 * x + 1)
    names = "RANK", "WORLD_SIZE"
    found = pool.run(lambda: [os.environ[name] for name in names])
    assert found == [["0", "2"], ["1", "2"]]
    assert pool.run(torch.get_num_threads) == [1, 1]
    child = [sys.executable, "-c", "print('child')"]
    assert pool.run(subprocess.check_output, child) == [b"child\n"] * 2
    # More than a pipe holds: 5 MB to and from each of them at once.
    sent = torch.ones(1_250_000)
    for rank, (where, (x,), _) in enumerate(pool.run(workers.echo, sent)):
        assert where == rank and torch.equal(x, sent)


def test_the_life_of_a_pool():
    """The processes of a run serve the next one, and end well."""
    pool = Ranks(2)
    pool.close()  # has not started
    for _ in range(2):
        assert pool.processes == []
        assert pool.run(workers.kept, 5) == [None, None]
        numbers = pool.processes
        assert set(numbers) <= set(processes.ranks())
        assert pool.run(workers.kept, 6) == [5, 5]
        assert pool.processes == numbers
        kept = [p.process for p in pool._processes]
        folder = pool._processes[0].log.parent
        assert folder.is_dir()
        pool.close()
        pool.close()
        assert [process.exitcode for process in kept] == [0, 0]
        assert not folder.exists()


# Functions that no other process can import ------------------------------

CELL = """
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist

lock = threading.Lock()
times = 2

@dataclass
class Point:
    x: int

def helper(point):
    return Point(times * point.x + dist.get_rank())

def uses_helper(point: Point):
    return helper(point), torch.ones(1).item()

def calls_itself(n):
    return n and 1 + calls_itself(n - 1)

def fails():
    def inner():
        raise ValueError("boom")

    inner()

def lacks_a_value():
    return nowhere

def uses_lock():
    return lock

def calls_itself_and_uses_it(n):
    return calls_itself_and_uses_it(n - 1) if n else uses_lock()

def closure():
    lines = (line for line in ())
    return lambda: lines
"""


@pytest.fixture(scope="module")
def cell():
    """What a notebook's cell defines; no file has its lines."""
    file = "/no/such/folder/büro.py"
    entry = len(CELL), None, CELL.splitlines(True), file
    space = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linecache.cache, file, entry)
        exec(compile(CELL, file, "exec"), space)
        yield SimpleNamespace(**space)


def test_functions_of_a_notebook_travel_with_what_they_use(pool, cell):
    point = cell.Point
    found = pool.run(cell.uses_helper, point(5))
    assert found == [(point(10), 1.0), (point(11), 1.0)]
    assert pool.run(workers.apply, cell.helper, point(1))[1] == point(3)
    assert pool.run(cell.calls_itself, 3) == [3, 3]
    times = 3
    assert pool.run(lambda: times * dist.get_rank()) == [0, 3]


def test_an_error_shows_the_lines_of_the_notebook(pool, cell):
    with pytest.raises(RankError) as caught:
        pool.run(cell.fails)
    places = re.findall(
        r'File "(.*)", line \d+, in (.*)\n +(.*)', str(caught.value)
    )
    file = "<function of the notebook: fails>"
    assert places == [
        (file, "fails", "inner()"),
        (file, "inner", 'raise ValueError("boom")'),
    ]
    with pytest.raises(RankError, match="name 'nowhere' is not defined"):
        pool.run(cell.lacks_a_value)


def test_what_cannot_travel(cell):
    pool = Ranks(2)
    generator = (i for i in range(2))
    lock = "lock, which uses_lock uses, cannot be sent to another process: "
    for said, worker, *args in (
        (lock + "cannot pickle '_thread.lock' object. Send", cell.uses_lock),
        (lock, cell.calls_itself_and_uses_it, 3),
        ("lines, which <lambda> uses, cannot be sent", cell.closure()),
        ("this cannot be sent", workers.echo, generator),
        ("this cannot be sent", workers.echo, torch.ops.c10d.barrier),
        ("this cannot be sent .* Ranks belong to", workers.echo, pool),
    ):
        with pytest.raises(TypeError, match=f"^{said}") as caught:
            pool.run(worker, *args)
        assert str(caught.value).endswith(
            "make anything else inside the function"
        )
    assert pool.processes == []


# What the ranks print ----------------------------------------------------


def test_lines_are_shown_as_asked(pool, capsys):
    """By default those of rank 0."""
    pool.run(workers.talk, "I am {}\nagain", " {}\n\n", "last")
    said = "I am 0\nagain 0\n\nlastto stderr, without an end\n"
    assert capsys.readouterr() == (said, "")
    lines = []
    pool.show = lambda *line: lines.append(line)
    assert pool.run(workers.talk, "a\nb") == [25, 25]  # as any file
    for rank in (0, 1):
        said = [line for r, line in lines if r == rank]
        assert said == ["a", "bto stderr, without an end"]
    pool.show = None
    pool.run(workers.talk, "a\nb")
    assert capsys.readouterr() == ("", "")


def test_a_line_comes_while_the_worker_works(pool, tmp_path):
    """The worker ends only after its line was shown."""
    sign = tmp_path / "sign"
    pool.show = lambda rank, line: sign.touch()
    pool.run(workers.talk_after, str(sign))


def test_ranks_that_print_much(pool):
    """200 kB each: more than the pipes hold."""
    count, lines = 1000, []
    pool.show = lambda *line: lines.append(line)
    pool.run(workers.talk_much, count, 200)
    for rank in (0, 1):
        said = [line.split()[0] for r, line in lines if r == rank]
        assert said == list(map(str, range(count)))


def test_an_error_in_show(pool):
    """Also a `KeyboardInterrupt`: the workers wait, and all of them end."""

    def show(rank, line):
        raise KeyboardInterrupt

    pool.show = show
    with pytest.raises(KeyboardInterrupt):
        pool.run(workers.sleep)
    assert processes.ranks() == pool.processes == []
    assert works(pool)


# A rank that fails -------------------------------------------------------


def test_a_rank_raises(pool, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", 0.1)
    with pytest.raises(RankError) as caught:
        pool.run(workers.fate, 1, "raise")
    assert caught.value.rank == 1
    trace = caught.value.traceback
    assert str(caught.value) == f"rank 1: ValueError: boom\n\n{trace}".rstrip()
    files = re.findall(r'File "(.*)", line \d+, in (.*)', trace)
    assert files == [(workers.__file__, "fate"), (workers.__file__, "boom")]
    assert not isinstance(caught.value, DeadlineError)
    assert pool.processes == processes.ranks() == []
    assert works(pool)


def test_where_an_error_comes_from(pool):
    with pytest.raises(RankError, match="RuntimeError: after") as caught:
        pool.run(workers.chained)
    assert "ValueError: boom" in caught.value.traceback
    assert "The above exception was the direct cause" in caught.value.traceback
    assert "rank_process" not in caught.value.traceback


@pytest.mark.parametrize(
    ("how", "message", "trace"),
    [
        ("real time", "rank 1 died of signal 40", ""),
        ("exit", "rank 1 left with exit code 0", ""),
        ("leave", "rank 1: SystemExit: enough", "in fate"),
        ("crash", "rank 1 died of signal 11 (SIGSEGV)", "in fate"),
    ],
)
def test_a_rank_dies(pool, how, message, trace):
    """Not that rank 0 lost the connection to it, which is what it says."""
    with pytest.raises(RankError) as caught:
        pool.run(workers.fate, 1, how)
    assert caught.value.rank == 1
    assert str(caught.value).splitlines()[0] == message
    assert trace in caught.value.traceback


@pytest.mark.parametrize(
    ("how", "said"),
    [("raise", "ValueError: boom"), ("kill", "died of signal 9 (SIGKILL)")],
)
def test_a_rank_fails_while_the_others_compute(pool, monkeypatch, how, said):
    """The error does not wait for them, nor for the deadline."""
    monkeypatch.setattr(launching, "GRACE", 0.1)
    worker = workers.fate_while_others_compute
    with pytest.raises(RankError) as caught:
        pool.run(worker, 1, how, deadline=workers.FOR_EVER)
    assert caught.value.rank == 1
    assert said in str(caught.value)
    assert not isinstance(caught.value, DeadlineError)


def test_the_first_of_two_that_died(pool, monkeypatch):
    """Rank 1, and rank 0 when that is known."""
    assert works(pool)
    ready = pool._ready

    def die_too(end, found, dead):
        if dead:
            pool._processes[0].process.kill()
            pool._processes[0].process.join()
        return ready(end, found, dead)

    monkeypatch.setattr(pool, "_ready", die_too)
    with pytest.raises(RankError, match=r"^rank 1 died of signal 9"):
        pool.run(workers.fate_while_others_compute, 1, "kill")


def test_what_was_printed_before_an_error_is_shown(pool, capsys):
    with pytest.raises(RankError, match="ValueError: boom"):
        pool.run(workers.talk_and_fail)
    assert capsys.readouterr().out == "before\nunfinished\n"


def test_a_result_that_cannot_be_sent(pool):
    with pytest.raises(RankError, match="TypeError: this cannot be sent"):
        pool.run(lambda: (i for i in range(3)))


def test_a_rank_that_died_between_two_runs(pool):
    for rank, use in (1, lambda: pool.run(workers.place)), (0, pool.close):
        assert works(pool)
        process = pool._processes[rank].process
        process.kill()
        process.join()
        with pytest.raises(RankError, match=f"^rank {rank} died of signal 9"):
            use()
        assert pool.processes == []


def test_an_error_in_the_block_ends_the_ranks():
    with pytest.raises(ZeroDivisionError), Ranks(1) as pool:
        assert works(pool)
        numbers = pool.processes
        raise ZeroDivisionError
    assert not any(map(processes.alive, numbers))


# A rank that does not end ------------------------------------------------


def test_a_hang_is_an_error_that_shows_where_the_ranks_are():
    """Rank 0 waits in a collective, 1 is through, and 2 computes."""
    with Ranks(3) as pool:
        assert works(pool)
        with pytest.raises(DeadlineError) as caught:
            pool.run(workers.hang, deadline=2)
    assert caught.value.rank == 0
    assert isinstance(caught.value, RankError | TimeoutError)
    message = str(caught.value)
    assert message.startswith("rank 0, 2 did not end within 2 s: a coll")
    places = message.split(" was here:")
    assert [place.split()[-1] for place in places[:-1]] == ["0", "2"]
    assert "all_reduce" in places[1] and "in sleep" in places[2]
    assert message.count("in hang") == 2
    assert "hread 0x" not in message  # of its other threads nothing


def test_until_a_rank_has_written_where_it_is(monkeypatch, tmp_path):
    log = tmp_path / "0.log"
    said = ["", "  line 3 in f\n", "  line 1 in <module>\n"]

    def sleep(seconds):
        log.write_text(log.read_text() + said.pop(0))

    log.touch()
    clock = SimpleNamespace(sleep=sleep, monotonic=launching.time.monotonic)
    monkeypatch.setattr(launching, "time", clock)
    process = SimpleNamespace(is_alive=lambda: True)
    pool = Ranks(1)
    pool._processes = [launching._Process(process, None, log)]
    pool._wait_for_dumps([0])
    assert said == []


def test_ranks_that_do_not_start(monkeypatch):
    with Ranks(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(launching, "DEADLINE", 1e-9)
            patch.setattr(launching, "PATIENCE", 5)  # it may not listen yet
            with pytest.raises(DeadlineError, match=r"rank 0 .* within 1e-09"):
                pool.run(workers.place)
        assert works(pool)


def test_a_worker_that_starts_a_thread(monkeypatch):
    """One that does not end keeps its process from ending."""
    lines = []
    pool = Ranks(1, show=lambda *line: lines.append(line))
    assert pool.run(workers.with_a_thread, True)[0].startswith("Thread")
    assert works(pool)
    assert (0, "from a thread") in lines
    pool.close()
    pool.run(workers.with_a_thread, False)
    process = pool._processes[0].process
    join = process.join
    monkeypatch.setattr(
        process, "join", lambda timeout=None: join(timeout and 0.1)
    )
    said = "^rank 0 did not end well: it is still running$"
    with pytest.raises(RankError, match=said):
        pool.close()


# What cannot be ----------------------------------------------------------


def test_a_backend_that_is_not_there():
    for backend, name in ("cpu:gloo,cuda:other", "other"), ("", ""):
        said = f"^there is no backend {name!r} for 2 ranks here: use one of gl"
        with pytest.raises(ValueError, match=said):
            Ranks(2, backend=backend)


def test_nccl_needs_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match="no backend 'nccl' for 3 ranks"):
        Ranks(3, backend="nccl")
    assert Ranks(3).backend == "gloo"
    assert Ranks(2).backend == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert Ranks(2).backend == "gloo"


def test_the_store_listens_to_this_machine_only(pool):
    assert works(pool)
    number = pool._store.port
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == number
    ]
    assert listening == ["127.0.0.1"]


# Nobody stays behind -----------------------------------------------------


def test_a_pool_that_nobody_keeps():
    pool = Ranks(1)
    assert works(pool)
    numbers = pool.processes
    assert all(map(processes.alive, numbers))
    del pool
    gc.collect()
    assert not any(map(processes.alive, numbers))


def test_a_fork_of_this_process_leaves_the_ranks_alone(pool):
    """What ends there is not theirs."""
    assert works(pool)
    numbers, number = pool.processes, os.fork()
    if not number:
        pool.kill()
        os._exit(0)
    assert os.waitpid(number, 0)[1] == 0
    assert works(pool)
    assert pool.processes == numbers


def test_a_deadline_longer_than_the_first_one_counts():
    """No limit of the group's own ends a collective that waits for long."""
    assert launching.rank_process.LIMIT.total_seconds() > launching.LONGEST
    Ranks(2, deadline=launching.LONGEST)


SCRIPT = """
import tempfile

folder = tempfile.TemporaryDirectory()  # it, too, ends at exit

import torch.distributed as dist

from membudget.sharding import RankError, Ranks

assert Ranks.__module__ == "membudget.sharding.launching"
print("only once")

class Own:
    start = 5

def helper():
    return Own.start + dist.get_rank()

def own():
    return helper()

pool = Ranks(2)
print(pool.run(own))
print(*pool.processes)
"""


@pytest.mark.few(0)
def test_a_script_that_ends_without_close(tmp_path):
    """Whatever was made before: at the end Python waits for processes."""
    script, mark = tmp_path / "script.py", f"SHARDING_TEST_{os.getpid()}"
    script.write_text(SCRIPT)
    try:
        done = subprocess.run(
            [sys.executable, script],
            env=os.environ | {mark: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stderr) == (0, "")
        once, result, numbers = done.stdout.splitlines()
        assert (once, result) == ("only once", "[5, 6]")
        assert not any(processes.alive(int(n)) for n in numbers.split())
    finally:
        left = processes.end(processes.marked, mark)
    assert left == []


@pytest.mark.few(0)
def test_a_parent_that_is_killed():
    """A rank that has ranks: one computes, the other one is in a collective.

    With them goes what made them.
    """
    found = []

    def kill(rank, line):
        found.append(line)
        if len(found) == 2:
            parent = psutil.Process(*pool.processes)
            found[:] = parent.children(recursive=True)
            parent.kill()

    pool = Ranks(1, show=kill)
    with pytest.raises(RankError, match="rank 0 died of signal 9"):
        pool.run(workers.parent)
    assert len(found) == 3
    assert (
        processes.end(lambda: [p.pid for p in found if p.is_running()]) == []
    )


def test_code_keeps_its_file_whatever_the_pickler_calls_it():
    """cloudpickle 3.1.3 writes "<dynamic-code>"."""
    code = rank_process.file_of.__code__.replace(co_filename="<dynamic-code>")
    _, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    rebuilt = rank_process._rebuild(arguments, "mine.py", [])
    assert rebuilt.co_filename == "mine.py"
