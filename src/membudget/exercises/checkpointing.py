"""The puzzles and exercises on checkpointing, of the chapter and the lab."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil, inf, isqrt
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget import checkpointing as ck
from membudget import models
from membudget.checkpointing import Stage
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import (
    Allowed,
    answer,
    attempts,
    schedule,
    segmented_network,
    segmented_step,
)

# Puzzles on the tape machine


def _puzzle(
    solution: Callable,
    cases: Sequence[tuple],
    allowed: Callable[..., Allowed],
    shown: str,
) -> Exercise:
    """An exercise whose answer is any schedule that meets the targets.

    It has no known mistakes: what a schedule misses is seen when it runs. A
    case is the chain, or its length, and others.
    """

    def told(chain: int | list[Stage], *rest: object) -> str:
        target = allowed(chain, *rest)
        text = f"a chain of {chain} stages"
        if isinstance(chain, list):
            outputs = [stage.output for stage in chain]
            times = [stage.time for stage in chain]
            text = f"outputs of {outputs} units, times of {times}"
        limit = f"recomputation ≤ {target.extra}"
        if target.again < inf:
            limit = f"extra runs of a stage ≤ {target.again}"
        return f"{text}; peak ≤ {target.peak}, {limit}"

    return Exercise(
        solution,
        cases=[Case(told(*c), partial(deepcopy, c)) for c in cases],
        observe=schedule(allowed),
        mistakes="",
        shown=shown,
    )


def remember(length):
    there = [f"record {i}" for i in range(length)]
    back = [f"backward {i}" for i in reversed(range(length))]
    return there + back


check_remember = _puzzle(
    remember,
    cases=[(4,), (7,)],
    allowed=lambda length: Allowed(length + 1, 0),
    shown=(
        "Every tape is kept: as many units as stages, one for the gradient "
        "on its way back, and no stage runs again."
    ),
)


def forget(length):
    schedule = []
    for stage in reversed(range(length)):
        schedule += [f"forward {i}" for i in range(stage)]
        schedule += [f"record {stage}", f"backward {stage}"]
    return schedule


check_forget = _puzzle(
    forget,
    cases=[(5,), (8,)],
    allowed=lambda length: Allowed(4, length * (length - 1) // 2),
    shown=(
        "Four units, however deep the chain is; the price grows with the "
        "square of its length."
    ),
)


def square_root(length):
    n = round(length**0.5)
    segments = [list(range(i, i + n)) for i in range(0, length - n, n)]
    return segments + list(range(length - n, length))


check_square_root = _puzzle(
    square_root,
    cases=[(9,), (16,), (25,)],
    allowed=lambda length: Allowed(2 * isqrt(length), length - isqrt(length)),
    shown=(
        "√L segments of √L stages; and the last one, whose turn comes first, "
        "needs no recomputation."
    ),
)


def shrinking(length):
    segments, stages = [], list(range(length))
    size = int((2 * length) ** 0.5)
    while stages:
        segments.append(stages[:size])
        stages, size = stages[size:], max(size - 1, 1)
    return segments


check_shrinking = _puzzle(
    shrinking,
    cases=[(15,), (21,)],
    allowed=lambda length: Allowed(isqrt(2 * length) + 2, length),
    shown=(
        "A later segment has more checkpoints below it, so it must be "
        "shorter: about √(2L) units instead of 2√L."
    ),
)


def two_sweeps(length):
    def cut(stages, sizes):
        parts = []
        for size in sizes:
            parts.append(stages[:size])
            stages = stages[size:]
        return [part for part in parts if part]

    m = {16: 4, 24: 5}[length]
    triangles = [k * (k + 1) // 2 for k in range(m, 0, -1)]
    outer = cut(list(range(length)), triangles)
    return [cut(part, range(m - j, 0, -1)) for j, part in enumerate(outer)]


check_two_sweeps = _puzzle(
    two_sweeps,
    cases=[(16,), (24,)],
    allowed=lambda length: Allowed({16: 6, 24: 7}[length], again=2),
    shown=(
        "Two more runs for each stage, and the peak is below what any "
        "segments without segments in them can reach: with two levels it "
        "grows with the cube root of the length."
    ),
)


def uneven(chain, budget):
    # from one small boundary to the next, over a large one
    return [0, [1, 2, 3, 4], 5, 6, 7]


def _bulges(*outputs: int) -> list[Stage]:
    """Stages of these outputs, whose gradients are as large.

    While a stage goes backward, the gradient of its input is its workspace;
    the input of the chain has one unit.
    """
    return [
        Stage(output=size, backward_workspace=before)
        for before, size in pairwise((1, *outputs))
    ]


check_uneven = _puzzle(
    uneven,
    cases=[(_bulges(1, 2, 4, 8, 2, 8, 4, 2), 27)],
    allowed=lambda chain, budget: Allowed(budget, 4),
    shown=(
        "A checkpoint belongs where the boundary is small, and what is "
        "forgotten where the tapes are large; equal segments of any number "
        "need 32 units."
    ),
)


def expensive(chain):
    # stage 4 takes 10 times as long: it keeps its tape
    return [[0, 1, 2, 3], 4, [5, 6], 7, 8]


check_expensive = _puzzle(
    expensive,
    cases=[([Stage(time=10 if i == 4 else 1) for i in range(9)],)],
    allowed=lambda chain: Allowed(6, 6),
    shown=(
        "The peak of √L segments, and the expensive stage runs once: it "
        "stands between two segments and keeps its tape."
    ),
)

# Formulas


def best_count(length, boundary, tape):
    def peak(count):
        return count * boundary + ceil(length / count) * tape

    return min(range(1, length + 1), key=peak)


OPTIMUM = "min(max((length * tape / boundary) ** 0.5, 1), length)"

check_best_count = Exercise(
    best_count,
    cases=[
        given(length=18, boundary=2, tape=6),
        given(length=30, boundary=2, tape=7),
        given(length=20, boundary=1, tape=1),
        given(length=12, boundary=1, tape=16),
        given(length=6, boundary=40, tape=3),
        given(length=23, boundary=1, tape=2),
    ],
    observe=answer,
    mistakes=f"""
        min(range(1, length + 1), key=peak) => \
        min(map(peak, range(1, length + 1)))
            this is the least peak: the number of segments that has it is
            asked.
        count * boundary + ceil(length / count) * tape => \
        count + ceil(length / count)
            this is the best count for equal costs, near √L: a boundary costs
            `boundary`, and a stage of the segment at work `tape`.
        count * boundary + ceil(length / count) * tape => \
        count * tape + ceil(length / count) * boundary
            the costs are swapped: there are k boundaries, and ⌈length/k⌉
            tapes.
        range(1, length + 1) => range(length, 0, -1)
            several counts have the least peak: the smallest of them is asked.
        length + 1 => length
            one stage for each segment, k = length, is a choice too.
        ceil(length / count) => (length / count)
        or ceil(length / count) => (length // count)
        or min(range(1, length + 1), key=peak) => round({OPTIMUM})
        or min(range(1, length + 1), key=peak) => int({OPTIMUM})
        or min(range(1, length + 1), key=peak) => ceil({OPTIMUM})
        or min(range(1, length + 1), key=peak) => {OPTIMUM}
            this is the optimum of k·c + L/k·a, near √(L·a/c). The longest
            segment has ⌈L/k⌉ stages, and not L/k: try every k.
        """,
    shown=(
        "Where tapes are large beside boundaries it is many segments, in the "
        "end one for each stage; where they are small it is one."
    ),
)


def sequential_peak(length, count):
    last = length - (count - 1) * (length // count)
    return count + last  # count - 1 boundaries, the last tapes, a gradient


check_sequential_peak = Exercise(
    sequential_peak,
    cases=[
        given(length=27, count=6),
        given(length=16, count=4),
        given(length=10, count=1),
        given(length=19, count=10),
        given(length=7, count=7),
    ],
    observe=answer,
    mistakes="""
        length - (count - 1) * (length // count) => length // count
        or length - (count - 1) * (length // count) => length // count - 1
        or length - (count - 1) * (length // count) => ceil(length / count)
            the last segment is longer than the others:
            `checkpoint_sequential` rounds down, and the last one takes what
            remains, length − (count − 1)·⌊length/count⌋ stages.
        count + last => count + last - 1
            one unit is missing: the gradient on its way back.
        count + last => count + last + 1
            one unit is too much: the input of the first segment is there
            anyway and does not count.
        count + last => last + 1
            the boundaries are missing: count − 1 of them are kept besides the
            tapes of the last segment.
        count + last => length + 1
            this is the peak without checkpoints.
        """,
    shown=(
        "Where the count does not divide the length, all the rest falls on "
        "the last segment: 10 segments of 19 stages need 20 units, as many "
        "as no checkpoints at all."
    ),
)

# Repairs


def segment_step(segments, x):
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=False)
    x.sum().backward()


def _segments(count: int, size: int) -> Case:
    def make() -> tuple:
        segments = [models.chain(8, size).double() for _ in range(count)]
        return segments, torch.rand(128, 8, dtype=torch.float64)

    return Case(f"{count} segments of {size} linear layers with ReLU", make)


check_segment_step = Exercise(
    segment_step,
    cases=[_segments(4, 6), _segments(3, 8)],
    observe=segmented_step,
    mistakes="""
        x = checkpoint(segment, x, use_reentrant=False) => \
        x = checkpoint(segment, x.detach(), use_reentrant=False); \
        x.sum().backward()
        x.sum().backward() =>
            the backward pass of every segment begins with a gradient of 1.
            Only that of the last one does: each of the others gets the
            gradient of the next one's input.
        x.sum() => x.mean()
        or x.sum() => (x.sum() / len(x))
            this is the gradient of a mean: the loss is the `sum()` of the
            last output.
        """,
    shown=(
        "The gradients are those of the plain run, and only one segment's "
        "activations are alive at a time."
    ),
)

# For the lab


def same_network(layers, x, count):
    def run(x, part):
        for i in part:
            x = F.relu(layers[i](x))
        return x

    for part in ck.equal_segments(len(layers), count):
        x = checkpoint(run, x, part, use_reentrant=False)
    return x


def _layers(count: int, segments: int) -> Case:
    def make() -> tuple:
        layers = [nn.Linear(16, 16).double() for _ in range(count)]
        return layers, torch.rand(8, 16, dtype=torch.float64), segments

    return Case(f"{count} layers in {segments} segments", make)


RELU, BARE = "F.relu(layers[i](x))", "layers[i](x)"

check_same_network = Exercise(
    same_network,
    cases=[_layers(6, 3), _layers(8, 2), _layers(7, 3)],
    observe=segmented_network,
    mistakes=f"""
        {RELU} => {BARE}
            the activation functions are missing, and without them the
            network is linear: ReLU after each layer, inside the segments.
        {RELU} => {BARE} if i == len(layers) - 1 else {RELU}
            the activation function after the last layer is missing.
        {RELU} => {BARE} if i == part[-1] else {RELU}
            the activation function after the last layer of each segment is
            missing: it belongs to every layer.
        {RELU} => {BARE} if i == part[-1] < len(layers) - 1 else {RELU}
            the activation functions between the segments are missing: ReLU
            comes after each layer.
        {RELU} => {RELU} if i == part[-1] else {BARE}
            the activation functions run between the segments alone: ReLU
            comes after each layer, inside the segments.
        """,
    shown="The same output and the same gradients as the plain run.",
)


def cheapest_count(chain, budget):
    fitting = []
    for count in range(len(chain) + 1):
        segments = ck.no_segments(len(chain))
        if count:
            segments = ck.equal_segments(len(chain), count)
        run = ck.simulate(chain, segments)
        if run.peak <= budget:
            fitting.append((run.extra_time, count))
    if not fitting:
        raise ValueError("no number of segments fits")
    return min(fitting)[1]


def _blocks(budget: int) -> Case:
    """Sizes as of transformer blocks, of which every third is larger."""
    block = Stage(
        output=1000,
        inner=5000,
        holds_output=False,
        forward_workspace=3000,
        backward_workspace=2000,
        time=8,
        recompute_time=5,
        backward_time=16,
    )
    large = replace(block, inner=9000)
    chain = [large, block, block] * 4
    return Case(f"12 blocks, {budget = }", lambda: (chain[:], budget))


def _equal_stages(budget: int) -> Case:
    chain = [Stage(output=64, backward_workspace=64)] * 16
    return Case(f"16 equal stages, {budget = }", lambda: (chain[:], budget))


check_cheapest_count = Exercise(
    cheapest_count,
    cases=[
        _blocks(38_000),
        _blocks(20_000),
        _blocks(90_000),
        _equal_stages(9 * 64),
        _blocks(18_000),
    ],
    observe=answer,
    mistakes="""
        range(len(chain) + 1) => range(1, len(chain) + 1)
            no checkpointing at all, 0 segments, is a choice too, and runs
            nothing again.
        (run.extra_time, count) => (run.peak, count)
            this is the count with the least peak: any peak within the budget
            is good enough, and the extra time decides.
        (run.extra_time, count) => (0, count)
            the fewest segments that fit need not be the cheapest: count what
            runs again by `run.extra_time`. More segments run a little less,
            because PyTorch stops a recomputation early.
        min(fitting)[1] => -min((time, -count) for time, count in fitting)[1]
            several counts take the same extra time: the smallest of them is
            asked.
        run.peak <= budget => run.peak < budget
            a peak of exactly the budget still fits: `<=`, not `<`.
        min(fitting)[1] => min(fitting)[0]
            this is the extra time: the number of segments that takes it is
            asked.
        (run.extra_time, count) => (run.extra_time, run.peak)
            this is the peak: the number of segments that has it is asked.
        raise ValueError("no number of segments fits") => return 0
        or raise ValueError("no number of segments fits") => return -1
        or raise ValueError("no number of segments fits") => return len(chain)
            where no number of segments fits, a ValueError must be raised;
            another answer would go unnoticed.
        run.peak <= budget => True
            this count does not fit: its peak is above the budget.
        """,
    shown=(
        "The budget decides which counts are allowed, the extra time which "
        "of them to take; and where the plain run fits, it is none."
    ),
)


def survive(step, batch):
    size = batch
    while True:
        try:
            step(size)
            return size
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        size //= 2  # here the error and all that it held are gone


ENOUGH = 30
"""Attempts, after which every size fits: no loop is endless."""


class _Step:
    """A training step that needs more memory than there is.

    Attributes:
        sizes: what it was called with.
        haunted: whether a failed attempt was alive when another began.
    """

    def __init__(self, fits: int, broken: int) -> None:
        self.fits, self.broken = fits, broken
        self.sizes: list[float] = []
        self.haunted = False
        self._failed: WeakSet[torch.Tensor] = WeakSet()

    def __call__(self, size: int) -> float:
        self.haunted |= len(self._failed) > 0
        self.sizes.append(float(size))
        activations = torch.empty(int(size), 1024)
        if len(self.sizes) > ENOUGH:
            return 0.5
        if size == self.broken:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        if size > self.fits:
            self._failed.add(activations)
            raise torch.OutOfMemoryError(
                f"a batch of {size} does not fit the budget"
            )
        return 0.5


def _memory(batch: int, fits: int, broken: int = -1) -> Case:
    told = f"batch = {batch}; {fits or 'no'} samples fit"
    if broken > 0:
        told += f", and a batch of {broken} has another error"
    return Case(told, lambda: (_Step(fits, broken), batch))


check_survive = Exercise(
    survive,
    cases=[
        _memory(100, 20),
        _memory(64, 64),
        _memory(7, 1),
        _memory(8, 0),
        _memory(100, 20, 25),
    ],
    observe=attempts,
    mistakes="""
        torch.OutOfMemoryError => ()
            the error passes through: catch torch.OutOfMemoryError, and try
            half the size.
        size //= 2 => size -= 1
            the size falls by one at a time: halve it, each attempt is a
            training step.
        size //= 2 => size //= 1
            the same size is tried again and again: halve it.
        size //= 2 => size /= 2
            half of an odd size is no number of samples: `size // 2`, not
            `size / 2`.
        step(size) => return step(size)
            this is what the step returned: the size that fitted is asked.
        size == 1 => size == 0
            a batch of no samples fits and trains nothing: where size 1 does
            not fit, raise the error.
        torch.OutOfMemoryError => RuntimeError
            an error that is not about memory is caught, and would be hidden:
            catch torch.OutOfMemoryError alone. (It is a RuntimeError, but not
            every RuntimeError is one.)
        """,
    shown=(
        "The size was halved until it fitted, nothing of a failed attempt "
        "was alive in the next one, and other errors came through."
    ),
)
