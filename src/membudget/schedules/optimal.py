"""The optimal schedule of a chain of unequal stages, for every budget.

There are three ways to run a stage forward: keep nothing, keep its input,
keep its tape (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous
chains", arXiv 1911.13214, called Rotor). Segments in segments are all the
schedules that can be made of them, so the programme looks for the best
segments. It is optimal among those: memory-persistent schedules, which keep
what they checkpoint until it is used up. A schedule that may drop a
checkpoint and make it anew is sometimes better.

The paper's programme has a table over budgets, rounded to some hundred. This
one has the exact frontier of each part of the chain instead: every pair of a
peak and the least extra time with it. Equal parts have the same frontier, so
a chain of equal stages has few.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from membudget.checkpointing.tape import SIZES, Stage, Stages, as_chain
from membudget.checks import whole

LONGEST = 300
"""Stages that the programme takes."""


class FrontierPoint(NamedTuple):
    """A schedule with which no other is as good in peak and in time.

    Attributes:
        peak: bytes at the peak (or units), as the tape machine counts them.
        extra_time: FLOPs (or layer runs) of the runs after each stage's
            first.
        segments: the schedule, as
            :data:`membudget.checkpointing.Segments`.
    """

    peak: int
    extra_time: float
    segments: list


def frontier(chain: Stages | int) -> list[FrontierPoint]:
    """The best that segments can do: extra time against peak.

    Args:
        chain: at most 300 stages, as for
            :func:`membudget.checkpointing.simulate`; a number stands for that
            many ``Stage()``. The workspace of a run without recording, and
            of a backward pass, is not negative.

    Returns:
        Points from the least peak, which takes the longest, to the least
        extra time. Peak and time are those of the tape machine.
    """
    programme = _solved(chain)
    peaks, times, _ = map(np.ndarray.tolist, programme.frontier)
    return [
        FrontierPoint(peak, time, programme.segments(peak))
        for peak, time in zip(peaks, times, strict=True)
    ]


def least_budget(chain: Stages | int) -> int:
    """The least peak of segments for this chain, in bytes (or units).

    Args:
        chain: as for :func:`frontier`.
    """
    return int(_solved(chain).frontier.peaks[0])


def optimal_segments(chain: Stages | int, budget: int) -> list:
    """The segments with the least extra time whose peak is in the budget.

    Args:
        chain: as for :func:`frontier`.
        budget: for everything that the tape machine counts, in bytes (in
            units for a chain in units). Exact: nothing is rounded.

    Returns:
        Segments, as :data:`membudget.checkpointing.Segments`; where several
        take the least time, those with the least peak.

    Raises:
        ValueError: a budget below :func:`least_budget`.
    """
    programme = _solved(chain)
    budget = whole(budget, "the budget in bytes", 0)
    least = int(programme.frontier.peaks[0])
    if budget < least:
        raise ValueError(
            f"the budget is {budget} bytes, and the least peak of this chain "
            f"is {least} bytes: allow that, use smaller micro-batches, or "
            "cut its stages into finer ones"
        )
    return programme.segments(budget)


def _solved(chain: Stages | int) -> "_Programme":
    stages = as_chain(chain)
    if len(stages) > LONGEST:
        raise ValueError(
            f"the chain has {len(stages)} stages: use at most {LONGEST}, "
            "several layers in one stage"
        )
    for index, stage in enumerate(stages):
        for name in ("forward", "backward", "again"):
            if getattr(stage, f"{name}_workspace") < 0:
                raise ValueError(
                    f"stage {index} has a negative {name}_workspace, so its "
                    "peak is not where it works: use 0 or more"
                )
    return _programme(stages)


class _Frontier(NamedTuple):
    """Pairs of a peak and its least time, from the least peak upwards.

    Each with the choice that begins it: how many stages are the first
    segment, or 0 where the first stage keeps its tape.
    """

    peaks: np.ndarray
    times: np.ndarray
    choices: np.ndarray

    def at(self, peaks: np.ndarray | int) -> np.ndarray | int:
        """Places of the best pairs with at most these peaks, or −1."""
        return self.peaks.searchsorted(peaks, "right") - 1

    def beaten(self, peaks: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Which pairs are none of these and no worse than any."""
        if not len(self.peaks):
            return np.ones(len(peaks), bool)
        places = self.at(peaks)
        return (places < 0) | (times < self.times[places])


_FREE, _AWHILE, _HELD = range(3)
"""What else holds a part's input: nothing; a checkpoint, until all tapes of
this level exist; something for as long as the part needs it."""


class _Part(NamedTuple):
    """Stages to the end of a level: of the first run, or of a segment's.

    Attributes:
        start, end: the stages.
        again: whether they are recomputed.
        held: what else holds their input.
        owed: bytes of the segment's own checkpoint where that is alive until
            all tapes of the level are there, and no tape takes it over.
    """

    start: int
    end: int
    again: bool
    held: int
    owed: int


class _Programme:
    """The frontiers of all parts of a chain.

    A part's peak is what it adds to all that others hold: tapes and
    checkpoints before it, and what the parameters' gradients behind it left.
    """

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages, self.length = stages, len(stages)
        self.root = [0]  # a view is the storage of its input
        for index, stage in enumerate(stages, 1):
            self.root.append(index if stage.output else self.root[-1])
        # the chain's input is there in any case
        self.sizes = [stages[i - 1].output if i else 0 for i in self.root]
        self.left = [0, *accumulate(stage.gradients for stage in stages)]
        self.gradient = [*(stage.gradient for stage in stages[:-1]), 0]
        self.kinds = self._kinds()
        sizes = [abs(getattr(s, name)) for s in stages for name in SIZES]
        times = [t for s in stages for t in (s.time, s.recompute_time)]
        self.size, self.number = _fitting(sizes), _fitting(times)
        self.nothing = self._frontier([0])
        self.known: dict[tuple, _Frontier] = {}
        for count in range(1, self.length + 1):  # what others are made of
            for start in range(self.length - count + 1):
                self._of(_Part(start, start + count, True, _HELD, 0))
        self.all = _Part(0, self.length, False, _HELD, 0)
        self.frontier = self._of(self.all)

    def _kinds(self) -> list[list[int]]:
        """A number for each start and count; parts that are alike share it."""
        known: dict[tuple, int] = {}

        def number(*key: object) -> int:
            return known.setdefault(key, len(known))

        kinds = [
            number(replace(stage, name=""), gradient)
            for stage, gradient in zip(self.stages, self.gradient, strict=True)
        ]
        return [
            list(accumulate(kinds[start:], number))
            for start in range(self.length)
        ]

    def _frontier(self, peaks: list[int]) -> _Frontier:
        """Where nothing runs."""
        times: np.ndarray = np.zeros(len(peaks), self.number)
        return _Frontier(
            np.array(peaks, self.size), times, np.zeros(len(peaks), int)
        )

    def segments(self, budget: int) -> list:
        """The best ones in a budget."""
        most = int(self.frontier.peaks[-1])
        return self._segments(self.all, min(budget, most))

    def _segments(self, part: _Part, budget: int) -> list:
        result: list = []
        while part.start < part.end:
            found = self._of(part)
            place = found.at(budget)
            budget, count = found.peaks[place], int(found.choices[place])
            if count:
                more, inner = self._inner(part, count)
                result.append(self._segments(inner, budget - more))
            else:
                result.append(part.start)
            more, part = self._rest(part, count)
            budget -= more
        return result

    # What a part is made of: bytes on top of which it stands, and the part

    def _part(
        self, start: int, end: int, again: bool, held: int, owed: int
    ) -> tuple[int, _Part]:
        part = _Part(start, end, again, held, owed)
        size = self.sizes[start]
        if not size:
            return 0, part._replace(held=_HELD)
        if held == _HELD or start == end or not self._takes(start):
            return 0, part
        # its tape, or its first segment's checkpoint, holds it as well
        owed = 0 if held == _AWHILE else owed
        return size, _Part(start, end, again, _HELD, owed)

    def _takes(self, start: int) -> bool:
        """Whether the stage's tape holds its input; a view is the same."""
        stage = self.stages[start]
        same = stage.holds_output and not stage.output
        return stage.holds_input or same

    def _rest(self, part: _Part, count: int) -> tuple[int, _Part]:
        """What follows the first segment, or stage where the count is 0."""
        start, end, again, held, owed = part
        stop = start + (count or 1)
        same = self.root[stop] == self.root[start]
        if count:
            more = self.sizes[start] if held != _HELD else 0
            owed = 0 if held == _AWHILE else owed
            held = _HELD if same else _FREE
        else:
            stage = self.stages[start]
            more = stage.inner + stage.output * stage.holds_output
            if not same:
                held = _HELD if stage.holds_output else _FREE
        shift, rest = self._part(stop, end, again, held, owed)
        return more + shift, rest

    def _inner(self, part: _Part, count: int) -> tuple[int, _Part]:
        """The first segment, when its turn to go backward has come."""
        start, end, again, held, _ = part
        stop, size = start + count, self.sizes[start]
        more = self.left[end] - self.left[stop]
        if held == _HELD:
            shift, inner = self._part(start, stop, True, _HELD, 0)
        elif again:  # its checkpoint goes when its tapes are there
            shift, inner = self._part(start, stop, True, _AWHILE, size)
        else:  # its checkpoint stays until the end
            shift, inner = self._part(start, stop, True, _HELD, 0)
            shift += size
        return more + shift, inner

    # The frontier of a part

    def _of(self, part: _Part) -> _Frontier:
        start, end, again, held, owed = part
        if start == end:  # when the level's own checkpoint goes
            return self._frontier([owed + self.gradient[end - 1]])
        size = self.sizes[start] if held != _HELD else 0
        key = self.kinds[start][end - start - 1], again, held, owed, size
        if key not in self.known:
            self.known[key] = self._solve(part)
        return self.known[key]

    def _solve(self, part: _Part) -> _Frontier:
        start, end, again, held, owed = part
        best = self._frontier([])
        floor, time = self._bare(part)
        more, rest = self._rest(part, 0)
        best = _better(
            best, 0, floor, time, [(more, self._of(rest)), (0, self.nothing)]
        )
        size = self.sizes[start]
        mine = size if held != _HELD else 0
        owed = 0 if held == _AWHILE else owed
        base = mine + owed + self.gradient[end - 1]
        floor = time = 0
        if start and not again:  # when its checkpoint goes, at the end
            floor = self.left[end] - self.left[start]
            floor += self.gradient[start - 1]
        choices = []
        for index in range(start, end):
            stage = self.stages[index]
            value = self.sizes[index] * (self.root[index] != self.root[start])
            work = value + stage.output + stage.forward_workspace
            floor, time = max(floor, work), time + again * stage.time
            choices.append((index + 1 - start, floor, time))
        if again:  # a last segment's input is enough: nothing runs before it
            choices.pop()
            if owed and held != _AWHILE:
                choices.append((end - start, 0, 0))
        # scattered, so that good ones come soon and most are not looked at
        for count, floor, time in sorted(
            choices, key=lambda choice: choice[0] * 0.618 % 1
        ):
            more, after = 0, self.nothing
            if start + count < end:
                more, item = self._rest(part, count)
                after = self._of(item)
            above, item = self._inner(part, count)
            parts = [(more, after), (above, self._of(item))]
            best = _better(best, count, base + floor, time, parts)
        return best

    def _bare(self, part: _Part) -> tuple[int, float]:
        """The peak and the extra time of the first stage with its tape."""
        start, end, again, held, owed = part
        stage = self.stages[start]
        value = self.sizes[start] if held == _FREE else 0
        work, time = stage.record_workspace, again * stage.time
        if again and start == end - 1:
            work, time = stage.recompute_workspace, stage.recompute_time
        run = owed + value + stage.inner + stage.output + work
        run += self.gradient[end - 1]
        tape = stage.inner + stage.output * stage.holds_output
        work = stage.again_workspace if again else stage.backward_workspace
        back = tape + self.left[end] - self.left[start + 1]
        return max(run, back + self.gradient[start] + work), time


_programme = lru_cache(maxsize=16)(_Programme)


def _better(
    best: _Frontier,
    choice: int,
    floor: int,
    time: float,
    parts: list[tuple[int, _Frontier]],
) -> _Frontier:
    """The frontier with another choice.

    Args:
        best: the frontier without it.
        choice: its number.
        floor: the peak of the runs before its parts.
        time: of these runs.
        parts: two, each with the bytes on top of which it stands.
            They are at work one after the other: the peaks' largest counts,
            and the times' sum.
    """
    (more, one), (above, two) = parts
    least = max(floor, one.peaks[0] + more, two.peaks[0] + above)
    peaks = np.concatenate([one.peaks + more, two.peaks + above])
    peaks = np.unique(np.maximum(peaks, least))
    times = one.times[one.at(peaks - more)] + two.times[two.at(peaks - above)]
    times = times + time
    good = best.beaten(peaks, times)
    if not good.any():
        return best
    peaks = np.concatenate([peaks[good], best.peaks])
    times = np.concatenate([times[good], best.times])
    choices = np.full(len(peaks), choice)
    choices[good.sum() :] = best.choices
    order = peaks.argsort(kind="stable")  # the new ones are faster
    peaks, times, choices = peaks[order], times[order], choices[order]
    so_far = np.minimum.accumulate(times)
    better = np.ones(len(times), bool)
    better[1:] = so_far[1:] < so_far[:-1]
    return _Frontier(peaks[better], times[better], choices[better])


def _fitting(values: list[float]) -> type:
    """A type for numpy that holds their sums, each as often as may be."""
    kinds = set(map(type, values))
    if kinds == {int} and len(values) * sum(values) < 2**62:
        return np.int64
    return float if kinds == {int, float} or kinds == {float} else object
