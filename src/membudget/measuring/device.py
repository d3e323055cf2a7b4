"""What a real device says of its memory, in bytes."""

from dataclasses import dataclass

import torch

from membudget.checks import installed, instance
from membudget.measuring.units import format_bytes


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this machine that is meant.

    Args:
        device: ``"cpu"``, ``"cuda"`` (the current one), ``"cuda:1"``, the
            same as a ``torch.device``, or None for CUDA where there is one
            and the CPU where not.

    Returns:
        The device as tensors name theirs: ``cpu`` or ``cuda:0``.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if count else "cpu"
    use = "a name, such as 'cpu' or 'cuda:0', or a torch.device"
    instance(device, str | torch.device, "device", use)
    names = ["cpu", *(f"cuda:{index}" for index in range(count))]
    name = str(device)
    if name == "cuda" and count:
        name = f"cuda:{torch.cuda.current_device()}"
    if name not in names:
        raise ValueError(
            f"device {str(device)!r} is not here: use one of "
            f"{', '.join(map(repr, names))}, or None for the best of them"
        )
    return torch.device(name)


@dataclass(frozen=True)
class MemoryReading:
    """Bytes at one moment; None where the device does not tell.

    Attributes:
        device: which device, ``"cpu"`` or ``"cuda:0"``.
        free: what no process uses; on the CPU what is available to a new
            one, reclaimable caches included.
        total: what the device has.
        requested: what this process's live tensors on it asked for.
        allocated: what the allocator gave them: the requests, rounded up.
        reserved: what the allocator took from the device, live or cached.
        peak_requested: the most that was requested since the last reset.
        peak_allocated: the most that was allocated.
        peak_reserved: the most that was reserved.
        process: what this process holds of it, on the CPU alone: its resident
            set, with the interpreter, libraries and freed memory it kept.
    """

    device: str
    free: int
    total: int
    requested: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak_requested: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    process: int | None = None

    def __str__(self) -> str:
        lines = [f"memory of {self.device}"]
        for name in ("requested", "allocated", "reserved"):
            now, peak = getattr(self, name), getattr(self, f"peak_{name}")
            if now is not None:
                now, peak = format_bytes(now), format_bytes(peak)
                lines.append(f"{name:<9}  {now}, peak {peak}")
        if self.process is not None:
            lines.append(f"process    {format_bytes(self.process)}")
        free, total = format_bytes(self.free), format_bytes(self.total)
        return "\n".join([*lines, f"free       {free} of {total}"])


def read_memory(device: str | torch.device | None = None) -> MemoryReading:
    """Read a device's memory now.

    On CUDA ``requested`` to ``peak_reserved`` are
    :func:`torch.cuda.memory_stats`, of this process and PyTorch's allocator
    alone, and ``free`` and ``total`` are :func:`torch.cuda.mem_get_info`, of
    all. (The backend ``cudaMallocAsync`` reports zeros for some.) It does not
    wait for the device: the allocator counts when memory is handed out.

    On the CPU there is no such allocator; ``process``, ``free`` and ``total``
    come from psutil.

    Args:
        device: as in :func:`resolve_device`.

    Raises:
        ModuleNotFoundError: the CPU is to be read and psutil is missing.
    """
    where = resolve_device(device)
    if where.type == "cpu":
        return _read_cpu()
    torch.cuda.init()
    stats = torch.cuda.memory_stats(where)
    free, total = torch.cuda.mem_get_info(where)
    return MemoryReading(
        device=str(where),
        requested=stats.get("requested_bytes.all.current"),
        allocated=stats.get("allocated_bytes.all.current"),
        reserved=stats.get("reserved_bytes.all.current"),
        peak_requested=stats.get("requested_bytes.all.peak"),
        peak_allocated=stats.get("allocated_bytes.all.peak"),
        peak_reserved=stats.get("reserved_bytes.all.peak"),
        free=free,
        total=total,
    )


def _read_cpu() -> MemoryReading:
    psutil = installed("psutil", "reading the CPU's memory")
    memory = psutil.virtual_memory()
    return MemoryReading(
        device="cpu",
        free=memory.available,
        total=memory.total,
        process=psutil.Process().memory_info().rss,
    )


def reset_peak(device: str | torch.device | None = None) -> bool:
    """Let the peaks of a device begin again at what is live now.

    Args:
        device: as in :func:`resolve_device`.

    Returns:
        Whether there was a peak to reset. The CPU keeps none (the peaks that
        :func:`read_memory` reads there are None): False, and nothing is done,
        so that one loop runs on both.
    """
    where = resolve_device(device)
    if where.type == "cpu":
        return False
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(where)
    return True
