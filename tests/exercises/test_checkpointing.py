"""The puzzles of chapter 4 against theory and search; its other exercises."""

import heapq
import re
from functools import cache
from itertools import count, product
from math import comb, inf
from random import Random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from membudget import checkpointing as ck
from membudget import exercises
from membudget.exercises import checkpointing as solutions
from membudget.exercises.core import CORRECT, NOT_RIGHT
from tests.soak import SOAK, part_of


def cases(name):
    """Of a puzzle: the chain, and what is allowed."""
    for case in getattr(exercises, f"check_{name}").cases:
        peak, limit = map(int, re.findall(r"≤ (\d+)", case.told))
        yield case.make()[0], peak, limit


# The targets: the best that there is


def one_level(chain):
    """All ways to checkpoint segments and to keep the tapes of the rest."""
    for cuts in product((False, True), repeat=len(chain) - 1):
        parts = [[0]]
        for stage, cut in enumerate(cuts, 1):
            if cut:
                parts.append([stage])
            else:
                parts[-1].append(stage)
        choices = [[p] if len(p) > 1 else [p, p[0]] for p in parts]
        yield from product(*choices)


def runs_of(chain, several):
    return [ck.simulate(chain, segments) for segments in several]


@pytest.mark.parametrize("name", ["uneven", "expensive"])
def test_targets_are_the_best_of_one_level(name):
    ((chain, peak, extra),) = cases(name)
    check = getattr(exercises, f"check_{name}")
    best = check.solution(*check.cases[0].make())
    some = part_of(one_level(chain), Random(0), 300)
    runs = runs_of(chain, [best, *some])
    assert peak == min(run.peak for run in runs)
    assert extra == min(run.extra_time for run in runs if run.peak == peak)


def test_equal_segments_do_not_fit_the_uneven_chain():
    ((chain, peak, _),) = cases("uneven")
    equal = [
        ck.simulate(chain, ck.equal_segments(len(chain), number)).peak
        for number in range(1, len(chain) + 1)
    ]
    assert min(equal) == 32 > peak  # as the text after "Correct." says


def longest(peak):
    """Stages that segments on one level can hold, one unit each.

    Behind j checkpoints a segment of s stages needs j + s + 2 units, and
    the last, which has no gradient to receive, one less.
    """
    sizes = [peak - 2 - j for j in range(peak)]
    return max(sum(sizes[:k]) + peak - 1 - k for k in range(peak - 1))


def test_longest_chain_of_one_level():
    for length in range(2, 8 if SOAK else 7):
        chain = [ck.Stage()] * length
        least = min(run.peak for run in runs_of(chain, one_level(chain)))
        assert longest(least - 1) < length <= longest(least)


def test_equal_segments_do_not_reach_the_shrinking_ones():
    for length, peak, extra in cases("shrinking"):
        m = peak - 2
        assert length == extra == m * (m + 1) // 2
        for number in range(1, length + 1):
            for split in (ck.equal_segments, ck.pytorch_segments):
                assert ck.simulate(length, split(length, number)).peak > peak
        assert longest(peak - 1) < length  # nor does any other one level


@cache
def reversible(length, units, runs, last=1):
    """Whether so many units for outputs are enough, and runs of each stage.

    ``last``: 1 if these stages receive the loss's gradient, which is a number.
    """
    if length <= units + last and runs:
        return True
    return min(units, runs) > 0 and any(
        reversible(length - m, units - 1, runs, last)
        and reversible(m, units, runs - 1, 0)
        for m in range(1, length)
    )


def possible(length, peak, again):
    """The same, of all schedules that there are."""
    start = first(length), (0,) * length
    seen, stack = {start}, [start]
    while stack:
        state, runs = stack.pop()
        if state[0] < 0:
            return True
        for kind, stage in product(ck.KINDS, range(length)):
            found = after(state, (kind, stage), length, peak)
            ran = list(runs)
            ran[stage] += kind in ("forward", "record")
            following = found and (found[1], tuple(ran))
            if found and max(ran) <= again + 1 and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def test_the_longest_chain_of_a_number_of_runs():
    for peak, runs in product(range(3, 9), range(1, 5)):
        most = comb(peak + runs - 3, runs) + 1
        assert reversible(most, peak - 2, runs)
        assert not reversible(most + 1, peak - 2, runs)
        if peak < 5 and runs < 3 and (most < 4 or SOAK):
            assert possible(most, peak, runs - 1)
            assert not possible(most + 1, peak, runs - 1)


def test_the_targets_of_two_sweeps_are_exact():
    for length, peak, again in cases("two_sweeps"):
        assert longest(peak) < length  # one level is not enough
        assert reversible(length, peak - 2, again + 1)
        assert not reversible(length, peak - 3, again + 1)


@pytest.mark.parametrize(("name", "below"), [("forget", inf), ("remember", 2)])
def test_no_lower_peak_is_possible(name, below):
    length, peak, extra = next(cases(name))
    assert fewest_extra_runs(length, peak - 1) == below
    assert fewest_extra_runs(length, peak) <= extra


def fewest_extra_runs(length, peak):
    """Of all schedules of equal stages, by Dijkstra's algorithm."""
    actions = [ck.Action(*pair) for pair in product(ck.KINDS, range(length))]
    best, order = {first(length): 0}, count()
    queue = [(0, next(order), first(length))]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state[0] < 0:
            return cost
        for action in actions:
            found = after(state, action, length, peak)
            if found and cost + found[0] < best.get(found[1], inf):
                best[found[1]] = cost + found[0]
                heapq.heappush(queue, (cost + found[0], next(order), found[1]))
    return inf


def first(length):
    """Before all actions: turn, value, kept, tapes, and what has run."""
    return length - 1, 0, frozenset(), frozenset(), frozenset()


def after(state, action, length, peak):
    """Extra runs and the state after an action, or None: written anew."""
    turn, value, kept, tapes, ran = state
    kind, i = action
    held = {b for tape in tapes for b in (tape, tape + 1)}
    there = i in kept | held | {0, value}
    gradient = turn < length - 1

    def alive(*more):
        return len({*kept, *held, *more} - {0, None}) + gradient

    if kind in ("forward", "record"):
        if not there or i > turn or i in tapes or alive(i, i + 1) > peak:
            return None
        tapes |= {i} if kind == "record" else set()
        return (i in ran), (turn, i + 1, kept, tapes, ran | {i})
    if kind == "keep":
        if i == 0 or i in kept or not there:
            return None
        return 0, (turn, value, kept | {i}, tapes, ran)
    if kind == "drop":
        return (
            (0, (turn, value, kept - {i}, tapes, ran)) if i in kept else None
        )
    if i != turn or i not in tapes or alive() + 1 > peak:
        return None
    return 0, (turn - 1, None, kept, tapes - {i}, ran)


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
    outcome = exercises.check_forget.judge(two_tapes_at_both_ends)
    assert outcome.state == CORRECT
    words = "with 5 stages yours peaks at 4 units and runs 5 stages again"
    assert words in outcome.text
    assert fewest_extra_runs(5, 4) == 5
    assert "Better" not in exercises.check_forget.judge(solutions.forget).text


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
    outcome = exercises.check_remember.judge(KINDS_OF_SCHEDULES[kind])
    assert outcome.state == CORRECT


def test_segments_in_any_form():
    def nested(length):
        n = round(length**0.5)
        for start in range(0, length - n, n):
            yield (stage for stage in range(start, start + n))
        yield from np.arange(length - n, length)

    assert exercises.check_square_root.judge(nested).state == CORRECT


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


def last_open(segments, x):
    for segment in segments[:-1]:
        x = checkpoint(segment, x, use_reentrant=False)
    loss = segments[-1](x).sum()
    loss.backward()
    return loss


def sequential(layers, x, number):
    stages = [nn.Sequential(layer, nn.ReLU()) for layer in layers]
    segments = ck.pytorch_segments(len(layers), number)
    return ck.Checkpointed(*stages, segments=segments)(x)


def outside(layers, x, number):
    def run(x, part):
        for i in part[:-1]:
            x = layers[i](x).relu()
        return layers[part[-1]](x)

    for part in ck.equal_segments(len(layers), number):
        x = checkpoint(run, x, part, use_reentrant=False).relu()
    return x


def recursive(step, batch):
    try:
        step(batch)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
        if batch < 2:
            raise
    return batch if fits else recursive(step, batch // 2)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("segment_step", by_hand),
        ("segment_step", last_open),
        ("same_network", sequential),
        ("same_network", outside),
        ("survive", recursive),
    ],
)
def test_other_right_answers(name, answer):
    check = getattr(exercises, f"check_{name}")
    assert check.judge(answer).state == CORRECT


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
    outcome = getattr(exercises, f"check_{name}").judge(answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text


def again(segment, x, reentrant=False):
    return checkpoint(segment, x, use_reentrant=reentrant)


def step_of(*runs):
    """The step whose first segments run so, and the others as the last."""

    def segment_step(segments, x):
        for i, segment in enumerate(segments):
            x = runs[min(i, len(runs) - 1)](segment, x)
        x.sum().backward()

    return segment_step


def page_step(segments, x):
    for segment in segments[:-1]:
        with torch.no_grad():
            x = segment(x)
    again(segments[-1], x).sum().backward()


def plainly(segment, x):
    return segment(x)


def reentrant(segment, x):
    return again(segment, x, reentrant=True)


def at_once(segments, x):
    again(nn.Sequential(*segments), x).sum().backward()


def no_backward(segments, x):
    for segment in segments:
        x = again(segment, x)
    return x.sum()


STEPS = [
    (page_step, "no gradient for segments 0, 1 and 2: the graph is cut"),
    (step_of(reentrant, again), "no gradient for segment 0: the graph is cut"),
    (step_of(reentrant), "the output has no graph. What comes out of `no_gra"),
    (step_of(plainly), "no segment runs again in the backward pass"),
    (step_of(plainly, again), "Segment 0 ran once, with all activations"),
    (step_of(*[plainly] * 3, again), "Segments 0, 1 and 2 ran once, with "),
    (at_once, "Checkpoint each segment by itself"),
    (no_backward, "no gradient in `param.grad` at the end: your function ret"),
]


@pytest.mark.parametrize(("answer", "words"), STEPS)
def test_what_a_step_keeps(answer, words):
    outcome = exercises.check_segment_step.judge(answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text


def run(layers, part, x):
    for i in part:
        x = layers[i](x).relu()
    return x


def network_of(split, reentrant=False):
    """The network in other segments; ``reentrant`` for the first of them."""

    def same_network(layers, x, number):
        for i, part in enumerate(split(len(layers), number)):
            old = reentrant and i == 0
            x = checkpoint(run, layers, part, x, use_reentrant=old)
        return x

    return same_network


def late(layers, x, number):
    for part in ck.equal_segments(len(layers), number):
        x = again(lambda x: run(layers, part, x), x)  # noqa: B023
    return x


def page_network(layers, x, number):
    return checkpoint_sequential(layers, number, x, use_reentrant=False)


@torch.no_grad()
def without_graph(layers, x, number):
    return plain_network(layers, x, number)


def listed(layers, x, number):
    return [plain_network(layers, x, number)]


def unreturned(layers, x, number):
    x = plain_network(layers, x, number)


NETWORKS = [
    (page_network, "without them the network is linear"),
    (plain_network, "no layer runs again in the backward pass"),
    (
        network_of(lambda length, number: [range(length)]),
        "1 × the size of x is alive after the forward pass; 3 segments leave "
        "more",
    ),
    (
        network_of(lambda length, number: ck.equal_segments(length, length)),
        "6 × the size of x is alive after the forward pass; 3 segments leave "
        "less",
    ),
    (
        network_of(ck.equal_segments, reentrant=True),
        "no gradient for layers 0 and 1: the graph is cut",
    ),
    (late, "the backward pass recomputes the wrong layers: layers 4 and 5"),
    (without_graph, "the output has no graph"),
    (listed, "your function returns a list: a tensor is needed"),
    (unreturned, "returns None: end it with `return`"),
]


@pytest.mark.parametrize(("answer", "words"), NETWORKS)
def test_what_a_network_keeps(answer, words):
    outcome = exercises.check_same_network.judge(answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text


def in_the_block(step, batch):
    try:
        step(batch)
        return batch
    except torch.OutOfMemoryError:
        if batch == 1:
            raise
        return in_the_block(step, batch // 2)


def kept_error(step, batch):
    failed = None
    while batch:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError as error:
            failed = error
        batch //= 2
    raise failed


def twice(step, batch):
    size = recursive(step, batch)
    step(size)
    return size


def another_error(step, batch):
    while batch:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            batch //= 2
    raise ValueError("not even one sample fits")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_the_block, "the failed attempt is still alive when the next one"),
        (kept_error, "the failed attempt is still alive when the next one"),
        (twice, "the list of sizes tried is 5 numbers; it must be 4 numbers"),
        (another_error, "OutOfMemoryError is needed here. ValueError in line"),
    ],
)
def test_what_an_attempt_leaves(answer, words):
    outcome = exercises.check_survive.judge(answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text
