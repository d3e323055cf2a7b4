"""Parallelism: a layer, a sequence or a network over several ranks."""

from membudget.parallelism.pipeline import bubble, cut, in_flight
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
    "SCHEDULES",
    "Operation",
    "PipelineStep",
    "Replay",
    "Table",
    "bubble",
    "cut",
    "in_flight",
    "replay",
    "run_pipeline",
    "simulate_pipeline",
    "table",
    "tensor_parallel",
    "tensor_tape",
    "tensor_traffic",
]
