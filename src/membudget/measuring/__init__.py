"""Measuring: what is alive, byte by byte, while PyTorch runs."""

from membudget.measuring.modules import OUTSIDE, ModuleStack
from membudget.measuring.saved import SavedBytes
from membudget.measuring.step import dry_run, trace_step
from membudget.measuring.tracker import (
    CATEGORIES,
    PHASES,
    Allocation,
    Operator,
    PeakTracker,
)
from membudget.measuring.units import format_bytes

__all__ = [
    "CATEGORIES",
    "OUTSIDE",
    "PHASES",
    "Allocation",
    "ModuleStack",
    "Operator",
    "PeakTracker",
    "SavedBytes",
    "dry_run",
    "format_bytes",
    "trace_step",
]
