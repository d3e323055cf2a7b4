"""Parallelism: a layer, a sequence or a network over several ranks."""

from membudget.parallelism.context import (
    ORDERS,
    WAYS,
    context_buffers,
    context_parallel,
    context_traffic,
    places,
    ring_attention,
    tiles,
)
from membudget.parallelism.tables import (
    SCHEDULES,
    Operation,
    Replay,
    Table,
    replay,
    table,
)

__all__ = [
    "ORDERS",
    "SCHEDULES",
    "WAYS",
    "Operation",
    "Replay",
    "Table",
    "context_buffers",
    "context_parallel",
    "context_traffic",
    "places",
    "replay",
    "ring_attention",
    "table",
    "tiles",
]
