"""Segments: which stages are forgotten together and recomputed together."""

from collections.abc import Sequence
from math import isqrt


def no_segments(length: int) -> list:
    """Nothing is checkpointed: every stage keeps its tape.

    Raises:
        ValueError: a length below 1.
    """
    _check_length(length)
    return list(range(length))


def equal_segments(length: int, count: int) -> list:
    """Balanced segments, all of them checkpointed, longer ones first.

    Args:
        length: stages in the chain.
        count: segments.

    Raises:
        ValueError: fewer than one segment or more than stages.
        TypeError: numbers that are not whole.
    """
    _check_count(length, count)
    small, longer = divmod(length, count)
    return segments_of([small + (i < longer) for i in range(count)])


def pytorch_segments(length: int, count: int) -> list:
    """The split of ``torch.utils.checkpoint.checkpoint_sequential``.

    ``count - 1`` segments of ⌊length/count⌋ stages; what remains, the last
    segment, is not checkpointed.

    Raises:
        as :func:`equal_segments`.
    """
    _check_count(length, count)
    size = length // count
    start = size * (count - 1)
    return [*segments_of([size] * (count - 1)), *range(start, length)]


def segments_of(sizes: Sequence[int]) -> list:
    """Checkpointed segments of these sizes, one after the other.

    Raises:
        ValueError: a size below 1.
    """
    result, start = [], 0
    for size in sizes:
        _whole("a segment's size", size)
        if size < 1:
            raise ValueError(
                f"the sizes {list(sizes)} hold {size}: a segment has at "
                "least one stage"
            )
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

    Raises:
        as :func:`equal_segments`, but for a count of 0.
    """
    _check_length(length)
    _whole("the number of segments", count)
    if count == 0:
        return length + 1
    _check_count(length, count)
    return length + 1 if count == 1 else count + (length + 1) // count


def least_peak(length: int) -> int:
    """The least of :func:`peak_of_segments`: ⌈2√(length + 2)⌉ − 1.

    Derived in chapter 4. It is ⌈2√length⌉, or one less. (2 for one stage.)

    Raises:
        ValueError: a length below 1.
        TypeError: it is not whole.
    """
    _check_length(length)
    return 2 if length == 1 else isqrt(4 * length + 7)


def _whole(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: use a whole number")


def _check_length(length: int) -> None:
    _whole("the number of stages", length)
    if length < 1:
        raise ValueError(f"the chain has {length} stages: use at least 1")


def _check_count(length: int, count: int) -> None:
    _check_length(length)
    _whole("the number of segments", count)
    if not 1 <= count <= length:
        raise ValueError(
            f"{count} segments for {length} stages: use 1 to {length}"
        )
