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
    "Operation",
    "PipelineStep",
    "Replay",
    "Table",
    "bubble",
    "context_buffers",
    "context_parallel",
    "context_traffic",
    "cut",
    "in_flight",
    "places",
    "replay",
    "ring_attention",
    "run_pipeline",
    "simulate_pipeline",
    "table",
    "tensor_parallel",
    "tensor_tape",
    "tensor_traffic",
    "tiles",
]
