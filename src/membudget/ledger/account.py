"""The ledger of any model, from the model itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from membudget.checks import whole
from membudget.ledger.lines import peak_at, peak_lines
from membudget.ledger.recipes import States
from membudget.measuring import PeakTracker, dry_run, format_bytes, replay
from membudget.measuring.allocator import Usage
from membudget.measuring.tracker import BEFORE

Loss = Callable[..., object]


@dataclass(frozen=True)
class Account:
    """What one step of a model needs; nothing of it was allocated.

    Attributes:
        states: parameters and buffers, gradients, optimizer states; in
            inference there are no gradients.
        activations: bytes that autograd and variables hold when the forward
            pass is over.
        by_module: the activations by the module that made them.
        peak: the most bytes alive.
        split: bytes at the peak by category.
        moment: the operator, module and phase of the peak; empty words
            where nothing needs more than what was there before.
        tracker: everything else.
    """

    states: States
    activations: int
    by_module: dict[str, int]
    peak: int
    split: dict[str, int]
    moment: tuple[str, str, str]
    tracker: PeakTracker

    @cached_property
    def usage(self) -> Usage:
        """The same step in the blocks of PyTorch's allocator for CUDA.

        The peaks, in bytes, of what is requested, of the blocks that are
        allocated for it, and of the segments that are reserved, by
        :func:`membudget.measuring.replay`. Everything that exists before the
        step is allocated first, in the order of the tracker.
        """
        allocator = replay(self.tracker.events)
        return Usage(
            allocator.peak_requested,
            allocator.peak_allocated,
            allocator.peak_reserved,
        )


def account(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    keep_gradients: bool = False,
    inference: bool = False,
    on: torch.device | str = "cpu",
) -> Account:
    """The ledger of a training step, or of inference, by a dry run.

    Say what the loop keeps; a loop that keeps more needs more.

    Args:
        model: on any device; one on ``meta`` takes no memory.
        loss: called as ``loss(model, *batch)``; the mean loss, or a tuple
            that begins with it or an object that has it as ``loss``, which
            lives until the backward pass is over.
        *batch: tensors, on ``meta`` too, with the samples along their first
            dimension.
        optimizer: of the model's parameters; its states are made in the dry
            run.
        micro_batch: samples that run at once.
        keep_gradients: the gradients stay from step to step, as after
            ``zero_grad(set_to_none=False)``.
        inference: only ``loss(model, *batch)``, under
            ``torch.inference_mode()``; what it returns lives until the end.
        on: the device that ``meta`` stands for.

    Raises:
        ValueError: a model that does not run without data, and what
            :func:`membudget.measuring.dry_run` refuses.
    """
    try:
        tracker = dry_run(
            model,
            loss,
            *batch,
            optimizer=optimizer,
            micro_batch=micro_batch,
            keep_gradients=keep_gradients,
            inference=inference,
            on=on,
        )
    except (RuntimeError, UnsupportedOperatorException) as error:
        unknown = NotImplementedError, UnsupportedOperatorException
        if not isinstance(error, unknown) and "fake impl" not in str(error):
            raise  # "fake impl" is missing from an operator of one's own
        raise ValueError(
            f"{type(model).__name__} does not run without data: {error}. Use "
            "operators that PyTorch knows on meta, or measure a real step "
            "with membudget.measuring.trace_step"
        ) from error
    marks = [index for index, label in tracker.marks if label == "backward"]
    marks.append(len(tracker.timeline))  # inference has no backward pass
    forward = tracker.at(marks[0] - 1)
    by_module: dict[str, int] = {}
    for a in forward:
        if a.category == "activations":
            name = a.operator.module
            by_module[name] = by_module.get(name, 0) + a.bytes
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = 0 if inference else sum(p.nbytes for p in trained)
    start = tracker.split(-1)
    moment = tracker.peak_moment
    at = tracker.operators[moment] if moment >= 0 else BEFORE
    return Account(
        states=States(start["parameters"], gradients, start["optimizer"]),
        activations=sum(by_module.values()),
        by_module=by_module,
        peak=tracker.peak,
        split=tracker.split(),
        moment=(at.name, at.module, at.phase),
        tracker=tracker,
    )


def largest_batch(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    limit: int,
    optimizer: torch.optim.Optimizer | None = None,
    on: torch.device | str = "cpu",
) -> int:
    """The most samples whose step stays within a memory limit.

    Dry runs of 2, 4 and 7 samples give the peak as a maximum of straight
    lines (:func:`peak_lines`), which is solved for the batch; dry runs of
    the answer and of one sample more confirm it. Where the bytes are not
    straight lines, dry runs halve the interval.

    Args:
        *batch: an example; its first dimension is replaced.
        limit: bytes.
        others: as for :func:`account`.

    Raises:
        ValueError: not even one sample fits, a limit that is not a positive
            whole number, and what :func:`account` refuses.
    """
    whole(limit, "limit")
    runs: dict[int, PeakTracker] = {}

    def run(size: int) -> PeakTracker:
        if size not in runs:
            parts = [
                torch.empty((size, *t.shape[1:]), dtype=t.dtype, device="meta")
                for t in batch
            ]
            runs[size] = account(
                model, loss, *parts, optimizer=optimizer, on=on
            ).tracker
        return runs[size]

    if run(1).peak > limit:
        raise ValueError(
            f"a step with one sample needs {format_bytes(run(1).peak)}, more "
            f"than the limit of {format_bytes(limit)}: use a smaller model "
            "or sample, activation checkpointing, or an optimizer with "
            "fewer states"
        )
    try:
        sizes = (2, 4, 7)
        lines = peak_lines(sizes, [run(n).timeline for n in sizes])
        size = min(
            ((limit - line.constant) // line.slope)
            for line in lines
            if line.slope > 0
        )
        size = max(size, 1)
        fits = peak_at(lines, size) <= limit >= run(size).peak
        if fits and run(size + 1).peak > limit:
            return size
    except ValueError:
        pass
    high = 2
    while run(high).peak <= limit:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if run(middle).peak <= limit:
            low = middle
        else:
            high = middle
    return low
