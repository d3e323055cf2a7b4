"""The peak tracker: live bytes after every operator."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakTracker(TorchDispatchMode):
    """Count the bytes of every tensor storage that is alive, and their peak.

    Inside the ``with`` block each operator's new storages are added, once
    each, and subtracted when the last tensor that uses them is gone. Views
    share a storage and count once. The count is exact in requested bytes, on
    any device; an allocator rounds each request up.

    Args:
        *existing: tensors that are alive before the block and belong to the
            account (parameters, gradients, optimizer states, the batch).
            Other tensors from outside the block, and views of them, are not
            counted.

    Attributes:
        start: bytes of ``existing``.
        live: bytes alive now.
        peak: the most bytes alive after any operator, ``start`` included.
        timeline: bytes alive after each operator, in order.
        marks: ``(index, label)`` pairs set by :meth:`mark`.

    Example:
        >>> with PeakTracker(*model.parameters()) as tracker:
        ...     model(x).sum().backward()
        >>> tracker.peak - tracker.start

    Storages that are resized in place (as FSDP does) keep the size they were
    first seen with.
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.timeline: list[int] = []
        self.marks: list[tuple[int, str]] = []
        self._storages: dict[int, weakref.finalize] = {}
        for tensor in existing:
            self._add(tensor)
        self.start = self.live

    def mark(self, label: str) -> None:
        """Remember that ``label`` begins at the next operator."""
        self.marks.append((len(self.timeline), label))

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.finalize(
            storage, self._remove, key, size
        )
        self.live += size
        self.peak = max(self.peak, self.live)

    def _remove(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        if func is torch.ops.aten.lift_fresh.default:
            inputs = set()  # torch.tensor(...) hands its new tensor over so
        foreign = inputs - self._storages.keys()
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in foreign:
                self._add(tensor)
        self.timeline.append(self.live)
        return result


def _tensors(tree) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
