"""Schedules: what runs in which order, as actions or as segments."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from membudget.checkpointing.segments import MOST
from membudget.checks import iterable, shown, whole

KINDS = ("forward", "record", "keep", "drop", "backward")
"""What an action can be."""

Segments = Sequence
"""Stage numbers in order; a list stands for a segment that is checkpointed.

``[[0, 1, 2], [3, 4, 5], 6, 7]``: two segments of three stages, whose inputs
are kept and whose tapes are recomputed, and two stages that keep their tapes.
A list within a list is checkpointed again when the outer one is recomputed.
"""


class Action(NamedTuple):
    """One action of a schedule; ``str`` gives ``"forward 3"``.

    The kind is one of :data:`KINDS`:

    * *forward i*: run stage i without a tape; its output is the new value.
    * *record i*: the same with a tape.
    * *keep i*: keep boundary i, the input of stage i, as a checkpoint.
    * *drop i*: let go of that checkpoint.
    * *backward i*: the backward pass of stage i; uses up its tape.

    A stage that runs, with or without a tape, after it has run before is
    *recomputed*.
    """

    kind: str
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}"


class ImpossibleAction(ValueError):
    """A schedule asks for what cannot be done; ``index`` says where."""

    def __init__(self, index: int, action: object, why: str) -> None:
        self.index = index
        where = f"at its end (after {index} actions)"
        if action is not None:
            where = f"action {index}, {action}"
        super().__init__(f"{where}: {why}")


def actions(segments: Segments, length: int | None = None) -> list[Action]:
    """The actions that checkpointing these segments performs.

    Args:
        segments: as :data:`Segments` says.
        length: stages in the chain, each of which the segments have to hold;
            by default the number that they do hold.
    """
    stages = list(flatten(segments))
    if length is None:
        length = len(stages)
    length = whole(length, "the number of stages", 0, MOST)
    if not stages:
        raise ValueError("there are no segments: they hold each stage once")
    if stages != list(range(length)):
        raise ValueError(
            f"the segments {shown(segments)} hold the stages "
            f"{shown(stages)}: use 0 to {length - 1}, each once, in order"
        )
    return [*_run(segments, 0, again=False), *_back(segments, 0, again=False)]


def is_list(value: object) -> TypeGuard[Sequence]:
    """Whether it is a list, a tuple or another sequence, but not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def flatten(segments: Segments) -> Iterator[int]:
    """The stages, in order, if these are segments."""
    if not is_list(segments):
        raise TypeError(
            f"the segments are {shown(segments)}: use a list, such as "
            "equal_segments(length, count)"
        )
    for item in segments:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item
        elif not is_list(item):
            raise TypeError(
                f"the segments hold {shown(item)}: use stage numbers, and "
                "lists of them for what is checkpointed"
            )
        elif not len(item):
            raise ValueError("a segment is empty: it has at least one stage")
        else:
            yield from flatten(item)


def _run(segments: Segments, start: int, again: bool) -> Iterator[Action]:
    """With recording, except in what is checkpointed.

    Args:
        segments: what runs.
        start: the stage whose input is kept already.
        again: whether it is a recomputation, which ends with the last thing
            that is missing: at a segment it needs to know the input alone.
    """
    for place, item in enumerate(segments, 1):
        if isinstance(item, int):
            yield Action("record", item)
            continue
        stages = list(flatten(item))
        if stages[0] != start:
            yield Action("keep", stages[0])
        if not again or place < len(segments):
            yield from (Action("forward", stage) for stage in stages)


def _back(
    segments: Segments, start: int, again: bool, owed: bool = False
) -> Iterator[Action]:
    """The backward passes, and before each segment's its recomputation.

    Args:
        segments: whose turn it is, in reverse order.
        start: the stage whose input is kept already.
        again: whether they were recomputed. Then what enters a segment is
            used up by the segment's own recomputation; only in the first run
            does it stay until the end.
        owed: whether that of ``start`` is to be dropped here.
    """
    for item in reversed(segments):
        if isinstance(item, int):
            yield Action("backward", item)
            continue
        first = next(flatten(item))
        mine = first != start or owed
        later = not isinstance(item[0], int)  # a segment within needs it
        drop = [Action("drop", first)] if mine else []
        yield from _run(item, first, again=True)
        if again and not later:
            yield from drop
        yield from _back(item, first, True, again and later and mine)
        if not again:
            yield from drop


def as_actions(schedule: Sequence, length: int) -> list[Action]:
    """Actions of a chain of this many stages.

    Args:
        schedule: :class:`Action` or text (``"forward 3"``), in a list or one
            for each line; or segments.
        length: stages in the chain.

    Raises:
        ImpossibleAction: text that is no action.
    """
    if isinstance(schedule, str):
        schedule = schedule.strip().splitlines()
    use = "actions, or of segments such as equal_segments(length, count)"
    schedule = list(iterable(schedule, "the schedule", use))
    if any(
        isinstance(item, int | Sequence) and not isinstance(item, str | Action)
        for item in schedule
    ):
        return actions(schedule, length)
    return [_parsed(index, item) for index, item in enumerate(schedule)]


def _parsed(index: int, item: Action | str) -> Action:
    if isinstance(item, Action):
        kind, number = item
        good = isinstance(number, int)
    else:
        kind, _, text = str(item).strip().partition(" ")
        good = text.strip().isdecimal()
        number = int(text) if good else 0
    if kind not in KINDS or not good:
        raise ImpossibleAction(
            index,
            repr(item),
            f"an action is one of {', '.join(KINDS)} and the number of a "
            'stage, such as "forward 3"',
        )
    return Action(kind, int(number))
