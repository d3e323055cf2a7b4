"""What a window costs: peak bytes, weights, steps per epoch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from membudget.accumulation.partition import NORMALISATIONS, partition
from membudget.accumulation.snapshot import buffer_copies
from membudget.checks import (
    function,
    instance,
    listed,
    module,
    one_of,
    plain_step,
    scalar_loss,
    whole,
)
from membudget.ledger import PeakLine, peak_at, peak_lines
from membudget.measuring import PeakTracker, optimizer_tensors

TRACED = 2, 4, 7
"""Micro-batch sizes that are run: two for the lines, and a third, with which
bytes that do not grow in proportion are noticed."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one optimizer step of a model, at every micro-batch size.

    Attributes:
        parameters: bytes of the parameters and, twice, of the buffers, of
            which a :class:`Window` keeps a copy.
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
        micro_batch = whole(micro_batch, "micro_batch")
        steps = whole(steps, "steps")
        lines = self.alone if steps == 1 else self.later
        return int(peak_at(lines, micro_batch))


def footprint(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss: Callable[[nn.Module, int], torch.Tensor],
) -> Footprint:
    """Trace a window at a few small sizes, for the peak at all of them.

    Args:
        build: makes the model and its optimizer anew.
        loss: the mean loss of a new micro-batch of the given size; what it
            makes, the inputs included, is counted.

    Raises:
        ValueError: as :func:`peak_lines`.
    """
    function(build, "build"), function(loss, "loss")

    def after_a_step() -> tuple[nn.Module, torch.optim.Optimizer]:
        """The optimizer has its states."""
        use = "a pair, the model and its optimizer"
        pair = listed(build(), "what build returned", use, 0)
        if len(pair) != 2:
            raise ValueError(f"build returned {len(pair)} things: use {use}")
        model, optimizer = module(pair[0]), plain_step(pair[1])
        scalar_loss(loss(model, TRACED[0])).backward()
        optimizer.step()
        return model, optimizer

    def trace(size: int, steps: int) -> PeakTracker:
        model, optimizer = after_a_step()
        optimizer.zero_grad()
        with PeakTracker(model, optimizer) as tracker:
            copies = buffer_copies(model)
            for _ in range(steps):
                loss(model, size).backward()
            optimizer.step()
            optimizer.zero_grad()
            del copies
        return tracker

    with torch.random.fork_rng():
        alone, later = (
            peak_lines(TRACED, [trace(n, steps).timeline for n in TRACED])
            for steps in (1, 2)
        )
        model, optimizer = after_a_step()
    with PeakTracker(*model.buffers()) as kept:
        buffer_copies(model)
    trained = [p for p in model.parameters() if p.grad is not None]
    return Footprint(
        parameters=sum(p.nbytes for p in model.parameters()) + kept.peak,
        gradients=sum(p.grad.nbytes for p in trained),
        optimizer=sum(t.nbytes for t in optimizer_tensors(optimizer)),
        alone=alone,
        later=later,
    )


@dataclass(frozen=True)
class Plan:
    """A global batch cut into micro-batches, and what follows from it.

    Args:
        global_batch: samples for one optimizer step.
        micro_batch: samples in a full micro-batch.
        samples: samples in an epoch.
        footprint: the model's bytes.
        normalisation: one of :data:`NORMALISATIONS`.
    """

    global_batch: int
    micro_batch: int
    samples: int
    footprint: Footprint
    normalisation: str = "window"

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "samples"):
            object.__setattr__(self, name, whole(getattr(self, name), name))
        instance(self.footprint, Footprint, "footprint", "a Footprint")
        one_of(self.normalisation, NORMALISATIONS, "normalisation")

    @property
    def steps(self) -> int:
        """Micro-batches in the window."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def largest(self) -> int:
        """Samples in the first micro-batch."""
        return min(self.micro_batch, self.global_batch)

    @property
    def last(self) -> int:
        """Samples in the last micro-batch: the remainder, if there is one."""
        return self.global_batch - (self.steps - 1) * self.largest

    @property
    def sizes(self) -> list[int]:
        """Samples in each micro-batch, the remainder last."""
        parts = partition(self.global_batch, self.micro_batch)
        return [part.stop - part.start for part in parts]

    def sample_weight(self, size: int) -> float:
        """Weight of one sample of a micro-batch of this size, in the gradient.

        With K micro-batches, N samples in the window and n in this one it is
        1/N for ``"window"``, 1/(K·n) for ``"mean of means"`` and 1/n for
        ``"no division"``.
        """
        size = whole(size, "size")
        if self.normalisation == "window":
            return 1 / self.global_batch
        if self.normalisation == "mean of means":
            return 1 / (self.steps * size)
        return 1 / size

    @property
    def peak(self) -> int:
        """Peak bytes of the window: of its first micro-batch, or of the
        largest after it, which adds to the gradients that are there."""
        first = self.footprint.peak(self.largest, 1)
        if self.steps == 1:
            return first
        after = self.largest if self.steps > 2 else self.last
        return max(first, self.footprint.peak(after, 2))

    @property
    def whole_peak(self) -> int:
        """Peak bytes of the whole batch at once."""
        return self.footprint.peak(self.global_batch, 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; the last window may be partial."""
        return -(-self.samples // self.global_batch)
