"""The law against every persistent schedule, and what it is not."""

from functools import cache
from math import ceil, comb, inf, sqrt

import pytest
from checkpoint_schedules import EndReverse, Forward, Revolve

from membudget.checkpointing import equal_segments, no_segments, simulate
from membudget.checkpointing import least_peak as equal_peak
from membudget.checkpointing.schedule import flatten
from membudget.schedules import (
    binomial_segments,
    every_first,
    longest_chain,
    peak_of_runs,
)
from tests.soak import SOAK

FAR = 130 if SOAK else 60
"""Where the search for the longest chain ends."""


@cache
def fits(length, units, runs, gradient):
    """Whether a persistent schedule of layers does with this.

    Args:
        units: beyond the input, which is held.
        runs: the most of any layer.
        gradient: 1 where one arrives, 0 at the loss.
    """
    if runs < 1:
        return False
    if length == 1:
        return 2 + gradient <= units
    if units >= 3 and fits(length - 1, units - 1, runs, gradient):
        return True  # the first layer keeps its tape
    return any(
        min(size, 2) + gradient <= units
        and fits(size, units, runs - 1, 1)
        and fits(length - size, units - 1, runs, gradient)
        for size in range(1, length)
    )


@cache
def fewest_runs(length, units, gradient=0):
    """Of all layers together, in a persistent schedule."""
    if length == 1:
        return 1 if 2 + gradient <= units else inf
    found = [inf]
    if units >= 3:
        found.append(1 + fewest_runs(length - 1, units - 1, gradient))
    for size in range(1, length):
        if min(size, 2) + gradient <= units:
            after = fewest_runs(length - size, units - 1, gradient)
            found.append(size + after + fewest_runs(size, units, 1))
    return min(found)


def test_no_schedule_reaches_further_and_one_reaches_it():
    tried = 0
    for peak in range(3, 14):
        for runs in range(1, 7):
            longest = longest_chain(peak, runs)
            assert longest == comb(peak + runs - 3, runs) + 1
            if longest < FAR:
                tried += 1
                assert fits(longest, peak, runs, 0)
                assert not fits(longest + 1, peak, runs, 0)
    assert tried > 30


def test_one_stage_has_two_units_however_often_it_runs():
    assert [longest_chain(2, runs) for runs in (1, 2, 9)] == [1, 1, 1]
    assert peak_of_runs(1, 5) == 2
    assert binomial_segments(1, 5) == [0]


@pytest.mark.parametrize("runs", [1, 2, 3, 4])
def test_the_constructed_schedule_is_what_the_law_promises(runs):
    for length in range(1, 61):
        peak = peak_of_runs(length, runs)
        assert longest_chain(peak, runs) >= length
        assert peak == 2 or longest_chain(peak - 1, runs) < length
        run = simulate(length, binomial_segments(length, runs))
        assert run.peak == peak
        assert max(run.runs) <= runs
        if length > 1:
            assert run.extra_runs >= fewest_runs(length, peak) - length


def test_it_reaches_the_longest_chains():
    for peak in range(4, 11):
        for runs in range(1, 6):
            length = longest_chain(peak, runs)
            if length <= (400 if SOAK else 130):
                run = simulate(length, binomial_segments(length, runs))
                assert (run.peak, max(run.runs)) == (peak, runs)


def test_special_cases():
    assert [longest_chain(peak, 1) for peak in (2, 3, 9)] == [1, 2, 8]
    assert binomial_segments(7, 1) == no_segments(7)
    # shrinking: each segment is one shorter than the one before
    assert binomial_segments(11, 2) == [
        *([0, 1, 2, 3], [4, 5, 6], [7, 8]),
        *(9, 10),
    ]
    for length in range(2, 500):
        closed = ceil((3 + sqrt(8 * length - 7)) / 2)
        assert peak_of_runs(length, 2) == closed


def test_the_table_of_equal_and_shrinking_segments():
    lengths = 12, 16, 24, 36, 48, 64, 100
    assert [equal_peak(n) for n in lengths] == [7, 8, 10, 12, 14, 16, 20]
    assert [peak_of_runs(n, 2) for n in lengths] == [7, 7, 9, 10, 12, 13, 16]
    equal = min(simulate(100, equal_segments(100, k)).peak for k in (9, 10))
    assert simulate(100, binomial_segments(100, 2)).peak <= 0.8 * equal


def test_a_million_stages():
    assert peak_of_runs(10**6, 11) == 15
    assert peak_of_runs(10**6, 10) > 15
    assert peak_of_runs(10**30, 1) == 10**30 + 1
    assert longest_chain(10**30, 2) == comb(10**30 - 1, 2) + 1
    with pytest.raises(ValueError, match="hundreds of digits: let one be at"):
        longest_chain(10**6, 10**6)


def test_ten_thousand_stages_can_be_constructed():
    segments = binomial_segments(10_000, 100)
    assert list(flatten(segments)) == list(range(10_000))
    run = simulate(1000, binomial_segments(1000, 5))
    assert run.peak == peak_of_runs(1000, 5) == 11
    assert max(run.runs) == 5


def test_the_first_blocks_of_a_transformer(block):
    """Each that is checkpointed gives back its tape: 198 − 15j units."""
    for count in range(12):
        run = simulate([block] * 12, every_first(12, count))
        assert run.peak == 198 - 15 * count
        assert run.runs == (2,) * count + (1,) * (12 - count)
    assert every_first(3, 0) == [0, 1, 2]
    assert every_first(3, 3) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="use a whole number from 0 to 3"):
        every_first(3, 4)


def test_revolve_counts_states_instead_of_tapes():
    """Griewank and Walther's r·L − C(s + r, r − 1), and the package's count:
    that and the L steps of the backward passes."""
    for length in (2, 5, 12, 30):
        for slots in (1, 2, 3, 5):
            if slots >= length:
                continue
            steps = 0
            for action in Revolve(length, slots):
                if isinstance(action, EndReverse):
                    break
                if isinstance(action, Forward):
                    steps += action.n1 - action.n0
            runs = next(
                r for r in range(1, length) if comb(slots + r, r) >= length
            )
            fewest = runs * length - comb(slots + runs, runs - 1)
            assert steps == fewest + length
