"""Bytes that autograd keeps for the backward pass."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from types import FrameType
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from membudget.checks import instance, told
from membudget.measuring.modules import (
    CHECKPOINT,
    ModuleStack,
    hooked_by_checkpoint,
)
from membudget.measuring.storages import module_tensors, storages


class SavedBytes:
    """Count the bytes autograd saves for backward inside the block.

    Each storage counts once, with all of its bytes and for the first who
    saved it, however many operators save it later. A tensor saved by an
    operator is held by the graph until backward has used it, or until nothing
    holds the operator's result; it stays counted. What an
    ``autograd.Function`` keeps as a plain attribute is not seen.

    Args:
        *exclude: what is alive anyway and is not to be counted: tensors
            (the batch), or modules (their parameters and buffers).

    Attributes:
        by_module: bytes by the innermost module at work, as
            :class:`ModuleStack` names it: by its path below the outermost
            module called or an excluded one (``"blocks.0.up"``), by its
            class for the outermost itself and for a module that is not below
            it, and ``""`` for what no module saved (a loss function, say).
            Modules of the same name, in two models, add up.

    Raises:
        RuntimeError: entered twice at once, or inside a function that runs
            under ``torch.utils.checkpoint``, where its hooks would switch the
            checkpointing off or see nothing. Enter it around the
            checkpointed call; it then sees the checkpoint's inputs.

    Example:
        >>> with SavedBytes(model, x) as saved:
        ...     loss = model(x).sum()
        >>> saved.total, saved.by_module["blocks.0.up"]

    Leave the block before backward: a reentrant checkpoint saves again, and
    would be counted, when it recomputes. PyTorch applies the innermost pair
    of saved-tensor hooks alone, so another pair entered outside this block
    (``save_on_cpu``) is idle within it. The hooks are those of
    :class:`torch.autograd.graph.saved_tensors_hooks`.
    """

    def __init__(self, *exclude: torch.Tensor | nn.Module) -> None:
        self.by_module: dict[str, int] = {}
        self._seen = excluded(exclude)
        models = [item for item in exclude if isinstance(item, nn.Module)]
        self._modules = ModuleStack(*models)
        self._exit: ExitStack | None = None

    @property
    def total(self) -> int:
        """Bytes saved so far."""
        return sum(self.by_module.values())

    def __enter__(self) -> "SavedBytes":
        if self._exit is not None:
            raise RuntimeError(
                "this SavedBytes is counting already: use another one inside"
            )
        refuse_inside_checkpoint("SavedBytes")
        with ExitStack() as stack:
            stack.enter_context(self._modules)
            stack.enter_context(saved_tensors_hooks(self._pack, unchanged))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        stack, self._exit = self._exit, None
        told(stack).close()

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        new = [s for s in storages(tensor) if s not in self._seen]
        self._seen.update(new)
        size = sum(storage.nbytes() for storage in new)
        if size:
            name = self._modules.name
            self.by_module[name] = self.by_module.get(name, 0) + size
        return keep(tensor)


def excluded(
    items: Iterable[torch.Tensor | nn.Module],
) -> WeakSet[torch.UntypedStorage]:
    """The storages of tensors, and of modules' parameters and buffers."""
    found: WeakSet[torch.UntypedStorage] = WeakSet()
    for item in items:
        use = "tensors and modules (unpack lists with *)"
        instance(item, torch.Tensor | nn.Module, "what to exclude", use)
        many = isinstance(item, nn.Module)
        for tensor in module_tensors(item) if many else [item]:
            found.update(storages(tensor))
    return found


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What a pack hook returns for a tensor that stays where it is."""
    # Detached: a graph that holds its own output would never be freed.
    return tensor.detach(), tensor._version


def unchanged(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The saved tensor; PyTorch leaves checking its version to the hooks."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been "
            f"modified by an inplace operation: a {tensor.dtype} tensor of "
            f"shape {tuple(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor


def refuse_inside_checkpoint(name: str) -> None:
    """Refuse to set hooks where a checkpoint's own are at work.

    Raises:
        RuntimeError: a checkpointed function runs.
    """
    if _inside_checkpoint():
        raise RuntimeError(
            f"{name} was entered inside a function that runs under "
            f"{CHECKPOINT}: there its hooks would switch the "
            "checkpointing off, or see nothing. Enter it around the "
            "checkpointed call"
        )


def _inside_checkpoint() -> bool:
    """Whether a checkpointed function runs, for the first time or again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == CHECKPOINT:
            return True
        frame = frame.f_back
    return hooked_by_checkpoint()  # composable ones have hooks and no frame
