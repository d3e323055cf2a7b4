"""What a window may change before its step, and how to take it back."""

from collections.abc import Sequence

import torch
from torch import nn

from membudget.accumulation._private import forget_iteration


class Snapshot:
    """What a window may change before its step, as it was at the start."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.scaler = scaler
        self.buffers = [(m, dict(m._buffers)) for m in model.modules()]
        self.copies = buffer_copies(model)
        self.cpu_random = torch.get_rng_state()
        self.cuda_random = (
            torch.cuda.get_rng_state_all()
            if torch.cuda.is_initialized()
            else []
        )
        self.scale = scaler.state_dict()  # empty where it is off
        self.synchronise_buffers = getattr(
            model, "require_forward_param_sync", None
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put it all back, and clear the gradients."""
        model, scaler = self.model, self.scaler
        forget_iteration(model)
        for parameter in (*model.parameters(), *self.parameters):
            parameter.grad = None
        if self.synchronise_buffers is not None:
            model.require_forward_param_sync = self.synchronise_buffers
        for buffer, value in self.copies.items():
            _put_back(buffer, value)
        for module, buffers in self.buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        torch.set_rng_state(self.cpu_random)
        if self.cuda_random:
            torch.cuda.set_rng_state_all(self.cuda_random)
        if self.scale:
            # A scaler forgets that it unscaled when it is given a scale,
            # which it takes once it has scaled something.
            device = self.parameters[0].device
            scaler.scale(torch.ones((), device=device))
            scaler.update(self.scale["scale"])
            scaler.load_state_dict(self.scale)


def buffer_copies(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """A copy of every buffer, whatever it is for, and once if it is shared.

    A forward pass may write to any of them, and by then it is too late.
    """
    return {b: b.detach().clone() for b in model.buffers()}


def _put_back(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write only where something changed: a view may refuse to be written."""
    if (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        buffer.data = value
    elif value.is_sparse or not torch.equal(buffer, value):
        buffer.copy_(value)
