"""Parallelism: a layer, a sequence or a network over several ranks."""

from membudget.parallelism.pipeline import bubble, cut, in_flight
from membudget.parallelism.tables import (
    SCHEDULES,
    Operation,
    Replay,
    Table,
    replay,
    table,
)

__all__ = [
    "SCHEDULES",
    "Operation",
    "Replay",
    "Table",
    "bubble",
    "cut",
    "in_flight",
    "replay",
    "table",
]
