"""The link between a device and another memory: copies out and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from weakref import WeakSet, finalize, ref

import torch

from membudget.checks import told
from membudget.offloading.places import Slot


class Copy:
    """A storage in another memory."""

    def __init__(self, slot: Slot, size: int, number: int) -> None:
        self.slot, self.size, self.number = slot, size, number
        self.handles: WeakSet[Handle] = WeakSet()

    @property
    def awaited(self) -> bool:
        """Whether it is yet to come back, for the first time."""
        waiting = [h for h in self.handles if not h.taken]
        return bool(waiting) and waiting[0].data is None


class Handle:
    """What the graph holds in place of a saved tensor."""

    def __init__(self, copy: Copy, tensor: torch.Tensor) -> None:
        self.copy, self.device = copy, tensor.device
        self.data: torch.Tensor | None = None  # the copy, once it is back
        self.copied: torch.cuda.Event | None = None
        self.taken = False
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        copy.handles.add(self)

    def take(self) -> torch.Tensor:
        """The tensor; the handle lets go of it."""
        data, self.data, self.taken = told(self.data), None, True
        empty = torch.empty(0, dtype=self._dtype, device=data.device)
        return empty.set_(data.untyped_storage(), *self._view)


class Link:
    """Takes the storages of one device out and back.

    Args:
        device: where their data belongs.
        ahead: storages that may be on their way, on a stream of their own,
            while the device computes; None for copies that are over at once.
    """

    def __init__(self, device: torch.device, ahead: int | None) -> None:
        self._device, self._ahead = device, ahead or 0
        self._stream = None if ahead is None else torch.cuda.Stream(device)
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._order: list[ref[Copy]] = []

    def out(self, storage: torch.UntypedStorage, slot: Slot) -> Copy:
        """Copy a storage into a slot."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        copy = Copy(slot, storage.nbytes(), len(self._order))
        self._order.append(ref(copy))
        data = torch.empty(0, dtype=torch.uint8, device=self._device)
        data.set_(storage)
        copied = self._copy(data, slot.write)
        if copied is not None:  # the source stays until the copy is over
            self._leaving.append((data, copied))
            self._settle(self._ahead)
        return copy

    def back(self, handle: Handle) -> int:
        """Bring back what the handle stands for, and on a GPU what is next.

        Returns:
            Bytes that were copied.
        """
        self._settle(0)
        copied = 0
        if handle.data is None:
            handle.taken = False
            copied += self._fetch(handle.copy)
        for copy in self._next(handle.copy):
            copied += self._fetch(copy)
        if handle.copied is not None:
            self._after(handle.copied)
        return copied

    def _next(self, copy: Copy) -> list[Copy]:
        """What left before the copy and is yet to come back."""
        first = max(0, copy.number - self._ahead)
        before = (ref() for ref in self._order[first : copy.number][::-1])
        return [c for c in before if c is not None and c.awaited]

    def _fetch(self, copy: Copy) -> int:
        """Each handle holds the data until it is unpacked; their bytes."""
        data = torch.empty(copy.size, dtype=torch.uint8, device=self._device)
        copied = self._copy(data, copy.slot.read)
        if copied is not None:  # a graph that goes before it is used
            finalize(data, self._after, copied).atexit = False
        for handle in copy.handles:
            if not handle.taken:
                handle.data, handle.copied = data, copied
        return copy.size

    def _copy(
        self, data: torch.Tensor, run: Callable[[torch.Tensor], None]
    ) -> torch.cuda.Event | None:
        """Copy; on a stream of its own after what the device is told."""
        if self._stream is None:
            run(data)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run(data)
            return self._stream.record_event()

    def _settle(self, most: int) -> None:
        """Let all but ``most`` of what leaves go, once its copy is over."""
        while len(self._leaving) > most:
            self._after(self._leaving.popleft()[1])

    def _after(self, copied: torch.cuda.Event) -> None:
        """Let what the device is told from now on wait for a copy."""
        torch.cuda.current_stream(self._device).wait_event(copied)
