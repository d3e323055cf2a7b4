"""What a window costs: peak bytes, weights, steps per epoch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from membudget.accumulation.partition import (
    _whole,
    partition,
    sample_weights,
)
from membudget.measuring import PeakTracker


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
        ValueError: fewer than two sizes, operators that differ between the
            sizes, or bytes that are not affine in the size.
    """
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


def peak_at(lines: Iterable[PeakLine], size: int) -> int:
    """Peak bytes at a micro-batch size: the maximum of the lines."""
    return max(constant + slope * size for constant, slope in lines)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one optimizer step of a model, at every micro-batch size.

    Attributes:
        parameters: bytes of the parameters.
        gradients: bytes of one gradient of the trained parameters.
        optimizer: bytes of the optimizer's states.
        alone: peak lines of a window with one micro-batch.
        later: peak lines of a window with several, where the summed gradient
            is alive during every forward pass but the first.
    """

    parameters: int
    gradients: int
    optimizer: int
    alone: Sequence[PeakLine]
    later: Sequence[PeakLine]

    def peak(self, micro_batch: int, steps: int) -> int:
        """Peak bytes with ``steps`` micro-batches of at most this size."""
        return peak_at(self.alone if steps == 1 else self.later, micro_batch)


def footprint(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss: Callable[[nn.Module, int], torch.Tensor],
    sizes: Sequence[int] = (2, 4, 7),
) -> Footprint:
    """Trace a window at a few small sizes, for the peak at all of them.

    Args:
        build: makes the model and its optimizer anew.
        loss: the mean loss of a new micro-batch of the given size; what it
            makes, the inputs included, is counted.
        sizes: the micro-batch sizes that are run, two or more. With a third
            one, bytes that do not grow in proportion are noticed.

    Raises:
        ValueError: as :func:`peak_lines`.
    """

    def trace(size: int, steps: int) -> PeakTracker:
        model, optimizer = build()
        loss(model, size).backward()
        optimizer.step()  # makes the states
        optimizer.zero_grad()
        with PeakTracker(*model.parameters(), *states(optimizer)) as tracker:
            for _ in range(steps):
                loss(model, size).backward()
            optimizer.step()
            optimizer.zero_grad()
        return tracker

    with torch.random.fork_rng():
        alone, later = (
            peak_lines(sizes, [trace(n, steps).timeline for n in sizes])
            for steps in (1, 2)
        )
        model, optimizer = build()
        loss(model, sizes[0]).backward()
        optimizer.step()
    trained = [p for p in model.parameters() if p.grad is not None]
    return Footprint(
        parameters=sum(p.nbytes for p in model.parameters()),
        gradients=sum(p.grad.nbytes for p in trained),
        optimizer=sum(t.nbytes for t in states(optimizer)),
        alone=alone,
        later=later,
    )


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors an optimizer holds."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


@dataclass(frozen=True)
class Plan:
    """A global batch cut into micro-batches, and what follows from it.

    Args:
        global_batch: samples for one optimizer step.
        micro_batch: samples in a full micro-batch.
        samples: samples in an epoch.
        footprint: the model's bytes.
        normalisation: one of :data:`NORMALISATIONS`.

    Raises:
        ValueError: a size that is not a whole number of at least 1, or an
            unknown normalisation.
    """

    global_batch: int
    micro_batch: int
    samples: int
    footprint: Footprint
    normalisation: str = "window"

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "samples"):
            _whole(getattr(self, name), name)
        sample_weights(self.sizes, self.normalisation)

    @property
    def sizes(self) -> list[int]:
        """Samples in each micro-batch, the remainder last."""
        parts = partition(self.global_batch, self.micro_batch)
        return [part.stop - part.start for part in parts]

    @property
    def sample_weights(self) -> list[float]:
        """Weight of one sample of each micro-batch in the gradient."""
        return sample_weights(self.sizes, self.normalisation)

    @property
    def peak(self) -> int:
        """Peak bytes of the window.

        With a remainder and only one full micro-batch it is a bound from
        above, as if the remainder were full.
        """
        return self.footprint.peak(self.sizes[0], len(self.sizes))

    @property
    def whole_peak(self) -> int:
        """Peak bytes of the whole batch at once."""
        return self.footprint.peak(self.global_batch, 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; the last window may be partial."""
        return -(-self.samples // self.global_batch)
