"""Ranks on one machine: started, watched, ended."""

import atexit
import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from membudget.checks import (
    function,
    installed,
    instance,
    number,
    told,
    whole,
)
from membudget.sharding import rank_process

if TYPE_CHECKING:  # one of them is not on Windows
    from multiprocessing.context import ForkServerContext, SpawnContext

DEADLINE = 600.0
"""Seconds after which it is a hang, unless the caller says otherwise. Many,
for a busy machine is slow: it is no measure of how long something takes."""

PATIENCE = 60.0
"""Seconds for what is under way already: it may wait for a processor."""

GRACE = 1.0
"""Seconds in which a failure may turn out to follow from another one."""

DUMPED = re.compile(r"line \d+ in <module>$|^  \.\.\.$", re.M)
"""Ends the dump of a rank's stack: the outermost call, or too many."""

MOST_RANKS = 1024
"""Processes that this machine is asked to start."""

LONGEST = 1e6
"""The longest deadline in seconds, about 11 days."""

PRELOADED = rank_process.__name__, "cloudpickle", "torch._dynamo"
"""Imported once for all ranks; each one's first optimizer needs the last."""


class RankError(RuntimeError):
    """A rank failed, died or did not end in time.

    Attributes:
        rank: the first that did.
        traceback: where it was, as text.
    """

    def __init__(self, rank: int, message: str, traceback: str) -> None:
        super().__init__(f"{message}\n\n{traceback}".rstrip())
        self.rank, self.traceback = rank, traceback


class DeadlineError(RankError, TimeoutError):
    """Ranks did not end in time."""


def first_rank(rank: int, line: str) -> None:
    """Print what rank 0 prints, and nothing of the others."""
    rank = whole(rank, "rank", 0)
    instance(line, str, "line", "a string")
    if rank == 0:
        print(line, flush=True)


@contextmanager
def joined() -> Iterator[None]:
    """The process group of ``torchrun``, joined and left cleanly.

    NCCL connects the ranks where each has a GPU, gloo otherwise. After an
    error the group is left without waiting for the other ranks, which
    ``torchrun`` then ends.

    Raises:
        RuntimeError: this process is no rank of ``torchrun``.
    """
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError(
            "this process is no rank of torchrun: start the script with it, "
            "or use Ranks"
        )
    local = int(os.environ["LOCAL_RANK"])
    backend = checked_backend(None, int(os.environ["LOCAL_WORLD_SIZE"]))
    if "nccl" in backend:
        torch.cuda.set_device(local)
    store, rank, ranks = _meeting()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"group {next(_groups)}", store),
        rank=rank,
        world_size=ranks,
    )
    yield
    dist.barrier()
    gc.collect()  # sharded models hold the group
    dist.destroy_process_group()


_groups = count()


@cache
def _meeting() -> tuple[dist.Store, int, int]:
    """The store of ``torchrun``'s ranks, this one's number, how many.

    One for all groups, one after the other: a rank that is early would find
    the store of the group before, which rank 0 is about to end.
    """
    return next(rendezvous("env://"))


def checked_backend(name: str | None, ranks: int) -> str:
    """The name of a backend that is there.

    Args:
        name: as for ``init_process_group``; None stands for NCCL where each
            of the ``ranks`` has a GPU of its own, and gloo otherwise.
    """
    if name is not None:
        instance(name, str, "backend", "its name, or None")
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available()
        and torch.cuda.device_count() >= ranks,
    }
    if name is None:
        name = "cpu:gloo,cuda:nccl" if there["nccl"] else "gloo"
    for part in name.split(","):
        backend = part.split(":")[-1]
        if not there.get(backend, False):
            have = [b for b in there if there[b]] or ["none"]
            raise ValueError(
                f"there is no backend {backend!r} for {ranks} ranks here: "
                f"use one of {', '.join(have)}. nccl needs a GPU for each "
                "rank"
            )
    return name


@dataclass(eq=False)
class _Process:
    process: BaseProcess
    connection: Connection
    log: Path


class Ranks:
    """Processes of this machine that form a group, for one call or many.

    They start with the first :meth:`run`, which takes some seconds, and wait
    for the next one. A rank that fails ends all of them with an error that
    shows that rank's traceback; the next :meth:`run` starts new ones. They
    end with :meth:`close`, at the end of the ``with`` block, and when this
    process ends, whatever the reason.

    On Linux a helper process makes them, which starts with the first rank
    and ends with this process: environment variables that are set after
    that do not reach them.

    Args:
        ranks: how many, 1 024 at most.
        backend: by default NCCL where each rank has a GPU, gloo otherwise.
        deadline: seconds for a call of :meth:`run`, unless it says otherwise.
            They count from when the ranks are there.
        show: called as ``show(rank, line)`` with each line that a worker
            prints, as it comes; None drops them. By default those of rank 0
            are printed.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str | None = None,
        deadline: float = DEADLINE,
        show: Callable[[int, str], None] | None = first_rank,
    ) -> None:
        self.ranks = whole(ranks, "ranks", 1, MOST_RANKS)
        self.backend = checked_backend(backend, self.ranks)
        self.deadline = _positive(deadline)
        self.show = None if show is None else function(show, "show")
        self._store: dist.TCPStore | None = None
        self._processes: list[_Process] = []
        self._end: weakref.finalize | None = None

    def __reduce__(self) -> str:
        raise TypeError("Ranks belong to the process that made them")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    @property
    def processes(self) -> list[int]:
        """The process numbers, by rank; empty before the first run."""
        return [told(p.process.pid) for p in self._processes]

    def run(
        self,
        worker: Callable,
        *args: object,
        deadline: float | None = None,
        **kwargs: object,
    ) -> list:
        """Call ``worker(*args, **kwargs)`` on every rank.

        Functions and classes that are written in a notebook are sent with
        all that they use: values are copied for each call.

        Args:
            worker: a function; it finds the process group ready
                (``dist.get_rank()``), and one thread.
            deadline: seconds.

        Returns:
            What each rank returned, in order of ranks.

        Raises:
            TypeError: a function or argument that cannot be sent.
            RankError: a rank raised an error, died, or returned what cannot
                be sent.
            DeadlineError: a rank did not end in time; the message shows
                where each of them was.
        """
        function(worker, "worker")
        seconds = _positive(self.deadline if deadline is None else deadline)
        task = rank_process.pack(worker, args, kwargs)
        try:
            if not self._processes:
                self._start()
                self._collect("ready", DEADLINE)
            self._tell(task)
            done = self._collect("done", seconds)
        except BaseException:
            self.kill()
            raise
        return [pickle.loads(result)[0] for result in done]

    def close(self) -> None:
        """End the processes, in order.

        Raises:
            RankError: one did not end well.
        """
        end = time.monotonic() + self.deadline
        try:
            if self._processes:
                self._tell(b"")
                self._collect("left", self.deadline)
            for p in self._processes:
                p.process.join(max(end - time.monotonic(), 0.1))
            for rank, p in enumerate(self._processes):
                if p.process.exitcode != 0:
                    raise RankError(
                        rank,
                        f"rank {rank} did not end well: it {_fate(p)}",
                        _tail(p),
                    )
        finally:
            self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        self._processes = []
        self._store = None  # gives its port back
        if self._end:
            self._end()
            atexit.unregister(self._end)

    def _tell(self, message: bytes) -> None:
        for p in self._processes:
            with suppress(OSError):  # a rank that died: _collect finds it
                p.connection.send_bytes(message)

    def _start(self) -> None:
        self._store = _store()
        folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context: SpawnContext | ForkServerContext = get_context("spawn")
        if sys.platform == "linux":
            context = get_context("forkserver")
            context.set_forkserver_preload(list(PRELOADED))
        started: list[_Process] = []
        self._end = weakref.finalize(self, _kill, started, folder, os.getpid())
        # Before multiprocessing waits for its processes at the end.
        atexit.register(self._end)
        with _no_main():
            for rank in range(self.ranks):
                here, there = context.Pipe()
                log = Path(folder.name, f"{rank}.log")
                process = context.Process(
                    target=rank_process.main,
                    args=(
                        rank,
                        self.ranks,
                        self._store.port,
                        self.backend,
                        there,
                        str(log),
                    ),
                )
                process.start()
                there.close()
                started.append(_Process(process, here, log))
        self._processes = started

    def _collect(self, kind: str, seconds: float) -> list:
        """What each rank sends; the lines in between are shown."""
        end = time.monotonic() + seconds
        found: dict[int, object] = {}
        failed: dict[int, tuple[str, str]] = {}
        dead: list[int] = []
        while len(found) < self.ranks:
            if failed or dead:
                end = min(end, time.monotonic() + GRACE)
            for rank in self._ready(end, found, dead):
                p = self._processes[rank]
                try:
                    name, content = pickle.loads(p.connection.recv_bytes())
                except (EOFError, OSError):
                    dead.append(rank)
                    continue
                if name == "line":
                    if self.show:
                        self.show(rank, content)
                elif name == "error":
                    failed[rank] = content
                elif name == kind:
                    found[rank] = content
            if len({*found, *failed, *dead}) == self.ranks:
                break
            if time.monotonic() >= end:
                break
        if dead:
            rank = dead[0]
            p = self._processes[rank]
            p.process.join(PATIENCE)
            raise RankError(rank, f"rank {rank} {_fate(p)}", _tail(p))
        if failed:
            rank, (message, traceback) = next(iter(failed.items()))
            raise RankError(rank, f"rank {rank}: {message}", traceback)
        late = [r for r in range(self.ranks) if r not in found]
        if late:
            raise self._deadline_error(late, seconds)
        return [found[rank] for rank in range(self.ranks)]

    def _ready(
        self, end: float, found: dict[int, object], dead: list[int]
    ) -> list[int]:
        """Ranks with news; waits for them until the end."""
        pipes = {
            rank: p.connection
            for rank, p in enumerate(self._processes)
            if rank not in found and rank not in dead
        }
        left = max(end - time.monotonic(), 0)
        ready = wait(list(pipes.values()), left)
        return [rank for rank, pipe in pipes.items() if pipe in ready]

    def _deadline_error(self, late: list[int], seconds: float) -> RankError:
        if hasattr(signal, "SIGUSR1"):
            for rank in late:
                with suppress(ProcessLookupError):
                    os.kill(self.processes[rank], signal.SIGUSR1)
            self._wait_for_dumps(late)
        where = "\n".join(
            f"rank {rank} was here:\n"
            f"{_tail(self._processes[rank]) or '(not started yet)'}"
            for rank in late
        )
        names = ", ".join(map(str, late))
        return DeadlineError(
            late[0],
            f"rank {names} did not end within {seconds:g} s: a collective "
            "waits for a rank that does not call it, or the work takes "
            "longer than the deadline allows",
            where,
        )

    def _wait_for_dumps(self, late: list[int]) -> None:
        """Until each rank wrote where it is, or died of the question."""
        end = time.monotonic() + PATIENCE
        waiting = [self._processes[rank] for rank in late]
        while waiting and time.monotonic() < end:
            time.sleep(0.02)
            waiting = [
                p
                for p in waiting
                if p.process.is_alive() and not DUMPED.search(_tail(p))
            ]


def _positive(seconds: float) -> float:
    return float(number(seconds, "deadline", above=0, most=LONGEST))


def _store() -> dist.TCPStore:
    """The place where the ranks find each other, on this machine only."""
    server = socket.create_server(("127.0.0.1", 0))
    # Left to itself the store listens to the whole network.
    return dist.TCPStore(
        *server.getsockname(),
        *(None, True, rank_process.LIMIT),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


@contextmanager
def _no_main() -> Iterator[None]:
    """Without ``__main__``: the ranks need not run the caller's script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _kill(
    processes: list[_Process], folder: tempfile.TemporaryDirectory, owner: int
) -> None:
    if os.getpid() != owner:  # a fork of the process that has them
        return
    for p in processes:
        p.process.kill()
    for p in processes:
        p.process.join()
        p.connection.close()
    folder.cleanup()


def _fate(p: _Process) -> str:
    code = p.process.exitcode
    if code is None:
        return "is still running"
    if code < 0:
        names = {int(s): s.name for s in signal.Signals}  # not real-time ones
        name = f" ({names[-code]})" if -code in names else ""
        return f"died of signal {-code}{name}"
    return f"left with exit code {code}"


def _tail(p: _Process, characters: int = 3000) -> str:
    """The end of what the process wrote on its own."""
    with suppress(OSError):
        return p.log.read_text(errors="replace")[-characters:]
    return ""


@dataclass(frozen=True)
class Finished:
    """What a script under ``torchrun`` wrote.

    Attributes:
        lines: of its ranks, to their output, in the order in which they came.
        errors: of its ranks and the agent, to their error output.
    """

    lines: list[str]
    errors: list[str]


def torchrun(
    script: str | os.PathLike,
    *options: object,
    ranks: int,
    restarts: int = 0,
    deadline: float = DEADLINE,
    show: Callable[[str], None] | None = print,
) -> Finished:
    """Run a script under ``torchrun`` on this machine.

    When this returns or raises, none of the processes is left.

    Args:
        script: a Python file.
        *options: for the script.
        ranks: processes, 1 024 at most.
        restarts: how often all ranks are started again after one failed.
        deadline: seconds for everything.
        show: called with each line of output, as it comes. ``torchrun`` runs
            scripts unbuffered: a line that is printed and its end are two
            pieces, and lines of two ranks may mix. Write both at once, with
            ``sys.stdout.write``.

    Raises:
        FileNotFoundError: no such script.
        ModuleNotFoundError: psutil is missing, which ends the processes.
        RuntimeError: a script that failed; the message has the end of what
            it wrote.
        TimeoutError: it did not end in time.
    """
    ranks = whole(ranks, "ranks", 1, MOST_RANKS)
    restarts = whole(restarts, "restarts", 0)
    seconds = _positive(deadline)
    instance(script, str | os.PathLike, "script", "the path of a Python file")
    if show is not None:
        function(show, "show")
    if not Path(script).is_file():
        raise FileNotFoundError(
            f"there is no script {script}: give the path of a Python file"
        )
    installed("psutil", "torchrun")
    mark = f"MEMBUDGET_TORCHRUN_{uuid4().hex}"
    said: list[tuple[bool, str]] = []  # whether an error, and a line
    seen = 0

    def read(stream: IO[str], error: bool) -> None:
        with stream:
            for line in stream:
                said.append((error, line.rstrip("\n")))

    def show_more() -> None:
        nonlocal seen
        while seen < len(said):
            error, line = said[seen]
            seen += 1
            if show and not error:
                show(line)

    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"),
            *(str(script), *map(str, options)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={
            **os.environ,
            mark: "1",
            "OMP_NUM_THREADS": "1",
            # A store of its own for each rendezvous, so that one rank's death
            # does not take the store with it.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    streams = (agent.stdout, False), (agent.stderr, True)
    threads = [threading.Thread(target=read, args=given) for given in streams]
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while agent.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            show_more()
        code = agent.poll()
    finally:
        _kill_marked(mark)
        agent.kill()
        agent.wait()
        for thread in threads:
            thread.join()
    show_more()
    message = "\n".join(line for _, line in said[-100:])
    if code is None:
        raise TimeoutError(
            f"{Path(script).name} did not end within {seconds:g} s: give it "
            f"a longer deadline, or see where it waits. It wrote:\n{message}"
        )
    if code:
        raise RuntimeError(
            f"{Path(script).name} failed with exit code {code}:\n{message}"
        )
    return Finished(
        [line for error, line in said if not error],
        [line for error, line in said if error],
    )


def _kill_marked(mark: str) -> None:
    """End every process with this name in its environment.

    The ranks of an agent have sessions of their own, and outlive it.
    """
    import psutil

    for _ in range(250):  # a process may start another one meanwhile
        everyone = psutil.process_iter(["environ"])
        marked = [p for p in everyone if mark in (p.info["environ"] or ())]
        if not marked:
            return
        for process in marked:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)
