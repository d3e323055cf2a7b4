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
from membudget.parallelism.experts import (
    Mixture,
    balance_loss,
    capacity,
    dropped,
    expert_parallel,
    received,
    row_bytes,
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
    "Mixture",
    "Operation",
    "Replay",
    "Table",
    "balance_loss",
    "capacity",
    "context_buffers",
    "context_parallel",
    "context_traffic",
    "dropped",
    "expert_parallel",
    "places",
    "received",
    "replay",
    "ring_attention",
    "row_bytes",
    "table",
    "tiles",
]
