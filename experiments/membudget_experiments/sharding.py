"""Experiments on sharding."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from membudget.measuring import PeakTracker
from membudget.models import Llama
from membudget.sharding import (
    fsdp_traffic,
    rank_moments,
    rank_states,
    shard,
    simulate_rank,
    units_of,
    zero_states,
)
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import SHARDED_RANKS
from membudget_experiments.workload import META, seconds

CALLS = ("gathers", "all_gather", "reductions", "reduce_scatter")


@experiment(
    sizes=SHARDED_RANKS,
    units={
        "model": "which of the models",
        "ranks": "ranks in the group; rank 0 is simulated",
        "states": "bytes of the rank's shards at the optimizer's step",
        "peak": "bytes, the most alive in a step",
        "phase": "forward, backward, recomputation or optimizer, of the peak",
        "parameters": "bytes at the peak, shards of the parameters",
        "gradients": "bytes at the peak, shards of the gradients",
        "optimizer": "bytes at the peak, shards of Adam's states",
        "gathered": "bytes at the peak, whole parameters of units at work",
        "whole_gradients": "bytes at the peak, gradients not yet reduced",
        "buffers": "bytes at the peak, of collectives",
        "activations": "bytes at the peak, kept by the forward pass",
        "recomputed": "bytes at the peak, activations of a checkpoint again",
        "inputs": "bytes at the peak, tokens",
        "temporaries": "bytes at the peak, everything else",
        "after_forward": "bytes alive when the forward pass is over",
        "gathers": "calls of all-gather in a step",
        "all_gather": "bytes that are gathered in a step",
        "reductions": "calls of reduce-scatter in a step",
        "reduce_scatter": "bytes that are reduced in a step",
        "seconds": "s for the simulation, each repeat",
    },
    over="runs",
    compares={"states": "states", **{key: key for key in CALLS}},
    gpu=False,
)
def sharded_ranks(
    device: torch.device,
    *,
    models: dict[str, dict],
    batch: list[int],
    runs: list[list],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """What rank 0 of many needs for a Llama, by formula and simulated.

    ``runs`` are a model and a number of ranks, N. The models have the shapes
    of Llama 7B and 70B (:class:`membudget.models.Llama`). FSDP2 shards each
    block and the rest (ZeRO-3); parameters and Adam's states are stored in
    fp32, gathered in bf16, and the gradients reduced in fp32. Each block is
    under a checkpoint. ``batch`` are the sequences of a rank and the tokens
    of each.

    Predicted for each run: the formula, 16 bytes for each of the model's
    ``numbers``, divided by N (``formula``,
    :func:`membudget.sharding.zero_states`); the shards to the byte, padding
    included (:func:`membudget.sharding.rank_states`); the most that FSDP2
    holds on top of them, activations aside (``held`` by kind, their sum
    ``held_peak``, and ``held_after_forward``,
    :func:`membudget.sharding.rank_moments`); and the collectives
    (:func:`membudget.sharding.fsdp_traffic`).

    Measured is a simulation (:func:`membudget.sharding.simulate_rank`): the
    real model and the real ``fully_shard`` on tensors without data, in any
    process, with a CPU's operators, so ``device`` does not matter. Ten kinds
    of bytes, from ``parameters`` to ``temporaries``, add up to the peak;
    :func:`residuals` puts them beside the formula. All but the seconds is
    the same in every run.
    """
    cases = [Case(name, models[name], ranks, batch) for name, ranks in runs]
    yield {"runs": [case.predict() for case in cases]}
    for case in cases:
        found: dict = {}
        times = seconds(
            lambda case=case, found=found: found.update(case.simulate()),
            CPU,
            warm_up,
            repeats,
        )
        yield {**found, "seconds": times}


CPU = torch.device("cpu")


# Simulated ranks -----------------------------------------------------------

GATHERED, REDUCED = 2, 4
"""Bytes of a number on its way: bf16 parameters, fp32 gradients."""


@dataclass(frozen=True)
class Case:
    """A Llama on one of many ranks.

    Args:
        model: its name.
        shape: arguments of :class:`membudget.models.Llama`.
        ranks: N.
        batch: sequences and tokens of each.
    """

    model: str
    shape: dict[str, int]
    ranks: int
    batch: list[int]

    def build(self) -> nn.Module:
        return Llama(**self.shape)

    def predict(self) -> dict:
        """What the formulas say."""
        with META:
            network = self.build()
        numbers = sum(p.numel() for p in network.parameters())
        units = units_of(network, network.blocks)
        states = rank_states(units, self.ranks)
        moments = rank_moments(
            units, self.ranks, gathered=GATHERED, reduced=REDUCED
        )
        traffic = fsdp_traffic(
            units, self.ranks, gathered=GATHERED, reduced=REDUCED
        )
        return {
            "model": self.model,
            "ranks": self.ranks,
            "numbers": numbers,
            "formula": zero_states(numbers, self.ranks, recipe="fp32").total,
            "states": states.total,
            **asdict(states),
            "held": asdict(moments.peak),
            "held_peak": moments.peak.total,
            "held_after_forward": moments.after_forward.total,
            **_calls(traffic),
        }

    def simulate(self) -> dict:
        """What a step of rank 0 needs."""
        tokens = torch.empty(self.batch, dtype=torch.int64, device=META)
        found = simulate_rank(
            self.build, mixed, next_token, tokens, ranks=self.ranks
        )
        run = found.tracker
        return {
            "model": self.model,
            "ranks": self.ranks,
            "states": found.states.total,
            "peak": found.peak,
            "phase": run.operators[run.peak_moment].phase,
            **self.parts(run),
            "after_forward": found.after_forward,
            **_calls(found.traffic),
        }

    def parts(self, run: PeakTracker) -> dict[str, int]:
        """The bytes at the peak by :data:`PARTS`; they add up to it.

        Nobody but FSDP2 calls ``empty``. A whole gradient is told by its
        size, that of a parameter of the module that made it: the number of
        tokens is none of the model's dimensions, so no activation is as
        large.
        """
        with META:
            network = self.build()
        sizes = {
            (name, GATHERED * parameter.numel())
            for name, module in network.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        sums = dict.fromkeys(PARTS, 0)
        for a in run.at_peak():
            kind, (name, module, phase) = a.category, a.operator
            if name == "storage.resize_":
                kind = "gathered"
            elif kind == "activations" and phase == "recomputation":
                kind = "recomputed"
            elif kind == "temporaries" and name == "aten.empty":
                kind = "buffers"
            elif (
                kind == "temporaries"
                and phase == "backward"
                and (module, a.bytes) in sizes
            ):
                kind = "whole_gradients"
            sums[kind] += a.bytes
        return sums


PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "whole_gradients",
    "buffers",
    "activations",
    "recomputed",
    "inputs",
    "temporaries",
)
"""The bytes at a simulated peak; the first three are shards."""


def mixed(network: nn.Module, mesh: DeviceMesh) -> None:
    """Checkpoint each block, then shard; bf16 gathered, fp32 reduced."""
    for block in network.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully(network, mesh, mp_policy=policy)


def fully(network: nn.Module, mesh: DeviceMesh, *stage, **options) -> None:
    """:func:`membudget.sharding.shard` with the model's own blocks."""
    shard(network, network.blocks, *stage, mesh=mesh, **options)


def next_token(network: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss, in fp32; the tokens stand for those that follow them."""
    logits = network(tokens).flatten(0, 1).float()
    return F.cross_entropy(logits, tokens.flatten())


def _calls(traffic: dict) -> dict[str, int]:
    """Calls and bytes of the two collectives of FSDP2."""
    gather, reduction = traffic["all-gather"], traffic["reduce-scatter"]
    counts = gather.calls, gather.bytes, reduction.calls, reduction.bytes
    return dict(zip(CALLS, counts, strict=True))
