"""PyTorch's tables of a pipeline, and their replay."""

from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from membudget.parallelism import SCHEDULES, Operation, replay, table
from membudget.parallelism._private import torch_table

GRID = [
    (schedule, ranks, ranks * times)
    for schedule in SCHEDULES
    for ranks in (2, 4, 8)
    for times in (2, 4)
]

# Counted in PyTorch's tables by other code, for 4 ranks and 8 micro-batches.
COUNTED = {
    "GPipe": (33, 0.273, [8, 8, 8, 8]),
    "1F1B": (33, 0.273, [4, 3, 2, 1]),
    "LoopedBFS": (28.5, 0.158, [8, 8, 8, 8]),
    "Interleaved1F1B": (28.5, 0.158, [5.5, 4.5, 3.5, 2.5]),
    "InterleavedZeroBubble": (25.5, 0.059, [4, 4, 4, 4]),
    "ZBVZeroBubble": (25.5, 0.059, [4, 4, 4, 4]),
    "DualPipeV": (25.5, 0.059, [4.5, 4.5, 4.5, 4.5]),
}


@pytest.mark.parametrize("schedule", COUNTED)
def test_bubble_and_tapes_are_those_that_were_counted(schedule):
    found = replay(table(schedule, 4, 8))
    time, bubble, peaks = COUNTED[schedule]
    assert found.time == time
    assert round(found.bubble, 3) == bubble
    assert found.peaks == peaks


@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.few(6)
def test_every_stage_runs_every_micro_batch_once(case):
    schedule, ranks, micro_batches = case
    order = table(*case)
    stages = ranks * SCHEDULES[schedule]
    count = Counter(o for row in order for o in row)
    assert set(count.values()) == {1}
    for kinds in ("F", "BI", "BW"):
        ran = [
            (o.stage, o.micro_batch)
            for row in order
            for o in row
            if o.kind in kinds
        ]
        assert len(ran) == len(set(ran)) == stages * micro_batches


def longest_path(order, costs):
    """The end of each operation: the longest way to it through what it
    waits for."""
    nodes = {o for row in order for o in row}
    kinds = {(o.kind, o.stage, o.micro_batch) for o in nodes}
    last = max(o.stage for o in nodes)

    def named(kind, stage, m):
        return Operation(
            "B" if (kind, stage, m) not in kinds else kind, stage, m
        )

    waits = {o: set() for o in nodes}
    for row in order:
        for first, second in pairwise(row):
            waits[second].add(first)
    for kind, stage, m in nodes:
        mine = waits[Operation(kind, stage, m)]
        if kind == "F" and stage > 0:
            mine.add(Operation("F", stage - 1, m))
        if kind in "BI":
            mine.add(Operation("F", stage, m))
            if stage < last:
                mine.add(named("I", stage + 1, m))
        if kind == "W":
            mine.add(Operation("I", stage, m))
    ends = {}
    for o in TopologicalSorter(waits).static_order():
        ends[o] = max((ends[w] for w in waits[o]), default=0) + costs[o.kind]
    return ends


@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.few(6)
def test_an_operation_ends_after_the_longest_way_to_it(case):
    order, chunks = table(*case), SCHEDULES[case[0]]
    found = replay(order, 3 * chunks, 5 * chunks, 4 * chunks)
    ends = longest_path(order, {"F": 3, "I": 5, "W": 4, "B": 9})
    for row, times in zip(order, found.ends, strict=True):
        assert [ends[o] for o in row] == list(times)


def test_torch_numbers_the_last_rank_of_1f1b_from_one():
    """If this fails, PyTorch has mended its table: use it."""
    theirs = torch_table("1F1B", 4, 8, 1)
    ours = [[tuple(o) for o in row] for row in table("1F1B", 4, 8)]
    assert theirs[:3] == ours[:3]
    assert [m for kind, _, m in theirs[3] if kind == "F"] == [*range(1, 9)]
    assert [m for kind, _, m in ours[3] if kind == "F"] == [*range(8)]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (("1F1B", 4, 3), "3 micro-batches are too few: 1F1B needs one for"),
        (("DualPipeV", 4, 7), "DualPipeV needs one for each stage, 8 or"),
        (("GPipe", 4, 8, 2), "in GPipe a rank has one stage"),
        (("ZBVZeroBubble", 4, 8, 3), "in ZBVZeroBubble a rank has two"),
        (("LoopedBFS", 4, 8, 1), "at least 2 stages: for one take 1F1B"),
        (("Interleaved1F1B", 4, 9), "do not go into 2 equal rounds"),
        (("GPipe", 1, 8), "ranks"),
    ],
)
def test_a_schedule_that_cannot_be_says_so(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        table(*call)


def F(stage, m):
    return Operation("F", stage, m)


def B(stage, m):
    return Operation("B", stage, m)


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (
            [[B(0, 0), F(0, 0)], [F(1, 0), B(1, 0)]],
            "rank 0 waits at B0 of stage 0 for F0 of stage 0; rank 1 waits",
        ),
        (
            [
                [F(0, 0), B(0, 0), F(0, 1), B(0, 1)],
                [F(1, 0), F(1, 1), B(1, 0), B(1, 1)],
            ],
            "rank 0 waits at B0 of stage 0 for B0 of stage 1; rank 1 waits at "
            "F1 of stage 1 for F1 of stage 0. Move",
        ),
        ([[F(0, 0)], [F(1, 0), B(1, 0)]], "stage 0 runs micro-batch 0 as F"),
        ([[F(0, 0), B(0, 0)], []], "a rank without operations"),
        (
            [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), B(1, 0)]],
            "stage 1 never runs micro-batch 1",
        ),
        ([[F(0, 0)], [F(1, 0), B(1, 0), B(0, 0)]], "one rank has to run"),
    ],
)
def test_an_order_that_cannot_run_says_why(order, sentence):
    with pytest.raises(ValueError, match=sentence):
        replay(order)


def test_a_rank_holds_a_tape_until_its_backward_pass_is_over():
    found = replay([[F(0, 0), B(0, 0), F(0, 1), B(0, 1)]])
    assert found.held == ((1, 1, 1, 1),)
    assert (found.time, found.bubble) == (6, 0)
