"""Measuring: what is alive, byte by byte, while PyTorch runs."""

from membudget.measuring.allocator import (
    CachingAllocator,
    replay,
)
from membudget.measuring.device import (
    MemoryReading,
    read_memory,
    reset_peak,
    resolve_device,
)
from membudget.measuring.dry import UNSURE, dry_run, unsure
from membudget.measuring.flops import FlopCounter
from membudget.measuring.modules import OUTSIDE
from membudget.measuring.monitor import (
    MemoryMonitor,
    Reading,
    Status,
    process_limit,
)
from membudget.measuring.out_of_memory import (
    CatchOutOfMemory,
    Fit,
    OutOfMemoryReport,
)
from membudget.measuring.saved import SavedBytes
from membudget.measuring.snapshot import (
    SnapshotSummary,
    summarise,
    trace_events,
)
from membudget.measuring.step import trace_step
from membudget.measuring.storages import optimizer_tensors
from membudget.measuring.timing import Timing, time_calls
from membudget.measuring.tracker import (
    CATEGORIES,
    PHASES,
    Allocation,
    Operator,
    PeakTracker,
)
from membudget.measuring.units import format_bytes
from membudget.measuring.witness import witness

__all__ = [
    "CATEGORIES",
    "OUTSIDE",
    "PHASES",
    "UNSURE",
    "Allocation",
    "CachingAllocator",
    "CatchOutOfMemory",
    "Fit",
    "FlopCounter",
    "MemoryMonitor",
    "MemoryReading",
    "Operator",
    "OutOfMemoryReport",
    "PeakTracker",
    "Reading",
    "SavedBytes",
    "SnapshotSummary",
    "Status",
    "Timing",
    "dry_run",
    "format_bytes",
    "optimizer_tensors",
    "process_limit",
    "read_memory",
    "replay",
    "reset_peak",
    "resolve_device",
    "summarise",
    "time_calls",
    "trace_events",
    "trace_step",
    "unsure",
    "witness",
]
