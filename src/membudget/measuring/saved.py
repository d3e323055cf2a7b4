"""Bytes that autograd keeps for the backward pass."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from membudget.checks import told
from membudget.measuring.modules import (
    CHECKPOINT,
    ModuleStack,
    hooked_by_checkpoint,
)
from membudget.measuring.storages import module_tensors, storages, tensors


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
        by_operator: bytes by the outermost public function at work, without
            its underscores (``"linear"``, ``"matmul"`` for ``@``), or by the
            class's name for an ``autograd.Function``. A checkpoint's inputs
            are saved by ``"checkpoint"``; ``""`` is the unknown.

    Raises:
        TypeError: ``exclude`` holds something else.
        RuntimeError: entered twice at once, or inside a function that runs
            under ``torch.utils.checkpoint``, where its hooks would switch the
            checkpointing off or see nothing. Enter it around the
            checkpointed call; it then sees the checkpoint's inputs.

    Example:
        >>> with SavedBytes(model, x) as saved:
        ...     loss = model(x).sum()
        >>> saved.total, saved.by_operator["linear"]

    Leave the block before backward: a reentrant checkpoint saves again, and
    would be counted, when it recomputes. PyTorch applies the innermost pair
    of saved-tensor hooks alone, so another pair entered outside this block
    (``save_on_cpu``) is idle within it. The hooks are those of
    :class:`torch.autograd.graph.saved_tensors_hooks`, and the names those of
    :class:`torch.overrides.TorchFunctionMode`.
    """

    def __init__(self, *exclude: torch.Tensor | nn.Module) -> None:
        self.by_module: dict[str, int] = {}
        self.by_operator: dict[str, int] = {}
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()
        for item in exclude:
            for tensor in _tensors(item):
                self._seen.update(storages(tensor))
        self._savers = _Savers()
        self._functions = _Functions()
        self._modules = ModuleStack(
            *(item for item in exclude if isinstance(item, nn.Module))
        )
        self._exit: ExitStack | None = None

    @property
    def total(self) -> int:
        """Bytes saved so far."""
        return sum(self.by_operator.values())

    def __enter__(self) -> "SavedBytes":
        if self._exit is not None:
            raise RuntimeError(
                "this SavedBytes is counting already: use another one inside"
            )
        if _inside_checkpoint():
            raise RuntimeError(
                "SavedBytes was entered inside a function that runs under "
                f"{CHECKPOINT}: there its hooks would switch the "
                "checkpointing off, or see nothing. Enter it around the "
                "checkpointed call"
            )
        with ExitStack() as stack:
            stack.enter_context(self._modules)
            stack.enter_context(self._functions)
            stack.enter_context(self._savers)
            stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
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
            operator = self._functions.name or self._savers.name(new[0])
            _add(self.by_module, self._modules.name, size)
            _add(self.by_operator, operator, size)
        # Detached: a graph that holds its own output would never be freed.
        return tensor.detach(), tensor._version


def _add(counts: dict[str, int], name: str, size: int) -> None:
    counts[name] = counts.get(name, 0) + size


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
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


class _Functions(TorchFunctionMode):
    """The name of the public function at work; what it calls goes unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.name = _name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = ""


class _Savers:
    """The names of ``autograd.Function`` classes by what they save.

    One saves when its ``forward`` is over: then no frame tells its name. One
    that is to have no backward pass saves nothing and is gone by then.
    """

    def __init__(self) -> None:
        self._by: WeakKeyDictionary[torch.UntypedStorage, WeakKeyDictionary]
        self._by = WeakKeyDictionary()

    def __enter__(self) -> None:
        self._original = original = FunctionCtx.save_for_backward
        by = self._by

        def save_for_backward(ctx, *given):
            name = type(ctx).__name__.removesuffix("Backward")
            if _of_checkpoint(sys._getframe(1)):
                name = "checkpoint"
            for tensor in tensors(given):
                # Where nothing is saved, one may have no storage.
                with suppress(NotImplementedError):
                    for storage in storages(tensor):
                        by.setdefault(storage, WeakKeyDictionary())[ctx] = name
            return original(ctx, *given)

        FunctionCtx.save_for_backward = save_for_backward

    def __exit__(self, *error: object) -> None:
        FunctionCtx.save_for_backward = self._original

    def name(self, storage: torch.UntypedStorage) -> str:
        """Who saves it now; a checkpoint may do so without a Function."""
        names = [*self._by.get(storage, {}).values()]
        if not names and any(map(_of_checkpoint, _frames())):
            return "checkpoint"
        return names[-1] if names else ""


def _name(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__  # a property's
    return name.strip("_")


def _tensors(item: torch.Tensor | nn.Module) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, nn.Module):
        return module_tensors(item)
    raise TypeError(
        f"{type(item).__name__} cannot be excluded: give tensors or modules"
    )


def _frames() -> Iterator[FrameType]:
    """The Python frames at work, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_checkpoint(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == CHECKPOINT


def _inside_checkpoint() -> bool:
    """Whether a checkpointed function runs, for the first time or again."""
    # Composable ones have hooks and no frame.
    return hooked_by_checkpoint() or any(map(_of_checkpoint, _frames()))
