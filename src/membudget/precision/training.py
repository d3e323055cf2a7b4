"""A training step in 16 bits, in the right order."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import nn

from membudget.checks import (
    flag,
    function,
    number,
    scalar_loss,
    stepper,
    trained,
)
from membudget.precision.devices import support
from membudget.precision.formats import FORMATS, format_of
from membudget.stepping import Stepping, backward, finite_loss

TRAINED = ("fp32", "bf16", "fp16")
"""The formats that autocast takes (fp32: it does nothing)."""


@dataclass(frozen=True)
class ScaledStep:
    """What happened in one step.

    Attributes:
        norm: of the gradient, unscaled, before clipping; not finite after
            an overflow.
        scale: the loss scale of this step, 1 without a scaler.
        clipped: whether the gradient was clipped.
        stepped: False where an overflow was met and the step skipped.
    """

    norm: float
    scale: float
    clipped: bool
    stepped: bool


class MixedPrecision(Stepping):
    """Autocast and the loss scale of a training loop.

    The order is: forward under :meth:`autocast`, :meth:`backward` (scales
    the loss) outside, once for each micro-batch, then :meth:`step`: unscale,
    clip, step, update the scale, clear the gradients. With
    :class:`membudget.accumulation.Accumulator` use :meth:`autocast` and hand
    over :attr:`scaler`; the accumulator does the rest. Checkpointing needs
    nothing: a recomputation runs under the autocast of its forward pass.

    Args:
        optimizer: of fp32 parameters; its ``step`` needs no closure.
        format: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        max_norm: clip the unscaled gradient to this norm.
        scaler: for fp16 alone; by default a new ``torch.amp.GradScaler``.
            One that is switched off trains without a loss scale. It is
            this loop's alone: each step updates it.
        emulated: whether a format that the device only emulates will do
            (:func:`membudget.precision.support`): for learning, not for
            speed.

    Attributes:
        scaler: the ``GradScaler`` under fp16, else None.

    Raises:
        ValueError: an unknown format or one that cannot train, a format that
            the device does not have, a scaler under bf16 or fp32, a
            ``max_norm`` that is not above zero, parameters that are not in
            fp32, or an optimizer without parameters or that needs a closure.

    Example:
        >>> precision = MixedPrecision(optimizer, "fp16", max_norm=1.0)
        >>> for x, y in loader:
        ...     with precision.autocast():
        ...         loss = loss_fn(model(x), y)
        ...     precision.backward(loss)
        ...     report = precision.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        format: str = "bf16",
        *,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        emulated: bool = False,
    ) -> None:
        super().__init__(optimizer, scaler, max_norm)
        flag(emulated, "emulated")
        parameters = self.parameters()
        self.format = _trainable(format)
        self.device = parameters[0].device
        _fp32(parameters)
        _allowed(self.format, self.device, emulated)
        if scaler is not None and self.format != "fp16":
            raise ValueError(
                f"a scaler is for fp16: {self.format} has the exponents of "
                "fp32, so no gradient falls below its range. Leave the "
                "scaler out"
            )
        if self.format == "fp16" and scaler is None:
            self.scaler = torch.amp.GradScaler(self.device.type)
        self._begun = self._unscaled = False

    def autocast(self) -> AbstractContextManager:
        """``torch.autocast`` in the format, for the forward pass."""
        return torch.autocast(
            self.device.type,
            FORMATS["bf16" if self.format == "fp32" else self.format].dtype,
            enabled=self.format != "fp32",
        )

    def backward(self, loss: torch.Tensor, share: float = 1.0) -> None:
        """Scale the loss and add its gradient.

        An error of the backward pass itself (out of memory) clears the
        gradients: begin the step again.

        Args:
            loss: scalar, in fp32 or fp64, the mean over the micro-batch.
                Reading whether it is finite waits for the device.
            share: of this micro-batch in the step, n_k / N; the shares of a
                step add up to 1.

        Raises:
            ValueError: a loss that is not a finite fp32 scalar with a graph,
                or a share that is not in (0, 1].
            RuntimeError: autocast is active, the gradient is unscaled
                already, or an optimizer steps in the backward pass.
        """
        if torch.is_autocast_enabled(self.device.type):
            raise RuntimeError(
                "backward runs under autocast: leave the block after the "
                "loss. The backward pass takes each operator's own format"
            )
        if self._unscaled:
            raise RuntimeError(
                "the gradient is unscaled already, and another scaled one "
                "cannot be added: run every micro-batch before unscale()"
            )
        _checked(loss)
        share = number(share, "share, n_k / N,", above=0, most=1)
        try:
            backward(self._scaled(loss * share), self.parameters())
        except BaseException:
            self._clear()
            raise
        self._begun = True

    def unscale(self) -> float:
        """Divide the gradient by the loss scale, and return its norm.

        :meth:`step` does so by itself; call it to look at the gradient, or
        to change it, before the step.

        Raises:
            RuntimeError: no backward pass came before, or the gradient is
                unscaled already.
        """
        if self._unscaled:
            raise RuntimeError(
                "the gradient is unscaled already, and would be too small by "
                "the loss scale: call unscale() once, before step()"
            )
        self._unscale()
        return self._norm().item()

    def step(self) -> ScaledStep:
        """Unscale, clip, step, update the scale, clear the gradients.

        After an overflow the parameters stay as they are, the scale falls
        and the gradients are cleared. They are cleared after an error in the
        optimizer, too, which may have updated some parameters.

        Raises:
            RuntimeError: no backward pass came before, or the gradient is
                not finite and there is no scaler.
        """
        if not self._unscaled:
            self._unscale()
        norm = self._norm()
        value, limit = norm.item(), self.max_norm or inf
        scale = self.scaler.get_scale() if self.scaler else 1.0
        stepped = False
        try:
            if self.scaler or isfinite(value):
                self._clip(norm)
                stepped = self._step()
        except BaseException:
            if self.scaler:  # it counts the gradient as unscaled still
                self.scaler.update(self.scaler.get_scale())
            raise
        finally:
            self._clear()
        if not stepped and not self.scaler:
            raise RuntimeError(
                f"the gradient has norm {value}, and without a scaler no step "
                "is skipped for it: the gradient is cleared, the parameters "
                "are as before. Lower the learning rate, or look for the "
                "operator that overflows"
            )
        return ScaledStep(value, scale, stepped and value > limit, stepped)

    def _unscale(self) -> None:
        if not self._begun:
            raise RuntimeError(
                "there is no gradient: run backward(loss) before, for every "
                "micro-batch of the step"
            )
        self._with_gradients()
        super()._unscale()
        self._unscaled = True

    def _clear(self) -> None:
        self._begun = self._unscaled = False
        self.optimizer.zero_grad()


class MasterWeights:
    """A bf16 model, and the fp32 copies that its optimizer steps.

    The recipe ``"master"`` of :data:`membudget.ledger.RECIPES`
    (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1).

    Args:
        model: in fp32; it is cast to bf16, its buffers too.
        optimizer: makes one from the list of copies.

    Attributes:
        copies: the fp32 weights, one for each trained parameter.
        optimizer: theirs.

    Raises:
        ValueError: a model that is not in fp32 or without trained
            parameters.

    Example:
        >>> master = MasterWeights(model, torch.optim.AdamW)
        >>> loss_fn(model(x), y).backward()
        >>> master.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.weights = trained(model, "hand over one that is to be trained")
        function(optimizer, "optimizer")
        _fp32(self.weights)
        self.copies = [p.detach().clone() for p in self.weights]
        made = optimizer(self.copies)
        self.optimizer = stepper(made, "what optimizer made")
        model.to(torch.bfloat16)

    def step(self) -> None:
        """Step the copies, round them into the model, clear the gradients.

        Raises:
            RuntimeError: no parameter has a gradient.
        """
        if all(p.grad is None for p in self.weights):
            raise RuntimeError(
                "no parameter has a gradient: run a backward pass before"
            )
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if weight.grad is not None:
                copy.grad = weight.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)
                weight.grad = copy.grad = None


def _trainable(format: str) -> str:
    if format_of(format).name in TRAINED:
        return format
    raise ValueError(
        f"autocast does not take {format}: use one of {', '.join(TRAINED)}"
        + (
            ". tf32 is switched on with membudget.precision.tf32"
            if format == "tf32"
            else ""
        )
    )


def _allowed(format: str, device: torch.device, emulated: bool) -> None:
    found = support(format, device)
    if found == "absent":
        raise ValueError(
            f"{device} cannot multiply matrices in {format}: use fp16 on a "
            "GPU that has no bf16, otherwise fp32"
        )
    if found == "emulated" and not emulated:
        raise ValueError(
            f"{device} only emulates {format}: the numbers are right, the "
            "speed is not that of 16 bits. Use another format "
            "(membudget.precision.support tells which is native), or say "
            "emulated=True"
        )


def _fp32(parameters: Sequence[torch.Tensor]) -> None:
    others = {p.dtype for p in parameters} - {torch.float32}
    if others:
        raise ValueError(
            f"some parameters are {', '.join(map(str, others))}: leave the "
            "model in fp32 (no model.half()); autocast casts what it needs"
        )


def _checked(loss: torch.Tensor) -> None:
    if scalar_loss(loss).dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the loss is {loss.dtype}: it has two or three digits, and in "
            "fp16 the gradient that enters it, a loss scale of 65 536, is "
            "infinite. Compute it in fp32, from output.float()"
        )
    finite_loss(loss)
