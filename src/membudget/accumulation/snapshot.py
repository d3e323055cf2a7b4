"""What a window may change before its step, and how to take it back."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class Snapshot:
    """What a window may change before its step, as it was at the start."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler | None,
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
        self.scale = scaler.state_dict() if scaler else None
        self.synchronise_buffers = getattr(
            model, "require_forward_param_sync", None
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put it all back, and clear the gradients."""
        model, scaler = self.model, self.scaler
        for parameter in (*model.parameters(), *self.parameters):
            parameter.grad = None
        _clear_sharded(model)
        if self.synchronise_buffers is not None:
            # DistributedDataParallel expects a backward pass after a forward
            # pass that synchronises, and it may not have come.
            model.require_forward_param_sync = self.synchronise_buffers
            model.reducer._reset_state()
        for buffer, value in self.copies.items():
            _put_back(buffer, value)
        for module, buffers in self.buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        torch.set_rng_state(self.cpu_random)
        if self.cuda_random:
            torch.cuda.set_rng_state_all(self.cuda_random)
        if scaler:
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


def unsharded_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients that ``fully_shard`` keeps outside ``param.grad``."""
    found = []
    for parameter in _sharded(model):
        whole = getattr(parameter, "_unsharded_param", None)
        found += (
            parameter.unsharded_accumulated_grad,
            getattr(whole, "grad", None),
        )
    return [gradient for gradient in found if gradient is not None]


def _clear_sharded(model: nn.Module) -> None:
    for parameter in _sharded(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _sharded(model: nn.Module) -> Iterable:
    """What ``fully_shard`` keeps of each parameter, once."""
    found = {}
    for module in model.modules():
        if not hasattr(module, "set_requires_gradient_sync"):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups or [state._fsdp_param_group]:
            for parameter in group.fsdp_params if group else []:
                found[id(parameter)] = parameter
    return found.values()
