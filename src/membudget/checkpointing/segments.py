"""Segments: which stages are forgotten together and recomputed together."""

from collections.abc import Sequence
from math import isqrt

from membudget.checks import listed, whole

MOST = 10_000
"""Stages in a chain that is written down."""


def no_segments(length: int) -> list:
    """Nothing is checkpointed: every stage keeps its tape.

    Args:
        length: stages in the chain, at most 10 000.
    """
    return list(range(_length(length, MOST)))


def equal_segments(length: int, count: int) -> list:
    """Balanced segments, all of them checkpointed, longer ones first.

    Args:
        length: stages in the chain, at most 10 000.
        count: segments, from one to as many as stages.
    """
    length, count = _counts(length, count, MOST)
    small, longer = divmod(length, count)
    return segments_of([small + (i < longer) for i in range(count)])


def pytorch_segments(length: int, count: int) -> list:
    """The split of ``torch.utils.checkpoint.checkpoint_sequential``.

    ``count - 1`` segments of ⌊length/count⌋ stages; what remains, the last
    segment, is not checkpointed.

    Args:
        length, count: as for :func:`equal_segments`.
    """
    length, count = _counts(length, count, MOST)
    size = length // count
    start = size * (count - 1)
    return [*segments_of([size] * (count - 1)), *range(start, length)]


def segments_of(sizes: Sequence[int]) -> list:
    """Checkpointed segments of these sizes, one after the other.

    Args:
        sizes: stages of each, at least 1; 10 000 in all at most.
    """
    result, start = [], 0
    for size in listed(sizes, "the sizes", "sizes of segments", 0):
        size = whole(size, "a segment's size", 1, MOST - start)
        result.append(list(range(start, start + size)))
        start += size
    return result


# Theory, for a chain of equal layers, in units


def peak_of_segments(length: int, count: int) -> int:
    """Units alive at the peak of :func:`equal_segments`.

    It is count + ⌊(length + 1)/count⌋, which is count + length/count where
    the count divides the length. One segment, or none (count 0), has the
    peak of no checkpointing, length + 1. Derived in chapter 4; the usual
    count + ⌈length/count⌉ is the same or one more.

    Source of the idea: Chen et al. 2016, arXiv 1604.06174, section 4.1.
    """
    length, count = _counts(length, count, least=0)
    if count == 0:
        return length + 1
    return length + 1 if count == 1 else count + (length + 1) // count


def least_peak(length: int) -> int:
    """The least of :func:`peak_of_segments`: ⌈2√(length + 2)⌉ − 1.

    Derived in chapter 4. It is ⌈2√length⌉, or one less. (2 for one stage.)
    """
    length = _length(length)
    return 2 if length == 1 else isqrt(4 * length + 7)


def _length(length: int, most: int | None = None) -> int:
    return whole(length, "the number of stages", 1, most)


def _counts(
    length: int, count: int, most: int | None = None, least: int = 1
) -> tuple[int, int]:
    """Of stages and of segments."""
    length = _length(length, most)
    count = whole(count, "the number of segments", None)
    if not least <= count <= length:
        raise ValueError(
            f"{count} segments for {length} stages: use 1 to {length}"
        )
    return length, count
