"""The peak at every micro-batch size: a maximum of straight lines."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from membudget.checks import listed, number, whole


class PeakLine(NamedTuple):
    """Bytes alive at one moment of a step: ``constant + slope * size``."""

    constant: int
    slope: int


def peak_lines(
    sizes: Sequence[int], timelines: Sequence[Sequence[int]]
) -> list[PeakLine]:
    """The lines whose maximum is the peak at every micro-batch size.

    At each moment of a step the live bytes are a constant (parameters,
    gradients, optimizer states) plus a multiple of the micro-batch size
    (activations). Two timelines give both for every moment, and a third
    shows that it is so; the peak is the maximum over the moments, so it is
    convex and piecewise affine in the size. Moments that are never the
    maximum are left out.

    Args:
        sizes: two or more different micro-batch sizes.
        timelines: bytes alive after each operator
            (:attr:`membudget.measuring.PeakTracker.timeline`) at each size.

    Raises:
        ValueError: operators that differ between the sizes, or bytes that
            are not affine in the size.
    """
    sizes = [
        whole(size, "a size") for size in listed(sizes, "sizes", "sizes", 0)
    ]
    timelines = [
        [
            whole(live, "the bytes of a timeline", 0)
            for live in listed(line, "a timeline", "bytes")
        ]
        for line in listed(timelines, "timelines", "timelines", 0)
    ]
    if not 2 <= len(sizes) == len(timelines) == len(set(sizes)):
        raise ValueError(
            "give two or more different sizes and a timeline for each"
        )
    first, *others = timelines
    for size, other in zip(sizes[1:], others, strict=True):
        if len(other) != len(first):
            raise ValueError(
                f"{len(first)} operators ran at size {sizes[0]} and "
                f"{len(other)} at size {size}: use sizes at which the step "
                "runs alike"
            )
    lines = set()
    for moment in zip(*timelines, strict=True):
        slope = (moment[1] - moment[0]) // (sizes[1] - sizes[0])
        line = PeakLine(moment[0] - slope * sizes[0], slope)
        if any(
            line.constant + slope * size != live
            for size, live in zip(sizes, moment, strict=True)
        ):
            raise ValueError(
                f"the bytes at sizes {', '.join(map(str, sizes))} are not a "
                "constant plus a multiple of the size: measure each size "
                "with a PeakTracker instead"
            )
        lines.add(line)
    return _envelope(lines)


def _envelope(lines: Iterable[PeakLine]) -> list[PeakLine]:
    """Lines that are the maximum at some size >= 1, by rising slope."""
    kept: list[tuple[PeakLine, float]] = []  # each with where it begins
    for line in sorted(lines, key=lambda line: (line.slope, line.constant)):
        begin = 1.0
        while kept:
            last, last_begin = kept[-1]
            if line.slope == last.slope:
                begin = last_begin
            else:
                crossing = last.constant - line.constant
                begin = max(1.0, crossing / (line.slope - last.slope))
            if begin > last_begin:
                break
            kept.pop()
        kept.append((line, begin))
    return [line for line, _ in kept]


def peak_at(lines: Iterable[PeakLine], size: float) -> float:
    """Peak bytes at a micro-batch size: the maximum of the lines.

    Args:
        lines: of :func:`peak_lines`, or pairs of whole numbers; one or more.
        size: above 0; where two lines cross, it need not be whole.
    """
    size = number(size, "the size", above=0)
    lines = listed(lines, "lines", "lines of peak_lines")
    return max(
        constant + slope * size for constant, slope in map(_line, lines)
    )


def _line(line: PeakLine) -> PeakLine:
    numbers = listed(line, "a line", "whole numbers", 2)
    if len(numbers) > 2:
        raise ValueError("a line has more than two numbers: use a PeakLine")
    return PeakLine(*(whole(n, "a number of a line", None) for n in numbers))
