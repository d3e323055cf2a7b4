"""One training step under the tracker."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from reprlib import repr as short

import torch
from torch import nn

from membudget.checks import flag, function, module, plain_step, trained, whole
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
        micro_batch: samples that run at once, at least 1; the batch is cut,
            and the gradients are summed with the micro-batches' shares as
            weights.
        keep_gradients: the gradients stay from step to step, as after
            ``zero_grad(set_to_none=False)``: the step begins with them.
        inference: instead of a step call ``loss(model, *batch)`` once, under
            ``torch.inference_mode()``. It returns anything, which lives
            until the end; nothing has to be trained.
        device: count only what is on it, as :class:`PeakTracker`.
        budget: bytes, as for :class:`PeakTracker`.

    Raises:
        ValueError: a model without trained parameters, a loss that is not a
            scalar tensor with a graph, a batch that cannot be cut into
            micro-batches, or inference with what only a training step has.
        torch.OutOfMemoryError: the budget does not suffice.
        RuntimeError: something compiled is called, as :class:`PeakTracker`.
    """
    if optimizer is not None:
        plain_step(optimizer)
    step = Step(
        model,
        loss,
        batch,
        optimizer,
        micro_batch=micro_batch,
        keep_gradients=keep_gradients,
        inference=inference,
    )
    model.zero_grad()
    existing = [model, *([optimizer] if optimizer else []), *batch]
    track = partial(PeakTracker, *existing, device=device, budget=budget)
    try:
        if not inference:
            with nothing_compiled(COMPILED) if budget is None else track():
                step()
        with track() as tracker:
            kept = step(tracker.mark)
        del kept  # alive until here
    finally:
        model.zero_grad()
    return tracker


@dataclass
class Step:
    """One training step, or a call without a backward pass, to be watched.

    The arguments are those of :func:`trace_step`. The gradients are None
    before the first call, and None or kept after each.
    """

    model: nn.Module
    loss: Loss
    batch: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer | None = None
    _: KW_ONLY
    micro_batch: int | None = None
    keep_gradients: bool = False
    inference: bool = False

    def __post_init__(self) -> None:
        module(self.model), function(self.loss, "loss", LOSS)
        flag(self.keep_gradients, "keep_gradients")
        flag(self.inference, "inference")
        only_tensors(self.batch)
        if self.inference:
            only_forward(self.optimizer, self.micro_batch, self.keep_gradients)
            return
        use = "hand over the model of the step, or ask for inference=True"
        trained(self.model, use)
        self.samples = self.size = 1  # as one, however many they are
        if self.micro_batch is not None:
            if any(t.is_nested for t in self.batch):
                raise ValueError(
                    "a nested tensor cannot be cut into micro-batches: pad "
                    "it (to_padded_tensor), or leave out micro_batch"
                )
            self.samples = samples_of(self.batch)
            self.size = whole(self.micro_batch, "micro_batch")

    def __call__(
        self, mark: Callable[[str], None] = lambda label: None
    ) -> object:
        """Take it; ``mark`` is told what begins.

        Returns:
            What inference returns; None after a training step.
        """
        if self.inference:
            with torch.inference_mode():
                mark("forward")
                return self.loss(self.model, *self.batch)
        for start in range(0, self.samples, self.size):
            self._pass(start, mark)
        if self.optimizer is not None:
            mark("step")
            self.optimizer.step()
        self.model.zero_grad(set_to_none=not self.keep_gradients)
        return None

    def _pass(self, start: int, mark: Callable[[str], None]) -> None:
        part, whole_batch = self.batch, self.size >= self.samples
        if not whole_batch:
            part = tuple(t[start : start + self.size] for t in self.batch)
        mark("forward")
        value, kept = parts_of(self.loss(self.model, *part))
        mark("backward")
        if not whole_batch:
            value = value * (len(part[0]) / self.samples)
        value.backward()
        del value, kept


def only_tensors(batch: tuple) -> None:
    """Refuse what is no tensor."""
    for item in batch:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"the batch holds {type(item).__name__}: hand over tensors "
                "(unpack lists with *), and leave the rest to the loss "
                "function"
            )


def samples_of(batch: tuple[torch.Tensor, ...]) -> int:
    """How many samples the batch has: at least 1, and as many each tensor."""
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
    """Refuse what belongs to training alone."""
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
    """The loss, and what lives beside it: None if it is alone."""
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
