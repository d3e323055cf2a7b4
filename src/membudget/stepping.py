"""What the training loops of several rooms share."""

from math import isfinite

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from membudget.checks import (
    scalar_loss,
)


def backward(loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """A micro-batch's backward pass, in which no optimizer may step.

    Raises:
        RuntimeError: one is about to, as from a hook on the gradients.
    """
    ours = {id(p) for p in parameters}

    def refuse(stepping: torch.optim.Optimizer, *_: object) -> None:
        if ours.isdisjoint(map(id, parameters_of(stepping))):
            return
        raise RuntimeError(
            f"{type(stepping).__name__} steps in the backward pass, from a "
            "hook on the gradients, so it would step once for each "
            "micro-batch: remove the hook, and let this loop take the step. "
            "Or keep the hook, and accumulate nothing"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        loss.backward()
    finally:
        handle.remove()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer trains."""
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"]]


def finite_loss(loss: torch.Tensor) -> float:
    """The value of a loss from which a backward pass can start.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has several elements or none, no graph, or it is not
            finite.
    """
    value = scalar_loss(loss).item()
    if not isfinite(value):
        raise ValueError(
            f"the loss is {value}: a finite one is needed, and no loss scale "
            "makes it one. Look for an overflow in the forward pass, a too "
            "high learning rate, or a micro-batch of padding only"
        )
    return value
