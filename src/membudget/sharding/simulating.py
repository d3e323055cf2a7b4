"""One rank of many, simulated: its step without its memory, and alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from membudget.checks import (
    function,
    listed,
    module,
    scalar_loss,
    whole,
)
from membudget.checks import stepper as checked_optimizer
from membudget.internals import FakeTensor, FakeTensorMode
from membudget.ledger import States
from membudget.measuring import PeakTracker
from membudget.measuring.fakes import CONVERTED
from membudget.measuring.step import only_tensors
from membudget.measuring.tracker import by_category
from membudget.sharding._private import (
    Waits,
    fake_group,
    offloads,
    real_meshes,
)
from membudget.sharding.communication import CommunicationCounter, Traffic
from membudget.sharding.shards import held_states

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MOST_RANKS, MOST_STEPS = 10**6, 1000
"""In a simulation; each micro-batch of it runs."""


@dataclass(frozen=True)
class Simulation:
    """A step of one rank.

    Attributes:
        ranks: of the group that was simulated.
        states: bytes of the rank's shards at the optimizer's step.
        peak: the most bytes alive in the forward and backward passes, and
            in the optimizer's step if it was tracked.
        split: all bytes at the peak by category; gathered parameters are
            ``"gathered"``, not in ``"parameters"``.
        after_forward: bytes alive when the forward pass is over.
        traffic: the collectives of the step.
        tracker: everything else.
    """

    ranks: int
    states: States
    peak: int
    split: dict[str, int]
    after_forward: int
    traffic: dict[str, Traffic]
    tracker: PeakTracker


def simulate_rank(
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module, DeviceMesh], object],
    loss: Callable[..., torch.Tensor],
    *batch: torch.Tensor,
    ranks: int,
    rank: int = 0,
    optimizer: Optimizer | None = None,
    micro_batches: int = 1,
    mesh: Sequence[int] | None = None,
) -> Simulation:
    """What one rank of a sharded step needs; nothing is allocated.

    The real model and PyTorch's real ``fully_shard`` run on fake tensors, in
    a process group whose other ranks do not exist. One step makes the
    optimizer's states, the next is tracked.

    What it does not see: an allocator's rounding, the libraries' work
    memory, NCCL's buffers, and how long streams of a GPU hold buffers. The
    operators are those of a CPU.

    Args:
        build: makes the model, on the CPU, and in the dtype in which it is
            stored (``torch.set_default_dtype``, ``dtype=``): PyTorch cannot
            convert a fake model with ``.to`` or ``.bfloat16()``.
        shard: called as ``shard(model, mesh)``; applies ``fully_shard``.
        loss: called as ``loss(model, *batch)``; the mean loss of a
            micro-batch.
        *batch: tensors of one micro-batch of this rank; ``meta`` will do.
        ranks: of the group, a million at most.
        rank: of the group.
        optimizer: called with the sharded parameters; by default Adam,
            tensor by tensor.
        micro_batches: in the step, a thousand at most; each reduces its
            gradients.
        mesh: shape of the mesh, as ``(2, 4)`` for two replicas of four
            shards; by default all ranks in a row.

    Raises:
        ValueError: a mesh of another shape, a model that was there before, a
            loss without a graph, shards that are offloaded to the CPU.
        RuntimeError: this process is in a process group, build converts the
            model, or this PyTorch lacks what the simulation needs.
    """
    ranks = whole(ranks, "ranks", 1, MOST_RANKS)
    rank = whole(rank, "rank", 0, ranks - 1)
    micro_batches = whole(micro_batches, "micro_batches", 1, MOST_STEPS)
    function(build, "build"), function(shard, "shard"), function(loss, "loss")
    if optimizer is not None:
        function(optimizer, "optimizer")
    only_tensors(batch)
    sizes = (ranks,) if mesh is None else listed(mesh, "mesh", "sizes", 0)
    shape = tuple(
        whole(size, "a size of the mesh", 1, MOST_RANKS) for size in sizes
    )
    if len(shape) not in (1, 2):
        raise ValueError(
            f"mesh is {shape}: use one number, the shards, or two, the "
            "replicas and the shards of each"
        )
    if torch.Size(shape).numel() != ranks:
        raise ValueError(
            f"a mesh of {' × '.join(map(str, shape))} is not {ranks} ranks: "
            "the product must be the number of ranks"
        )
    with fake_group(ranks, rank):
        names = ("replica", "shard")[-len(shape) :]
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with FakeTensorMode(), real_meshes(), Waits():
            model = module(_built(build), "what build made")
            if not all(isinstance(p, FakeTensor) for p in model.parameters()):
                raise ValueError(
                    "build gave a model that was there before: it must make "
                    "the model, as in build=lambda: GPT(...)"
                )
            shard(model, device_mesh)
            if offloads(model):
                raise ValueError(
                    "the shards wait in the CPU's memory (CPUOffloadPolicy), "
                    "and the simulation has no other: leave the policy out, "
                    "or measure on a device"
                )
            parameters = list(model.parameters())
            stepper = (
                checked_optimizer(optimizer(parameters), "what optimizer made")
                if optimizer
                else torch.optim.Adam(parameters, foreach=False)
            )
            parts = [
                torch.empty(t.shape, dtype=t.dtype, device="cpu")
                for t in batch
            ]

            def step(mark: Callable[[str], None]) -> None:
                for _ in range(micro_batches):
                    value = scalar_loss(loss(model, *parts))
                    mark("forward")
                    value.backward()
                    del value
                    torch.zeros(0)  # the tracker looks at each operator
                    mark("backward")
                stepper.step()
                mark("step")

            step(lambda label: None)
            states = held_states(model, stepper)
            stepper.zero_grad()
            counter = CommunicationCounter()
            with PeakTracker(model, stepper, *parts) as tracker, counter:
                step(tracker.mark)
    split = tracker.split()
    gathered = by_category(
        a for a in tracker.at_peak() if a.operator.name == "storage.resize_"
    )
    first = next(i for i, label in tracker.marks if label == "forward")
    return Simulation(
        ranks=ranks,
        states=states,
        peak=tracker.peak,
        split={
            "gathered": sum(gathered.values()),
            **{kind: split[kind] - gathered[kind] for kind in split},
        },
        after_forward=tracker.timeline[first - 1],
        traffic=counter.traffic,
        tracker=tracker,
    )


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    """The model, on fake tensors."""
    try:
        return build()
    except RuntimeError as error:
        if CONVERTED not in str(error):
            raise
        raise RuntimeError(
            "build converts the model, as .to and .bfloat16() do, and PyTorch "
            "cannot do so to every fake one: make it as it is stored, with "
            "torch.set_default_dtype or dtype=, or start real ranks with "
            "membudget.sharding.Ranks"
        ) from error
