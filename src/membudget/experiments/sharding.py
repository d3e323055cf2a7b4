"""Experiments on sharding."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from membudget.experiments.definition import experiment
from membudget.experiments.machine import physical_memory
from membudget.experiments.precision import _clear, seeded
from membudget.experiments.record import Record, check_experiment
from membudget.experiments.runner import is_out_of_memory
from membudget.experiments.sizes import FSDP_ONE_GPU, FSDP_RANKS, SHARDED_RANKS
from membudget.experiments.workload import META, peak_bytes, seconds
from membudget.ledger import OPTIMIZERS, States
from membudget.measuring import PeakTracker
from membudget.measuring.device import read_memory
from membudget.models import GPT, Llama
from membudget.sharding import (
    CommunicationCounter,
    RankError,
    Ranks,
    fsdp_traffic,
    held_states,
    rank_moments,
    rank_states,
    shard,
    simulate_rank,
    units_of,
    zero_states,
)


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


@experiment(
    sizes=FSDP_ONE_GPU,
    units={
        "run": "plain, sharded (on one rank) or offloaded (to the CPU, too)",
        "outcome": "measured, or why not",
        "parameters": "bytes at the optimizer's step, wherever they are",
        "gradients": "bytes at the optimizer's step, wherever they are",
        "optimizer": "bytes at the optimizer's step, wherever they are",
        "on_device": "bytes of these three on the device",
        "requested": "bytes, peak of a step, less what was there before",
        "allocated": "bytes, the same after the allocator's rounding",
        "live_before": "bytes requested and alive before there was a model",
        "losses": "loss in each of the first steps",
        "seconds": "s for a step, each repeat",
    },
    over="runs",
)
def fsdp_one_gpu(
    device: torch.device,
    *,
    shape: dict[str, int],
    batch: int,
    runs: list[str],
    steps: int,
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """A GPT on one device: plain, sharded on one rank, offloaded to the CPU.

    ``plain`` is the model as it is; ``sharded`` has ``fully_shard`` on each
    block and on the model, in a process group of this process alone;
    ``offloaded`` has ``CPUOffloadPolicy`` as well, so that the shards, their
    gradients and Adam's states stay in the CPU's memory and Adam steps
    there. All in fp32, with Adam tensor by tensor.

    Predicted: the states by formula
    (:func:`membudget.sharding.rank_states`), and how much of them is on the
    device: on a GPU all but Adam's step counts, with offloading nothing. The
    peak (``peak``) is that of a simulation of one rank, with a CPU's
    operators; it is None for ``offloaded``, because the simulation knows one
    device. It counts Adam's step counts, and no library's workspace.

    Measured are, of one and the same training: the first losses, which
    should be equal; the states of the next step; its successor's peak, as in
    ``mixed_precision``; and the time of those that follow. On a GPU a
    training of one step comes first and is thrown away, for libraries take
    their workspaces then. Where a run cannot be, ``outcome`` says why, and
    the rest is None: ``offloaded`` needs a GPU, and there may be too little
    memory. So are the allocator's numbers on a CPU.
    """
    yield {
        "runs": [
            {"run": run, **_predict_one(run, shape, batch, device)}
            for run in runs
        ]
    }
    for run in runs:
        found = _measure_one(
            run, Task(shape, batch), device, steps, warm_up, repeats
        )
        yield {"run": run, **found}


@experiment(
    sizes=FSDP_RANKS,
    units={
        "ranks": "ranks in the group, on this machine",
        "stage": "zero-2 or zero-3",
        "outcome": "measured, or why not",
        "backend": "of the process group",
        "parameters": "bytes at the optimizer's step, on each rank",
        "gradients": "bytes at the optimizer's step, on each rank",
        "optimizer": "bytes at the optimizer's step, on each rank",
        "gathers": "calls of all-gather in a step, on rank 0",
        "all_gather": "bytes that are gathered in a step, on rank 0",
        "reductions": "calls of reduce-scatter in a step, on rank 0",
        "reduce_scatter": "bytes that are reduced in a step, on rank 0",
        "requested": "bytes, peak of a step on each rank's GPU",
        "losses": "mean loss of all ranks in each of the first steps",
        "seconds": "s for a step on the slowest rank, each repeat",
    },
    over="runs",
)
def fsdp_ranks(
    device: torch.device,
    *,
    shape: dict[str, int],
    batch: int,
    runs: list[list],
    steps: int,
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """A GPT on several ranks of this machine, with ZeRO-2 and ZeRO-3.

    ``runs`` are a number of ranks and a stage. The ranks share the
    ``batch``, the same in all runs, so the losses should agree up to
    rounding; and on one rank nothing is split. On a CPU they are processes
    with one thread each that talk through gloo; on GPUs each has one of its
    own, from the first one on, with NCCL. All in fp32, with Adam tensor by
    tensor.

    Predicted: the states of each rank to the byte, padding included
    (:func:`membudget.sharding.rank_states`), and the collectives of a step
    (:func:`membudget.sharding.fsdp_traffic`). Nothing is predicted of the
    seconds.

    Measured are, of one and the same training: the first losses; states and
    collectives of the next step; on GPUs the peak of the one after it, of
    all that the rank's process asked for; and the time of those that follow.
    Where a run cannot be, ``outcome`` says why, and the rest is None: there
    may be too few GPUs for its ranks, or too little memory.
    """
    yield {"runs": [_predict_ranks(shape, *run) for run in runs]}
    kind, task = device.type, Task(shape, batch)
    for ranks, group in groupby(runs, key=lambda run: run[0]):
        stages = [stage for _, stage in group]
        if lacking := _lacking(device, ranks):
            for stage in stages:
                yield _skipped(ranks, stage, lacking)
            continue
        backend = BACKENDS[kind]
        with Ranks(
            ranks, backend=backend, deadline=DEADLINE, show=None
        ) as pool:
            for stage in stages:
                given = (kind, task, stage, steps, warm_up, repeats)
                try:
                    found = pool.run(one_rank, *given)
                except RankError as error:
                    if "OutOfMemoryError" not in str(error):
                        raise
                    yield _skipped(ranks, stage, "out of memory")
                    continue
                yield {
                    "ranks": ranks,
                    "stage": stage,
                    "outcome": MEASURED,
                    "backend": backend.rpartition(":")[2],
                    **_together(found),
                }


MEASURED = "measured"
CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
DEADLINE = 300.0
"""Seconds that a run on several ranks may take."""


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


CALLS = ("gathers", "all_gather", "reductions", "reduce_scatter")


def _calls(traffic: dict) -> dict[str, int]:
    """Calls and bytes of the two collectives of FSDP2."""
    gather, reduction = traffic["all-gather"], traffic["reduce-scatter"]
    counts = gather.calls, gather.bytes, reduction.calls, reduction.bytes
    return dict(zip(CALLS, counts, strict=True))


# Real ranks ----------------------------------------------------------------

RATE = 0.001


@dataclass(frozen=True)
class Task:
    """A GPT in fp32 and a batch of random tokens, from a seed.

    Args:
        shape: arguments of :class:`membudget.models.GPT`.
        batch: sequences of the whole group.
    """

    shape: dict[str, int]
    batch: int

    def build(self, device: torch.device) -> nn.Module:
        with seeded(device), device:
            return GPT(**self.shape)

    def tokens(self, rank: int = 0, ranks: int = 1) -> torch.Tensor:
        """The sequences of a rank, on the CPU."""
        with seeded(CPU):
            place = (self.batch, self.shape["context"])
            tokens = torch.randint(self.shape["vocabulary"], place)
        return tokens.chunk(ranks)[rank]


@dataclass(frozen=True)
class Training:
    """A model at work, with a batch that stays the same."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor

    def backward(self) -> float:
        """Make the gradients; the loss."""
        value = next_token(self.network, self.tokens)
        value.backward()
        return value.item()

    def step(self) -> float:
        """A whole step; the loss."""
        loss = self.backward()
        self.end()
        return loss

    def states(self) -> States:
        """The bytes held at the optimizer's step."""
        self.backward()
        return held_states(self.network, self.optimizer)

    def end(self) -> None:
        """Step with the gradients that are there."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def start(
    task: Task,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    stage: str = "zero-3",
    **options: object,
) -> Training:
    """A new training.

    Args:
        device: of this process.
        mesh: of all ranks; None for a plain model.
        stage, **options: of :func:`membudget.sharding.shard`.
    """
    network = task.build(device)
    rank, ranks = 0, 1
    if mesh is not None:
        rank, ranks = mesh.get_rank(), mesh.size()
        fully(network, mesh, stage, **options)
    return Training(
        network,
        adam(list(network.parameters())),
        task.tokens(rank, ranks).to(device),
    )


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam, tensor by tensor, on every device."""
    return torch.optim.Adam(parameters, lr=RATE, foreach=False)


# One device ----------------------------------------------------------------


def _predict_one(
    run: str, shape: dict[str, int], batch: int, device: torch.device
) -> dict:
    """States, their part on the device, and the peak."""
    with META:
        network = GPT(**shape)
    units = units_of(network, network.blocks)
    states = rank_states(units, 1)
    counts = sum(len(unit.shapes) for unit in units)
    on_device = states.total
    if device.type != "cpu":
        on_device -= COUNT * counts
    peak = None
    if run == "offloaded":
        on_device = 0
    else:
        tokens = torch.empty(
            batch, shape["context"], dtype=torch.int64, device=META
        )
        peak = simulate_rank(
            lambda: GPT(**shape),
            fully if run == "sharded" else lambda network, mesh: None,
            next_token,
            tokens,
            ranks=1,
            optimizer=adam,
        ).peak
    return {**asdict(states), "on_device": on_device, "peak": peak}


COUNT = 4 * OPTIMIZERS["adam"].counts
"""Bytes in which Adam counts its steps, for each tensor, on the CPU."""

ONE = (
    "parameters",
    "gradients",
    "optimizer",
    "on_device",
    "requested",
    "allocated",
    "live_before",
    "losses",
    "seconds",
)


def _measure_one(
    run: str,
    task: Task,
    device: torch.device,
    steps: int,
    warm_up: int,
    repeats: int,
) -> dict:
    """One training on one device; None where it cannot be."""
    nothing = dict.fromkeys(ONE)
    if run == "offloaded" and (why := _not_offloaded(task, device)):
        return {"outcome": why, **nothing}
    try:
        if run == "plain":
            begin = partial(start, task, device)
            found = _trained(begin, device, steps, warm_up, repeats)
        else:
            with alone(device) as mesh:
                begin = partial(start, task, device, mesh)
                if run == "offloaded":
                    begin.keywords["offload_policy"] = CPUOffloadPolicy()
                found = _trained(begin, device, steps, warm_up, repeats)
        return {"outcome": MEASURED, **found}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
    return {"outcome": "out of memory", **nothing}


def _not_offloaded(task: Task, device: torch.device) -> str | None:
    """Why nothing can be offloaded; None if it can.

    A process that takes more than the CPU's memory is killed by the system,
    without an error.
    """
    if device.type == "cpu":
        return "needs a GPU to offload from"
    with META:
        network = GPT(**task.shape)
    needed = rank_states(units_of(network, network.blocks), 1).total * 5 // 4
    there = physical_memory()
    if there is None or needed <= there:
        return None
    return f"needs {needed >> 30} GiB of the CPU's memory, of {there >> 30}"


@contextmanager
def alone(device: torch.device) -> Iterator[DeviceMesh]:
    """A process group of this process alone; its mesh."""
    current = (
        nullcontext() if device.type == "cpu" else torch.cuda.device(device)
    )
    with current:
        dist.init_process_group(
            BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1
        )
        try:
            yield init_device_mesh(device.type, (1,))
        finally:
            gc.collect()  # before the group: sharded tensors hold it
            dist.destroy_process_group()


def _trained(
    begin: partial,
    device: torch.device,
    steps: int,
    warm_up: int,
    repeats: int,
) -> dict:
    """What is measured, with a new training."""
    before = None
    if device.type != "cpu":
        _clear(device)
        begin().step()  # libraries take their workspaces
        _clear(device)
        before = read_memory(device)
    training = begin()
    losses = [training.step() for _ in range(steps)]
    states = training.states()
    on_device = PeakTracker(
        training.network, training.optimizer, device=device
    ).start
    training.end()
    if before is None:
        memory = {
            "requested": _tracked(training),
            "allocated": None,
            "live_before": None,
        }
    else:
        peak = peak_bytes(training.step, device)
        memory = {
            "requested": peak["requested"] - before.requested,
            "allocated": peak["allocated"] - before.allocated,
            "live_before": before.requested,
        }
    return {
        **asdict(states),
        "on_device": on_device,
        **memory,
        "losses": losses,
        "seconds": seconds(training.step, device, warm_up, repeats),
    }


def _tracked(training: Training) -> int:
    """On a CPU: the peak of a step that the tracker counts."""
    with PeakTracker(
        training.network, training.optimizer, training.tokens
    ) as run:
        training.step()
    return run.peak


# Several devices -----------------------------------------------------------


def _predict_ranks(shape: dict[str, int], ranks: int, stage: str) -> dict:
    """States of each rank, and the collectives."""
    with META:
        network = GPT(**shape)
    units = units_of(network, network.blocks)
    states = [asdict(rank_states(units, ranks, rank)) for rank in range(ranks)]
    return {
        "ranks": ranks,
        "stage": stage,
        **{kind: [each[kind] for each in states] for kind in states[0]},
        **_calls(fsdp_traffic(units, ranks, stage)),
    }


def _lacking(device: torch.device, ranks: int) -> str | None:
    """Why there cannot be so many ranks; None if there can."""
    if device.type == "cpu" or ranks <= (there := torch.cuda.device_count()):
        return None
    return f"skipped: {ranks} ranks need {ranks} GPUs, here are {there}"


def _skipped(ranks: int, stage: str, why: str) -> dict:
    return {
        **dict.fromkeys(fsdp_ranks.units),
        "ranks": ranks,
        "stage": stage,
        "outcome": why,
    }


def one_rank(
    kind: str,
    task: Task,
    stage: str,
    steps: int,
    warm_up: int,
    repeats: int,
) -> dict:
    """What a rank measures of its training; it runs in the rank's process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = CPU if kind == "cpu" else torch.device(kind, rank)
    training = start(task, device, init_device_mesh(kind, (ranks,)), stage)
    losses = [training.step() for _ in range(steps)]
    with CommunicationCounter() as counter:
        states = training.states()
    training.end()
    peak = None
    if kind != "cpu":
        peak = peak_bytes(training.step, device)["requested"]
    return {
        **asdict(states),
        **_calls(counter.traffic),
        "requested": peak,
        "losses": losses,
        "seconds": seconds(training.step, device, warm_up, repeats),
    }


def _together(found: list[dict]) -> dict:
    """One sample of what the ranks measured."""
    each = {key: [rank[key] for rank in found] for key in found[0]}
    peaks = each["requested"]
    return {
        **{
            kind: each[kind]
            for kind in ("parameters", "gradients", "optimizer")
        },
        **{key: each[key][0] for key in CALLS},
        "requested": None if None in peaks else peaks,
        "losses": [
            sum(step) / len(found)
            for step in zip(*each["losses"], strict=True)
        ],
        "seconds": [max(step) for step in zip(*each["seconds"], strict=True)],
    }


# Reading the records -------------------------------------------------------


class Residual(NamedTuple):
    """A run of ``sharded_ranks``: the formula beside the simulation.

    Attributes:
        model, ranks: of the run.
        numbers: how many the model has.
        formula: 16 bytes for each, divided by the ranks.
        states: bytes of the rank's shards, as predicted and as simulated.
        held: the most that FSDP2 holds, as predicted, activations aside.
        peak: bytes, simulated.
        residual: the peak less the formula.
        parts: what the residual is made of. ``shards`` are those at the
            peak less the formula: padding and step counts, less the
            gradients that are not there yet.
        seconds: median of a simulation.
    """

    model: str
    ranks: int
    numbers: int
    formula: int
    states: int
    held: int
    peak: int
    residual: int
    parts: dict[str, int]
    seconds: float


SHARDS = PARTS[:3]


def residuals(record: Record) -> list[Residual]:
    """The runs of ``sharded_ranks``, in their order.

    Raises:
        ValueError: a record of another experiment.
    """
    check_experiment(record, "sharded_ranks")
    predictions = {
        (row["model"], row["ranks"]): row
        for row in record["prediction"]["values"]["runs"]
    }
    rows = []
    for s in record["samples"]:
        row = predictions[s["model"], s["ranks"]]
        shards = sum(s[kind] for kind in SHARDS)
        rows.append(
            Residual(
                s["model"],
                s["ranks"],
                row["numbers"],
                row["formula"],
                s["states"],
                row["held_peak"],
                s["peak"],
                s["peak"] - row["formula"],
                {
                    "shards": shards - row["formula"],
                    **{kind: s[kind] for kind in PARTS[3:]},
                },
                median(s["seconds"]),
            )
        )
    return rows
