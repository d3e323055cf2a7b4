"""Reading snapshots, simulated or made by hand as PyTorch makes them."""

import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from membudget.measuring.allocator import CachingAllocator, replay
from membudget.measuring.snapshot import (
    LiveBlock,
    summarise,
    trace_events,
)
from tests.soak import examples

MIB = 1 << 20
SITE = "/opt/conda/lib/python3.11/site-packages/"


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


LINEAR = [
    frame(SITE + "torch/nn/modules/linear.py", 125, "forward"),
    frame(SITE + "torch/nn/modules/module.py", 1775, "_call_impl"),
    frame("/home/me/model.py", 17, "forward"),
    frame("/home/me/train.py", 90, "main"),
]
CPP = [
    frame("??", 0, "torch::unwind::unwind()"),
    frame("/pytorch/c10/cuda/CUDACachingAllocator.cpp", 900, "malloc"),
    frame("/pytorch/torch/optim/adam.py", 180, "_init_group"),
    frame("C:\\x\\site-packages\\torch\\optim\\optimizer.py", 5, "step"),
    frame("<ipython-input-3>", 2, "<module>"),
]


def block(address, size, requested, state="active_allocated", frames=()):
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": list(frames),
    }


def segment(address, blocks, device=0, kind="large"):
    active = [b for b in blocks if b["state"] != "inactive"]
    used = [b for b in active if b["state"] == "active_allocated"]
    return {
        "device": device,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": sum(b["size"] for b in used),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b["requested_size"] for b in active),
        "stream": 0,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def entry(action, addr, size, frames=None, **more):
    made = {
        "action": action,
        "device_free" if action == "oom" else "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": 1_751_000_000_000_000,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
    }
    return made if frames is None else made | {"frames": frames}


def freed(addr, size):
    frames = [frame("/home/me/train.py", 99, "free")]
    return [
        entry("free_requested", addr, size, frames),
        entry("free_completed", addr, size, frames),
    ]


@pytest.fixture
def made():
    """Device 0 has all that there is; device 1 has one block, no history."""
    return {
        "segments": [
            segment(
                0x1000000,
                [
                    block(0x1000000, 3000 * 512, 3000 * 512 - 100, frames=CPP),
                    block(0x1177000, 512, 400, "active_pending_free"),
                    # A free block keeps the request it last served.
                    block(0x1177200, 9 * MIB, 777, "inactive"),
                ],
            ),
            segment(
                0x3000000,
                [
                    block(0x3000000, 1024, 513, frames=LINEAR),
                    block(0x3000400, 3 * MIB, 5, "inactive"),
                    block(0x3300400, 512, 512),
                ],
                kind="small",
            ),
            segment(0x9000000, [block(0x9000000, 2 * MIB, MIB)], device=1),
        ],
        "device_traces": [
            [
                *freed(0x5000000, 4000),  # older than the history
                entry("segment_alloc", 0x3000000, 4 * MIB),
                entry("alloc", 0x3000000, 10_000, LINEAR),
                *freed(0x3000000, 10_000),
                entry("alloc", 0x3300000, 9_000),
                entry("alloc", 0x3000000, 513, LINEAR),
                entry("oom", 77, 1 << 40, LINEAR),
                entry("free_requested", 0x3300000, 9_000),
                entry("free_completed", 0x3300000, 9_000),
                entry("alloc", 0x3300400, 512, CPP),
                entry("segment_free", 0x5000000, 2 * MIB),
                entry("snapshot", 0, 1234),
            ],
            [],
        ],
        "allocator_settings": {"max_split_size": -1},
        "external_annotations": [],
    }


# By hand -----------------------------------------------------------------


def test_sums(made):
    summary = summarise(made)
    assert summary.reserved == 12 * MIB + 3001 * 512 + 1024 + 512
    assert summary.allocated == 3000 * 512 + 1024 + 512
    assert summary.free == 12 * MIB
    assert summary.largest_free == 9 * MIB


def test_peak(made):
    summary = summarise(made)
    older = 3000 * 512 - 100 + 400  # in use at the end, never mentioned
    # First 4000 more; then 10 000; then 9000 + 513.
    assert summary.peak_requested == older + 10_000
    assert summary.peak_event == 3
    assert summary.at_peak == (
        LiveBlock(0x1000000, 3000 * 512 - 100, "<ipython-input-3>:2 <module>"),
        LiveBlock(0x3000000, 10_000, "/home/me/model.py:17 forward"),
        LiveBlock(0x1177000, 400, None),
    )
    assert summarise(made, largest=1).at_peak == summary.at_peak[:1]
    assert summarise(made, largest=0).at_peak == ()


def test_peak_before_the_history(made):
    made["device_traces"][0][1]["size"] = 20_000
    made["device_traces"][0][0]["size"] = 20_000
    summary = summarise(made)
    assert summary.peak_event == -1
    assert summary.peak_requested == 3000 * 512 - 100 + 400 + 20_000
    assert summary.at_peak[1] == LiveBlock(0x5000000, 20_000, None)


def test_a_history_without_some_actions(made):
    """A new allocation at an address ends the one before."""
    older = 3000 * 512 - 100 + 400 + 512
    made["device_traces"][0] = [
        entry("alloc", 0x3000000, 100),
        entry("alloc", 0x3000000, 300),
        entry("alloc", 0x4000000, 50),
        *freed(0x4000000, 50),
        *freed(0x4000000, 50),
        entry("alloc", 0x4000000, 50),
    ]
    summary = summarise(made)
    assert summary.peak_requested == older + 350
    assert summary.peak_event == 2  # the first time
    assert trace_events(made)[3:] == [
        ("allocate", 3, 100),
        ("free", 3, 100),
        ("allocate", 5, 300),
        ("allocate", 6, 50),
        ("free", 6, 50),
        ("allocate", 8, 50),
    ]


def test_the_largest_come_first_and_of_equals_the_lower_address(made):
    made["device_traces"][0] = [
        entry("alloc", n, max(n, 5) << 20)
        for n in (12 << 20, *range(12, 0, -1))
    ]
    at_peak = summarise(made).at_peak
    assert [b.size >> 20 for b in at_peak] == [
        *(12 << 20, 12, 11, 10, 9, 8, 7, 6, 5, 5)
    ]
    assert [b.address for b in at_peak[-2:]] == [1, 2]


def test_a_device_without_history_and_one_without_segments(made):
    summary = summarise(made, device=1)
    assert summary.reserved == 2 * MIB
    assert summary.largest_free == summary.free == 0
    assert summary.peak_requested is summary.peak_event is None
    assert summary.at_peak == ()
    with pytest.raises(ValueError, match=r"no history of device 1: call tor"):
        trace_events(made, device=1)
    made["device_traces"][1] = [entry("alloc", 5, 100), *freed(5, 100)]
    del made["segments"][2]
    summary = summarise(made, device=1)
    assert summary.reserved == 0
    assert summary.peak_requested == 100


def test_frames_are_optional(made):
    for part in made["segments"][0]["blocks"]:
        del part["frames"]
    assert summarise(made).at_peak[0].where is None


def test_real_frames():
    """Frames as PyTorch gathers them; the innermost is inside of torch."""
    profiler = pytest.importorskip("torch._C._profiler")

    class Gather(torch.nn.Module):
        forward = staticmethod(
            lambda: profiler.gather_traceback(
                python=True, script=False, cpp=False
            )
        )

    (frames,) = profiler.symbolize_tracebacks([Gather()()])
    while frames[0]["filename"] == __file__:
        frames = frames[1:]
    assert "torch/nn/modules/module.py" in frames[0]["filename"]
    snapshot = {
        "segments": [segment(0, [block(0, 512, 512)])],
        "device_traces": [[entry("alloc", 0, 512, frames)]],
    }
    where = summarise(snapshot).at_peak[0].where
    assert where.startswith(f"{__file__}:")
    assert where.endswith(" test_real_frames")


# Simulated ---------------------------------------------------------------


def simulated(expandable=False):
    allocator = CachingAllocator(200 * MIB, expandable_segments=expandable)
    handles = [
        allocator.allocate(n)
        for n in (100, 3 * MIB + 1, 40 * MIB, MIB, 13 * MIB, 8 * MIB)
    ]
    allocator.free(handles[2])
    allocator.free(handles[4])
    allocator.empty_cache()
    allocator.allocate(6 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(500 * MIB)
    return allocator


@pytest.mark.parametrize("expandable", [False, True])
def test_summary_of_a_simulation(expandable):
    allocator = simulated(expandable)
    summary = summarise(allocator.snapshot())
    assert summary.reserved == allocator.reserved
    assert summary.allocated == allocator.allocated
    assert summary.free == allocator.reserved - allocator.allocated
    assert summary.peak_requested == allocator.peak_requested
    sizes = [block.size for block in summary.at_peak]
    assert sizes[:3] == [40 * MIB, 13 * MIB, 8 * MIB]
    assert sizes[3:] == [3 * MIB + 1, MIB, 100]


def test_the_whole_of_a_small_simulation():
    allocator = CachingAllocator()
    allocator.allocate(700)
    address = allocator.segments[0].address
    blocks = [
        block(address, 1024, 700),
        block(address + 1024, 2 * MIB - 1024, 0, "inactive"),
    ]
    history = [
        entry("segment_alloc", address, 2 * MIB),
        entry("alloc", address, 700),
        entry("snapshot", 0, 1024),
    ]
    for time, made in enumerate(history):
        made["time_us"] = time
    for length in (2, 3):
        assert allocator.snapshot() == {
            "segments": [segment(address, blocks, kind="small")],
            "device_traces": [history[:length]],
            "allocator_settings": {"expandable_segments": False},
            "external_annotations": [],
        }


def test_the_history_of_a_simulation():
    allocator = CachingAllocator(capacity=30 * MIB)
    allocator.free(allocator.allocate(3 * MIB))
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(100 * MIB - 7)
    first = allocator.snapshot()
    (trace,) = first["device_traces"]
    assert [(e["action"], e["size"]) for e in trace] == [
        ("segment_alloc", 20 * MIB),
        ("alloc", 3 * MIB),
        ("free_requested", 3 * MIB),
        ("free_completed", 3 * MIB),
        ("segment_free", 20 * MIB),
        ("oom", 100 * MIB),
    ]
    assert trace[-1]["device_free"] == 30 * MIB
    assert "addr" not in trace[-1]
    assert len({e["addr"] for e in trace[:-1]}) == 1
    assert [e["time_us"] for e in trace] == list(range(6))
    trace[0]["size"] = 0  # a copy
    assert allocator.snapshot()["device_traces"][0][0]["size"] == 20 * MIB


def test_the_history_of_expandable_segments():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.free(allocator.allocate(45 * MIB))
    allocator.empty_cache()
    trace = allocator.snapshot()["device_traces"][0]
    assert [(e["action"], e["size"]) for e in trace] == [
        ("segment_map", 60 * MIB),
        ("alloc", 45 * MIB),
        ("free_requested", 45 * MIB),
        ("free_completed", 45 * MIB),
        ("segment_unmap", 60 * MIB),
    ]


@pytest.mark.parametrize("expandable", [False, True])
def test_the_tools_of_pytorch_accept_it(expandable):
    allocator = simulated(expandable)
    snapshot = allocator.snapshot()
    sizes, reserved = _memory_viz.Bytes, allocator.reserved
    free = reserved - allocator.requested
    share = (allocator.allocated - allocator.requested) / free * 100
    text = _memory_viz.segsum(snapshot)
    for line in (
        f"segments: {len(allocator.segments)}\n",
        f"total_reserved: {sizes(reserved)}\n",
        f"total_allocated: {sizes(allocator.requested)}\n",
        f"total_free: {sizes(free)} ({share:.1f}% internal)",
    ):
        assert line in text
    text = _memory_viz.trace(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in text
    left = sizes(200 * MIB - reserved)
    assert f"Error # 500.0MiB requested, {left} free in CUDA" in text
    lines = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == reserved
    assert "seg_" in _memory_viz.segments(snapshot, format_flamegraph=str)
    assert "snapshot" in _memory_viz.trace_plot(snapshot)
    assert "snapshot" in _memory_viz.segment_plot(snapshot)


# Events ------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(
    st.lists(st.integers(-8, 40_000_000), max_size=40),
    st.integers(0, 100),
    st.booleans(),
)
def test_events_of_a_history_replay_to_the_same(sizes, cut, expandable):
    """Also one that begins in the middle: then requested bytes agree."""
    allocator = CachingAllocator(expandable_segments=expandable)
    live = [allocator.allocate(5)]
    for size in sizes:
        if size > 0:
            live.append(allocator.allocate(size))
        elif live:
            allocator.free(live.pop(size % len(live)))
    snapshot = allocator.snapshot()
    again = replay(trace_events(snapshot), expandable_segments=expandable)
    assert again.timeline == [
        after
        for before, after in zip(
            [None, *allocator.timeline], allocator.timeline, strict=False
        )
        if before != after
    ]
    assert again.segments[0].size == allocator.segments[0].size
    trace = snapshot["device_traces"][0]
    del trace[: cut % len(trace)]
    late = replay(trace_events(snapshot))
    assert late.requested == allocator.requested
    summary = summarise(snapshot)
    assert summary.peak_requested == late.peak_requested
    assert summary.peak_requested <= allocator.peak_requested
    at_peak = summarise(snapshot, largest=1000).at_peak
    assert sum(block.size for block in at_peak) == late.peak_requested


def test_events_by_hand(made):
    assert trace_events(made) == [
        ("allocate", 0, 3000 * 512 - 100),
        ("allocate", 1, 400),
        ("allocate", 2, 4000),
        ("free", 2, 4000),
        ("allocate", 4, 10_000),
        ("free", 4, 10_000),
        ("allocate", 6, 9_000),
        ("allocate", 7, 513),
        ("free", 6, 9_000),
        ("allocate", 9, 512),
    ]


# Files -------------------------------------------------------------------


def test_a_file(tmp_path, made):
    path = tmp_path / "snapshot.pickle"
    with open(path, "wb") as file:  # as torch.cuda.memory._dump_snapshot
        pickle.dump(made, file)
    assert summarise(path) == summarise(made)
    assert trace_events(str(path)) == trace_events(made)
    assert os.listdir(tmp_path) == ["snapshot.pickle"]
    with pytest.raises(FileNotFoundError):
        summarise(tmp_path / "nothing")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_file_runs_no_code(tmp_path, made, protocol):
    made["external_annotations"] = Evil(tmp_path / "trace")
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(made, protocol))
    with pytest.raises(
        ValueError, match=r"evil\.pickle is no CUDA .*asks for \w+\.mkdir"
    ):
        summarise(path)
    assert os.listdir(tmp_path) == ["evil.pickle"]


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", b"{}", pickle.dumps({"a": 1})[:-3]],
)
def test_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"is no CUDA memory snapshot: .*_dump_snapshot"
    ):
        summarise(path)


# Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it is of type list"),
        ({}, "it has no segments and no device_traces"),
        ({"segments": []}, "it has no device_traces"),
    ],
)
def test_no_snapshot(data, message):
    with pytest.raises(
        ValueError, match=f"no CUDA memory snapshot: .*{message}"
    ):
        summarise(data)


@pytest.mark.parametrize("traces", [[], [[], []]])
def test_an_empty_snapshot(traces):
    with pytest.raises(
        ValueError,
        match=r"snapshot is empty.*_record_memory_history\(\) before",
    ):
        summarise({"segments": [], "device_traces": traces})


def test_an_unknown_device(made):
    with pytest.raises(ValueError, match="nothing of device 2, but of 0, 1"):
        summarise(made, 2)
