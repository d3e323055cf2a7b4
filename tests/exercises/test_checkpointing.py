"""The puzzles of chapter 4 against theory and search; its other exercises."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from membudget import checkpointing as ck
from membudget import exercises, schedules
from membudget.exercises import checkpointing as solutions

from .judging import accepts, checker, edits, judged, rejects


def cases(name):
    """Of a puzzle: the chain, and what is allowed."""
    for case in checker(name).cases:
        peak, limit = map(int, re.findall(r"≤ (\d+)", case.told))
        yield case.make()[0], peak, limit


# The targets: the best that there is, by the room that proves it


@pytest.mark.parametrize("name", ["uneven", "expensive", "remember"])
def test_no_segments_are_better_than_the_target(name):
    for chain, peak, extra in cases(name):
        points = [point[:2] for point in schedules.frontier(chain)]
        assert (peak, extra) in points


def test_no_lower_peak_is_possible():
    for length, peak, extra in cases("forget"):
        least, *_ = schedules.frontier(length)
        assert least.peak == peak
        assert least.extra_time <= extra


def test_equal_segments_do_not_fit_the_uneven_chain():
    ((chain, peak, _),) = cases("uneven")
    equal = [
        ck.simulate(chain, ck.equal_segments(len(chain), number)).peak
        for number in range(1, len(chain) + 1)
    ]
    assert min(equal) == 32 > peak  # as the text after "Correct." says


def test_equal_segments_do_not_reach_the_shrinking_ones():
    for length, peak, extra in cases("shrinking"):
        m = peak - 2
        assert length == extra == m * (m + 1) // 2
        for number in range(1, length + 1):
            for split in (ck.equal_segments, ck.pytorch_segments):
                assert ck.simulate(length, split(length, number)).peak > peak
        assert schedules.peak_of_runs(length, 2) == peak


def test_the_targets_of_two_sweeps_are_exact():
    for length, peak, again in cases("two_sweeps"):
        assert schedules.peak_of_runs(length, 2) > peak
        assert schedules.peak_of_runs(length, again + 1) == peak


# The solutions


@pytest.mark.parametrize("m", range(4, 9))
def test_solutions_of_other_lengths_are_exact(m):
    triangle = m * (m + 1) // 2
    for puzzle, length, peak, extra in [
        (solutions.remember, m, m + 1, 0),
        (solutions.forget, m, 4, m * (m - 1) // 2),
        (solutions.square_root, m * m, 2 * m, m * m - m),
        (solutions.shrinking, triangle, m + 2, triangle),
    ]:
        run = ck.simulate(length, puzzle(length))
        assert (run.peak, run.extra_runs) == (peak, extra)


@pytest.mark.parametrize("length", [1, 2, 7, 12, 40])
def test_sequential_peak_is_exact(length):
    for number in range(1, length + 1):
        run = ck.simulate(length, ck.pytorch_segments(length, number))
        assert solutions.sequential_peak(length, number) == run.peak


def plain_step(segments, x):
    nn.Sequential(*segments)(x).sum().backward()


def plain_network(layers, x, number):
    for layer in layers:
        x = layer(x).relu()
    return x


@pytest.mark.parametrize(
    ("check", "plain"),
    [
        (exercises.check_segment_step, plain_step),
        (exercises.check_same_network, plain_network),
    ],
)
def test_checkpoints_change_no_gradient(check, plain):
    for case in check.cases:
        mended, right = check.see(check.solution, case), check.see(plain, case)
        assert not mended.hint
        assert right.hint  # and the numbers are the same
        assert mended.parts.keys() == right.parts.keys()
        for name, numbers in right.parts.items():
            torch.testing.assert_close(mended.parts[name], numbers)


@pytest.mark.parametrize("budget", [19_000, 20_999, 88_999])
def test_cheapest_count_is_that_of_a_list(budget):
    chain, _ = exercises.check_cheapest_count.cases[0].make()
    n = len(chain)
    every = [
        ck.no_segments(n),
        *(ck.equal_segments(n, k + 1) for k in range(n)),
    ]
    runs = [ck.simulate(chain, segments) for segments in every]
    fits = [run for run in runs if run.peak <= budget]
    least = min(fits, key=lambda run: run.extra_time)
    assert solutions.cheapest_count(chain, budget) == runs.index(least)


# Other right answers


def two_tapes_at_both_ends(length):
    schedule = [f"forward {i}" for i in range(length - 2)]
    schedule += [f"record {length - 2}", f"record {length - 1}"]
    schedule += [f"backward {length - 1}", f"backward {length - 2}"]
    for stage in reversed(range(2, length - 2)):
        schedule += [f"forward {i}" for i in range(stage)]
        schedule += [f"record {stage}", f"backward {stage}"]
    return [*schedule, "record 0", "record 1", "backward 1", "backward 0"]


def test_better_than_asked_is_said():
    accepts("forget", two_tapes_at_both_ends)
    words = "with 5 stages yours peaks at 4 units and runs 5 stages again"
    assert words in judged("forget", two_tapes_at_both_ends).text
    assert "Better" not in judged("forget", solutions.forget).text


KINDS_OF_SCHEDULES = {
    "generator": lambda length: (s for s in solutions.remember(length)),
    "tuple": lambda length: tuple(solutions.remember(length)),
    "lines": lambda length: "\n".join(solutions.remember(length)),
    "actions": lambda length: ck.actions(range(length)),
    "range": lambda length: range(length),
    "numbers": np.arange,
    "tensor": torch.arange,
    "pairs": lambda length: list(map(tuple, ck.actions(range(length)))),
}


@pytest.mark.parametrize("kind", KINDS_OF_SCHEDULES)
def test_a_schedule_in_any_form(kind):
    accepts("remember", KINDS_OF_SCHEDULES[kind])


def test_segments_in_any_form():
    def nested(length):
        n = round(length**0.5)
        for start in range(0, length - n, n):
            yield (stage for stage in range(start, start + n))
        yield from np.arange(length - n, length)

    accepts("square_root", nested)


def by_hand(segments, x):
    inputs = [x]
    with torch.no_grad():
        for segment in segments:
            inputs.append(segment(inputs[-1]))
    gradient = torch.ones_like(inputs.pop())
    for segment in reversed(segments):
        x = inputs.pop().requires_grad_(len(inputs) > 0)
        segment(x).backward(gradient)
        gradient = x.grad


def sequential(layers, x, number):
    stages = [nn.Sequential(layer, nn.ReLU()) for layer in layers]
    segments = ck.pytorch_segments(len(layers), number)
    return ck.Checkpointed(*stages, segments=segments)(x)


def recursive(step, batch):
    try:
        step(batch)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
        if batch < 2:
            raise
    return batch if fits else recursive(step, batch // 2)


RIGHT = {
    "segment_step": """
        x = checkpoint( => \
        x = segment(x) if segment is segments[-1] else checkpoint(
        x.sum().backward() => loss = x.sum(); loss.backward(); return loss
            the last segment is open
        """,
    "same_network": """
        F.relu(layers[i](x)) => \
        layers[i](x) if i == part[-1] else F.relu(layers[i](x))
        use_reentrant=False) => use_reentrant=False).relu()
            the last activation function of each segment is outside
        """,
}


@pytest.mark.parametrize(
    ("name", "answer", "why"),
    [
        ("segment_step", by_hand, ""),
        ("same_network", sequential, ""),
        ("survive", recursive, ""),
        *edits(RIGHT),
    ],
)
def test_other_right_answers(name, answer, why):
    accepts(name, answer)


# What an observer says


def nothing(length):
    [f"record {i}" for i in range(length)]


def endless(length):
    yield "record 0"
    while True:
        yield "keep 1"
        yield "drop 1"


def broken(length):
    for stage in range(length):
        yield f"record {1 // (2 - stage)}"


def for_nothing(chain, budget):
    """Tape 2 holds boundary 3, and checkpoint 4 goes before it is needed."""
    actions = list(map(str, ck.actions([0, 1, 2, [3, 4], 5, 6, 7])))
    actions[actions.index("keep 3")] = "forward 3\nkeep 4\ndrop 4"
    actions.remove("forward 3")
    actions.remove("drop 3")
    return "\n".join(actions)


ALL_AGAIN = [list(range(4))]
SMALL = "Let a stage keep its tape where that is small, "
SCHEDULES = [
    ("remember", lambda length: length, "an int: a schedule is needed"),
    ("remember", nothing, "returns None: end it with `return`"),
    ("remember", endless, "after 10000 actions"),
    ("remember", broken, "ZeroDivisionError in line 3 of your function"),
    ("remember", lambda n: ["remember 0"], "an action is one of forward, "),
    ("remember", lambda n: [0, "record 0"], "segments hold 'record 0': use"),
    ("remember", lambda n: [], "at its end (after 0 actions)"),
    ("remember", lambda n: ALL_AGAIN, "runs 4 stages again; none is allowed."),
    (
        "forget",
        ck.no_segments,
        "the peak is 6 units in action 5, backward 4: 5 on tapes, 1 of "
        "workspace; at most 4 are allowed. (Tried",
    ),
    ("forget", lambda n: [[i] for i in range(n)], " 4 kept, "),
    (
        "square_root",
        lambda n: ck.equal_segments(n, round(n**0.5)),
        "it runs 9 stages again; at most 6 are allowed. (Tried",
    ),
    (
        "square_root",
        lambda n: ck.equal_segments(n, n),
        "are allowed. And it runs 9 stages again; at most 6 are allowed.",
    ),
    (
        "two_sweeps",
        solutions.forget,
        "stage 0 runs 15 times again; at most 2 are allowed.",
    ),
    (
        "uneven",
        lambda chain, budget: ck.equal_segments(len(chain), 3),
        "at most 27 are allowed. Boundary 4, with 8 units, is the largest "
        "that waits below stage 5: forget large ones, in a segment that "
        "begins and ends at small ones. And it runs 8 stages again; at most "
        f"4 are allowed. {SMALL}",
    ),
    (
        "uneven",
        lambda chain, budget: [0, 1, 2, [3, 4], 5, 6, 7],
        "the peak is 33 units in action 10, backward 6: 4 kept, 17 on tapes, "
        "4 of gradient, 8 of workspace; at most 27 are allowed. Boundary 3, "
        "with 4 units, is the largest that waits below stage 6",
    ),
    ("uneven", for_nothing, "Boundary 3, with 4 units, is the largest"),
    (
        "uneven",
        lambda chain, budget: [[0], [1, 2, 3, 4], 5, 6, 7],
        f"it runs 5 stages again; at most 4 are allowed. {SMALL}",
    ),
    (
        "expensive",
        lambda chain: [[0, 1, 2], [3, 4, 5], 6, 7, 8],
        "6 stages again, which takes 15; at most 6 are allowed. Let a stage",
    ),
]


@pytest.mark.parametrize(("name", "answer", "words"), SCHEDULES)
def test_what_a_schedule_misses(name, answer, words):
    rejects(name, answer, words)


RUN = "checkpoint(run, x, part, use_reentrant=False)"
SEGMENTS = "equal_segments(len(layers), count)"
FEWER = "is alive after the forward pass; 3 segments leave"
WRONG = {
    "segment_step": """
        x = checkpoint( => x = segment(x).detach() \
        if segment is not segments[-1] else checkpoint(
            no gradient for segments 0, 1 and 2: the graph is cut
        use_reentrant=False => use_reentrant=segment is segments[0]
            no gradient for segment 0: the graph is cut
        use_reentrant=False => use_reentrant=True
            the output has no graph. What comes out of `no_grad`
        checkpoint(segment, x, use_reentrant=False) => segment(x)
            no segment runs again in the backward pass
        x = checkpoint( => \
        x = segment(x) if segment is segments[0] else checkpoint(
            Segment 0 ran once, with all activations
        x = checkpoint( => \
        x = segment(x) if segment is not segments[-1] else checkpoint(
            Segments 0, 1 and 2 ran once, with
        in segments => in [torch.nn.Sequential(*segments)]
            Checkpoint each segment by itself
        x.sum().backward() => return x.sum()
            no gradient in `param.grad` at the end: your function ret
        """,
    "same_network": f"""
        {RUN} => run(x, part)
            no layer runs again in the backward pass
        ck.{SEGMENTS} => [range(len(layers))]
            1 × the size of x {FEWER} more
        {SEGMENTS} => equal_segments(len(layers), len(layers))
            6 × the size of x {FEWER} less
        use_reentrant=False => use_reentrant=0 in part
            no gradient for layers 0 and 1: the graph is cut
        checkpoint(run, x, part => checkpoint(lambda x: run(x, part), x
            the backward pass recomputes the wrong layers: layers 4 and 5
        {RUN} => run(x, part).detach()
            the output has no graph
        {RUN} => {RUN}; return [x]
            your function returns a list: a tensor is needed
        {RUN} => {RUN}; return
            returns None: end it with `return`
        """,
    "survive": """
        size == 1 => size > 1
        raise => return survive(step, size // 2)
            the failed attempt is still alive when the next one
        torch.OutOfMemoryError: => torch.OutOfMemoryError as error:
        if size == 1: => if (failed := error) and size == 1:
            the failed attempt is still alive when the next one
        return size => step(size); return size
            the list of sizes tried is 5 numbers; it must be 4 numbers
        raise => raise ValueError("not even one sample fits")
            OutOfMemoryError is needed here. ValueError in line
        """,
}


def page_network(layers, x, count):
    return checkpoint_sequential(layers, count, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        *edits(WRONG),
        ("same_network", page_network, "without them the network is linear"),
    ],
)
def test_what_an_observer_sees(name, answer, words):
    rejects(name, answer, words)
