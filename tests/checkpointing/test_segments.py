"""Splits of a chain, and the theory of equal segments."""

from math import ceil, isqrt, sqrt

import pytest

from membudget.checkpointing import (
    equal_segments,
    least_peak,
    no_segments,
    peak_of_segments,
    pytorch_segments,
    segments_of,
    simulate,
)
from tests.soak import SOAK

LENGTHS = (4, 9, 16, 25, 36, 64, 100) if SOAK else (1, 2, 9, 25)
FAR = 2001 if SOAK else 300


def flat(segments):
    return [
        stage
        for item in segments
        for stage in ([item] if isinstance(item, int) else item)
    ]


def sizes(segments):
    return [len(item) for item in segments if not isinstance(item, int)]


# Splits ------------------------------------------------------------------


def test_splits_by_hand():
    assert no_segments(3) == [0, 1, 2]
    assert equal_segments(7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert equal_segments(6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert pytorch_segments(7, 3) == [[0, 1], [2, 3], 4, 5, 6]
    assert pytorch_segments(7, 1) == no_segments(7)
    assert segments_of([3, 1, 2]) == [[0, 1, 2], [3], [4, 5]]


@pytest.mark.parametrize("length", LENGTHS)
def test_splits(length):
    """Equal ones differ by one at most, the longer ones first; PyTorch
    rounds down."""
    for count in range(1, length + 1):
        equal = equal_segments(length, count)
        theirs = pytorch_segments(length, count)
        assert flat(equal) == flat(theirs) == list(range(length))
        found = sizes(equal)
        assert len(found) == count
        assert found == sorted(found, reverse=True)
        assert found[0] - found[-1] <= 1
        assert sizes(theirs) == [length // count] * (count - 1)


# Theory, in units --------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_the_peak_of_equal_segments(length):
    """k + ⌊(L + 1)/k⌋, and never above the usual k + ⌈L/k⌉."""
    for count in range(1, length + 1):
        run = simulate(length, equal_segments(length, count))
        assert run.peak == peak_of_segments(length, count)
        usual = count + ceil(length / count)
        exact = length % count in (0, count - 1)
        assert run.peak == usual - (not exact)
        assert run.extra_runs == run.extra_time == length
        assert run.time == 4 * length
        assert set(run.runs) == {2}


@pytest.mark.parametrize("length", LENGTHS)
def test_pytorch_runs_fewer_stages_again(length):
    for count in range(1, length + 1):
        run = simulate(length, pytorch_segments(length, count))
        assert run.extra_runs == (count - 1) * (length // count)
        assert run.peak == count + length - run.extra_runs


@pytest.mark.parametrize("length", LENGTHS)
def test_without_checkpoints_every_tape_is_alive(length):
    run = simulate(length, no_segments(length))
    assert run.peak == length + 1 == peak_of_segments(length, 0)
    assert run.extra_runs == run.extra_time == 0
    assert run.time == 3 * length


def near_the_root(length):
    """Counts among which the best is; farther away the peaks only grow."""
    if length <= 200:
        return range(1, length + 1)
    return range(isqrt(length) - 5, isqrt(length) + 6)


def test_the_least_peak():
    """⌈2√(L + 2)⌉ − 1; the least of the usual bound, min (k + ⌈L/k⌉), is
    ⌈2√L⌉: the same, or one more."""
    assert least_peak(1) == 2
    for length in range(2, FAR):
        counts = near_the_root(length)
        found = min(peak_of_segments(length, count) for count in counts)
        assert found == least_peak(length)
        assert found == ceil(2 * sqrt(length + 2)) - 1
        bound = min(count + ceil(length / count) for count in counts)
        assert bound == ceil(2 * sqrt(length))
        assert bound - found in (0, 1)


def test_the_least_peak_of_large_numbers_is_exact():
    """Where a float has too few digits."""
    assert least_peak(10**40) == 2 * 10**20
    assert least_peak(10**40 - 1) == 2 * 10**20
    assert least_peak(10**40 - 2) == 2 * 10**20 - 1


# Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "bad"),
    [(equal_segments, 0), (pytorch_segments, 10), (peak_of_segments, -1)],
)
def test_too_few_or_many_segments_are_refused(split, bad):
    message = rf"^{bad} segments for 9 stages: use 1 to 9$"
    with pytest.raises(ValueError, match=message):
        split(9, bad)
