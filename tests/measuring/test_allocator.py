"""The simulated caching allocator, rule by rule and against a plain model."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget.measuring import allocator as module
from membudget.measuring.allocator import (
    CachingAllocator,
    replay,
    round_size,
    segment_size,
)
from tests.soak import examples

MIB, GIB = 1 << 20, 1 << 30


def in_mib(allocator):
    """Each segment as its blocks: MiB, negative where they are free."""
    return [
        [(-b.size if b.free else b.size) / MIB for b in segment.blocks]
        for segment in allocator.segments
    ]


def bytes_of(allocator):
    return (allocator.requested, allocator.allocated, allocator.reserved)


def run(allocator, steps):
    """Run steps; yields after each, with what is live."""
    live = {}
    for kind, value in steps:
        if kind == "allocate":
            try:
                live[allocator.allocate(value)] = value
            except torch.OutOfMemoryError:
                kind = "failed"
        elif kind == "free" and live:
            handle = list(live)[value % len(live)]
            allocator.free(handle)
            del live[handle]
        elif kind == "empty":
            allocator.empty_cache()
        yield kind, value, live


def program(text):
    """``+30 -0 /``: allocate 30 MiB, free what is oldest, empty the cache."""
    kinds = {"+": ("allocate", MIB), "-": ("free", 1), "/": ("empty", 0)}
    made = []
    for word in text.split():
        kind, unit = kinds[word[0]]
        made.append((kind, int(word[1:] or 0) * unit))
    return made


# The constants -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kMinBlockSize", module.MIN_BLOCK),
        ("kSmallSize", module.SMALL_SIZE),
        ("kSmallBuffer", module.SMALL_SEGMENT),
        ("kMinLargeAlloc", module.MIN_LARGE),
        ("kRoundLarge", module.ROUND_LARGE),
        ("large_segment_size_", module.LARGE_SEGMENT),
    ],
)
def test_constants_are_those_of_the_installed_pytorch(name, value):
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text() if header.exists() else ""
    found = re.search(rf"{name} ?[={{] ?(\d+)", text)
    if not found:
        pytest.skip("this version of PyTorch has its constants elsewhere")
    assert int(found[1]) == value


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded before the choice
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (13 * MIB, 13 * MIB, 14 * MIB),
    ],
)
def test_rounding(size, block, segment):
    assert round_size(0) == 512
    assert round_size(size) == block
    assert segment_size(block) == segment
    allocator = CachingAllocator()
    allocator.allocate(size)
    unsplit = segment == 14 * MIB  # a rest of 1 MiB is not split off
    assert bytes_of(allocator) == (
        size,
        segment if unsplit else block,
        segment,
    )


# Pressure ----------------------------------------------------------------


def test_shortage():
    allocator = CachingAllocator(capacity=30 * MIB)
    allocator.allocate(20 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        allocator.allocate(12 * MIB)
    assert str(caught.value) == (
        "out of memory (simulated): tried to allocate 12.0 MiB. Of a "
        "capacity of 30.0 MiB, 20.0 MiB are allocated and 20.0 MiB reserved; "
        "0 B are free inside segments and 10.0 MiB outside."
    )


def test_fragmentation_is_blamed():
    """Four of five tensors are freed, and still no segment is."""
    allocator = CachingAllocator(capacity=GIB)
    handles = [allocator.allocate(4 * MIB) for _ in range(255)]
    for index, handle in enumerate(handles):
        if index % 5 != 2:
            allocator.free(handle)
    assert bytes_of(allocator) == (204 * MIB, 204 * MIB, 1020 * MIB)
    allocator.allocate(8 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        allocator.allocate(8 * MIB + 1 + 4 * MIB)
    assert str(caught.value) == (
        "out of memory (simulated): tried to allocate 12.0 MiB. Of a "
        "capacity of 1.00 GiB, 212 MiB are allocated and 1020 MiB reserved; "
        "808 MiB are free inside segments and 4.00 MiB outside. Enough is "
        "free, but not in one piece: fragmentation. The largest piece that "
        "a large request can use has 8.00 MiB. expandable_segments may help."
    )


def test_the_pool_is_named_where_the_free_piece_is_in_the_other():
    allocator = CachingAllocator(capacity=20 * MIB)
    allocator.allocate(4 * MIB)
    message = r"piece that a small request can use has 0 B\."
    with pytest.raises(torch.OutOfMemoryError, match=message):
        allocator.allocate(512)


def test_the_segment_is_blamed_where_the_tensor_would_fit():
    allocator = CachingAllocator(capacity=19 * MIB)
    message = "would hold the tensor, but the driver is asked for 20.0 MiB."
    with pytest.raises(torch.OutOfMemoryError, match=f"{message}$"):
        allocator.allocate(19 * MIB - 511)
    allocator.allocate(10 * MIB)


# Expandable segments -----------------------------------------------------


PAGES = "+25 +70 +10 -1 /"
GAP = "+20 +60 +20 -1 /"
ROW = "+40 +10 +50 +20 -0 -1 /"
ROOM = "+5 +12 -0"
FREE = "+9 +2 +4 +2 +6 +14 -0 -1 -2"


@pytest.mark.parametrize(
    ("steps", "blocks"),
    [
        # Pages of 20 MiB are mapped as needed.
        ("+30", [[30, -10]]),
        ("+30 +5", [[30, 5, -5]]),
        ("+30 +5 +26", [[30, 5, 26, -19]]),  # 21 more take two pages
        # Whole free pages go back: 40 to 80 lies within the free block.
        ("+25 +70 +10 -1", [[25, -70, 10, -15]]),
        (PAGES, [[25, -15], [-15, 10, -15]]),
        (f"{PAGES} -0 -0 /", []),
        # Gaps are filled first.
        (GAP, [[20], [20]]),
        (f"{GAP} +60 -2", [[20, -60, 20]]),
        (f"{GAP} +60 -2 / +25", [[20, 25, -15], [20]]),
        # 15 and the unmapped page behind
        (f"{GAP} +60 -2 / +25 +30", [[20, 25, 30, -5, 20]]),
        (f"{GAP} +60 -2 / +25 +30 -0 / +8", [[8, -12, 25, 30, -5, 20]]),
        # Free and unmapped blocks in a row serve one request.
        (ROW, [[10, -10], [20]]),
        (f"{ROW} -0 +90", [[90, -10, 20]]),
        # A block counts with the room behind it: best fit spares the one at
        # the growing end, though it is smaller.
        (ROOM, [[-5, 12, -3]]),
        (f"{ROOM} +2", [[2, -3, 12, -3]]),
        (f"{ROOM} +2 +3", [[2, 3, 12, -3]]),
        (f"{ROOM} +2 +3 +3", [[2, 3, 12, 3]]),
        # Of blocks without room behind the smallest is taken.
        (FREE, [[-9, 2, -4, 2, -6, 14, -3]]),
        (f"{FREE} +3", [[-9, 2, 3, -1, 2, -6, 14, -3]]),
    ],
)
def test_expandable_segments(steps, blocks):
    allocator = CachingAllocator(expandable_segments=True)
    for _ in run(allocator, program(steps)):
        pass
    assert in_mib(allocator) == blocks


def test_pages_of_the_small_pool():
    allocator = CachingAllocator(expandable_segments=True)
    for size in (30 * MIB, MIB // 2, 3 * MIB // 4, MIB, MIB):
        allocator.allocate(size)
    assert in_mib(allocator) == [[30, -10], [0.5, 0.75, 1, 1, -0.75]]
    assert [s.pool for s in allocator.segments] == ["large", "small"]


def test_pages_unmapped_under_pressure_serve_elsewhere():
    allocator = CachingAllocator(100 * MIB, expandable_segments=True)
    for _ in run(allocator, program("+20 +20 +20 +20 +20 -0 -1 +40")):
        pass
    assert allocator.reserved == allocator.allocated == 100 * MIB
    # 112.5 MiB of addresses, in pages 120: the range ends after 20 more.
    assert in_mib(allocator) == [[20], [20, 20], [40]]
    first, second, _ = allocator.segments
    assert second.address - first.address == 40 * MIB


def test_partly_used_pages_are_blamed():
    allocator = CachingAllocator(50 * MIB, expandable_segments=True)

    def refused(size, message):
        with pytest.raises(torch.OutOfMemoryError, match=f"{message}$"):
            allocator.allocate(size)

    allocator.allocate(25 * MIB)
    refused(24 * MIB, r"not in whole pages of 20\.0 MiB: fragmentation\.")
    refused(26 * MIB, r"10\.0 MiB outside\.")
    allocator.allocate(15 * MIB)
    refused(10 * MIB, r"the driver is asked for 20\.0 MiB\.")
    assert in_mib(allocator) == [[25, 15]]


def test_more_than_the_addresses_is_out_of_memory():
    allocator = CachingAllocator(20 * MIB, expandable_segments=True)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 50"):
        allocator.allocate(50 * MIB)
    assert allocator.segments == ()
    unlimited = CachingAllocator(expandable_segments=True)
    unlimited.allocate(1 << 50)
    assert unlimited.reserved == 53687092 * 20 * MIB


# Peaks, timeline, segments, errors ---------------------------------------


@pytest.mark.parametrize("expandable", [False, True])
def test_peaks_and_timeline(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)

    def peaks():
        names = ("peak_requested", "peak_allocated", "peak_reserved")
        return tuple(getattr(allocator, name) for name in names)

    a = allocator.allocate(3 * MIB + 1)
    b = allocator.allocate(700)
    allocator.free(a)
    allocator.empty_cache()
    whole = (3 * MIB + 701, 3 * MIB + 512 + 1024, 22 * MIB)
    end = (700, 1024, 2 * MIB)
    assert allocator.timeline == [
        (3 * MIB + 1, 3 * MIB + 512, 20 * MIB),
        whole,
        (700, 1024, 22 * MIB),
        end,
    ]
    assert allocator.timeline[1].reserved == 22 * MIB
    assert peaks() == whole
    allocator.reset_peak()
    assert peaks() == end
    allocator.free(b)
    assert peaks() == end


def test_segments_say_who_uses_what():
    allocator = CachingAllocator()
    handles = [allocator.allocate(n) for n in (100, 600, 300)]
    assert handles == [1, 2, 3]
    allocator.free(handles[1])
    (segment,) = allocator.segments
    assert (segment.size, segment.pool) == (2 * MIB, "small")
    assert [
        (b.address - segment.address, b.size, b.requested, b.handle, b.free)
        for b in segment.blocks
    ] == [
        (0, 512, 100, handles[0], False),
        (512, 1024, 0, None, True),
        (1536, 512, 300, handles[2], False),
        (2048, 2 * MIB - 2048, 0, None, True),
    ]


@pytest.mark.parametrize("expandable", [False, True])
def test_runs_are_the_same_and_addresses_not_used_twice(expandable):
    def run():
        allocator = CachingAllocator(expandable_segments=expandable)
        allocator.free(allocator.allocate(20 * MIB))
        first = allocator.segments[0].address
        allocator.empty_cache()
        allocator.allocate(20 * MIB)
        return first, allocator.segments[0].address

    assert run() == run()
    assert len(set(run())) == 2


def test_handles_are_freed_once():
    """Also one of no bytes, which take no block."""
    allocator = CachingAllocator()
    for size in (100, 0):
        handle = allocator.allocate(size)
        allocator.free(handle)
        with pytest.raises(ValueError, match=f"{handle} is not live"):
            allocator.free(handle)
    for unknown in (handle + 1, -1):
        with pytest.raises(ValueError, match=f"{unknown} is not live"):
            allocator.free(unknown)
    assert bytes_of(allocator) == (0, 0, 2 * MIB)
    assert allocator.timeline[2:] == [(0, 0, 2 * MIB)] * 2


# Replay ------------------------------------------------------------------


def test_replay():
    events = [
        ("allocate", "x", 3 * MIB),
        ("allocate", 7, 600),
        ("free", "x", 3 * MIB),
        ("allocate", "x", 2 * MIB),  # a key may come again
        ("free", 7, None),
    ]
    allocator = replay(events, expandable_segments=True)
    assert allocator.expandable_segments
    assert [usage.requested for usage in allocator.timeline] == [
        3 * MIB,
        3 * MIB + 600,
        600,
        2 * MIB + 600,
        2 * MIB,
    ]
    assert allocator.peak_allocated == 3 * MIB + 1024
    assert in_mib(allocator) == [[2, -18], [-2]]
    assert replay(iter([])).timeline == []


def test_replay_until_it_is_out_of_memory():
    events = [("allocate", n, 10 * MIB) for n in range(4)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        replay(events, capacity=30 * MIB)
    assert caught.value.__notes__ == ["at event 3: ('allocate', 3, 10485760)"]


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([("allocate", 1, 5)] * 2, ValueError, "1 is allocated twice"),
        ([("free", 1, 5)], ValueError, "1 is freed, but not allocated"),
        ([("alloc", 1, 5)], ValueError, "'alloc': use 'allocate' or 'free'"),
        ([("allocate", 1)], ValueError, "three parts"),
        ([("allocate", 1, -5)], ValueError, "is -5"),
    ],
)
def test_bad_events(events, kind, message):
    with pytest.raises(kind, match=message) as caught:
        replay([("allocate", 0, 1), *events])
    assert caught.value.__notes__[0].startswith("at event ")


# Any sequence ------------------------------------------------------------

EDGES = [512, MIB, 2 * MIB, 10 * MIB, 19 * MIB, 20 * MIB]
SIZES = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 30 * MIB),
    st.sampled_from(EDGES).flatmap(lambda n: st.integers(n - 513, n + 513)),
    st.integers(1, 24).map(lambda n: n * MIB),
).map(lambda size: max(size, 0))
STEPS = st.lists(
    st.one_of(
        SIZES.map(lambda size: ("allocate", size)),
        SIZES.map(lambda size: ("allocate", size)),
        st.integers(0, 99).map(lambda index: ("free", index)),
        st.integers(0, 99).map(lambda index: ("free", index)),
        st.just(("empty", 0)),
    ),
    max_size=60,
)
CAPACITIES = st.sampled_from([None, 30 * MIB, 64 * MIB, 100 * MIB])


@settings(max_examples=examples(50))
@given(STEPS, CAPACITIES, st.booleans())
def test_invariants(steps, capacity, expandable):
    allocator = CachingAllocator(capacity, expandable)
    live, peak = {}, (0, 0, 0)
    for kind, _, live in run(allocator, steps):
        end = 0
        for segment in allocator.segments:
            assert segment.address >= end
            end = segment.address
            for block in segment.blocks:
                assert block.address == end
                assert block.size > 0 == block.size % 512
                end += block.size
            assert end == segment.address + segment.size
            assert segment.size % (2 * MIB) == 0
            free = [block.free for block in segment.blocks]
            assert (True, True) not in set(pairwise(free))
            assert kind != "empty" or expandable or not all(free)
        used = [b for s in allocator.segments for b in s.blocks if not b.free]
        assert {b.handle: b.requested for b in used} == {
            h: size for h, size in live.items() if size
        }
        assert bytes_of(allocator) == (
            sum(live.values()),
            sum(b.size for b in used),
            sum(s.size for s in allocator.segments),
        )
        assert allocator.reserved <= (capacity or 1 << 60)
        for block in used:
            rest = block.size - round_size(block.requested)
            assert 0 <= rest <= (0 if expandable else MIB)
        now = allocator.timeline[-1] if allocator.timeline else (0, 0, 0)
        assert now == bytes_of(allocator)
        peak = tuple(map(max, peak, now))
        assert peak == (
            allocator.peak_requested,
            allocator.peak_allocated,
            allocator.peak_reserved,
        )
    for handle in list(live):
        allocator.free(handle)
    allocator.empty_cache()
    assert bytes_of(allocator) == (0, 0, 0)
    assert allocator.segments == ()


class Plain:
    """The default mode once more: lists, and a search through all of them."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.segments = []  # (small, [[size, name or None], …])

    def reserved(self):
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def release(self):
        self.segments = [
            s for s in self.segments if len(s[1]) > 1 or s[1][0][1] is not None
        ]

    def allocate(self, name, size):
        need = -(-size // 512) * 512
        small = need <= MIB
        fits = [
            (block[0], position, index)
            for position, (kind, blocks) in enumerate(self.segments)
            for index, block in enumerate(blocks)
            if kind == small and block[1] is None and block[0] >= need
        ]
        if fits:
            _, position, index = min(fits)
        else:
            new = 2 if small else 20 if need < 10 * MIB else 0
            new = new * MIB or -(-need // (2 * MIB)) * 2 * MIB
            if self.capacity and self.reserved() + new > self.capacity:
                self.release()
                if self.reserved() + new > self.capacity:
                    return False
            self.segments.append((small, [[new, None]]))
            position, index = len(self.segments) - 1, 0
        blocks = self.segments[position][1]
        rest = blocks[index][0] - need
        if rest >= 512 if small else rest > MIB:
            blocks[index : index + 1] = [[need, name], [rest, None]]
        else:
            blocks[index][1] = name
        return True

    def free(self, name):
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == name:
                    block[1] = None
            for index in range(len(blocks) - 1, 0, -1):
                if blocks[index][1] is None is blocks[index - 1][1]:
                    blocks[index - 1][0] += blocks.pop(index)[0]


@settings(max_examples=examples(60))
@given(STEPS, CAPACITIES)
@example(program("+20 -0 +19"), None)  # a rest of 1 MiB stays with it
@example(program("+30 +10 +20 -0 -0 -0 +12 +7 +9 +9"), None)  # best fit
@example(program("+4 +4 +4 -0 -1 -0 +20"), None)  # free neighbours join
@example(program("+4 +4 +4 -2 -1 -0 +20"), None)
@example(program("+4 +4 +14 +1 -0 -1 -1 / -0 /"), None)  # one is in use
@example(program("+18 -0 +1 -0 +20 +20"), 40 * MIB)  # just fits, then not
def test_every_layout_is_that_of_the_plain_model(steps, capacity):
    allocator, plain = CachingAllocator(capacity), Plain(capacity)
    known = set()
    for kind, value, live in run(allocator, steps):
        for handle in known - live.keys():
            plain.free(handle)
        if kind == "allocate" and value:
            (handle,) = live.keys() - known
            assert plain.allocate(handle, value)
        elif kind == "failed":
            assert not plain.allocate("none", value)
        elif kind == "empty":
            plain.release()
        known = set(live)
        assert [
            [(block.size, block.handle) for block in segment.blocks]
            for segment in allocator.segments
        ] == [[tuple(b) for b in blocks] for _, blocks in plain.segments]
