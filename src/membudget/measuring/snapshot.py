"""Reading a CUDA memory snapshot.

A snapshot is what ``torch.cuda.memory._snapshot()`` returns and
``torch.cuda.memory._dump_snapshot(path)`` writes: the segments of the caching
allocator with their blocks and, if ``_record_memory_history()`` was called
before, the history of every device. Its keys are documented in
``torch/cuda/memory.py`` and made in ``torch/csrc/cuda/Module.cpp``.
"""

import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass

from membudget.checks import whole

RECORD = "torch.cuda.memory._record_memory_history()"
DUMP = "torch.cuda.memory._dump_snapshot(path)"
USED = "active_allocated"
FREE = "inactive"
CHANGES = ("alloc", "free_completed")
INSIDE_TORCH = re.compile(r"-packages/torch/|/pytorch/torch/")


@dataclass(frozen=True)
class LiveBlock:
    """An allocation that was alive at the peak.

    Attributes:
        address: of its first byte.
        size: bytes, as requested.
        where: ``"file:line function"`` of the innermost Python frame outside
            of torch; None where no frames were recorded, or the allocation is
            older than the history and was freed within it.
    """

    address: int
    size: int
    where: str | None


@dataclass(frozen=True)
class SnapshotSummary:
    """What a snapshot says about one device, in bytes.

    Attributes:
        reserved: in segments.
        allocated: in blocks that tensors use. The rest of ``reserved`` is
            free, or freed and waits for another stream.
        free: in blocks that are cached for the next tensor.
        largest_free: the largest free block.
        peak_requested: the most bytes alive at once during the history, in
            requested bytes, since the history does not have the sizes of
            blocks; compare ``memory_stats()["requested_bytes.all.peak"]``.
            A tensor counts until ``free_completed``. None without history.
        peak_event: index in ``device_traces[device]`` of the allocation that
            first reached the peak; -1 if that was before the history begins.
            None without history.
        at_peak: the largest allocations alive then, largest first.
    """

    reserved: int
    allocated: int
    free: int
    largest_free: int
    peak_requested: int | None
    peak_event: int | None
    at_peak: tuple[LiveBlock, ...]


def summarise(
    snapshot: Mapping | str | os.PathLike, device: int = 0, largest: int = 10
) -> SnapshotSummary:
    """Sum a snapshot up.

    Args:
        snapshot: the dictionary, or the path of a file that
            ``torch.cuda.memory._dump_snapshot`` wrote. Files are read without
            running code: anything but plain containers is refused.
        device: index of the device.
        largest: how many of the allocations alive at the peak to name.

    The history is a ring buffer: it may begin in the middle. What is freed in
    it without having been allocated in it, and what is in use at its end
    without being mentioned, was alive at its beginning and counts from there.
    A history recorded with ``skip_actions`` is incomplete.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or dictionary is no snapshot, the snapshot is
            empty, or it has nothing of this device.

    Example:
        >>> torch.cuda.memory._record_memory_history()
        >>> step()
        >>> torch.cuda.memory._dump_snapshot("step.pickle")
        >>> summary = summarise("step.pickle")
        >>> summary.peak_requested, summary.at_peak[0].where
    """
    largest = whole(largest, "largest", 0)
    segments, trace = _of_device(snapshot, device)
    return _summary(segments, trace, largest)


def trace_events(
    snapshot: Mapping | str | os.PathLike, device: int = 0
) -> list[tuple[str, int, int]]:
    """The history as events for :func:`~membudget.measuring.replay`.

    So the simulated allocator can be compared with a real one: they agree to
    the byte if the history goes back to the first allocation, there is one
    stream, and ``empty_cache`` was not called. What was alive when a history
    begins is allocated first, by address, though it may have lain elsewhere.

    Args:
        snapshot: as for :func:`summarise`.
        device: index of the device.

    Returns:
        ``("allocate" or "free", key, bytes)`` with requested bytes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as :func:`summarise`, or there is no history.
    """
    segments, trace = _of_device(snapshot, device)
    if not trace:
        raise ValueError(
            f"the snapshot has no history of device {device}: call {RECORD} "
            "before what is to be seen"
        )
    return _events(_alive_at_start(segments, trace), trace)


def _summary(segments, trace, largest: int) -> SnapshotSummary:
    blocks = [block for segment in segments for block in segment["blocks"]]
    used = [b["size"] for b in blocks if b["state"] == USED]
    free = [b["size"] for b in blocks if b["state"] == FREE]
    peak, event, alive = _peak(segments, trace)
    return SnapshotSummary(
        reserved=sum(segment["total_size"] for segment in segments),
        allocated=sum(used),
        free=sum(free),
        largest_free=max(free, default=0),
        peak_requested=peak,
        peak_event=event,
        at_peak=tuple(
            LiveBlock(address, size, _where(frames))
            for address, (size, frames) in sorted(
                alive.items(), key=lambda item: (-item[1][0], item[0])
            )[:largest]
        ),
    )


# The history. What is alive is {address: (requested bytes, frames)}.


def _alive_at_start(segments, trace) -> dict[int, tuple[int, list]]:
    alive: dict[int, tuple[int, list]] = {}
    seen = set()
    for entry in trace:
        if entry["action"] == "free_completed" and entry["addr"] not in seen:
            # Its frames, where it has any, say where it was freed.
            alive[entry["addr"]] = entry["size"], []
        if entry["action"] in CHANGES:
            seen.add(entry["addr"])
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != FREE and block["address"] not in seen:
                frames = block.get("frames", [])
                alive[block["address"]] = block["requested_size"], frames
    return alive


def _apply(entry, alive) -> int:
    """Bring ``alive`` to after an entry; by how many bytes it grew."""
    if entry["action"] not in CHANGES:
        return 0
    before, _ = alive.pop(entry["addr"], (0, []))
    if entry["action"] == "free_completed":
        return -before
    alive[entry["addr"]] = entry["size"], entry.get("frames", [])
    return entry["size"] - before


def _peak(segments, trace):
    """Most bytes alive, the event that reached them, and what was alive."""
    if not trace:
        return None, None, {}
    alive = _alive_at_start(segments, trace)
    now = peak = sum(size for size, _ in alive.values())
    event = -1
    for index, entry in enumerate(trace):
        now += _apply(entry, alive)
        if now > peak:
            peak, event = now, index
    alive = _alive_at_start(segments, trace)
    for entry in trace[: event + 1]:
        _apply(entry, alive)
    return peak, event, alive


def _events(alive, trace) -> list[tuple[str, int, int]]:
    keys: dict[int, int] = {}
    events: list[tuple[str, int, int]] = []
    for address, (size, _) in sorted(alive.items()):
        keys[address] = len(events)
        events.append(("allocate", len(events), size))
    for entry in trace:
        if entry["action"] not in CHANGES:
            continue
        key = keys.pop(entry["addr"], None)
        if key is not None:
            events.append(("free", key, events[key][2]))
        if entry["action"] == "alloc":
            keys[entry["addr"]] = len(events)
            events.append(("allocate", len(events), entry["size"]))
    return events


def _where(frames) -> str | None:
    for frame in frames:
        name = frame["filename"].replace("\\", "/")
        python = name.endswith(".py") or name.startswith("<")
        if python and not INSIDE_TORCH.search(name):
            return f"{frame['filename']}:{frame['line']} {frame['name']}"
    return None


# The file


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and strings; runs no code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _load(path: str | os.PathLike):
    with open(path, "rb") as file:
        try:
            return _PlainUnpickler(file).load()
        except Exception as error:  # garbage may raise anything
            why = " ".join(str(error).split()).rstrip(".")
            raise _no_snapshot(
                os.fspath(path), why or type(error).__name__
            ) from error


def _of_device(snapshot, device: int):
    """The segments and the history of one device."""
    device = whole(device, "device", 0)
    data, what = snapshot, "this"
    if isinstance(snapshot, str | os.PathLike):
        data, what = _load(snapshot), os.fspath(snapshot)
    if not isinstance(data, Mapping):
        raise _no_snapshot(what, f"it is of type {type(data).__name__}")
    missing = [k for k in ("segments", "device_traces") if k not in data]
    if missing:
        raise _no_snapshot(what, f"it has no {' and no '.join(missing)}")
    traces = dict(enumerate(data["device_traces"]))
    segments: dict[int, list] = {}
    for segment in data["segments"]:
        segments.setdefault(segment["device"], []).append(segment)
    known = sorted({*segments, *(d for d in traces if traces[d])})
    if not known:
        raise ValueError(
            "the snapshot is empty: no memory was reserved and no history "
            f"recorded. Call {RECORD} before what is to be seen, and {DUMP} "
            "after it, while its tensors are alive"
        )
    if device not in known:
        raise ValueError(
            f"the snapshot has nothing of device {device}, but of "
            f"{', '.join(map(str, known))}"
        )
    return segments.get(device, []), traces.get(device, [])


def _no_snapshot(what: str, why: str) -> ValueError:
    return ValueError(
        f"{what} is no CUDA memory snapshot: {why}. Use what "
        f"torch.cuda.memory._snapshot() returns or {DUMP} writes"
    )
