"""A pool of rank processes: what it returns, how it fails, what it leaves."""

import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import processes
import pytest
import sharding_workers as workers
import torch
import torch.distributed as dist
from project import PATIENCE

from membudget.sharding import (
    DeadlineError,
    RankError,
    Ranks,
    free_port,
    launch,
    launching,
)

pytestmark = pytest.mark.skipif(
    not dist.is_available()
    or not dist.is_gloo_available()
    or not sys.platform.startswith("linux"),
    reason="this PyTorch has no gloo, or processes cannot be counted",
)


@pytest.fixture(autouse=True)
def no_rank_is_left():
    """After every test, also a failing one."""
    yield
    gc.collect()
    left = processes.ranks()
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert left == []


@pytest.fixture(scope="module")
def interpreter():
    """Runs a script in a Python of its own; ends what it leaves."""
    marks = []

    def start(source, tmp_path):
        mark = f"SHARDING_TEST_{os.getpid()}_{len(marks)}"
        marks.append(mark)
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            mark: "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        process = subprocess.Popen(
            [sys.executable, script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process, mark

    yield start
    for mark in marks:
        for number in processes.marked(mark):
            os.kill(number, signal.SIGKILL)


def says(text):
    """The whole message, literally."""
    return f"^{re.escape(text)}$"


def works(pool):
    """The pool runs something, maybe on new processes."""
    return pool.run(workers.place) == [
        (rank, pool.ranks) for rank in range(pool.ranks)
    ]


# What a run returns ------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_results_come_in_order_of_ranks(ranks):
    """Eight are more than most machines of these tests have cores."""
    everyone = [(rank, ranks) for rank in range(ranks)]
    assert launch(workers.place, ranks=ranks) == everyone


def test_many_runs_on_the_same_processes():
    with Ranks(2) as pool:
        assert pool.processes == []
        first = [pool.run(workers.kept, i) for i in (5, 6)]
        numbers = pool.processes
        assert first == [[None, None], [5, 5]]
        for i in range(20):
            assert pool.run(workers.total, float(i)) == [2 * i + 1] * 2
        assert pool.processes == numbers
        assert sorted(processes.ranks()) == sorted(numbers)
    assert pool.processes == []


def test_what_a_worker_gets():
    x = torch.arange(6.0).reshape(2, 3)
    with Ranks(2) as pool:
        found = pool.run(workers.echo, 1, [x], kind="a", f=workers.twice)
        for rank, (where, args, kwargs) in enumerate(found):
            assert where == rank
            assert args[0] == 1 and torch.equal(args[1][0], x)
            assert kwargs == {"kind": "a", "f": workers.twice}
        assert pool.run(workers.apply, workers.twice, 4) == [8, 8]
        assert torch.equal(pool.run(workers.total, x)[1], 2 * x + 1)
        assert pool.run(workers.environment) == [
            {"RANK": str(rank), "WORLD_SIZE": "2"} for rank in (0, 1)
        ]
        assert pool.run(workers.threads) == [1, 1]
        assert pool.run(workers.child) == ["child\n"] * 2


def test_large_arguments_and_results():
    """More than a pipe holds: 50 MB from each of two ranks at once."""
    numbers = 12_500_000
    with Ranks(2) as pool:
        for rank, x in enumerate(pool.run(workers.big, numbers)):
            assert x.shape == (numbers,) and bool((x == rank).all())
        sent = torch.ones(numbers)
        for _, (x,), _ in pool.run(workers.echo, sent):
            assert torch.equal(x, sent)


def test_a_closed_pool_starts_again():
    pool = Ranks(2)
    pool.close()  # has not started
    for _ in range(2):
        assert works(pool)
        pool.close()
        pool.close()
    assert repr(pool) == "Ranks(2, backend='gloo')"


# Functions that no other process can import ------------------------------

OUTER = 3


def written_here(x: OUTER, times=2):
    import torch.distributed as dist

    return times * x + dist.get_rank()


def calls_itself(n):
    return n and 1 + calls_itself(n - 1)


def lacks_an_import():
    return torch.ones(1)


def lacks_a_value():
    x = x + 1  # noqa: F821
    return x


class Written:
    pass


for thing in (
    *(written_here, calls_itself, lacks_an_import, lacks_a_value),
    Written,
):
    thing.__module__ = "__main__"


def test_functions_of_the_notebook_travel_as_source():
    with Ranks(2) as pool:
        assert pool.run(written_here, 5) == [10, 11]
        assert pool.run(written_here, 5, times=3) == [15, 16]
        assert pool.run(workers.apply, written_here, 1) == [2, 3]
        assert pool.run(calls_itself, 3) == [3, 3]
        with pytest.raises(RankError) as caught:
            pool.run(lacks_an_import)
        message, _, trace = str(caught.value).partition("\n\n")
        assert message.startswith("rank ") and message.endswith(
            "NameError: name 'torch' is not defined. A function written in a "
            "notebook travels alone: import inside it what it uses, and pass "
            "the rest as arguments"
        )
        assert "return torch.ones(1)" in trace  # the source is shown
        with pytest.raises(RankError) as caught:
            pool.run(lacks_a_value)
        assert "UnboundLocalError" in str(caught.value)
        assert "travels alone" not in str(caught.value)


def test_functions_that_cannot_travel():
    inner = 1

    def closure():
        return inner

    nameless = lambda: 1  # noqa: E731
    nameless.__module__ = closure.__module__ = "__main__"
    nameless.__qualname__ = "<lambda>"
    pool = Ranks(2)
    for worker, args, what in (
        (nameless, (), "<lambda> is no function of the top level"),
        (closure, (), "closure is no function of the top level"),
        (lambda: 1, (), "lambda"),
        (workers.echo, (Written(),), "the class Written is written in the"),
        (workers.echo, (i for i in range(2)), "generator"),
        (workers.echo, (torch.ops.c10d.barrier,), "pickle"),
    ):
        args = args if isinstance(args, tuple) else (args,)
        with pytest.raises(TypeError, match="cannot be sent") as caught:
            pool.run(worker, *args)
        assert what in str(caught.value)
        assert "written with def" in str(caught.value)
    assert pool.processes == []


@pytest.mark.parametrize("bad", [None, "place", 3])
def test_a_worker_that_is_no_function(bad):
    with pytest.raises(
        TypeError, match=says(f"worker is {bad!r}: use a function")
    ):
        Ranks(2).run(bad)


# What the ranks print ----------------------------------------------------


def test_rank_0_is_printed(capsys):
    with Ranks(2) as pool:
        pool.run(workers.talk, "I am {}\nagain", " {}\n\n", "last")
    captured = capsys.readouterr()
    assert captured.out == (
        "I am 0\nagain 0\n\nlastto stderr, without an end\n"
    )
    assert captured.err == ""


def test_lines_are_shown_as_asked(capsys):
    lines = []
    with Ranks(2, show=lambda *line: lines.append(line)) as pool:
        assert pool.run(workers.talk, "a\nb") == [25, 25]  # as any file
    expected = ["a", "bto stderr, without an end"]
    for rank in (0, 1):
        assert [line for r, line in lines if r == rank] == expected
    with Ranks(2, show=None) as pool:
        pool.run(workers.talk, "a\nb")
    assert capsys.readouterr() == ("", "")


def test_a_line_comes_while_the_worker_works(tmp_path):
    """The workers end only after the lines were shown."""
    sign, seen = tmp_path / "sign", set()

    def show(rank, line):
        assert line == "here"
        seen.add(rank)
        if len(seen) == 2:
            sign.touch()

    with Ranks(2, show=show) as pool:
        pool.run(workers.talk_after, str(sign))


def test_ranks_that_print_much():
    """2 MB each: far more than the pipes hold."""
    count, lines = 10_000, []
    with Ranks(2, show=lambda *line: lines.append(line)) as pool:
        pool.run(workers.talk_much, count, 200)
        assert works(pool)
    for rank in (0, 1):
        said = [line.split()[0] for r, line in lines if r == rank]
        assert said == list(map(str, range(count)))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_show(error):
    """Also a `KeyboardInterrupt`: the workers wait, and all of them end."""

    def show(rank, line):
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise error

    with Ranks(2, show=show) as pool:
        with pytest.raises(error):
            pool.run(workers.sleep)
        assert processes.ranks() == pool.processes == []
        assert works(pool)


# A rank that fails -------------------------------------------------------


def test_a_rank_raises():
    with Ranks(3) as pool:
        with pytest.raises(RankError) as caught:
            pool.run(workers.fate, 1, "raise")
        assert caught.value.rank == 1
        trace = caught.value.traceback
        assert (
            str(caught.value)
            == f"rank 1: ValueError: boom\n\n{trace}".rstrip()
        )
        files = re.findall(r'File "(.*)", line \d+, in (.*)', trace)
        assert files == [
            (workers.__file__, "fate"),
            (workers.__file__, "boom"),
        ]
        assert not isinstance(caught.value, DeadlineError)
        assert pool.processes == processes.ranks() == []
        assert works(pool)


def test_where_an_error_comes_from():
    with Ranks(2) as pool, pytest.raises(RankError) as caught:
        pool.run(workers.chained)
    assert (
        str(caught.value).split(": ", 1)[1].startswith("RuntimeError: after")
    )
    assert "ValueError: boom" in caught.value.traceback
    assert "The above exception was the direct cause" in caught.value.traceback
    assert "rank_process" not in caught.value.traceback


@pytest.mark.parametrize(
    ("how", "message", "trace"),
    [
        ("kill", "rank 1 died of signal 9 (SIGKILL)", ""),
        ("real time", "rank 1 died of signal 40", ""),
        ("exit", "rank 1 left with exit code 0", ""),
        ("leave", "rank 1: SystemExit: enough", "in fate"),
        ("crash", "rank 1 died of signal 11 (SIGSEGV)", "in fate"),
    ],
)
def test_a_rank_dies(how, message, trace):
    """Not that rank 0 lost the connection to it, which is what it says."""
    with Ranks(2) as pool:
        with pytest.raises(RankError) as caught:
            pool.run(workers.fate, 1, how)
        assert caught.value.rank == 1
        assert str(caught.value).splitlines()[0] == message
        assert trace in caught.value.traceback
        assert works(pool)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_fails_while_the_others_compute(how):
    """The error does not wait for them, nor for the deadline."""
    with Ranks(3) as pool, pytest.raises(RankError) as caught:
        pool.run(
            workers.fate_while_others_compute,
            *(2, how),
            deadline=workers.FOR_EVER,
        )
    assert caught.value.rank == 2
    assert not isinstance(caught.value, DeadlineError)


def test_what_was_printed_before_an_error_is_shown(capsys):
    with Ranks(1) as pool, pytest.raises(RankError, match="rank 0: ValueErr"):
        pool.run(workers.talk_and_fail)
    assert capsys.readouterr().out == "before\nunfinished\n"


def test_a_result_that_cannot_be_sent():
    with Ranks(2) as pool:
        with pytest.raises(RankError, match="TypeError: this cannot be sent"):
            pool.run(workers.unpicklable)
        assert works(pool)


def end_rank(pool, rank):
    """Kill it, and wait until its end of the connection is closed."""
    process = pool._processes[rank].process
    process.kill()
    process.join()


def test_a_rank_that_died_between_two_runs():
    with Ranks(2) as pool:
        assert works(pool)
        end_rank(pool, 1)
        with pytest.raises(RankError, match=r"^rank 1 died of signal 9"):
            pool.run(workers.place)
        assert works(pool)
        end_rank(pool, 0)
        with pytest.raises(RankError, match=r"^rank 0 died of signal 9"):
            pool.close()
        assert pool.processes == []


@pytest.mark.parametrize("kind", [RankError, DeadlineError])
def test_an_error_goes_to_another_process_as_it_is(kind):
    error = kind(1, "rank 1: ValueError: boom", "Traceback …")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert str(error) == "rank 1: ValueError: boom\n\nTraceback …"
    assert (copy.rank, copy.traceback) == (error.rank, error.traceback)


def test_an_error_in_the_block_ends_the_ranks():
    with pytest.raises(ZeroDivisionError), Ranks(2) as pool:
        assert works(pool)
        numbers = pool.processes
        raise ZeroDivisionError
    assert not any(map(processes.alive, numbers))


# A rank that does not end ------------------------------------------------


def test_a_hang_is_an_error_that_shows_where_the_rank_is():
    with Ranks(2) as pool:
        assert works(pool)
        with pytest.raises(DeadlineError) as caught:
            pool.run(workers.one_does_not_call, deadline=2)
        assert caught.value.rank == 0
        assert isinstance(caught.value, RankError | TimeoutError)
        message = str(caught.value)
        assert message.startswith("rank 0 did not end within 2 s: a coll")
        assert "rank 0 was here:" in message and "all_reduce" in message
        assert "in one_does_not_call" in message
        assert "rank 1 was here" not in message
        assert "hread 0x" not in message  # of its other threads nothing
        assert works(pool)


def test_a_rank_that_computes_for_too_long():
    with Ranks(2) as pool:
        assert works(pool)
        with pytest.raises(DeadlineError) as caught:
            pool.run(workers.sleep, deadline=2)
        assert str(caught.value).startswith("rank 0, 1 did not end within")
        assert str(caught.value).count("in sleep") == 2


def test_ranks_that_do_not_start(monkeypatch):
    pool = Ranks(2)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "DEADLINE", 1e-9)
        with pytest.raises(DeadlineError, match=r"rank 0, 1 .* within 1e-09"):
            pool.run(workers.place)
    assert works(pool)
    pool.close()


@pytest.mark.parametrize("daemon", [True, False])
def test_a_worker_that_starts_a_thread(daemon, monkeypatch):
    """One that does not end keeps its process from ending."""
    lines = []
    pool = Ranks(1, show=lambda *line: lines.append(line))
    assert pool.run(workers.with_a_thread, daemon)[0].startswith("Thread")
    assert works(pool)
    assert (0, "from a thread") in lines
    if daemon:
        pool.close()
    else:
        process = pool._processes[0].process
        join = process.join
        monkeypatch.setattr(
            process, "join", lambda timeout=None: join(timeout and 0.1)
        )
        with pytest.raises(
            RankError,
            match=says("rank 0 did not end well: it is still running"),
        ):
            pool.close()


# What cannot be ----------------------------------------------------------


def test_ranks_are_missing():
    with pytest.raises(ValueError, match="ranks is missing: say how many"):
        launch(workers.place)


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf")])
def test_deadlines_that_cannot_be(deadline):
    message = (
        f"deadline is {deadline!r}: use a finite number above 0 and up to "
        "1000000.0"
    )
    with pytest.raises(ValueError, match=says(message)):
        Ranks(2, deadline=deadline)
    with pytest.raises(ValueError, match=says(message)):
        Ranks(2).run(workers.place, deadline=deadline)


@pytest.mark.parametrize("port", [0, 65536])
def test_ports_that_cannot_be(port):
    with pytest.raises(ValueError, match=rf"^port is {port!r}: "):
        Ranks(2, port=port)


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        pool = Ranks(2, port=port)
        with pytest.raises(
            OSError,
            match=says(
                f"port {port} is in use: leave port out, and a free one is "
                "taken"
            ),
        ):
            pool.run(workers.place)
        assert pool.processes == []
    assert works(pool)
    pool.close()


def test_a_port_that_is_not_allowed(monkeypatch):
    """That is another error than one in use."""

    def refuse(address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(launching.socket, "create_server", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        Ranks(2, port=80).run(workers.place)


def test_the_store_listens_to_this_machine_only():
    number = free_port()
    port, lines = f":{number:04X}", []
    with Ranks(2, port=number) as pool:
        assert works(pool)
        for table in ("tcp", "tcp6"):
            table = Path("/proc/net", table).read_text()
            lines += [line.split() for line in table.splitlines()]
    listening = [w[1] for w in lines if w[1].endswith(port) and w[3] == "0A"]
    assert listening == ["0100007F" + port]


def test_a_port_of_ones_own_is_used_again():
    """After a failure and after the end."""
    pool = Ranks(2, port=free_port())
    with pytest.raises(RankError, match="boom"):
        pool.run(workers.boom)
    for _ in range(2):
        assert works(pool)
        pool.close()


@pytest.mark.parametrize(
    ("backend", "name"),
    [("nonsense", "nonsense"), ("cpu:gloo,cuda:other", "other"), ("", "")],
)
def test_a_backend_that_is_not_there(backend, name):
    with pytest.raises(ValueError) as caught:
        Ranks(2, backend=backend)
    assert str(caught.value).startswith(
        f"there is no backend {name!r} for 2 ranks here: use one of gloo"
    )


def test_nccl_needs_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match="no backend 'nccl' for 3 ranks"):
        Ranks(3, backend="nccl")
    assert Ranks(3).backend == "gloo"
    assert Ranks(2).backend == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert Ranks(2).backend == "gloo"


def test_free_ports_are_free():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


# Nobody stays behind -----------------------------------------------------


def test_the_ranks_end_with_exit_code_0():
    pool = Ranks(4)
    pool.run(workers.total, 1.0)
    kept = [p.process for p in pool._processes]
    folder = pool._processes[0].log.parent
    assert folder.is_dir()
    pool.close()
    assert [process.exitcode for process in kept] == [0] * 4
    assert not folder.exists()


def test_a_pool_that_nobody_keeps():
    pool = Ranks(2)
    assert works(pool)
    numbers = pool.processes
    assert all(map(processes.alive, numbers))
    del pool
    gc.collect()
    assert not any(map(processes.alive, numbers))


def test_a_fork_of_this_process_leaves_the_ranks_alone():
    """What ends there is not theirs."""
    with Ranks(2) as pool:
        assert works(pool)
        number = os.fork()
        if not number:
            pool.kill()
            os._exit(0)
        assert os.waitpid(number, 0)[1] == 0
        assert works(pool)


def test_a_deadline_longer_than_the_first_one_counts():
    """No limit of the group's own ends a collective that waits for long."""
    assert launching.rank_process.LIMIT.total_seconds() > launching.LONGEST
    Ranks(2, deadline=launching.LONGEST)


def test_a_script_that_ends_without_close(interpreter, tmp_path):
    """Whatever was made before: at the end Python waits for processes."""
    script = """
        import tempfile

        folder = tempfile.TemporaryDirectory()  # it, too, ends at exit

        from membudget.sharding import RankError, Ranks

        assert Ranks.__module__ == "membudget.sharding.launching"
        print("only once")

        def own():
            import torch.distributed as dist

            return dist.get_rank()

        pool = Ranks(2)
        print(pool.run(own))
        try:
            pool.run(lambda: 1)
        except TypeError as error:
            print(error)
        print(*pool.processes)
    """
    process, mark = interpreter(script, tmp_path)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (0, "")
    once, result, refused, numbers = out.splitlines()
    assert (once, result) == ("only once", "[0, 1]")
    assert "<lambda> is no function of the top level" in refused
    assert not any(processes.alive(int(n)) for n in numbers.split())
    assert processes.end(mark) == []


def test_a_parent_that_is_killed(interpreter, tmp_path):
    """One rank computes, the other one waits in a collective."""
    script = """
        import sharding_workers as workers
        from membudget.sharding import Ranks

        show = lambda rank, line: print(line, flush=True)
        Ranks(2, show=show).run(workers.hang_in_a_collective)
    """
    process, mark = interpreter(script, tmp_path)
    with process:
        numbers = [int(process.stdout.readline().split()[1]) for _ in "01"]
        assert all(map(processes.alive, numbers))
        process.kill()
        process.communicate()
    assert processes.end(mark) == []
