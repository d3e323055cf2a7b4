"""The link between a device and another memory: copies out and back."""

from __future__ import annotations

from collections import deque
from weakref import WeakSet, ref

import torch

from membudget.checks import told
from membudget.offloading.places import Slot


class Piece:
    """A storage in another memory."""

    def __init__(self, slot: Slot, size: int, number: int) -> None:
        self.slot, self.size, self.number = slot, size, number
        self.handles: WeakSet[Handle] = WeakSet()

    @property
    def here(self) -> bool:
        """Whether a handle waits with its data."""
        return any(handle.data is not None for handle in self.handles)


class Handle:
    """What the graph holds in place of a saved tensor."""

    def __init__(self, piece: Piece, tensor: torch.Tensor) -> None:
        self.piece, self.device = piece, tensor.device
        self.data: torch.Tensor | None = None  # the piece, once it is back
        self.copied: torch.cuda.Event | None = None
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        piece.handles.add(self)

    def take(self) -> torch.Tensor:
        """The tensor; the handle lets go of it."""
        data, self.data = told(self.data), None
        empty = torch.empty(0, dtype=self._dtype, device=data.device)
        return empty.set_(data.untyped_storage(), *self._view)


class Link:
    """Copies the pieces of one device.

    Args:
        device: where their data belongs.
        ahead: pieces that may be on their way, on a stream of their own,
            while the device computes; None for copies that are over at once.
    """

    def __init__(self, device: torch.device, ahead: int | None) -> None:
        self._device, self._ahead = device, ahead or 0
        self._stream = None if ahead is None else torch.cuda.Stream(device)
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._order: list[ref[Piece]] = []

    def out(self, storage: torch.UntypedStorage, slot: Slot) -> Piece:
        """Copy a storage into a slot."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        piece = Piece(slot, storage.nbytes(), len(self._order))
        self._order.append(ref(piece))
        data = torch.empty(0, dtype=torch.uint8, device=self._device)
        data.set_(storage)
        copied = self._copy(data, slot.write)
        if copied is not None:  # the source stays until the copy is over
            self._leaving.append((data, copied))
            self._settle(self._ahead)
        return piece

    def back(self, handle: Handle) -> int:
        """Bring back what the handle stands for, and on a GPU what is next.

        Returns:
            Bytes that were copied.
        """
        self._settle(0)
        wanted = [] if handle.data is not None else [handle.piece]
        if self._stream is not None:
            wanted += self._next(handle.piece)
        for piece in wanted:
            self._fetch(piece)
        if handle.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(handle.copied)
        return sum(piece.size for piece in wanted)

    def _next(self, piece: Piece) -> list[Piece]:
        """What left before the piece, and is not back."""
        first = max(0, piece.number - self._ahead)
        before = (ref() for ref in self._order[first : piece.number][::-1])
        return [p for p in before if p is not None and not p.here]

    def _fetch(self, piece: Piece) -> None:
        """Each of its handles holds the data until it is unpacked."""
        data = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
        copied = self._copy(data, piece.slot.read)
        for handle in piece.handles:
            handle.data, handle.copied = data, copied

    def _copy(self, data, copy) -> torch.cuda.Event | None:
        """Copy; on a stream of its own after what the device is told."""
        if self._stream is None:
            copy(data)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy(data)
            return self._stream.record_event()

    def _settle(self, most: int) -> None:
        """Let all but ``most`` of what leaves go, once its copy is over."""
        while len(self._leaving) > most:
            copied = self._leaving.popleft()[1]
            torch.cuda.current_stream(self._device).wait_event(copied)
