"""One training step under the tracker."""

from collections.abc import Callable
from functools import partial
from reprlib import repr as short

import torch
from torch import nn

from membudget.checks import flag, function, module, stepper, trained, whole
from membudget.internals import nothing_compiled
from membudget.measuring.tracker import COMPILED, PeakTracker

Loss = Callable[..., object]
"""``loss(model, *batch)``: the mean loss of a batch, as a scalar tensor.

With what the loop keeps alive during the backward pass it is a tuple or list
that begins with the loss, or an object with the loss as its ``loss``.
"""
LOSS = "a function, called as loss(model, *batch)"


def trace_step(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    keep_gradients: bool = False,
    inference: bool = False,
    device: torch.device | str | None = None,
    budget: int | None = None,
) -> PeakTracker:
    """Track one training step: forward, backward, optimizer step.

    A step that is not measured comes first and makes the optimizer's states,
    within the budget, too; both change the model as training steps do.
    Gradients are None before and after the call. The marks say where
    ``"forward"``, ``"backward"`` and ``"step"`` begin.

    A loop that has the model's output in a variable keeps it alive. The loss
    function says so by what it returns: all of it lives until the backward
    pass is over, and is gone when the optimizer steps.

    Args:
        model: a model with trained parameters.
        loss: called as ``loss(model, *batch)``; returns the loss, or the
            loss with what the loop keeps: a tuple or list that begins with
            the loss, or an object with the attribute ``loss``.
        *batch: tensors with the samples along their first dimension; alive
            during the whole step.
        optimizer: steps where it is given.
        micro_batch: samples that run at once; the batch is cut, and the
            gradients are summed with the micro-batches' shares as weights.
        keep_gradients: the gradients stay from step to step, as after
            ``zero_grad(set_to_none=False)``: they are there at the start.
        inference: instead of a step call ``loss(model, *batch)`` once, under
            ``torch.inference_mode()``. It returns anything, which lives
            until the end; nothing has to be trained.
        device: count only what is on it, as :class:`PeakTracker`.
        budget: bytes, as for :class:`PeakTracker`.

    Raises:
        ValueError: a model without trained parameters, a loss that is not a
            scalar tensor with a graph, a micro-batch below 1, a batch that
            cannot be cut into micro-batches, or inference with what only a
            training step has.
        TypeError: something else than a model, a function, an optimizer, a
            whole number of samples, True or False, or tensors in the batch.
        torch.OutOfMemoryError: the budget does not suffice.
        RuntimeError: something compiled is called, as :class:`PeakTracker`.
    """
    module(model), function(loss, "loss", LOSS)
    flag(keep_gradients, "keep_gradients"), flag(inference, "inference")
    if optimizer is not None:
        stepper(optimizer)
    only_tensors(batch)
    if inference:
        only_forward(optimizer, micro_batch, keep_gradients)
        model.zero_grad()
        tracker = PeakTracker(model, *batch, device=device, budget=budget)
        with tracker, torch.inference_mode():
            tracker.mark("forward")
            kept = loss(model, *batch)
        del kept  # alive until here
        return tracker
    use = "hand over the model of the step, or ask for inference=True"
    trained(model, use)
    samples = size = 1  # as one, however many they are
    if micro_batch is not None:
        samples, size = samples_of(batch), whole(micro_batch, "micro_batch")

    def step(mark: Callable[[str], None]) -> None:
        for start in range(0, samples, size):
            part = batch
            if size < samples:
                part = tuple(t[start : start + size] for t in batch)
            mark("forward")
            value, kept = parts_of(loss(model, *part))
            mark("backward")
            if size < samples:
                value = value * (len(part[0]) / samples)
            value.backward()
            del value, kept
        if optimizer is not None:
            mark("step")
            optimizer.step()
        model.zero_grad(set_to_none=not keep_gradients)

    model.zero_grad()
    existing = [model, *([optimizer] if optimizer else []), *batch]
    track = partial(PeakTracker, *existing, device=device, budget=budget)
    try:
        with nothing_compiled(COMPILED) if budget is None else track():
            step(lambda label: None)
        with track() as tracker:
            step(tracker.mark)
    finally:
        model.zero_grad()
    return tracker


def only_tensors(batch: tuple) -> None:
    """Refuse what is no tensor.

    Raises:
        TypeError: something else than tensors in the batch.
    """
    for item in batch:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"the batch holds {type(item).__name__}: hand over tensors "
                "(unpack lists with *), and leave the rest to the loss "
                "function"
            )


def samples_of(batch: tuple[torch.Tensor, ...]) -> int:
    """How many samples the batch has.

    Raises:
        ValueError: no tensors, or tensors that have none or not the same
            number.
    """
    counts = {len(t) if t.ndim else 0 for t in batch}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"the batch's tensors have the shapes "
            f"{[tuple(t.shape) for t in batch]}: use the same number of "
            "samples, at least 1, along the first dimension of each, and "
            "leave the rest to the loss function"
        )
    return counts.pop()


def only_forward(
    optimizer: object, micro_batch: object, keep_gradients: bool
) -> None:
    """Refuse what inference has not.

    Raises:
        ValueError: an optimizer, micro-batches or gradients.
    """
    for name, given in (
        ("optimizer", optimizer is not None),
        ("micro_batch", micro_batch is not None),
        ("keep_gradients", keep_gradients),
    ):
        if given:
            raise ValueError(
                f"inference has no backward pass and no step: leave out "
                f"{name}, or inference"
            )


def parts_of(returned: object) -> tuple[torch.Tensor, object]:
    """The loss, and what lives beside it: None if it is alone.

    Raises:
        ValueError: no loss among it.
    """
    if isinstance(returned, torch.Tensor):
        return _checked(returned), None
    if hasattr(returned, "loss"):
        return _checked(returned.loss), returned
    if isinstance(returned, tuple | list) and returned:
        return _checked(returned[0]), returned
    return _checked(returned), None


def _checked(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"the loss function returned {short(value)}: return the loss, a "
            "scalar tensor, alone or first in a tuple or as .loss"
        )
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"the loss has the shape {tuple(value.shape)} and "
            f"requires_grad={value.requires_grad}: return a scalar that was "
            "computed from the model's parameters"
        )
    return value
