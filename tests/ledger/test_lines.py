"""The peak at every micro-batch size, as a maximum of lines."""

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import membudget.accumulation
from membudget import ledger
from membudget.ledger import PeakLine, peak_at, peak_lines
from tests.soak import examples

lines_of = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 40)),
    min_size=1,
    max_size=12,
)
sizes_of = st.lists(st.integers(1, 20), min_size=2, max_size=4, unique=True)


def timelines(lines, sizes):
    return [[c + s * n for c, s in lines] for n in sizes]


@settings(max_examples=examples(40))
@given(lines_of, sizes_of)
@example([(0, 1)], [2, 1])
@example([(5, 0), (0, 5), (0, 5)], [2, 4])
@example([(9, 1), (6, 2), (3, 3), (0, 4)], [2, 4])
def test_the_maximum_of_the_lines_is_that_of_all_moments(lines, sizes):
    found = peak_lines(sizes, timelines(lines, sizes))
    for n in [*range(1, 50), 10**6]:
        assert peak_at(found, n) == max(c + s * n for c, s in lines)
    assert set(found) <= set(lines)
    assert [s for _, s in found] == sorted({s for _, s in found})


@settings(max_examples=examples(40))
@given(lines_of)
def test_no_line_is_kept_in_vain(lines):
    """Each is the only maximum at some size, whole or not, from 1 on."""
    found = peak_lines([2, 4], timelines(lines, [2, 4]))
    crossings = {Fraction(1), Fraction(10**6)}
    for a in found:
        for b in found:
            if a.slope != b.slope:
                crossings.add(
                    Fraction(a.constant - b.constant, b.slope - a.slope)
                )
    places = sorted(n for n in crossings if n >= 1)
    middles = [(a + b) / 2 for a, b in pairwise(places)]
    best = [
        [line for line in found if line.constant + line.slope * n == most]
        for n in middles
        for most in [max(c + s * n for c, s in found)]
    ]
    winners = {lines[0] for lines in best if len(lines) == 1}
    assert winners == set(found)


def test_a_kink_is_found():
    """The gradient dominates small sizes, activations large ones."""
    lines = peak_lines([2, 4], [[100, 30], [100, 40]])
    assert lines == [PeakLine(100, 0), PeakLine(20, 5)]
    assert [peak_at(lines, n) for n in (1, 16, 17)] == [100, 100, 105]


def refused(sizes, timelines, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        peak_lines(sizes, timelines)


@pytest.mark.parametrize(
    ("sizes", "timelines"),
    [
        ([], []),
        ([2], [[1]]),
        ([2], [[1], [1]]),
        ([2, 4, 8], [[1], [1]]),
        ([2, 4, 2], [[1], [1], [1]]),
    ],
)
def test_two_sizes_are_needed(sizes, timelines):
    message = "give two or more different sizes and a timeline for each"
    refused(sizes, timelines, message)


def test_operators_that_differ():
    message = (
        "3 operators ran at size 2 and 1 at size 8: use sizes at which the "
        "step runs alike"
    )
    refused([2, 4, 8], [[1, 2, 3], [1, 2, 3], [1]], message)


@pytest.mark.parametrize(
    ("sizes", "timelines"),
    [([4, 2], [[1, 3], [1, 2]]), ([2, 4, 6], [[4], [8], [13]])],
)
def test_bytes_that_are_not_affine(sizes, timelines):
    message = (
        f"the bytes at sizes {str(sizes)[1:-1]} are not a constant plus a "
        "multiple of the size: measure each size with a PeakTracker instead"
    )
    refused(sizes, timelines, message)


def test_accumulation_hands_them_on():
    for name in ("PeakLine", "peak_at", "peak_lines"):
        ours = getattr(ledger, name)
        assert getattr(membudget.accumulation, name) is ours
