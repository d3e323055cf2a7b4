"""Another memory: that of the host, or a file."""

import bisect
import errno
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Protocol

import numpy as np
import torch

from membudget.checks import instance
from membudget.measuring import format_bytes


class Slot(Protocol):
    """Bytes of another memory, until nothing holds the slot."""

    def write(self, data: torch.Tensor) -> None:
        """Copy ``data`` here: uint8, contiguous, of the slot's size."""

    def read(self, data: torch.Tensor) -> None:
        """Copy what was written into ``data``."""


class HostMemory:
    """The host's memory.

    What comes from a GPU lies in pinned memory, which the system cannot swap
    and a GPU reads while it computes; PyTorch rounds it up to a power of 2.
    On a CPU it is NumPy's, so that neither the tracker nor PyTorch's
    allocator counts it: it stands for the memory of another device.
    """

    def slot(self, size: int, device: torch.device) -> Slot:
        """A slot of ``size`` bytes for data of a device."""
        if device.type == "meta":
            return _Nothing()
        return _Array(size) if device.type == "cpu" else Pinned(size)


class _Nothing:
    """What a tensor without data needs elsewhere."""

    def write(self, data: torch.Tensor) -> None: ...

    def read(self, data: torch.Tensor) -> None: ...


class _Array:
    def __init__(self, size: int) -> None:
        self._bytes = np.empty(size, np.uint8)

    def write(self, data: torch.Tensor) -> None:
        np.copyto(self._bytes, data.numpy())

    def read(self, data: torch.Tensor) -> None:
        np.copyto(data.numpy(), self._bytes)


class Pinned:
    """Pinned memory; copies may be on their way when a call returns."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def write(self, data: torch.Tensor) -> None:
        self._bytes.copy_(data, non_blocking=True)

    def read(self, data: torch.Tensor) -> None:
        data.copy_(self._bytes, non_blocking=True)


class FileMemory:
    """A file in a folder: real bytes, on the folder's disk.

    The file has no name, so nothing is left behind, however the process
    ends. It grows with what is held at once, and is gone when nothing holds
    it.

    Args:
        folder: an existing folder in which files can be made.

    Raises:
        ValueError: no such folder, or no file can be made in it.
        OSError: later, if the disk is full.
    """

    def __init__(self, folder: str | Path) -> None:
        use = "a path, such as '/tmp'"
        self._folder = Path(instance(folder, str | Path, "folder", use))
        self._file = self._open()
        self._gaps: list[tuple[int, int]] = []  # offset and size, in order
        self._end = 0

    def _open(self) -> IO[bytes]:
        try:
            return TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise ValueError(
                f"no file can be made in {self._folder} "
                f"({error.strerror}): use a folder that exists and that you "
                "may write to"
            ) from error

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._file.fileno()).st_size

    def slot(self, size: int, device: torch.device) -> Slot:
        """A slot of ``size`` bytes for data of a device."""
        for index, (offset, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[index : index + 1] = (
                    [(offset + size, gap - size)] if gap > size else []
                )
                return _Part(self, offset, size)
        self._end += size
        return _Part(self, self._end - size, size)

    def _free(self, offset: int, size: int) -> None:
        """A part is no longer needed: join it with the gaps beside it."""
        at = bisect.bisect(self._gaps, (offset, size))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size:
            size += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            offset, before = self._gaps.pop(at - 1)
            size, at = size + before, at - 1
        self._gaps.insert(at, (offset, size))

    def _write(self, offset: int, data: memoryview) -> None:
        try:
            self._file.seek(offset)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"{self._folder} has no room for {format_bytes(len(data))} "
                f"more ({error.strerror}): the file has "
                f"{format_bytes(self.size)}. Make room, use another folder, "
                "or checkpoint the blocks, which leaves their inputs alone "
                "to move",
            ) from error

    def _read(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while data:
            got = self._file.readinto(data)  # type: ignore[attr-defined]
            if not got:
                raise OSError(errno.EIO, "the file ends before its data")
            data = data[got:]


class _Part:
    def __init__(self, memory: FileMemory, offset: int, size: int) -> None:
        self._memory, self._offset, self._size = memory, offset, size

    def write(self, data: torch.Tensor) -> None:
        self._memory._write(self._offset, memoryview(data.cpu().numpy()))

    def read(self, data: torch.Tensor) -> None:
        here = data if data.device.type == "cpu" else data.cpu()
        self._memory._read(self._offset, memoryview(here.numpy()))
        if here is not data:
            data.copy_(here)

    def __del__(self) -> None:
        self._memory._free(self._offset, self._size)
