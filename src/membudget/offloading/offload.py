"""Saved tensors that wait in another memory."""

from contextlib import ExitStack
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from membudget.checks import instance, told, whole
from membudget.internals import FakeTensor
from membudget.measuring.saved import (
    excluded,
    keep,
    refuse_inside_checkpoint,
    unchanged,
)
from membudget.measuring.storages import is_wrapper
from membudget.offloading.link import Copy, Handle, Link
from membudget.offloading.places import FileMemory, HostMemory, Pinned


class Offload:
    """Let what autograd saves inside the block wait in another memory.

    Each storage leaves whole and once, when it is first saved. In the
    backward pass it comes back when it is first needed, and goes after its
    last use. Gradients are the same to the last bit. PyTorch's
    ``save_on_cpu`` copies each saved tensor by itself, weights too.

    Around non-reentrant checkpoints only their inputs leave, since the hooks
    see no more, and of these no keyword arguments. On CUDA the copies run
    beside the computation, on a stream of their own, and storages come back
    before they are needed.

    Args:
        *exclude: what is alive anyway and stays: tensors (the batch), or
            modules (their buffers; parameters stay in any case).
        to: where they wait; by default a :class:`HostMemory`.
        ahead: storages that may be on their way, out or in, while a GPU
            computes. They take its memory meanwhile.

    Attributes:
        out: bytes that left.
        back: bytes that came back.

    Raises:
        RuntimeError: entered twice at once, or inside a function that runs
            under ``torch.utils.checkpoint``, where its hooks would switch
            the checkpointing off.
        OSError: in the forward pass, from a file whose disk is full.

    Example:
        >>> with Offload(model, x, y) as moved:
        ...     loss = loss_fn(model(x), y)
        >>> loss.backward()
        >>> moved.out, moved.back

    Under autocast the weights' 16-bit copies leave, as autograd keeps them.
    A tensor subclass that holds others (DTensor), and what is on another
    device than a CPU or CUDA, stays; on ``meta`` bytes are counted, and none
    move. A graph that is kept (``retain_graph``) fetches anew in each pass.
    The hooks are those of
    :class:`torch.autograd.graph.saved_tensors_hooks`.
    """

    def __init__(
        self,
        *exclude: torch.Tensor | nn.Module,
        to: HostMemory | FileMemory | None = None,
        ahead: int = 4,
    ) -> None:
        self.out = self.back = 0
        use = "a HostMemory or a FileMemory"
        to = HostMemory() if to is None else to
        self._place = instance(to, HostMemory | FileMemory, "to", use)
        self._ahead = whole(ahead, "ahead", 0)
        self._stays = excluded(exclude)
        # of each storage that lives, its copies by version
        self._copies: WeakKeyDictionary[
            torch.UntypedStorage, WeakValueDictionary[int, Copy]
        ] = WeakKeyDictionary()
        self._links: dict[torch.device, Link] = {}
        self._exit: ExitStack | None = None

    def __enter__(self) -> "Offload":
        if self._exit is not None:
            raise RuntimeError(
                "this Offload is at work already: use another one inside"
            )
        refuse_inside_checkpoint("Offload")
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        stack, self._exit = self._exit, None
        told(stack).close()

    def _pack(self, tensor: torch.Tensor) -> Handle | tuple:
        if not _movable(tensor) or tensor.untyped_storage() in self._stays:
            return keep(tensor)
        storage, version = tensor.untyped_storage(), tensor._version
        copies = self._copies.setdefault(storage, WeakValueDictionary())
        copy = copies.get(version)
        if copy is None:
            copies[version] = copy = self._leave(storage, tensor.device)
        return Handle(copy, tensor)

    def _leave(
        self, storage: torch.UntypedStorage, device: torch.device
    ) -> Copy:
        slot = self._place.slot(storage.nbytes(), device)
        if device not in self._links:
            beside = self._ahead if isinstance(slot, Pinned) else None
            self._links[device] = Link(device, beside)
        copy = self._links[device].out(storage, slot)
        self.out += copy.size
        return copy

    def _unpack(self, packed: Handle | tuple) -> torch.Tensor:
        if not isinstance(packed, Handle):
            return unchanged(packed)
        self.back += self._links[packed.device].back(packed)
        return packed.take()


def _movable(tensor: torch.Tensor) -> bool:
    """Whether it is one plain storage of a CPU, a GPU or ``meta``.

    And no weight: FSDP gathers one for a while, in memory of its own.
    """
    plain = not is_wrapper(type(tensor)) and tensor.layout is torch.strided
    whole = tensor if tensor._base is None else tensor._base
    return (
        plain
        and not isinstance(whole, nn.Parameter)
        and not isinstance(tensor, FakeTensor)
        and tensor.device.type in ("cpu", "cuda", "meta")
    )
