"""Measurement records, and what is known of the experiments that left them.

What they run stands beside the package, in the folder ``experiments``.
"""

from membudget.records.record import (
    RECORDS,
    SIZES,
    best,
    catalogue,
    check,
    compared,
    is_current,
    load,
    missing,
    provenance,
)

__all__ = [
    "RECORDS",
    "SIZES",
    "best",
    "catalogue",
    "check",
    "compared",
    "is_current",
    "load",
    "missing",
    "provenance",
]
