"""Checkpointing: forget activations and get them back."""

from membudget.checkpointing.profiling import profile
from membudget.checkpointing.running import ATTENTION, MATMULS, Checkpointed
from membudget.checkpointing.schedule import (
    KINDS,
    Action,
    ImpossibleAction,
    Segments,
    actions,
)
from membudget.checkpointing.segments import (
    equal_segments,
    least_peak,
    no_segments,
    peak_of_segments,
    pytorch_segments,
    segments_of,
)
from membudget.checkpointing.tape import (
    PARTS,
    Moment,
    Run,
    Stage,
    Stages,
    simulate,
)

__all__ = [
    "ATTENTION",
    "KINDS",
    "MATMULS",
    "PARTS",
    "Action",
    "Checkpointed",
    "ImpossibleAction",
    "Moment",
    "Run",
    "Segments",
    "Stage",
    "Stages",
    "actions",
    "equal_segments",
    "least_peak",
    "no_segments",
    "peak_of_segments",
    "profile",
    "pytorch_segments",
    "segments_of",
    "simulate",
]
