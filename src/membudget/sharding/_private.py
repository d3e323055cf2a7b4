"""What is used of PyTorch beyond its public interface, in one place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def fake_mode():
    """``FakeTensorMode``: tensors with a shape and a device, and no memory.

    Raises:
        RuntimeError: this PyTorch has none.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise RuntimeError(_lacks("torch._subclasses.fake_tensor")) from error
    return FakeTensorMode()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of ``FakeTensorMode``."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@contextmanager
def fake_group(ranks: int, rank: int) -> Iterator[None]:
    """A process group of which only one rank exists.

    Its collectives return at once and move nothing.

    Raises:
        RuntimeError: this PyTorch has none, or there is a group already.
    """
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "this process is in a process group already: simulate in a "
            "process of its own, or after destroy_process_group()"
        )
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RuntimeError(
            _lacks("torch.testing._internal.distributed.fake_pg")
        ) from error
    dist.init_process_group(
        "fake", rank=rank, world_size=ranks, store=FakeStore()
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _lacks(name: str) -> str:
    return (
        f"torch {torch.__version__} has no {name}, which the simulation "
        "needs: use torch 2.11 to 2.15, or start real ranks with "
        "membudget.sharding.Ranks"
    )
