"""A pipeline's schedule: PyTorch's own tables, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from membudget.checks import instance, number, one_of, whole
from membudget.parallelism._private import torch_table

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""PyTorch's schedules, with the chunks of a rank: those of which a rank has
one stage, then those with several, at the least 2."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Exactly 2 chunks, of which rank 0 has the first stage and the last."""

Key = tuple[str, int, int]
"""What is there once an operation is over: "F", "I" or "W", the stage and
the micro-batch."""

MOST_RANKS, MOST_MICRO_BATCHES = 1024, 10**4


class Operation(NamedTuple):
    """One of a rank.

    Attributes:
        kind: "F" forward; "B" the whole backward pass; "I" its part for the
            inputs and "W" its part for the weights.
        stage: of all ranks' stages.
        micro_batch: of the step.
    """

    kind: str
    stage: int
    micro_batch: int


Table = tuple[tuple[Operation, ...], ...]
"""The operations of each rank, in order."""


def table(
    schedule: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> Table:
    """What each rank of a pipeline does, in PyTorch's own order.

    1F1B's is made here: PyTorch 2.13 numbers the forward passes of its last
    rank from 1. (What PyTorch runs is right.)

    Args:
        schedule: one of :data:`SCHEDULES`.
        ranks: of the pipeline, at least 2.
        micro_batches: of a step.
        chunks: stages of a rank, by default the schedule's least.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: numbers that the schedule cannot have.
        RuntimeError: this PyTorch has no tables.
    """
    ranks, micro_batches, chunks = checked(
        schedule, ranks, micro_batches, chunks
    )
    if schedule == "1F1B":
        return tuple(
            _one_by_one(ranks, micro_batches, r) for r in range(ranks)
        )
    rows = torch_table(schedule, ranks, micro_batches, chunks)
    return tuple(tuple(Operation(*entry) for entry in row) for row in rows)


def checked(
    schedule: str, ranks: int, micro_batches: int, chunks: int | None
) -> tuple[int, int, int]:
    """Ranks, micro-batches and chunks, if the schedule can have them."""
    least = SCHEDULES[one_of(schedule, SCHEDULES, "schedule")]
    ranks = whole(ranks, "ranks", 2, MOST_RANKS)
    micro_batches = whole(
        micro_batches, "micro_batches", 1, MOST_MICRO_BATCHES
    )
    chunks = least if chunks is None else whole(chunks, "chunks", 1)
    _check(schedule, ranks, micro_batches, chunks, least)
    return ranks, micro_batches, chunks


def _check(
    schedule: str, ranks: int, micro_batches: int, chunks: int, least: int
) -> None:
    if least == 1 and chunks != 1:
        raise ValueError(
            f"chunks is {chunks}, and in {schedule} a rank has one stage: "
            "leave chunks out, or take Interleaved1F1B"
        )
    if schedule in V_SHAPED and chunks != 2:
        raise ValueError(
            f"chunks is {chunks}, and in {schedule} a rank has two stages: "
            "leave chunks out"
        )
    if chunks < least:
        raise ValueError(
            f"chunks is {chunks}, and in {schedule} a rank has at least "
            f"{least} stages: for one take 1F1B"
        )
    needed = {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(schedule, 1)
    if micro_batches < needed:
        raise ValueError(
            f"{micro_batches} micro-batches are too few: {schedule} needs one "
            f"for each stage, {needed} or more"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule.startswith("Interleaved") and micro_batches % rounds:
        raise ValueError(
            f"{micro_batches} micro-batches do not go into {rounds} equal "
            f"rounds of {schedule}: use a multiple of the {ranks} ranks"
        )


def _one_by_one(
    ranks: int, micro_batches: int, rank: int
) -> tuple[Operation, ...]:
    """1F1B: some forward passes, then one backward for each further one."""
    ahead = min(ranks - rank - 1, micro_batches)
    row = [Operation("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            row.append(Operation("F", rank, m + ahead))
        row.append(Operation("B", rank, m))
    return tuple(row)


@dataclass(frozen=True)
class Replay:
    """A table's step, with times in any unit.

    Attributes:
        starts, ends: of each operation, by rank.
        held: what a rank keeps while each operation runs, by rank, in tapes
            of all the rank's stages for one micro-batch.
        time: until the last operation ends.
        bubble: share of all ranks' time in which they do nothing.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    held: tuple[tuple[float, ...], ...]
    time: float
    bubble: float

    @property
    def peaks(self) -> list[float]:
        """The most that each rank keeps, in tapes."""
        return [max(row) for row in self.held]


def replay(
    order: Sequence[Sequence[Operation]],
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> Replay:
    """When each operation runs, and what each rank keeps.

    A rank runs its operations in their order, each as soon as it can. A
    forward pass waits for that of the stage before, a backward pass for the
    same stage's forward pass and for the next stage's backward pass, and its
    part for the weights for its part for the inputs. Messages take no time.

    A stage's tape is there from the beginning of its forward pass to the end
    of its whole backward pass, or of the part for the weights: PyTorch keeps
    what the layers saved until then.

    Args:
        order: of the operations, by rank; :func:`table` or your own.
        forward: time of a rank's forward pass for one micro-batch, above 0.
        inputs, weights: the two parts of its backward pass. Each of several
            stages takes its share.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a time that cannot be, or an order that cannot run.
    """
    times = [
        float(number(value, name, above=0))
        for name, value in (
            ("forward", forward),
            ("inputs", inputs),
            ("weights", weights),
        )
    ]
    clock = _Clock(_checked(order), dict(zip("FIW", times, strict=True)))
    while clock.left:
        if not clock.advance():
            raise ValueError(clock.stuck())
    return clock.replay()


class _Clock:
    """Runs each rank's operations as soon as what they need is there."""

    def __init__(
        self, rows: list[list[Operation]], times: dict[str, float]
    ) -> None:
        self.rows = rows
        self.lasts = times | {"B": times["I"] + times["W"]}
        self.chunks = [len({o.stage for o in row}) for row in rows]
        self.final = max(o.stage for row in rows for o in row)
        self.starts: list[list[float]] = [[] for _ in rows]
        self.ends: list[list[float]] = [[] for _ in rows]
        self.done: dict[Key, float] = {}

    @property
    def left(self) -> int:
        return sum(map(len, self.rows)) - sum(map(len, self.ends))

    def next(self, rank: int) -> Operation | None:
        """What the rank has to run, if it is not through."""
        done = len(self.ends[rank])
        return self.rows[rank][done] if done < len(self.rows[rank]) else None

    def missing(self, operation: Operation) -> list[Key]:
        needs = _needs(operation, self.final)
        return [key for key in needs if key not in self.done]

    def advance(self) -> int:
        """Let each rank run as far as it can; how many operations ran."""
        before = self.left
        for rank in range(len(self.rows)):
            while (o := self.next(rank)) and not self.missing(o):
                self.run(rank, o)
        return before - self.left

    def run(self, rank: int, operation: Operation) -> None:
        ready = [self.done[key] for key in _needs(operation, self.final)]
        start = max([0.0, *self.ends[rank][-1:], *ready])
        end = start + self.lasts[operation.kind] / self.chunks[rank]
        self.starts[rank].append(start)
        self.ends[rank].append(end)
        self.done[_key(operation)] = end

    def stuck(self) -> str:
        """Who waits for what."""
        waits = [
            f"rank {rank} waits at {_name(o)} for {self.named(o)}"
            for rank in range(len(self.rows))
            if (o := self.next(rank))
        ]
        return (
            f"this order cannot run: {'; '.join(waits)}. Move an operation "
            "before what it waits for"
        )

    def named(self, operation: Operation) -> str:
        """What it waits for, as the order has it."""
        needed = Operation(*self.missing(operation)[0])
        there = any(needed in row for row in self.rows)
        return _name(needed if there else needed._replace(kind="B"))

    def replay(self) -> Replay:
        time = max(row[-1] for row in self.ends)
        busy = sum(
            self.lasts[o.kind] / chunks
            for row, chunks in zip(self.rows, self.chunks, strict=True)
            for o in row
        )
        pairs = zip(self.rows, self.chunks, strict=True)
        return Replay(
            tuple(map(tuple, self.starts)),
            tuple(map(tuple, self.ends)),
            tuple(_held(row, chunks) for row, chunks in pairs),
            time,
            1 - busy / (time * len(self.rows)),
        )


def _name(operation: Operation) -> str:
    kind, stage, m = operation
    return f"{kind}{m} of stage {stage}"


def _key(operation: Operation) -> Key:
    """What waits for a whole backward pass waits for its inputs alone."""
    kind = "I" if operation.kind == "B" else operation.kind
    return kind, operation.stage, operation.micro_batch


def _needs(operation: Operation, final: int) -> list[Key]:
    kind, stage, m = operation
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [("I", stage, m)]
    behind = [("I", stage + 1, m)] if stage < final else []
    return [("F", stage, m), *behind]


def _held(row: Sequence[Operation], chunks: int) -> tuple[float, ...]:
    """While each operation of a rank runs."""
    now, held = 0, []
    for operation in row:
        now += operation.kind == "F"
        held.append(now / chunks)
        now -= operation.kind in "BW"
    return tuple(held)


def _checked(order: Sequence[Sequence[Operation]]) -> list[list[Operation]]:
    """The rows, of which each stage runs each micro-batch once."""
    instance(order, Sequence, "order", "a list of operations for each rank")
    rows = [
        [
            instance(o, Operation, "an operation", "an Operation")
            for o in instance(row, Sequence, "a row", "a list of operations")
        ]
        for row in order
    ]
    if not rows or not all(rows):
        raise ValueError("order has a rank without operations: give each some")
    _check_pairs(_pairs(rows))
    return rows


Pairs = dict[tuple[int, int], list[str]]
"""Of a stage and a micro-batch what runs where: "F of 0"."""


def _pairs(rows: list[list[Operation]]) -> Pairs:
    seen: Pairs = {}
    for rank, row in enumerate(rows):
        for o in row:
            one_of(o.kind, "FBIW", "kind")
            key = (
                whole(o.stage, "stage", 0),
                whole(o.micro_batch, "micro_batch", 0),
            )
            seen.setdefault(key, []).append(f"{o.kind} of {rank}")
    return seen


def _check_pairs(seen: Pairs) -> None:
    """Each stage runs each micro-batch once, on one rank."""
    for (stage, m), found in seen.items():
        kinds = sorted(text[0] for text in found)
        where = {text[1:] for text in found}
        if kinds not in (["B", "F"], ["F", "I", "W"]) or len(where) > 1:
            raise ValueError(
                f"stage {stage} runs micro-batch {m} as {', '.join(found)}: "
                "one rank has to run its F and its B, or F, I and W, once each"
            )
    stages, batches = map(set, zip(*seen, strict=True))
    for stage, m in product(range(max(stages) + 1), sorted(batches)):
        if (stage, m) not in seen:
            raise ValueError(
                f"stage {stage} never runs micro-batch {m}: each stage "
                "runs each micro-batch"
            )
