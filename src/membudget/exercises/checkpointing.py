"""The puzzles and exercises on checkpointing, of the chapter and the lab."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from math import ceil, inf, isqrt, sqrt

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget import models
from membudget.checkpointing import (
    Run,
    Stage,
    equal_segments,
    no_segments,
    pytorch_segments,
    segments_of,
    simulate,
)
from membudget.exercises.core_old import Case, Exercise, variants
from membudget.exercises.observe import (
    Allowed,
    answer,
    attempts,
    schedule,
    segment_step,
    segmented_network,
)

# Puzzles on the tape machine


def _puzzle(
    signature: str,
    cases: Sequence[tuple],
    allowed: Callable[..., Allowed],
    solution: Callable,
    shown: str,
) -> Exercise:
    """An exercise whose answer is any schedule that meets the targets.

    Args:
        signature: as for :class:`Exercise`.
        cases: the arguments: the chain, or its length, and others.
        allowed: the targets, from the arguments.
        solution: as for :class:`Exercise`.
        shown: as for :class:`Exercise`.
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
        signature=signature,
        cases=[Case(told(*c), lambda c=c: _copy(c)) for c in cases],
        observe=schedule(allowed),
        solution=solution,
        mistakes=[],
        shown=shown,
    )


def _copy(arguments: tuple) -> tuple:
    return tuple(a[:] if isinstance(a, list) else a for a in arguments)


check_remember = _puzzle(
    "remember(length)",
    [(4,), (7,)],
    lambda length: Allowed(length + 1, 0),
    no_segments,
    "Every tape is kept: as many units as stages, one for the gradient on "
    "its way back, and no stage runs again.",
)


def _forget(length: int) -> list[str]:
    actions = []
    for stage in reversed(range(length)):
        actions += [f"forward {i}" for i in range(stage)]
        actions += [f"record {stage}", f"backward {stage}"]
    return actions


check_forget = _puzzle(
    "forget(length)",
    [(5,), (8,)],
    lambda length: Allowed(4, length * (length - 1) // 2),
    _forget,
    "Four units, however deep the chain is; the price grows with the square "
    "of its length.",
)


def _last_open(segments: list[list[int]]) -> list:
    """The last segment keeps its tapes."""
    return [*segments[:-1], *segments[-1]]


check_square_root = _puzzle(
    "square_root(length)",
    [(9,), (16,), (25,)],
    lambda length: Allowed(2 * isqrt(length), length - isqrt(length)),
    lambda length: _last_open(equal_segments(length, isqrt(length))),
    "√L segments of √L stages; and the last one, whose turn comes first, "
    "needs no recomputation.",
)


def _triangular(length: int) -> int:
    """The m of length = m(m + 1)/2."""
    return isqrt(2 * length)


check_shrinking = _puzzle(
    "shrinking(length)",
    [(15,), (21,)],
    lambda length: Allowed(_triangular(length) + 2, length),
    lambda length: segments_of(range(_triangular(length), 0, -1)),
    "A later segment has more checkpoints below it, so it must be shorter: "
    "about √(2L) units instead of 2√L.",
)

TWO_SWEEPS = {16: 6, 24: 7}
"""The least peak for a number of stages of which none runs more than twice
again, in units; one level of segments does not reach it."""


def _cut(stages: list[int], sizes: Iterable[int]) -> list[list[int]]:
    parts = []
    for size in sizes:
        parts.append(stages[:size])
        stages = stages[size:]
    return [part for part in parts if part]


def _two_sweeps(length: int) -> list:
    """Segments of triangular numbers of stages, each cut as before."""
    m = TWO_SWEEPS[length] - 2
    triangles = [k * (k + 1) // 2 for k in range(m, 0, -1)]
    outer = _cut(list(range(length)), triangles)
    return [_cut(part, range(m - j, 0, -1)) for j, part in enumerate(outer)]


check_two_sweeps = _puzzle(
    "two_sweeps(length)",
    [(16,), (24,)],
    lambda length: Allowed(TWO_SWEEPS[length], again=2),
    _two_sweeps,
    "Two more runs for each stage, and the peak is below what any segments "
    "without segments in them can reach: with two levels it grows with the "
    "cube root of the length.",
)


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
    "uneven(chain, budget)",
    [(_bulges(1, 2, 4, 8, 2, 8, 4, 2), 27)],
    lambda chain, budget: Allowed(budget, 4),
    lambda chain, budget: [0, [1, 2, 3, 4], 5, 6, 7],
    "A checkpoint belongs where the boundary is small, and what is forgotten "
    "where the tapes are large; equal segments of any number need 32 units.",
)

check_expensive = _puzzle(
    "expensive(chain)",
    [([Stage(time=10 if i == 4 else 1) for i in range(9)],)],
    lambda chain: Allowed(6, 6),
    lambda chain: [[0, 1, 2, 3], 4, [5, 6], 7, 8],
    "The peak of √L segments, and the expensive stage runs once: it stands "
    "between two segments and keeps its tape.",
)


# Formulas


def _given(**arguments: int) -> Case:
    told = ", ".join(f"{name} = {value}" for name, value in arguments.items())
    return Case(told, lambda: tuple(arguments.values()))


def _best_count(
    length: int,
    boundary: int,
    tape: int,
    round_up: bool = True,
    shares: Callable[[int, int], tuple] = lambda boundary, tape: (
        boundary,
        tape,
    ),
    first: bool = True,
    end: int = 1,
) -> int:
    """The count with the least peak, the first or the last of them."""
    boundary, tape = shares(boundary, tape)

    def peak(count: int) -> int:
        size = -(-length // count) if round_up else length / count
        return count * boundary + size * tape

    counts = range(1, length + end)
    return min(counts if first else reversed(counts), key=peak)


def _optimum(length: int, boundary: int, tape: int) -> float:
    return min(max(sqrt(length * tape / boundary), 1), length)


NOT_WHOLE = (
    "this is the optimum of k·c + L/k·a, near √(L·a/c). The longest segment "
    "has ⌈L/k⌉ stages, and not L/k: try every k."
)

check_best_count = Exercise(
    signature="best_count(length, boundary, tape)",
    cases=[
        _given(length=18, boundary=2, tape=6),
        _given(length=30, boundary=2, tape=7),
        _given(length=20, boundary=1, tape=1),
        _given(length=12, boundary=1, tape=16),
        _given(length=6, boundary=40, tape=3),
        _given(length=23, boundary=1, tape=2),
    ],
    observe=answer,
    solution=_best_count,
    mistakes=[
        (
            "this is the least peak: the number of segments that has it is "
            "asked.",
            lambda n, c, a: min(
                k * c + ceil(n / k) * a for k in range(1, n + 1)
            ),
        ),
        *variants(
            _best_count,
            [
                (
                    "this is the best count for equal costs, near √L: a "
                    "boundary costs `boundary`, and a stage of the segment "
                    "at work `tape`.",
                    {"shares": lambda boundary, tape: (1, 1)},
                ),
                (
                    "the costs are swapped: there are k boundaries, and "
                    "⌈length/k⌉ tapes.",
                    {"shares": lambda boundary, tape: (tape, boundary)},
                ),
                (
                    "several counts have the least peak: the smallest of "
                    "them is asked.",
                    {"first": False},
                ),
                (
                    "one stage for each segment, k = length, is a choice too.",
                    {"end": 0},
                ),
                (NOT_WHOLE, {"round_up": False}),
            ],
        ),
        (NOT_WHOLE, lambda *args: round(_optimum(*args))),
        (NOT_WHOLE, lambda *args: int(_optimum(*args))),
        (NOT_WHOLE, lambda *args: ceil(_optimum(*args))),
        (NOT_WHOLE, _optimum),
    ],
    shown=(
        "Where tapes are large beside boundaries it is many segments, in the "
        "end one for each stage; where they are small it is one."
    ),
)


def _sequential_peak(
    length: int, count: int, of: Callable[[int, int], list] = pytorch_segments
) -> int:
    return simulate(length, of(length, count)).peak


def _forgotten_rest(length: int, count: int) -> int:
    return count + length // count


LONG_LAST = (
    "the last segment is longer than the others: `checkpoint_sequential` "
    "rounds down, and the last one takes what remains, "
    "length − (count − 1)·⌊length/count⌋ stages."
)

check_sequential_peak = Exercise(
    signature="sequential_peak(length, count)",
    cases=[
        _given(length=27, count=6),
        _given(length=16, count=4),
        _given(length=10, count=1),
        _given(length=19, count=10),
        _given(length=7, count=7),
    ],
    observe=answer,
    solution=_sequential_peak,
    mistakes=[
        (LONG_LAST, _forgotten_rest),
        (LONG_LAST, lambda n, k: _forgotten_rest(n, k) - 1),
        (LONG_LAST, partial(_sequential_peak, of=equal_segments)),
        (LONG_LAST, lambda n, k: k + ceil(n / k)),
        (
            "one unit is missing: the gradient on its way back.",
            lambda n, k: _sequential_peak(n, k) - 1,
        ),
        (
            "one unit is too much: the input of the first segment is there "
            "anyway and does not count.",
            lambda n, k: _sequential_peak(n, k) + 1,
        ),
        (
            "the boundaries are missing: count − 1 of them are kept besides "
            "the tapes of the last segment.",
            lambda n, k: n - (k - 1) * (n // k) + 1,
        ),
        (
            "this is the peak without checkpoints.",
            lambda n, k: n + 1,
        ),
    ],
    shown=(
        "Where the count does not divide the length, all the rest falls on "
        "the last segment: 10 segments of 19 stages need 20 units, as many "
        "as no checkpoints at all."
    ),
)


# Repairs


def _segments(count: int, size: int) -> Case:
    def make() -> tuple:
        segments = [models.chain(8, size).double() for _ in range(count)]
        return segments, torch.rand(128, 8, dtype=torch.float64)

    return Case(f"{count} segments of {size} linear layers with ReLU", make)


def _enough(segments: list[nn.Module], x: torch.Tensor) -> int:
    """Bytes of the boundaries, a segment, and what goes back through it."""
    parameters = sum(p.nbytes for s in segments for p in s.parameters())
    return (len(segments) + len(segments[0]) + 4) * x.nbytes + parameters


def _segment_step(segments: list[nn.Module], x: torch.Tensor) -> None:
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=False)
    x.sum().backward()


check_segment_step = Exercise(
    signature="segment_step(segments, x)",
    cases=[_segments(4, 6), _segments(3, 8)],
    observe=segment_step(_enough),
    solution=_segment_step,
    mistakes=[],
    shown=(
        "The gradients are those of the plain run, and only one segment's "
        "activations are alive at a time."
    ),
)


def _layers(count: int, segments: int) -> Case:
    def make() -> tuple:
        layers = [nn.Linear(16, 16).double() for _ in range(count)]
        return layers, torch.rand(8, 16, dtype=torch.float64), segments

    return Case(f"{count} layers in {segments} segments", make)


def _network(
    layers: list[nn.Linear],
    x: torch.Tensor,
    count: int,
    split: Callable[[int, int], list] = equal_segments,
    bare: Callable[[int, list[int], int], bool] = lambda i, part, n: False,
) -> torch.Tensor:
    """The checkpointed network; ``bare`` layers have no ReLU."""

    def run(x: torch.Tensor, part: list[int]) -> torch.Tensor:
        for i in part:
            x = layers[i](x)
            x = x if bare(i, part, len(layers)) else F.relu(x)
        return x

    for part in split(len(layers), count):
        part = [part] if isinstance(part, int) else part
        x = checkpoint(run, x, part, use_reentrant=False)
    return x


BETWEEN = (
    "the activation function after the last layer of each segment is "
    "missing: it belongs to every layer."
)

check_same_network = Exercise(
    signature="same_network(layers, x, count)",
    cases=[_layers(6, 3), _layers(8, 2), _layers(7, 3)],
    observe=segmented_network,
    solution=_network,
    mistakes=variants(
        _network,
        [
            (
                "the activation functions are missing, and without them the "
                "network is linear: ReLU after each layer, inside the "
                "segments.",
                {"bare": lambda i, part, n: True},
            ),
            (
                "the activation function after the last layer is missing.",
                {"bare": lambda i, part, n: i == n - 1},
            ),
            (BETWEEN, {"bare": lambda i, part, n: i == part[-1]}),
            (
                "the activation functions between the segments are missing: "
                "ReLU comes after each layer.",
                {"bare": lambda i, part, n: i == part[-1] and i < n - 1},
            ),
            (
                "the activation functions run between the segments alone: "
                "ReLU comes after each layer, inside the segments.",
                {"bare": lambda i, part, n: i != part[-1]},
            ),
        ],
    ),
    shown=(
        "The same output and the same gradients as the plain run: the "
        "activation functions are inside the segments."
    ),
)


# For the lab


def _blocks() -> list[Stage]:
    """Sizes as of transformer blocks, of which every third is larger."""
    return [
        Stage(
            output=1000,
            inner=9000 if index % 3 == 0 else 5000,
            holds_output=False,
            forward_workspace=3000,
            backward_workspace=2000,
            time=8,
            recompute_time=5,
            backward_time=16,
            name=f"block {index}",
        )
        for index in range(12)
    ]


def _plain_stages() -> list[Stage]:
    return [Stage(output=64, backward_workspace=64) for _ in range(16)]


def _bytes(chain: Callable[[], list[Stage]], budget: int) -> Case:
    told = "blocks" if chain is _blocks else "equal stages"
    return Case(
        f"{len(chain())} {told}, {budget = }", lambda: (chain(), budget)
    )


@cache
def _segmented(chain: tuple[Stage, ...], count: int) -> Run:
    if not count:
        return simulate(chain, no_segments(len(chain)))
    return simulate(chain, equal_segments(len(chain), count))


def _cheapest_count(
    chain: list[Stage],
    budget: int,
    start: int = 0,
    room: float = 0,
    order: Callable = lambda count, run: (run.extra_time, count),
    told: Callable = lambda count, run: count,
    none: int | None = None,
) -> float:
    runs = [
        (count, _segmented(tuple(chain), count))
        for count in range(start, len(chain) + 1)
    ]
    fitting = [found for found in runs if found[1].peak <= budget + room]
    if fitting:
        return told(*min(fitting, key=lambda found: order(*found)))
    if none is None:
        raise ValueError(f"no number of segments fits {budget} bytes")
    return none


NONE_FITS = (
    "where no number of segments fits, a ValueError must be raised; another "
    "answer would go unnoticed."
)

check_cheapest_count = Exercise(
    signature="cheapest_count(chain, budget)",
    cases=[
        _bytes(_blocks, 38_000),
        _bytes(_blocks, 20_000),
        _bytes(_blocks, 90_000),
        _bytes(_plain_stages, 9 * 64),
        _bytes(_blocks, 18_000),
    ],
    observe=answer,
    solution=_cheapest_count,
    mistakes=variants(
        _cheapest_count,
        [
            (
                "no checkpointing at all, 0 segments, is a choice too, and "
                "runs nothing again.",
                {"start": 1},
            ),
            (
                "this is the count with the least peak: any peak within the "
                "budget is good enough, and the extra time decides.",
                {"order": lambda count, run: (run.peak, count)},
            ),
            (
                "the fewest segments that fit need not be the cheapest: the "
                "last stage of each segment is recomputed in "
                "`recompute_time`, which is less here. Compare extra_time.",
                {"order": lambda count, run: count},
            ),
            (
                "several counts take the same extra time: the smallest of "
                "them is asked.",
                {"order": lambda count, run: (run.extra_time, -count)},
            ),
            (
                "a peak of exactly the budget still fits: `<=`, not `<`.",
                {"room": -1},
            ),
            (
                "this is the extra time: the number of segments that takes "
                "it is asked.",
                {"told": lambda count, run: run.extra_time},
            ),
            (
                "this is the peak: the number of segments that has it is "
                "asked.",
                {"told": lambda count, run: run.peak},
            ),
            (NONE_FITS, {"none": 0}),
            (NONE_FITS, {"none": -1}),
            (NONE_FITS, {"none": 12}),
            (
                "this count does not fit: its peak is above the budget.",
                {"room": inf},
            ),
        ],
    ),
    shown=(
        "The budget decides which counts are allowed, the extra time which "
        "of them to take; and where the plain run fits, it is none."
    ),
)

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
        self._failed: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, size: int) -> float:
        self.haunted |= any(ref() is not None for ref in self._failed)
        self.sizes.append(float(size))
        activations = torch.empty(int(size), 1024)
        if len(self.sizes) > ENOUGH:
            return 0.5
        if size == self.broken:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        if size > self.fits:
            self._failed.append(weakref.ref(activations))
            raise torch.OutOfMemoryError(
                f"a batch of {size} does not fit the budget"
            )
        return 0.5


def _memory(batch: int, fits: int, broken: int = -1) -> Case:
    told = f"batch = {batch}; {fits or 'no'} samples fit"
    if broken > 0:
        told += f", and a batch of {broken} has another error"
    return Case(told, lambda: (_Step(fits, broken), batch))


def _survive(
    step: _Step,
    batch: int,
    smaller: Callable[[int], float] = lambda size: size // 2,
    caught: tuple | type[BaseException] = torch.OutOfMemoryError,
    least: int = 1,
    told: Callable[[float, float], float] = lambda size, loss: size,
) -> float:
    size = batch
    while True:
        try:
            loss = step(size)
        except caught:
            if size <= least:
                raise
        else:
            return told(size, loss)
        size = smaller(size)


OTHER_ERROR = (
    "an error that is not about memory is caught, and would be hidden: catch "
    "torch.OutOfMemoryError alone. (It is a RuntimeError, but not every "
    "RuntimeError is one.)"
)

check_survive = Exercise(
    signature="survive(step, batch)",
    cases=[
        _memory(100, 20),
        _memory(64, 64),
        _memory(7, 1),
        _memory(8, 0),
        _memory(100, 20, 25),
    ],
    observe=attempts,
    solution=_survive,
    mistakes=variants(
        _survive,
        [
            (
                "the error passes through: catch torch.OutOfMemoryError, and "
                "try half the size.",
                {"caught": ()},
            ),
            (
                "the size falls by one at a time: halve it, each attempt is "
                "a training step.",
                {"smaller": lambda size: size - 1},
            ),
            (
                "the same size is tried again and again: halve it.",
                {"smaller": lambda size: size},
            ),
            (
                "half of an odd size is no number of samples: `size // 2`, "
                "not `size / 2`.",
                {"smaller": lambda size: size / 2},
            ),
            (
                "this is what the step returned: the size that fitted is "
                "asked.",
                {"told": lambda size, loss: loss},
            ),
            (
                "a batch of no samples fits and trains nothing: where size 1 "
                "does not fit, raise the error.",
                {"least": 0},
            ),
            (OTHER_ERROR, {"caught": RuntimeError}),
        ],
    ),
    shown=(
        "The size was halved until it fitted, nothing of a failed attempt "
        "was alive in the next one, and other errors came through."
    ),
)
