"""The exercises on schedules, of the chapter and of what goes deeper."""

from dataclasses import replace
from functools import cache
from math import comb

from membudget import checkpointing as ck
from membudget import schedules
from membudget.checkpointing import Stage
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import Allowed, answer, schedule

# The law and the programme


def peak_for_runs(length, runs):
    peak = 2  # of a single stage
    while comb(peak + runs - 3, runs) + 1 < length:
        peak += 1
    return peak


check_peak_for_runs = Exercise(
    peak_for_runs,
    cases=[
        given(length=106, runs=2),
        given(length=36, runs=3),
        given(length=40, runs=1),
        given(length=1, runs=4),
        given(length=1_000_000, runs=11),
    ],
    observe=answer,
    mistakes="""
        + runs - 3, runs) => + runs - 2, runs + 1)
            this counts extra runs only: in the law, `runs` includes the first
            one.
        peak = 2 => peak = 3
            a single stage has a peak of 2 units, its tape and its workspace:
            begin there.
        + 1 < length => + 1 <= length
        or + 1 < length => < length
            this is one unit too many where the length is just the longest:
            C(P + r − 3, r) + 1 stages still fit.
        runs - 3 => runs - 2
        or return peak => return peak - 1
            this is off by one: the longest chain of this peak is too short.
            The law has P + r − 3, and the first P that is enough is asked.
        return peak => return comb(peak + runs - 3, runs) + 1
            this is the length of the longest chain with that peak: the peak
            is asked.
        """,
    shown=(
        "One run needs one unit more than stages, two about √(2L), and "
        "with 11 runs of each a million stages fit into 15 units."
    ),
)


def fewest_runs(length, peak):
    @cache
    def extra(n, units, gradient):
        if n + gradient <= units:
            return 0  # all tapes fit
        ways = [
            k + extra(k, units, 1) + extra(n - k, units - 1, gradient)
            for k in range(1, n)
        ]
        return min(ways, default=float("inf"))

    return extra(length, peak - 1, 0)


check_fewest_runs = Exercise(
    fewest_runs,
    cases=[
        given(length=17, peak=7),
        given(length=12, peak=6),
        given(length=7, peak=5),
        given(length=9, peak=10),
        given(length=24, peak=6),
        given(length=6, peak=3),
    ],
    observe=answer,
    mistakes="""
        k + extra(k, units, 1) => extra(k, units, 1)
            a segment runs again before it goes backward: k extra runs, and
            those within it.
        extra(k, units, 1) => (0 if k + 1 <= units else float("inf"))
            this is the best on one level: a segment may hold segments, and
            is a chain of its own when its turn comes.
        extra(k, units, 1) => extra(k, units, 0)
        or n + gradient <= units => n <= units
            a gradient arrives at a segment that others follow, and takes a
            unit; only that of the loss takes none.
        extra(n - k, units - 1, gradient) => extra(n - k, units, gradient)
            the checkpoint between a segment and the rest takes a unit: the
            rest has one less.
        extra(k, units, 1) => extra(k, units - 1, 1)
            when the first segment's turn comes, what stood behind it is gone:
            it has all units again.
        peak - 1, 0) => peak, 0)
            the workspace is missing: while a stage goes backward, the
            gradient that it makes takes a unit.
        peak - 1, 0) => peak - 1, 1)
            the loss's gradient is a single number and takes no unit: the
            last stages have one more than a segment.
        return extra(length => return length + extra(length
            these are all runs: extra ones are asked, without the first run
            of each stage.
        """,
    shown=(
        "The same numbers as `schedules.frontier`, by the same idea: the "
        "first segment, then the rest with a unit less."
    ),
)


def blocks_for_budget(chain, budget):
    for j in range(len(chain) + 1):
        segments = schedules.every_first(len(chain), j)
        if ck.simulate(chain, segments).peak <= budget:
            return j
    raise ValueError("no number of blocks fits")


LAST = "[*range(len(chain) - j), *([i] for i in range(len(chain) - j, \
len(chain)))]"


def _blocks(budget: int) -> Case:
    """Sizes as of transformer blocks, of which every third is larger."""
    block = Stage(
        output=1000,
        inner=15_000,
        holds_output=False,
        forward_workspace=4000,
        recompute_workspace=-1000,
        backward_workspace=4000,
        time=8,
        recompute_time=6,
        backward_time=16,
    )
    chain = [replace(block, inner=22_000), block, block] * 4
    return Case(f"12 blocks, {budget = }", lambda: (chain[:], budget))


check_blocks_for_budget = Exercise(
    blocks_for_budget,
    cases=[
        _blocks(97_000),
        _blocks(80_000),
        _blocks(300_000),
        _blocks(36_000),
        _blocks(20_000),
    ],
    observe=answer,
    mistakes=f"""
        schedules.every_first(len(chain), j) => {LAST}
            these are the last j blocks: they run again first, while all
            tapes before them are alive. Checkpoint the first ones.
        schedules.every_first(len(chain), j) => \
        ck.equal_segments(len(chain), j) if j else ck.no_segments(len(chain))
            these are j equal segments: the first j blocks are asked, each a
            segment of its own, and the others not.
        range(len(chain) + 1) => reversed(range(len(chain) + 1))
            this is the largest j that fits: the smallest runs less again.
        .peak <= budget => .peak < budget
            a peak of exactly the budget still fits: `<=`, not `<`.
        return j => return len(chain) - j
            these are the blocks that keep their tapes: those that are
            checkpointed are asked.
        range(len(chain) + 1) => range(1, len(chain) + 1)
            no block at all, j = 0, is a choice too.
        raise ValueError("no number of blocks fits") => return len(chain)
        or raise ValueError("no number of blocks fits") => return -1
            where no j fits, a ValueError must be raised; another answer
            would go unnoticed.
        """,
    shown=(
        "Each block more saves about its tape, all but the last one, and "
        "costs one run: the first j that fits is the cheapest."
    ),
)

# Schedules: any one that meets the targets


def restart(chain):
    there = ["record 0", "record 1", "forward 2", "forward 3"]
    end = ["record 4", "record 5", "record 6"]
    back = ["backward 6", "backward 5", "backward 4"]
    again = ["forward 1", "record 2", "record 3"]  # boundary 2 anew
    rest = ["backward 3", "backward 2", "backward 1", "backward 0"]
    return there + end + back + again + rest


check_restart = Exercise(
    restart,
    cases=[
        Case(
            "7 stages; the tape of stage 1 does not hold its output; peak ≤ "
            "6, recomputation ≤ 3",
            lambda: ([Stage(holds_output=i != 1) for i in range(7)],),
        )
    ],
    observe=schedule(lambda chain: Allowed(6, 3)),
    mistakes="",
    shown=(
        "A tape without its output is no place to restart from: its stage "
        "runs once more. A checkpoint of the output would save that run and "
        "cost a seventh unit."
    ),
)


def nest(length, peak, runs):
    def cut(stages, peak, runs):
        if len(stages) <= peak - 2:
            return stages  # all tapes fit
        size = comb(peak + runs - 4, runs - 1)
        if len(stages) <= size:
            return cut(stages, peak, runs - 1)  # fewer runs are enough
        first = cut(stages[:size], peak, runs - 1)
        return [first, *cut(stages[size:], peak - 1, runs)]

    stages = list(range(length))
    return [*cut(stages[:-1], peak, runs), *stages[-1:]]


check_nest = Exercise(
    nest,
    cases=[
        given(length=11, peak=5, runs=3),
        given(length=106, peak=16, runs=2),
        given(length=126, peak=7, runs=5),
        given(length=10, peak=7, runs=4),
        given(length=1, peak=2, runs=1),
    ],
    observe=schedule(lambda length, peak, runs: Allowed(peak, again=runs - 1)),
    mistakes="",
    shown=(
        "`schedules.binomial_segments` cuts in the same way, and finds the "
        "least peak itself."
    ),
)

OUTPUTS = [392] * 3 + [196] * 3 + [98] * 3 + [49] * 3
INNERS = [1176, 784, 784, 882, 392, 392, 441, 196, 196, 220, 98, 98]
TIMES = [59, 56, 56, 95, 56, 56, 95, 56, 56, 95, 56, 56]
"""MiB, MiB and GFLOPs of 12 bottleneck blocks as in ResNet-50, three for each
resolution, with 128 images of 224 × 224 in float32; counted by hand."""

BUDGET, EQUAL = 3528, 378
"""MiB, and the extra GFLOPs of the best equal segments within them: those of
``pytorch_segments(12, 7)``."""


def _resnet() -> tuple[list[Stage], int]:
    columns = zip(OUTPUTS, INNERS, TIMES, [98, *OUTPUTS[:-1]], strict=True)
    return [
        Stage(output=o, inner=i, time=t, backward_workspace=w)
        for o, i, t, w in columns
    ], BUDGET


def beat(chain, budget):
    # large tapes, two by two; the small ones at the end are cheap to keep
    return [[0, 1], [2, 3], *range(4, len(chain))]


check_beat = Exercise(
    beat,
    cases=[
        Case(f"12 blocks; peak ≤ {BUDGET}, recomputation < {EQUAL}", _resnet)
    ],
    observe=schedule(lambda chain, budget: Allowed(budget, EQUAL - 1)),
    mistakes="",
    shown=(
        f"checkpoint_sequential takes {EQUAL}, for six blocks of one each. "
        "Two by two, the large blocks leave half of the checkpoints, and "
        "four blocks are enough."
    ),
)
