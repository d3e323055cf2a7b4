"""What is used of PyTorch's process groups beyond the public interface."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import debug
from torch.utils._python_dispatch import TorchDispatchMode

from membudget import TORCH


@contextmanager
def fake_group(ranks: int, rank: int) -> Iterator[None]:
    """A process group of which only one rank exists.

    Its collectives return at once and move nothing.

    Raises:
        RuntimeError: this PyTorch has none, or there is a group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "this process is in a process group already: simulate in a "
            "process of its own, or after destroy_process_group()"
        )
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no {error.name}, which the "
            f"simulation needs: use torch {TORCH[0]} to {TORCH[1]}, or start "
            "real ranks with membudget.sharding.Ranks"
        ) from error
    _forget_meshes()
    dist.init_process_group(
        "fake", rank=rank, world_size=ranks, store=FakeStore()
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """DTensor's rules keep meshes, and a mesh of another rank is the same to
    them: a new one would send in groups that are gone."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


class Waits(TorchDispatchMode):
    """Waiting for a collective returns what was waited for, also of a fake
    tensor, for which PyTorch makes another one."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def real_meshes() -> Iterator[None]:
    """FSDP of what is sliced joins two meshes; their tensors of ranks are
    real under ``FakeTensorMode``, too."""
    join = getattr(DeviceMesh, "_concatenate", None)
    if join is None:  # before it was so
        yield
        return

    def joined(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(meshes)

    with patch.object(DeviceMesh, "_concatenate", staticmethod(joined)):
        yield


def offloads(model: nn.Module) -> bool:
    """Whether a shard of FSDP2 waits in the CPU's memory."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            several = hasattr(state, "_fsdp_param_groups")  # since 2.12
            groups = state._fsdp_param_groups if several else ()
            for group in groups or [state._fsdp_param_group]:
                policy = getattr(group, "offload_policy", None)
                if isinstance(policy, CPUOffloadPolicy):
                    return True
    return False
