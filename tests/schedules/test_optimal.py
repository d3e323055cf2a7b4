"""The programme against all segments, all schedules, and simpler splits."""

import heapq
import random
import time
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import inf

import pytest

from membudget.checkpointing import (
    Stage,
    equal_segments,
    no_segments,
    pytorch_segments,
    simulate,
)
from membudget.checkpointing.tape import _Machine
from membudget.schedules import (
    binomial_segments,
    every_first,
    frontier,
    least_budget,
    optimal_segments,
    peak_of_runs,
)
from membudget.schedules.optimal import _programme
from tests.soak import SOAK, examples

# Every segmentation ------------------------------------------------------


@cache
def levels(start, end):
    """All segments in segments of these stages, none of them the whole."""
    if start == end:
        return [()]
    return [
        *((start, *rest) for rest in all_segments(start + 1, end)),
        *(
            (inner, *rest)
            for middle in range(start + 1, end)
            for inner in levels(start, middle)
            for rest in all_segments(middle, end)
        ),
    ]


def all_segments(start, end):
    """All of them; a segment that is just another one is that one."""
    found = levels(start, end)
    return found if start == end else found + [(item,) for item in found]


def ran(chain, schedule):
    run = simulate(chain, schedule)
    return run.peak, run.extra_time


def best_of(points):
    """Those with which no other is as good in both."""
    result = []
    for peak, extra in sorted(points):
        if not result or extra < result[-1][1]:
            result.append((peak, extra))
    return result


def points(chain):
    """The frontier; each point is checked on the machine."""
    found = frontier(chain)
    for point in found:
        assert ran(chain, point.segments) == point[:2]
    return [point[:2] for point in found]


def random_stage(rng):
    """Small and of every kind, views and frozen ones among them."""
    output = rng.randint(0, 4)
    return Stage(
        output=output,
        inner=rng.choice([0, 0, 1, 3]),
        holds_input=rng.random() < 0.6,
        holds_output=rng.random() < 0.5,
        forward_workspace=rng.randint(0, 2),
        record_workspace=rng.randint(0, 2),
        recompute_workspace=rng.randint(-min(output, 1), 2),
        backward_workspace=rng.randint(0, 3),
        again_workspace=rng.randint(0, 3),
        gradients=rng.choice([0, 0, 1]),
        gradient=rng.randint(0, 3),
        time=rng.randint(0, 4),
        recompute_time=rng.randint(0, 3),
    )


def test_all_segments_are_counted():
    counts = [len(all_segments(0, length)) for length in range(1, 6)]
    assert counts == [2, 8, 48, 352, 2880]


@pytest.mark.parametrize("length", range(1, 7 if SOAK else 6))
def test_no_segments_of_equal_stages_are_better(length):
    every = [ran(length, s) for s in all_segments(0, length)]
    assert points(length) == best_of(every)


def test_no_segments_of_unequal_stages_are_better():
    for seed in range(examples(40)):
        rng = random.Random(seed)
        length = rng.randint(1, 5 if SOAK else 4)
        chain = [random_stage(rng) for _ in range(length)]
        every = [ran(chain, s) for s in all_segments(0, length)]
        assert points(chain) == best_of(every), chain


# Every schedule ----------------------------------------------------------


def at(chain, state):
    """The machine in a state: value, kept, tapes, next, how far it came."""
    value, kept, tapes, following, ran = state
    machine = _Machine(chain)
    machine.value, machine.next = value, following
    machine.kept, machine.tapes = set(kept), set(tapes)
    machine.runs = [int(index < ran) for index in range(len(chain))]
    return machine


def least_time(chain, budget):
    """Of any schedule that the machine can run, in whatever order.

    The shortest way through the machine's states. Recomputed workspaces and
    times are those of first runs, so that a state says all.
    """
    chain = tuple(chain)
    start = 0, (), (), len(chain) - 1, 0
    least, done, queue, count = {start: 0}, set(), [(0, 0, start)], 0
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state[3] < 0:
            return so_far - sum(stage.time for stage in chain)
        for kind in ("forward", "record", "keep", "drop", "backward"):
            for index in range(len(chain)):
                machine = at(chain, state)
                if getattr(machine, f"_why_not_{kind}")(index):
                    continue
                if sum(getattr(machine, f"_{kind}")(index, False)) > budget:
                    continue
                came, cost = state[4], 0
                if kind in ("forward", "record"):
                    came, cost = max(came, index + 1), chain[index].time
                after = (
                    machine.value,
                    tuple(sorted(machine.kept)),
                    tuple(sorted(machine.tapes)),
                    machine.next,
                    came,
                )
                if so_far + cost < least.get(after, inf):
                    least[after], count = so_far + cost, count + 1
                    queue_item = so_far + cost, count, after
                    heapq.heappush(queue, queue_item)
    return inf


@pytest.mark.parametrize("length", range(1, 8 if SOAK else 6))
def test_no_schedule_of_equal_stages_is_better(length):
    chain = [Stage()] * length
    found = dict(points(length))
    best = inf
    for budget in range(2, length + 2):
        best = found.get(budget, best)
        assert least_time(chain, budget) == best


FOUR = [
    Stage(output=3, inner=1, backward_workspace=0, time=1),
    Stage(output=4, inner=1, time=2),
    Stage(output=4, inner=0, time=5),
    Stage(output=4, inner=1, time=3),
]
"""Where a checkpoint that is dropped and made anew is better."""


def test_a_schedule_that_drops_a_checkpoint_may_be_better():
    free = """
        forward 0, keep 1, forward 1, forward 2, record 3, backward 3,
        forward 1, drop 1, record 2, backward 2,
        forward 0, record 1, backward 1, record 0, backward 0"""
    assert ran(FOUR, free.split(",")) == (13, 11)
    assert least_time(FOUR, 13) == 11
    assert points(FOUR) == [(13, 12), (14, 3), (18, 1), (19, 0)]


# Simpler splits ----------------------------------------------------------


def splits(length):
    yield no_segments(length)
    for count in range(1, length + 1):
        yield equal_segments(length, count)
        yield pytorch_segments(length, count)
        yield every_first(length, count)
    for runs in (2, 3, 4):
        yield binomial_segments(length, runs)
    for n in range(2, length):  # every n-th stage a segment
        yield [[i] if i % n == 0 else i for i in range(length)]


def never_worse(chain):
    found = points(chain)
    for segments in splits(len(chain)):
        peak, extra = ran(chain, segments)
        assert min(e for p, e in found if p <= peak) <= extra + 1e-9


@pytest.mark.parametrize("length", [12, 36])
def test_it_is_never_worse_for_equal_stages(length):
    never_worse([Stage()] * length)
    assert least_budget(length) == 4
    for runs in (2, 3):  # the law's peak is in reach with as many runs
        peak = peak_of_runs(length, runs)
        run = simulate(length, optimal_segments(length, peak))
        assert run.extra_runs <= (runs - 1) * length


@pytest.mark.parametrize("count", [12, 32])
def test_it_is_never_worse_for_blocks(block, halves, count):
    never_worse([exact(block)] * count)
    if SOAK:
        never_worse([exact(half) for half in halves] * count)


def exact(stage):
    """Times as fractions: no last digits."""
    times = {
        name: Fraction(getattr(stage, name)).limit_denominator(3)
        for name in ("time", "recompute_time")
    }
    return replace(stage, **times)


def forwards(chain, budget):
    """Extra time of the best segments, in forward passes."""
    run = simulate(chain, optimal_segments(chain, budget))
    assert run.peak <= budget
    return round(float(run.extra_time / sum(s.time for s in chain)), 3)


def test_twelve_blocks_by_budget(block, halves):
    chain = [exact(block)] * 12
    budgets = 26, 30, 33, 48, 80, 100, 150
    assert [forwards(chain, budget) for budget in budgets] == [
        *(1.333, 0.917, 0.667, 0.606, 0.485, 0.424, 0.242),
    ]
    # a budget that is rounded to 500 slots gave 0.722 at 54 units
    assert [forwards([exact(block)] * 32, b) for b in (28, 36, 54)] == [
        *(1.798, 1.236, 0.705),
    ]
    finer = [exact(half) for half in halves] * 12
    assert [forwards(finer, budget) for budget in budgets[3:]] == [
        *(0.574, 0.379, 0.25, 0.136),
    ]


def test_equal_parts_are_solved_once():
    length, seconds = (200, 5) if SOAK else (100, 2)
    chain = (*[Stage()] * (length - 1), Stage(inner=1))
    start = time.process_time()
    assert least_budget(chain) == 4
    assert time.process_time() - start < seconds
    assert len(_programme(chain).known) < 5 * length


# Numbers and refusals ----------------------------------------------------


def test_sizes_and_times_of_any_magnitude():
    small = [Stage(output=2, inner=3, time=2), Stage(inner=1), Stage()] * 2
    for factor in (10**6, 10**30):
        large = [
            replace(
                stage,
                **{
                    name: getattr(stage, name) * factor
                    for name in (
                        *("output", "inner", "gradient", "time"),
                        *("backward_workspace", "again_workspace"),
                        "recompute_time",
                    )
                },
            )
            for stage in small
        ]
        expected = [(p * factor, t * factor) for p, t in points(small)]
        assert points(large) == expected
    third = [
        replace(s, time=Fraction(1, 3), recompute_time=Fraction(1, 3))
        for s in small
    ]
    assert all(3 * t == int(3 * t) for _, t in points(third))


def test_stages_without_any_size():
    nothing = Stage(output=0, backward_workspace=0)
    assert frontier([nothing] * 3) == [(0, 0, [0, 1, 2])]
    assert optimal_segments([nothing] * 3, 0) == [0, 1, 2]


def test_a_budget_below_the_least():
    assert optimal_segments(3, 10**40) == [0, 1, 2]
    message = (
        r"^the budget is 3 bytes, and the least peak of this chain is 4 "
        "bytes: allow that"
    )
    with pytest.raises(ValueError, match=message):
        optimal_segments(12, 3)


def test_a_chain_that_it_does_not_take():
    with pytest.raises(ValueError, match="has 301 stages: use at most"):
        frontier(301)
    with pytest.raises(ValueError, match=r"^stage 1 has a negative backward_"):
        frontier([Stage(), Stage(backward_workspace=-1)])
