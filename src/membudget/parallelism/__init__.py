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
from membudget.parallelism.pipeline import (
    bubble,
    cut,
    in_flight,
)
from membudget.parallelism.running import (
    PipelineStep,
    run_pipeline,
    simulate_pipeline,
)
from membudget.parallelism.tables import (
    SCHEDULES,
    Operation,
    Replay,
    Table,
    replay,
    table,
)
from membudget.parallelism.tensor import (
    GATHERS,
    tensor_parallel,
    tensor_tape,
    tensor_traffic,
)

__all__ = [
    "GATHERS",
    "ORDERS",
    "SCHEDULES",
    "WAYS",
    "Mixture",
    "Operation",
    "PipelineStep",
    "Replay",
    "Table",
    "balance_loss",
    "bubble",
    "capacity",
    "context_buffers",
    "context_parallel",
    "context_traffic",
    "cut",
    "dropped",
    "expert_parallel",
    "in_flight",
    "places",
    "received",
    "replay",
    "ring_attention",
    "row_bytes",
    "run_pipeline",
    "simulate_pipeline",
    "table",
    "tensor_parallel",
    "tensor_tape",
    "tensor_traffic",
    "tiles",
]
