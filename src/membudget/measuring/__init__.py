"""Measuring: what is alive, byte by byte, while PyTorch runs."""

from membudget.measuring.saved import SavedBytes
from membudget.measuring.tracker import PeakTracker

__all__ = ["PeakTracker", "SavedBytes"]
