"""The law of nested segments, for a chain of equal layers, in units.

With a peak of P units and at most r runs of any stage, the first one
included, the longest chain has C(P + r − 3, r) + 1 stages. It holds for
memory-persistent schedules, which keep what they checkpoint until it is used
up, in setting S and for stages ``Stage()`` of the tape machine. r = 1 is the
plain step, r = 2 are shrinking segments, and a peak that grows with r is the
schedule of Griewank and Walther (2000, "Algorithm 799: revolve"), whose
C(s + r, s) counts stored states instead of tapes.
"""

from math import comb

from membudget.checkpointing.segments import MOST
from membudget.checks import whole

DEEPEST = 100
"""Runs of a stage in a schedule that is written down, and so its lists in
lists."""

DIGITS = 1000
"""Above this many units and runs together a chain's length is only digits."""


def longest_chain(peak: int, runs: int) -> int:
    """The most stages with this peak: C(peak + runs − 3, runs) + 1.

    Args:
        peak: units; a single stage has 2.
        runs: the most of any stage, the first included.

    Raises:
        TypeError: a number that is not whole.
        ValueError: a peak below 2 or runs below 1; both above 1 000.
    """
    peak, runs = whole(peak, "the peak in units", 2), _runs(runs)
    if min(peak, runs) > DIGITS:
        raise ValueError(
            f"a peak of {peak} units and {runs} runs allow a chain whose "
            f"length has hundreds of digits: let one be at most {DIGITS}"
        )
    return _longest(peak, runs, 0)


def peak_of_runs(length: int, runs: int) -> int:
    """The least peak of a chain whose stages run at most so often, in units.

    The least P with C(P + runs − 3, runs) + 1 ≥ length. One run is the plain
    step, length + 1; two are ⌈(3 + √(8·length − 7))/2⌉ ≈ √(2·length). With as
    many runs as units it grows with the logarithm: a million stages have a
    peak of 15 units with 11 runs.

    Args:
        length: stages in the chain.
        runs: the most of any stage, the first included.

    Raises:
        TypeError: a number that is not whole.
        ValueError: fewer than one stage or run.
    """
    length, runs = whole(length, "the number of stages"), _runs(runs)
    low, high = 1, 2  # too low, and what may do
    while _longest(high, runs, 0) < length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _longest(middle, runs, 0) < length:
            low = middle
        else:
            high = middle
    return high


def binomial_segments(length: int, runs: int) -> list:
    """Segments in segments that have the least peak of the law.

    The first segment is the longest one whose stages still have the runs and
    the units they need when it is recomputed; what follows has a unit less,
    for the segment's input. A part that does with fewer runs has fewer.

    Args:
        length: stages in the chain, at most 10 000.
        runs: the most of any stage, the first included; at most 100.

    Returns:
        Segments, as :data:`membudget.checkpointing.Segments`, with the peak
        :func:`peak_of_runs` on the tape machine.

    Raises:
        TypeError: a number that is not whole.
        ValueError: one below 1 or above what is allowed.
    """
    length = whole(length, "the number of stages", 1, MOST)
    runs = whole(runs, "the number of runs", 1, DEEPEST)
    return _binomial(0, length, peak_of_runs(length, runs), 0)


def every_first(length: int, count: int) -> list:
    """The first stages each a segment of its own, the others not.

    For stages whose tapes are large beside their outputs, as the blocks of a
    transformer, that is the best choice of that many stages to run again: what
    is recomputed last is recomputed when all other tapes are gone.

    Args:
        length: stages in the chain.
        count: those that are checkpointed, from none to all.

    Raises:
        TypeError: a number that is not whole.
        ValueError: fewer than one stage or more than 10 000; a count that is
            not from 0 to the length.
    """
    length = whole(length, "the number of stages", 1, MOST)
    count = whole(count, "the number of checkpointed stages", 0, length)
    return [*([stage] for stage in range(count)), *range(count, length)]


def _runs(runs: int) -> int:
    return whole(runs, "the number of runs")


def _longest(peak: int, runs: int, gradient: int) -> int:
    """The most stages; one less where a gradient arrives, which is no unit
    at the loss."""
    return comb(peak + runs - 3, runs) + 1 - gradient


def _binomial(start: int, length: int, peak: int, gradient: int) -> list:
    """Of the stages from ``start`` on, with the fewest runs for this peak."""
    result: list = []
    end = start + length
    while True:
        left, runs = end - start, 1
        while _longest(peak, runs, gradient) < left:
            runs += 1
        if runs == 1:
            return [*result, *range(start, end)]
        size = min(left - 1, _longest(peak, runs - 1, 1))
        result.append(_binomial(start, size, peak, 1))
        start, peak = start + size, peak - 1
