"""What the command uses of PyTorch beyond the public interface.

It may be imported while a script imports torch, so it imports little.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "in_backward",
    "on_cuda",
    "snapshot_of",
    "tree_flatten",
    "tree_unflatten",
]


def in_backward() -> bool:
    """Whether a node of autograd is at work in this thread."""
    return torch._C._current_autograd_node() is not None


def on_cuda(observer: Callable[[int, int, int, int], None]) -> None:
    """Call the observer where CUDA's allocator gives up, before it raises.

    It is called with the device's index and bytes: of the segment that was
    asked for, of the device, and of its free memory. It begins when the
    script initialises CUDA, which this does not. The allocator's history is
    recorded without stacks, which would cost time at each allocation. Where
    the allocator is another one than PyTorch's, it may have neither.
    """

    def begin() -> None:
        with suppress(RuntimeError):
            torch._C._cuda_attach_out_of_memory_observer(observer)
            torch.cuda.memory._record_memory_history(
                "state", context=None, max_entries=100
            )

    if torch.backends.cuda.is_built():
        torch.cuda._lazy_call(begin)


def snapshot_of(device: int) -> tuple[dict[str, Any], int | None]:
    """The allocator's snapshot, and the bytes that it has last refused.

    A second snapshot no longer tells what was refused.
    """
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][device]
    refused = [e["size"] for e in events if e["action"] == "oom"]
    return snapshot, refused[-1] if refused else None
