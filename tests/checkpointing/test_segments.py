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

LENGTHS = (4, 9, 16, 25, 36, 64, 100)
GRID = [(L, k) for L in LENGTHS for k in range(1, L + 1)]


def flat(segments):
    return [
        stage
        for item in segments
        for stage in ([item] if isinstance(item, int) else item)
    ]


def sizes(segments):
    return [len(item) for item in segments if not isinstance(item, int)]


# Splits ------------------------------------------------------------------


def test_no_segments_are_all_stages():
    assert no_segments(3) == [0, 1, 2]


def test_equal_segments_are_longer_first():
    assert equal_segments(7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert equal_segments(6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert equal_segments(3, 3) == [[0], [1], [2]]
    assert equal_segments(3, 1) == [[0, 1, 2]]


@pytest.mark.parametrize("length", LENGTHS)
def test_equal_segments_differ_by_one_at_most(length):
    for count in range(1, length + 1):
        segments = equal_segments(length, count)
        assert flat(segments) == list(range(length))
        found = sizes(segments)
        assert len(found) == count
        assert found == sorted(found, reverse=True)
        assert found[0] - found[-1] <= 1


def test_pytorch_leaves_the_last_segment_unchecked():
    assert pytorch_segments(7, 3) == [[0, 1], [2, 3], 4, 5, 6]
    assert pytorch_segments(7, 1) == no_segments(7)
    assert pytorch_segments(7, 7) == [[0], [1], [2], [3], [4], [5], 6]


@pytest.mark.parametrize("length", LENGTHS)
def test_pytorch_segments_round_down(length):
    for count in range(1, length + 1):
        segments = pytorch_segments(length, count)
        assert flat(segments) == list(range(length))
        assert sizes(segments) == [length // count] * (count - 1)


def test_segments_of_given_sizes():
    assert segments_of([3, 1, 2]) == [[0, 1, 2], [3], [4, 5]]


# Theory, in units --------------------------------------------------------


@pytest.mark.parametrize(("length", "count"), GRID)
def test_the_peak_of_equal_segments(length, count):
    """k + ⌊(L + 1)/k⌋, and never above the usual k + ⌈L/k⌉."""
    run = simulate(length, equal_segments(length, count))
    assert run.peak == peak_of_segments(length, count)
    usual = count + ceil(length / count)
    exact = length % count in (0, count - 1)
    assert run.peak == usual - (not exact)
    assert run.extra_runs == length
    assert set(run.runs) == {2}


@pytest.mark.parametrize(("length", "count"), GRID)
def test_pytorch_runs_fewer_stages_again(length, count):
    run = simulate(length, pytorch_segments(length, count))
    assert run.extra_runs == (count - 1) * (length // count)
    last = length - (count - 1) * (length // count)
    assert run.peak == count + last


@pytest.mark.parametrize("length", LENGTHS)
def test_without_checkpoints_every_tape_is_alive(length):
    run = simulate(length, no_segments(length))
    assert run.peak == length + 1 == peak_of_segments(length, 0)
    assert run.extra_runs == 0


def near_the_root(length):
    """Counts among which the best is; farther away the peaks only grow."""
    if length <= 200:
        return range(1, length + 1)
    return range(isqrt(length) - 5, isqrt(length) + 6)


def test_the_least_peak():
    """⌈2√(L + 2)⌉ − 1."""
    assert least_peak(1) == 2
    for length in range(2, 2001):
        counts = near_the_root(length)
        found = min(peak_of_segments(length, count) for count in counts)
        assert found == least_peak(length)
        assert found == ceil(2 * sqrt(length + 2)) - 1


def test_the_usual_bound_is_least_at_twice_the_root():
    """min (k + ⌈L/k⌉) = ⌈2√L⌉: the least peak, or one more."""
    for length in range(2, 2001):
        counts = near_the_root(length)
        bound = min(count + ceil(length / count) for count in counts)
        assert bound == ceil(2 * sqrt(length))
        assert bound - least_peak(length) in (0, 1)


def test_the_least_peak_of_large_numbers_is_exact():
    """Where a float has too few digits."""
    assert least_peak(10**40) == 2 * 10**20
    assert least_peak(10**40 - 1) == 2 * 10**20
    assert least_peak(10**40 - 2) == 2 * 10**20 - 1


@pytest.mark.parametrize("length", LENGTHS)
def test_equal_segments_take_one_more_forward_pass(length):
    plain = simulate(length, no_segments(length))
    assert plain.time == 3 * length
    assert plain.extra_time == 0
    for count in (1, 2, length):
        equal = simulate(length, equal_segments(length, count))
        assert equal.time == 4 * length
        assert equal.extra_time == length


# Bad input ---------------------------------------------------------------

BY_COUNT = [equal_segments, pytorch_segments, peak_of_segments]


@pytest.mark.parametrize("split", BY_COUNT)
@pytest.mark.parametrize("count", [-1, 10, 100])
def test_too_many_segments_are_refused(split, count):
    with pytest.raises(
        ValueError, match=rf"^{count} segments for 9 stages: use 1 to 9$"
    ):
        split(9, count)


@pytest.mark.parametrize("split", BY_COUNT[:2])
def test_zero_segments_are_refused(split):
    with pytest.raises(ValueError, match=r"^0 segments for 9 stages: use 1"):
        split(9, 0)
