"""Sharding: model states over many ranks, by formula, simulation and run."""

from membudget.sharding.communication import (
    COLLECTIVES,
    CommunicationCounter,
    Traffic,
    fsdp_traffic,
    sent,
)
from membudget.sharding.launching import (
    DeadlineError,
    Finished,
    RankError,
    Ranks,
    first_rank,
    joined,
    torchrun,
)
from membudget.sharding.moments import (
    PLACES,
    Held,
    Moments,
    Place,
    rank_moments,
)
from membudget.sharding.saving import (
    CheckpointError,
    Loaded,
    load_checkpoint,
    save_checkpoint,
)
from membudget.sharding.script import training_script
from membudget.sharding.shards import (
    Unit,
    held_states,
    rank_states,
    rows,
    shard,
    units_of,
)
from membudget.sharding.simulating import Simulation, simulate_rank
from membudget.sharding.states import (
    STAGES,
    ZeroStage,
    zero_states,
    zero_traffic,
)

__all__ = [
    "COLLECTIVES",
    "PLACES",
    "STAGES",
    "CheckpointError",
    "CommunicationCounter",
    "DeadlineError",
    "Finished",
    "Held",
    "Loaded",
    "Moments",
    "Place",
    "RankError",
    "Ranks",
    "Simulation",
    "Traffic",
    "Unit",
    "ZeroStage",
    "first_rank",
    "fsdp_traffic",
    "held_states",
    "joined",
    "load_checkpoint",
    "rank_moments",
    "rank_states",
    "rows",
    "save_checkpoint",
    "sent",
    "shard",
    "simulate_rank",
    "torchrun",
    "training_script",
    "units_of",
    "zero_states",
    "zero_traffic",
]
