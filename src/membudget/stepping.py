"""What the training loops of several rooms share: how a step ends."""

from math import inf, isfinite

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from membudget.checks import (
    instance,
    number,
    plain_step,
    scalar_loss,
    stepper,
)


class Stepping:
    """An optimizer with the loss scale and the clipping of its steps.

    Args:
        optimizer: its ``step`` needs no closure.
        scaler: a ``torch.amp.GradScaler``, for fp16; one that is switched
            off counts as none.
        max_norm: clip the gradient to this norm.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: an optimizer without parameters or that needs a closure,
            or a ``max_norm`` that is not above zero.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
    ) -> None:
        self.optimizer = stepper(optimizer)
        if scaler is not None:
            kind = torch.amp.GradScaler
            instance(scaler, kind, "scaler", "a torch.amp.GradScaler or None")
        if not self.parameters():
            raise ValueError(
                "the optimizer has no parameters: "
                "give it those of the model that are to be trained"
            )
        plain_step(optimizer)
        if max_norm is not None:
            max_norm = number(max_norm, "max_norm", above=0, infinite=True)
        self.scaler = scaler if scaler and scaler.is_enabled() else None
        self.max_norm = max_norm

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer trains."""
        return parameters_of(self.optimizer)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss) if self.scaler else loss

    def _with_gradients(self) -> list[nn.Parameter]:
        """Those of the parameters that have a gradient."""
        found = [p for p in self.parameters() if p.grad is not None]
        if not found:
            raise RuntimeError(
                "no parameter of the optimizer has a gradient: give the "
                "optimizer the parameters of the model that made the loss"
            )
        return found

    def _unscale(self) -> None:
        if self.scaler:
            self.scaler.unscale_(self.optimizer)

    def _norm(self) -> torch.Tensor:
        """Of the gradient; of the whole one, where it is sharded."""
        numbers = [_values(p.grad) for p in self._with_gradients()]
        return full(nn.utils.get_total_norm(numbers))

    def _clip(self, norm: torch.Tensor) -> None:
        if norm.item() > (self.max_norm or inf):
            nn.utils.clip_grads_with_norm_(
                self.parameters(), self.max_norm, norm
            )

    def _step(self) -> bool:
        """Take the optimizer's step; False where an overflow forbids it."""
        if not self.scaler:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before > 0


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


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The value that all ranks share, where a tensor is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers in a gradient, which may be a sparse tensor."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
