"""Run a reader's function on real ranks, and say what goes wrong there.

The ranks are processes: they are started when a check first needs them, and
serve all checks.
"""

import gc
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch.distributed as dist

from membudget.exercises import guard
from membudget.exercises.guard import Problem
from membudget.sharding import (
    CommunicationCounter,
    DeadlineError,
    RankError,
    Ranks,
)
from membudget.sharding.rank_process import file_of, pack

RANKS = 2
"""How many ranks there are, as a rule."""

DEADLINE = 30.0
"""Seconds for a function; it needs less than one, or four where the machine
is busy."""

PATIENCE = 5.0
"""Seconds that a rank whose function failed waits for the other ones."""

_turns = itertools.count()


@dataclass(frozen=True)
class Fault:
    """An exception in a reader's function, as a sentence.

    A stub says that nothing was written yet.
    """

    text: str
    stub: bool


Result = TypeVar("Result")
Report = tuple[Result | Fault, dict[str, int]]
"""What a rank sends back: a scene's result, and how often it called each
collective."""


class Alone(Exception):
    """A function failed on this rank, and not on all others."""


def together(
    scene: Callable[..., Result],
    fn: Callable,
    *args: object,
    ranks: int = RANKS,
) -> tuple[list[Result], bool]:
    """Call ``scene(fn, *args)`` on all ranks at once.

    Args:
        scene: an importable function; it calls ``fn``, the reader's, with
            what it makes of the arguments.

    Returns:
        The result of each rank, and whether any called a collective.

    Raises:
        Problem: ``fn`` fails, waits for ever or cannot be sent.
    """
    try:
        pack(fn)
    except TypeError as error:
        raise Problem(f"{error}.") from error
    pool = _pool(ranks)
    try:
        if not pool.processes:
            pool.run(_ready)
        reports: list[Report[Result]] = pool.run(
            _enter, fn, scene, args, next(_turns), PATIENCE,
            deadline=DEADLINE,
        )  # fmt: skip
    except DeadlineError as error:
        raise Problem(_waiting(error, fn)) from error
    except RankError as error:
        raise Problem(_alone(error)) from error
    results, calls = zip(*reports, strict=True)
    if any(made != calls[0] for made in calls):
        pool.kill()  # what one rank sent may still be on its way
    good = [r for r in results if not isinstance(r, Fault)]
    if len(good) == ranks:
        return good, any(calls)
    faults = [r if isinstance(r, Fault) else None for r in results]
    rank, fault = next((r, f) for r, f in enumerate(faults) if f)
    same = all(f and f.text == fault.text for f in faults)
    if same and fault.stub:
        raise Problem
    raise Problem(fault.text if same else f"on rank {rank}: {fault.text}")


def _pool(ranks: int = RANKS) -> Ranks:
    if ranks not in _pools:
        _pools[ranks] = Ranks(ranks, backend="gloo")
    return _pools[ranks]


_pools: dict[int, Ranks] = {}


def _waiting(error: DeadlineError, fn: Callable) -> str:
    """Say which ranks wait, and in which line."""
    code = getattr(fn, "__code__", None)
    places = []
    for text in re.split(
        r"^rank (?=\d+ was here)", error.traceback, flags=re.M
    ):
        if not text[:1].isdigit():
            continue
        place = f"rank {text.split()[0]}"
        if code:
            here = rf'"{_dumped(file_of(code))}", line (\d+) in '
            found = re.search(here + _dumped(code.co_name), text)
            if found:
                line = int(found[1]) - code.co_firstlineno + 1
                place += f" in line {line} of your function"
        places.append(place)
    return (
        f"after {DEADLINE:g} s not all ranks were done. Still there: "
        f"{', '.join(places)}. A collective waits until every rank calls it, "
        "and all must call the same ones in the same order: look for what "
        "one rank leaves out."
    )


def _dumped(name: str) -> str:
    """A pattern for a name as faulthandler writes it: in ASCII."""
    return re.escape(name.encode("ascii", "backslashreplace").decode())


def _alone(error: RankError) -> str:
    """Say what failed on one rank."""
    text = str(error).split("\n")[0]
    name = f": {Alone.__name__}: "
    if name not in text:
        return f"{text}."
    rank, text = text.split(name, 1)
    return f"on {rank}: {text} The other rank waits for it in a collective."


# In the ranks


def _ready() -> None:
    """Have what is imported by now left out of garbage collections."""
    gc.collect()
    gc.freeze()


def _enter(
    fn: Callable, scene: Callable, args: tuple, turn: int, patience: float
) -> Report[object]:
    """One rank's part of :func:`together`."""
    with guard.sealed(), CommunicationCounter() as counter:
        try:
            result: object = scene(fn, *args)
        except Problem as problem:
            result = Fault(str(problem), not problem.args)
        except BaseException as error:
            result = Fault(guard.describe(error, fn), guard.is_stub(error))
    _meet(result, turn, patience)
    return result, {**counter.calls, **counter.others}


def _meet(result: object, turn: int, patience: float) -> None:
    """Let all ranks know that this one is through.

    Raises:
        Alone: the function failed here, and another rank is not through: it
            may wait for this one for ever.
    """
    store = _store()
    store.set(f"{turn}/{dist.get_rank()}", "through")
    if isinstance(result, Fault):
        others = [f"{turn}/{r}" for r in range(dist.get_world_size())]
        try:
            store.wait(others, timedelta(seconds=patience))
        except RuntimeError:
            raise Alone(result.text) from None


@cache
def _store() -> dist.TCPStore:
    """Kept as long as the rank lives: now and then it takes seconds to
    connect, and who waits for this rank would not know why."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False)
