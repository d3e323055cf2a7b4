"""The ledger of any model, from the model itself."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from membudget.ledger.recipes import States
from membudget.measuring import PeakTracker, dry_run, replay
from membudget.measuring.allocator import Usage
from membudget.measuring.step import Loss
from membudget.measuring.tracker import BEFORE


@dataclass(frozen=True)
class Account:
    """What one step of a model needs; nothing of it was allocated.

    Attributes:
        states: parameters and buffers, gradients, optimizer states; in
            inference there are no gradients.
        activations: bytes that autograd and variables hold when the forward
            pass of the first micro-batch is over.
        by_module: the activations by the module that made them; ``""`` is
            outside of all.
        peak: the most bytes alive, as they were requested.
        split: bytes at the peak by category.
        moment: the operator, module and phase of the peak; empty words
            where nothing needs more than what was there before.
        tracker: the dry run's tracker.
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
    estimate: bool = False,
) -> Account:
    """The ledger of a training step, or of inference, by a dry run.

    The loop of this account sets its gradients to None, and keeps alive what
    the loss function returns, nothing else. Say so where yours keeps more.
    Memory in kernels, workspaces and the CUDA context are not in it.

    Args:
        model: on any device; one on ``meta`` takes no memory.
        loss: called as ``loss(model, *batch)``; the mean loss, or a tuple
            that begins with it or an object that has it as ``loss``, which
            lives until the backward pass is over.
        *batch: tensors, on ``meta`` too, with the samples along their first
            dimension.
        others: as for :func:`membudget.measuring.trace_step` and
            :func:`membudget.measuring.dry_run`.

    Raises:
        ValueError: a model that does not run without data, and what
            :func:`membudget.measuring.dry_run` refuses.
        RuntimeError: something compiled is called.
    """
    tracker = dry_run(
        model,
        loss,
        *batch,
        optimizer=optimizer,
        micro_batch=micro_batch,
        keep_gradients=keep_gradients,
        inference=inference,
        on=on,
        estimate=estimate,
    )
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
