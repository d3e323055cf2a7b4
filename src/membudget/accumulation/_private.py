"""What is used of DDP beyond its public interface."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def forget_iteration(model: nn.Module) -> None:
    """Bring a model back to before a forward pass.

    DDP expects a backward pass after a forward pass that synchronises, and
    it may not have come.
    """
    if isinstance(model, DistributedDataParallel):
        model.reducer._reset_state()


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
