"""Experiments: what is measured, and the records that prove it.

This module, :mod:`~membudget.experiments.record` and the commands ``list``
and ``check`` need no torch.
"""

from membudget.experiments.definition import experiment
from membudget.experiments.record import (
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
    "experiment",
    "is_current",
    "load",
    "missing",
    "provenance",
]
