"""A checkpoint in twenty lines, to be read."""

import torch
from torch import nn

from membudget.checks import instance, module


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.rng = run, _rng_state(x)
        ctx.save_for_backward(x, *parameters)
        return run(x)  # without a graph: PyTorch records nothing in here

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            _set_rng_state(x, ctx.rng)
            y = ctx.run(x)
        trained = [t for t in (x, *parameters) if t.requires_grad]
        found = torch.autograd.grad(y, trained, gradient, allow_unused=True)
        found = iter(found)
        return None, *(
            next(found) if t.requires_grad else None for t in (x, *parameters)
        )


def checkpoint_by_hand(segment: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``segment(x)``, recomputed in the backward pass.

    What ``torch.utils.checkpoint`` does, at its core. It does less: nothing
    may be kept in between, it is no use where gradients of gradients are
    asked, autocast is not restored, a buffer that changes (batch norm) does
    so twice, the recomputation does not stop early. The output of the segment
    stays alive while it goes backward, and so do the gradients of all its
    parameters, which are added at the end.

    Args:
        segment: takes one tensor and returns one.
        x: its input.

    Raises:
        TypeError: a segment that is no module, or an input that is no tensor.
    """
    module(segment, "the segment"), instance(x, torch.Tensor, "x", "a tensor")
    return _Checkpoint.apply(segment, x, *segment.parameters())


def _rng_state(x: torch.Tensor) -> list[torch.Tensor]:
    """The states of the generators that may be used on this device."""
    states = [torch.get_rng_state()]
    if x.is_cuda:
        states.append(torch.cuda.get_rng_state(x.device))
    return states


def _set_rng_state(x: torch.Tensor, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, x.device)
