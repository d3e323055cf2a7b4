"""What is used of FSDP2 and DDP beyond their public interface."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from membudget import TORCH


def _guarded(function: Callable) -> Callable:
    """Say which versions are known, where PyTorch is another one inside."""

    @wraps(function)
    def guarded(model: nn.Module) -> object:
        try:
            return function(model)
        except AttributeError as error:
            raise RuntimeError(
                f"torch {torch.__version__} keeps what a backward pass leaves "
                f"in another way ({error}): accumulate with fully_shard and "
                f"DDP under torch {TORCH[0]} to {TORCH[1]}"
            ) from error

    return guarded


@_guarded
def unsharded_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients that ``fully_shard`` keeps outside ``param.grad``.

    Raises:
        RuntimeError: this PyTorch keeps them elsewhere.
    """
    found = {}
    for group in _groups(model):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            for gradient in (
                parameter.unsharded_accumulated_grad,
                getattr(whole, "grad", None),
            ):
                if gradient is not None:  # from 2.15 on they are the same
                    found[id(gradient)] = gradient
    return list(found.values())


@_guarded
def forget_iteration(model: nn.Module) -> None:
    """Bring a model back to before a forward pass.

    An error in the middle of a backward pass leaves ``fully_shard`` where it
    was: it would reduce nothing in the next one. Its gradients go. DDP
    expects a backward pass after a forward pass that synchronises, and it may
    not have come.

    Raises:
        RuntimeError: this PyTorch keeps its state elsewhere.
    """
    if isinstance(model, DistributedDataParallel):
        model.reducer._reset_state()
    for module in _sharded_modules(model):
        if module._get_fsdp_state()._is_root:
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
            else:
                _reset(module._get_fsdp_state())
    for group in _groups(model):
        for parameter in group.fsdp_params:
            if not _is_property(parameter, "unsharded_accumulated_grad"):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


@contextmanager
def unsynchronised(
    model: nn.Module, group: "dist.ProcessGroup | None"
) -> Iterator[None]:
    """No rank waits for another one in here; DDP's buffers begin as rank 0's.

    DDP itself would send them in the first forward pass, which a rank that
    runs out of memory may not reach.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    if model.broadcast_buffers:
        for buffer in model.module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
    model.require_forward_param_sync = False
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = True


def _reset(root: Any) -> None:
    """What ``reset_iter_state`` does from torch 2.13 on."""
    if root._device.type != "cpu":
        root._device_handle.synchronize()
    shared = root._comm_ctx
    shared.all_gather_state = None
    shared.post_forward_order.clear()
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
    else:
        shared.reduce_scatter_state = None
    for state in root._state_ctx.all_states:
        state._training_state = type(state._training_state).IDLE
        state._modules_to_run_forward.clear()
        for group in _groups_of(state):
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._partial_reduce_output = None
            group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _is_property(thing: object, name: str) -> bool:
    return isinstance(getattr(type(thing), name, None), property)


def _sharded_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]


def _groups(model: nn.Module) -> Iterable:
    """What ``fully_shard`` gathers together, once each."""
    states = (m._get_fsdp_state() for m in _sharded_modules(model))
    return {id(g): g for s in states for g in _groups_of(s)}.values()


def _groups_of(state: Any) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = state._fsdp_param_group  # torch 2.11
    return [group] if group else []
