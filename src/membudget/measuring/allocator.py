"""PyTorch's caching allocator for CUDA, simulated to the byte.

PyTorch does not ask the driver for each tensor. It takes *segments* from the
driver, hands out *blocks* of them, and keeps what is freed for the next
tensor. So three sums of bytes differ: *requested* by tensors ≤ *allocated* in
blocks ≤ *reserved* in segments. The rules, with the names of the functions of
``c10/cuda/CUDACachingAllocator.cpp``:

* A request is rounded up to a multiple of 512 bytes (``round_size``).
* Requests up to 1 MiB are served from the small pool, the others from the
  large pool; blocks never change pools (``get_pool``).
* The smallest free block of the pool that is large enough is taken; of
  several, the one in the oldest segment (``get_free_block``).
* Where there is none, a segment is taken from the driver: 2 MiB for the small
  pool; in the large pool 20 MiB for requests under 10 MiB, else the request
  rounded up to 2 MiB (``get_allocation_size``).
* What is left of a block is split off if it is at least 512 bytes in the
  small pool, more than 1 MiB in the large one. A smaller rest stays with the
  block and counts as allocated (``should_split``).
* A freed block joins its free neighbours in the segment
  (``try_merge_blocks``). The segment stays reserved.
* Where the driver has no memory for a segment, all segments without a used
  block go back to it, and it is asked again (``release_cached_blocks``). If
  that fails as well, the request is out of memory.

With ``expandable_segments:True`` a pool has one long range of addresses, into
which pages of memory are mapped as they are needed, 2 MiB each in the small
pool and 20 MiB in the large one (``try_allocate_expandable_block``); rests of
512 bytes are split off in both pools; and free pages go back to the driver
even if their neighbours are in use (``unmap_block``).

Read in PyTorch's main branch after 2.13, and compared with a version of about
2.5, which differs in nothing above but the choice among free blocks of one
size (by address). 2.13 has the constants in ``c10/core/AllocatorConfig.h``.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from membudget.checks import flag, iterable, shown, told, whole
from membudget.measuring.units import format_bytes

MIB = 1 << 20
MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = MIB  # kSmallSize
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer, now large_segment_size
MIN_LARGE = 10 * MIB  # kMinLargeAlloc
ROUND_LARGE = 2 * MIB  # kRoundLarge
FIRST_ADDRESS = 0x7F00_0000_0000
ENDLESS = 1 << 44


def round_size(size: int) -> int:
    """Bytes of the block that a request of ``size`` bytes needs at least."""
    return max(MIN_BLOCK, _round_up(size, MIN_BLOCK))


def segment_size(size: int) -> int:
    """Bytes of the segment that a request of ``size`` bytes takes anew."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return _round_up(size, ROUND_LARGE)


@dataclass(frozen=True)
class PoolBlock:
    """A piece of a segment.

    Attributes:
        address: where it begins; simulated.
        size: bytes.
        requested: bytes that were asked for; 0 if it is free.
        handle: the allocation that uses it; None if it is free.
    """

    address: int
    size: int
    requested: int
    handle: int | None

    @property
    def free(self) -> bool:
        """Whether no allocation uses it."""
        return self.handle is None


@dataclass(frozen=True)
class PoolSegment:
    """What the driver gave in one piece, tiled by its blocks.

    Attributes:
        address: where it begins; simulated.
        size: bytes.
        pool: ``"small"`` or ``"large"``.
        blocks: in the order of their addresses.
    """

    address: int
    size: int
    pool: str
    blocks: tuple[PoolBlock, ...]


class Usage(NamedTuple):
    """Three sums of bytes at one moment."""

    requested: int
    allocated: int
    reserved: int


class CachingAllocator:
    """Simulate the memory of one device, with one stream.

    Args:
        capacity: bytes that the driver can hand out, at least 1; None for no
            limit. On a real GPU it is less than the memory of the card: the
            CUDA context and other processes hold some.
        expandable_segments: as the option of ``PYTORCH_ALLOC_CONF``.

    Attributes:
        requested: bytes that the live allocations asked for.
        allocated: bytes of their blocks, as ``torch.cuda.memory_allocated``.
        reserved: bytes of all segments, as ``torch.cuda.memory_reserved``.
        peak_requested, peak_allocated, peak_reserved: the most of each, since
            the beginning or the last :meth:`reset_peak`.
        timeline: a :class:`Usage` after each :meth:`allocate` (a failed one
            too), :meth:`free` and :meth:`empty_cache`.

    Addresses are simulated and never used again for another segment. Several
    streams, CUDA graphs and options other than ``expandable_segments`` are
    left out.

    Example:
        >>> allocator = CachingAllocator()
        >>> handle = allocator.allocate(1_200_000)
        >>> allocator.allocated, allocator.reserved
        (1200128, 20971520)
    """

    def __init__(
        self, capacity: int | None = None, expandable_segments: bool = False
    ) -> None:
        if capacity is not None:
            capacity = whole(capacity, "the capacity")
        self.capacity = capacity
        self.expandable_segments = flag(
            expandable_segments, "expandable_segments"
        )
        self.requested = self.allocated = self.reserved = 0
        self.timeline: list[Usage] = []
        self.reset_peak()
        self._small = _Pool("small", SMALL_SEGMENT, MIN_BLOCK)
        self._large = _Pool(
            "large",
            LARGE_SEGMENT,
            MIN_BLOCK if expandable_segments else SMALL_SIZE + 1,
        )
        self._segments: list[_Segment] = []
        self._live: dict[int, _Block | None] = {}
        self._handles = 0
        self._next_address = FIRST_ADDRESS
        self._trace: list[dict] = []

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes; a handle for :meth:`free`.

        No bytes are served without a block, as in PyTorch.

        Raises:
            torch.OutOfMemoryError: there is no room, not even after the
                unused segments went back to the driver.
        """
        size = whole(size, "the size of an allocation", 0)
        try:
            block = self._take(size) if size else None
        finally:
            self._log()
        self._handles += 1
        self._live[self._handles] = block
        if block:
            block.handle = self._handles
        return self._handles

    def free(self, handle: int) -> None:
        """Free an allocation; its block stays reserved for the next one.

        Raises:
            ValueError: it is unknown, or was freed before.
        """
        handle = whole(handle, "the handle", None)
        if handle not in self._live:
            raise ValueError(
                f"allocation {shown(handle)} is not live: free what allocate "
                "returned, and once"
            )
        block = self._live.pop(handle)
        if block:
            self._record("free_requested", block.address, block.requested)
            self._record("free_completed", block.address, block.requested)
            self._count(requested=-block.requested, allocated=-block.size)
            block.handle, block.requested = None, 0
            self._insert(self._join_neighbours(block))
        self._log()

    def empty_cache(self) -> None:
        """Give unused segments (unused pages, if expandable) back."""
        self._release_cached()
        self._log()

    def reset_peak(self) -> None:
        """Let the peaks begin anew at what is in use now."""
        self.peak_requested = self.requested
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    @property
    def segments(self) -> tuple[PoolSegment, ...]:
        """The segments of the moment, in the order of their addresses.

        An expandable segment appears as the pieces in which it is mapped.
        """
        return tuple(
            PoolSegment(
                blocks[0].address,
                sum(block.size for block in blocks),
                segment.pool.name,
                tuple(
                    PoolBlock(b.address, b.size, b.requested, b.handle)
                    for b in blocks
                ),
            )
            for segment in self._segments
            for blocks in segment.mapped()
        )

    def snapshot(self) -> dict:
        """The state and history as ``torch.cuda.memory._snapshot`` has them.

        The keys are those of ``torch/csrc/cuda/Module.cpp``; there are no
        frames, and ``time_us`` counts the entries of the history.
        """
        segments = [self._segment_entry(s) for s in self.segments]
        result = {
            "segments": segments,
            "device_traces": [[dict(entry) for entry in self._trace]],
            "allocator_settings": {
                "expandable_segments": self.expandable_segments
            },
            "external_annotations": [],
        }
        self._record("snapshot", 0, self.allocated)
        return result

    def _segment_entry(self, segment: PoolSegment) -> dict:
        used = [block for block in segment.blocks if not block.free]
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(block.size for block in used),
            "active_size": sum(block.size for block in used),
            "requested_size": sum(block.requested for block in used),
            "stream": 0,
            "segment_type": segment.pool,
            "segment_pool_id": (0, 0),
            "is_expandable": self.expandable_segments,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "inactive" if block.free else "active_allocated",
                    "frames": [],
                }
                for block in segment.blocks
            ],
        }

    # Bookkeeping

    def _count(self, **changes: int) -> None:
        for name, change in changes.items():
            value = getattr(self, name) + change
            setattr(self, name, value)
            if value > getattr(self, f"peak_{name}"):
                setattr(self, f"peak_{name}", value)

    def _log(self) -> None:
        self.timeline.append(
            Usage(self.requested, self.allocated, self.reserved)
        )

    def _record(self, action: str, address: int, size: int) -> None:
        self._trace.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": 0,
                "time_us": len(self._trace),
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
            }
        )

    # Taking a block

    def _take(self, size: int) -> "_Block":
        need = round_size(size)
        pool = self._small if need <= SMALL_SIZE else self._large
        grow = self._expand if self.expandable_segments else self._new_segment
        block = self._best_fit(pool, need) or grow(pool, need)
        if block is None:
            self._release_cached()
            block = grow(pool, need)
        if block is None:
            self._record("oom", told(self.capacity) - self.reserved, need)
            raise torch.OutOfMemoryError(self._out_of_memory(pool, size))
        if block.size - need >= pool.min_rest:
            self._insert(block.split(need))
        block.requested = size
        self._record("alloc", block.address, size)
        self._count(requested=size, allocated=block.size)
        return block

    def _best_fit(self, pool: "_Pool", need: int) -> "_Block | None":
        index = bisect_left(pool.free, (need,))
        if index == len(pool.free):
            return None
        # In an expandable segment, a block counts with the room behind it.
        while (
            index + 1 < len(pool.free)
            and pool.free[index + 1][-1].room < pool.free[index][-1].room
        ):
            index += 1
        return pool.free.pop(index)[-1]

    def _fits(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def _new_segment(self, pool: "_Pool", need: int) -> "_Block | None":
        size = segment_size(need)
        if not self._fits(size):
            return None
        block = self._add_segment(pool, size, mapped=True)
        self._record("segment_alloc", block.address, size)
        self._count(reserved=size)
        return block

    def _add_segment(self, pool: "_Pool", size: int, mapped: bool) -> "_Block":
        segment = _Segment(pool, self._next_address)
        segment.first = _Block(segment, segment.address, size, mapped)
        self._segments.append(segment)
        self._next_address += size
        return segment.first

    def _insert(self, block: "_Block") -> None:
        insort(block.segment.pool.free, block.key)

    def _remove(self, block: "_Block") -> None:
        free = block.segment.pool.free
        del free[bisect_left(free, block.key)]

    def _join_neighbours(self, block: "_Block") -> "_Block":
        """Join a block with neighbours that are free and mapped as it is."""
        for left, right in ((block, block.next), (block.previous, block)):
            if left and right and left.joins(right):
                other = right if left is block else left
                if other.mapped:
                    self._remove(other)
                left.join_next()
                block = left
        return block

    def _release_cached(self) -> None:
        for pool in (self._large, self._small):
            for *_, block in list(pool.free):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.alone:
                    self._remove(block)
                    self._segments.remove(block.segment)
                    self._record("segment_free", block.address, block.size)
                    self._count(reserved=-block.size)

    # Expandable segments

    def _expand(self, pool: "_Pool", need: int) -> "_Block | None":
        """Map pages until there is a block of ``need`` bytes."""
        block: _Block | None = self._find_room(pool, need)
        if block and not block.mapped:
            block = self._map(block, min(need, block.size))
        while block and block.size < need:
            following = told(block.next)
            rest = min(need - block.size, following.size)
            block = self._map(following, rest)
        if block:
            self._remove(block)
        return block

    def _find_room(self, pool: "_Pool", need: int) -> "_Block":
        """The first of several free or unmapped blocks in a row.

        A new range of addresses is 9/8 of the capacity, so that a request
        that it cannot hold cannot be mapped either.
        """
        for segment in self._segments:
            for block in segment if segment.pool is pool else ():
                if block.room_at_least(need):
                    return block
        if self.capacity is None:
            size = max(ENDLESS, need)
        else:
            size = self.capacity * 9 // 8
        size = _round_up(size, pool.page)
        return self._add_segment(pool, size, mapped=False)

    def _map(self, block: "_Block", size: int) -> "_Block | None":
        """Map the first ``size`` bytes of a block, in whole pages."""
        size = _round_up(size, block.segment.pool.page)
        if not self._fits(size):
            return None
        if size < block.size:
            block.split(size)
        block.mapped = True
        self._record("segment_map", block.address, size)
        self._count(reserved=size)
        block = self._join_neighbours(block)
        self._insert(block)
        return block

    def _unmap(self, block: "_Block") -> None:
        """Give the pages that lie wholly within a free block back."""
        start, page = block.segment.address, block.segment.pool.page
        begin = start + _round_up(block.address - start, page)
        end = start + (block.end - start) // page * page
        if begin >= end:
            return
        self._remove(block)
        if begin > block.address:
            before, block = block, block.split(begin - block.address)
            self._insert(before)
        if end < block.end:
            self._insert(block.split(end - block.address))
        block.mapped = False
        self._record("segment_unmap", begin, end - begin)
        self._count(reserved=begin - end)
        block = self._join_neighbours(block)
        if block.alone:
            self._segments.remove(block.segment)

    # What went wrong

    def _out_of_memory(self, pool: "_Pool", size: int) -> str:
        need = round_size(size)
        capacity = told(self.capacity)
        outside = capacity - self.reserved
        inside = self.reserved - self.allocated
        text = (
            f"out of memory (simulated): tried to allocate "
            f"{format_bytes(size)}. Of a capacity of "
            f"{format_bytes(capacity)}, {format_bytes(self.allocated)} "
            f"are allocated and {format_bytes(self.reserved)} reserved; "
            f"{format_bytes(inside)} are free inside segments and "
            f"{format_bytes(outside)} outside."
        )
        if inside + outside < need:
            return text
        if outside >= need:
            asked = (
                _round_up(need, pool.page)
                if self.expandable_segments
                else segment_size(need)
            )
            return (
                f"{text} What is outside would hold the tensor, but the "
                f"driver is asked for {format_bytes(asked)}."
            )
        if self.expandable_segments:
            return (
                f"{text} Enough is free, but not in whole pages of "
                f"{format_bytes(pool.page)}: fragmentation."
            )
        largest = max([outside, *(size for size, *_ in pool.free)])
        return (
            f"{text} Enough is free, but not in one piece: fragmentation. "
            f"The largest piece that a {pool.name} request can use has "
            f"{format_bytes(largest)}. expandable_segments may help."
        )


def replay(
    events: Iterable[tuple[str, Hashable, int]], **kwargs
) -> CachingAllocator:
    """Run a sequence of allocations and frees.

    Args:
        events: ``(kind, key, bytes)`` in order, ``kind`` being ``"allocate"``
            or ``"free"`` and ``key`` anything hashable that names the
            allocation between the two; the bytes of a free are not read. The
            ``events`` of a ``PeakTracker`` are such a sequence, and so is
            what :func:`~membudget.measuring.trace_events` reads from a
            snapshot of a GPU.
        **kwargs: of the new :class:`CachingAllocator`.

    Returns:
        The allocator as it is at the end, with its peaks and timeline.

    Raises:
        ValueError: a key that is allocated twice, or freed without being
            live.
        torch.OutOfMemoryError: of the allocator. A note names the event.

    Example:
        >>> allocator = replay(tracker.events, capacity=15 << 30)
        >>> allocator.peak_allocated, allocator.peak_reserved
    """
    allocator = CachingAllocator(**kwargs)
    handles: dict[Hashable, int] = {}
    for index, event in enumerate(iterable(events, "events", "events")):
        try:
            _run(event, allocator, handles)
        except (TypeError, ValueError, torch.OutOfMemoryError) as error:
            error.add_note(f"at event {index}: {event!r}")
            raise
    return allocator


def _run(event, allocator: CachingAllocator, handles: dict) -> None:
    if not isinstance(event, tuple | list) or len(event) != 3:
        raise ValueError("an event has three parts: (kind, key, bytes)")
    kind, key, size = event
    if kind == "allocate":
        if key in handles:
            raise ValueError(
                f"{key!r} is allocated twice: free it first, or name the "
                "second allocation differently"
            )
        handles[key] = allocator.allocate(size)
    elif kind == "free":
        if key not in handles:
            raise ValueError(f"{key!r} is freed, but not allocated")
        allocator.free(handles.pop(key))
    else:
        raise ValueError(f"unknown kind {kind!r}: use 'allocate' or 'free'")


# What the simulation is made of: pools, segments, and their blocks in a list.


@dataclass(eq=False, repr=False, slots=True)
class _Pool:
    name: str
    page: int  # bytes that an expandable segment grows by
    min_rest: int  # bytes from which a rest is split off
    free: list[tuple] = field(default_factory=list)  # keys, in order


@dataclass(eq=False, repr=False, slots=True)
class _Segment:
    pool: _Pool
    address: int
    first: "_Block" = field(init=False)

    def __iter__(self) -> Iterator["_Block"]:
        block: _Block | None = self.first
        while block:
            yield block
            block = block.next

    def mapped(self) -> list[list["_Block"]]:
        """Its blocks, in runs between unmapped ones."""
        runs: list[list[_Block]] = [[]]
        for block in self:
            if block.mapped:
                runs[-1].append(block)
            else:
                runs.append([])
        return [run for run in runs if run]


@dataclass(eq=False, repr=False, slots=True)
class _Block:
    segment: _Segment
    address: int
    size: int
    mapped: bool
    requested: int = 0
    handle: int | None = None
    previous: "_Block | None" = None
    next: "_Block | None" = None

    @property
    def key(self) -> tuple:
        return (self.size, self.address, self)

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def alone(self) -> bool:
        return self.previous is None and self.next is None

    @property
    def room(self) -> int:
        """Its bytes, and the unmapped ones behind it."""
        behind = self.next
        return self.size + (behind.size if behind and not behind.mapped else 0)

    def room_at_least(self, need: int) -> bool:
        """Whether free and unmapped blocks from here on have that many."""
        block: _Block | None = self
        room = 0
        while block and block.handle is None and room < need:
            room += block.size
            block = block.next
        return room >= need

    def joins(self, other: "_Block") -> bool:
        free = self.handle is None and other.handle is None
        return free and self.mapped == other.mapped

    def split(self, size: int) -> "_Block":
        """Keep ``size`` bytes; the new block that has the others."""
        rest = _Block(
            self.segment, self.address + size, self.size - size, self.mapped
        )
        rest.previous, rest.next = self, self.next
        if self.next:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def join_next(self) -> None:
        """Take the next block over."""
        taken = told(self.next)
        self.size += taken.size
        self.next = taken.next
        if self.next:
            self.next.previous = self


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
