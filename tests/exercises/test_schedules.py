"""The exercises of chapter 5 against the room, and what their hints say."""

from itertools import product
from math import inf

import pytest

from membudget import checkpointing as ck
from membudget import schedules
from membudget.exercises import schedules as solutions
from tests.soak import SOAK

from .judging import accepts, checker, rejects


def arguments(name, case=0):
    return checker(name).cases[case].make()


# The solutions


def test_the_peak_is_that_of_the_law():
    for length, runs in product(range(1, 60), range(1, 6)):
        peak = solutions.peak_for_runs(length, runs)
        assert peak == schedules.peak_of_runs(length, runs)
        assert schedules.longest_chain(peak, runs) >= length


@pytest.mark.parametrize("length", range(1, 25, 1 if SOAK else 4))
def test_the_programme_is_the_frontier(length):
    points = schedules.frontier(length)
    for peak in range(1, length + 3):
        fitting = [p.extra_time for p in points if p.peak <= peak]
        least = min(fitting, default=inf)
        assert solutions.fewest_runs(length, peak) == least


def test_each_block_more_has_a_lower_peak_until_the_last():
    chain, _ = arguments("blocks_for_budget")
    n = len(chain)
    peaks = [
        ck.simulate(chain, schedules.every_first(n, j)).peak
        for j in range(n + 1)
    ]
    assert peaks[:n] == sorted(set(peaks), reverse=True)
    assert peaks[n] == peaks[n - 1]
    for j, peak in enumerate(peaks[:n]):
        assert solutions.blocks_for_budget(chain, peak) == j
    with pytest.raises(ValueError, match="no number of blocks"):
        solutions.blocks_for_budget(chain, peaks[n] - 1)


def checkpoint(chain):
    """The given schedule of `restart` with the output kept."""
    return [0, 1, [2, 3], 4, 5, 6]


def test_the_two_repairs_are_the_best_of_their_peaks():
    (chain,) = arguments("restart")
    points = {p.peak: p.extra_time for p in schedules.frontier(chain)}
    for repair, peak, extra in [(solutions.restart, 6, 3), (checkpoint, 7, 2)]:
        run = ck.simulate(chain, repair(chain))
        assert (run.peak, run.extra_time) == (peak, extra)
        assert points[peak] == extra


def test_nested_segments_reach_the_law():
    for length, runs in product(range(1, 131, 1 if SOAK else 3), range(1, 7)):
        peak = schedules.peak_of_runs(length, runs)
        run = ck.simulate(length, solutions.nest(length, peak, runs))
        assert run.peak == peak
        assert max(run.runs) <= runs


def test_the_schedule_to_beat_is_the_best_of_equal_segments():
    chain, budget = arguments("beat")
    runs = [
        ck.simulate(chain, split(len(chain), count))
        for split in (ck.equal_segments, ck.pytorch_segments)
        for count in range(1, len(chain) + 1)
    ]
    fits = [run.extra_time for run in runs if run.peak <= budget]
    assert min(fits) == solutions.EQUAL
    segments = solutions.beat(chain, budget)
    run = ck.simulate(chain, segments)
    assert segments == schedules.optimal_segments(chain, budget)
    assert (run.peak, run.extra_time) == (budget, 266)


def convolution(into, out, side, kernel=1):
    return 2 * into * out * kernel**2 * side**2


def test_the_chain_to_beat_is_counted_from_its_layers():
    chain, _ = arguments("beat")
    images, width, side, into = 128, 256, 56, 64

    def mib(channels, side):
        return images * channels * side**2 * 4 / 2**20

    for i, stage in enumerate(chain):
        first, mid = i % 3 == 0, width // 4
        before = side * 2 if first and i else side
        sizes = [mib(mid, before)] * 2 + [mib(mid, side)] * 2
        flops = convolution(into, mid, before)
        flops += convolution(mid, mid, side, 3) + convolution(mid, width, side)
        sizes += [mib(width, side)] * (1 + first)
        flops += convolution(into, width, side) * first
        assert stage.output == mib(width, side)
        assert abs(stage.inner - sum(sizes)) < 1
        assert abs(stage.time - images * flops / 1e9) < 1
        into = width
        if i % 3 == 2:
            width, side = 2 * width, side // 2


# Other answers


def by_frontier(length, peak):
    points = schedules.frontier(length)
    return min((p.extra_time for p in points if p.peak <= peak), default=inf)


def later(chain):
    """Stage 1 begins the segment: its tape alone is no more than that."""
    return [0, [1, 2, 3], 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("peak_for_runs", schedules.peak_of_runs),
        ("fewest_runs", by_frontier),
        ("restart", later),
        ("nest", lambda n, _, runs: schedules.binomial_segments(n, runs)),
        ("beat", schedules.optimal_segments),
        ("beat", lambda chain, budget: [[[0], 1], [2, 3], *range(4, 12)]),
    ],
)
def test_another_right_answer(name, answer):
    accepts(name, answer)


def broken(chain):
    schedule = solutions.restart(chain)
    schedule.remove("forward 1")
    return schedule


WRONG = [
    (
        "nest",
        lambda length, peak, runs: schedules.binomial_segments(length, 2),
        "the peak is 6 units in action",
    ),
    (
        "nest",
        lambda length, peak, runs: schedules.optimal_segments(length, 4),
        "times again; at most 2 are allowed",
    ),
    ("restart", broken, "boundary 2, is not there: neither the value at wo"),
    ("restart", checkpoint, "the peak is 7 units in action"),
    ("restart", lambda chain: list(range(7)), "at most 6 are allowed"),
    (
        "restart",
        lambda chain: [[0, 1, 2, 3, 4], 5, 6],
        "it runs 5 stages again; at most 3 are allowed",
    ),
    (
        "beat",
        lambda chain, budget: ck.pytorch_segments(12, 7),
        "it runs 6 stages again, which takes 378; at most 377 are allowed",
    ),
    (
        "beat",
        lambda chain, budget: [[0, 1, 2, 3], *range(4, 12)],
        "at most 3528 are allowed",
    ),
    ("beat", lambda chain, budget: 7, "returns an int: a schedule is needed"),
]


@pytest.mark.parametrize(("name", "answer", "words"), WRONG)
def test_what_a_schedule_misses(name, answer, words):
    rejects(name, answer, words)
