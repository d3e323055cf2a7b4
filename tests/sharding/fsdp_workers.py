"""Sharded models, for one process to simulate and for ranks to run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from membudget.measuring import PeakTracker
from membudget.models import GPT, convnet
from membudget.sharding import (
    CommunicationCounter,
    Traffic,
    held_states,
    shard,
)
from membudget.sharding.shards import _stored

BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
TOKENS = torch.arange(16).view(2, 8)

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, foreach=False),
}


def linear_layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class TiedPair(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def tied_layers() -> nn.Sequential:
    return nn.Sequential(TiedPair(6), nn.Linear(6, 6), nn.ReLU())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x).float()
    if x.is_floating_point():
        return out.square().mean()
    return F.cross_entropy(out.flatten(0, 1), x.flatten())


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it."""

    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], Iterable[nn.Module]]
    x: torch.Tensor
    stage: str = "zero-3"
    optimizer: str = "adam"
    bf16: bool = False
    steps: int = 1  # of accumulation
    last: bool = False  # only the last micro-batch is reduced

    def shard(self, model, mesh):
        policy = {"mp_policy": BF16} if self.bf16 else {}
        shard(model, self.blocks(model), self.stage, mesh=mesh, **policy)


BLOCKS = attrgetter("blocks")

even = partial(
    Case, partial(linear_layers, 8, 8, 8, 8), list, torch.ones(2, 8)
)
uneven = partial(
    Case, partial(linear_layers, 5, 7, 3, 10), list, torch.ones(2, 5)
)
few_rows = partial(
    Case,
    partial(linear_layers, 3, 2, 1, 2),
    lambda model: model[:-1],
    torch.ones(2, 3),
)
gpt = partial(Case, partial(GPT, 33, 9, 12, 2, 3), BLOCKS, TOKENS)

CASES = {
    "even": even(),
    "even, zero-2": even(stage="zero-2"),
    "even, sgd": even(optimizer="sgd"),
    "even, bf16": even(bf16=True),
    "uneven": uneven(),
    "uneven, zero-2, momentum": uneven(stage="zero-2", optimizer="momentum"),
    "uneven, zero-2, bf16": uneven(stage="zero-2", bf16=True),
    "uneven, one unit": Case(uneven().build, lambda model: [], uneven().x),
    "a bias of 2 and one of 1": few_rows(),
    "a bias of 2 and one of 1, bf16": few_rows(bf16=True),
    "tied in a block": Case(
        tied_layers,
        list,  # one of them without parameters
        torch.ones(2, 6),
    ),
    "GPT": gpt(),
    "GPT, bf16": gpt(bf16=True),
    "GPT, embedding a block": Case(
        gpt().build, lambda model: [model.token, *model.blocks], TOKENS
    ),
    "GPT, tied": Case(
        partial(GPT, 33, 9, 12, 2, 3, tied=True), BLOCKS, TOKENS
    ),
    "convnet with batch norm": Case(
        partial(convnet, (5, 3)),
        lambda model: [part for part in model if [*part.parameters()]],
        torch.ones(2, 3, 8, 8),
    ),
    **{
        f"uneven, {stage}, {steps} micro-batches, {when} reduced": uneven(
            stage=stage, steps=steps, last=when == "the last"
        )
        for stage, steps in (("zero-2", 2), ("zero-3", 3))
        for when in ("each", "the last")
    },
}


@dataclass(frozen=True)
class Found:
    """What a rank holds at the optimizer's step, and what it sent.

    ``numbers`` are those of its rows, of parameters and optimizer states.
    """

    states: tuple[int, int, int]
    numbers: tuple[int, int]
    traffic: dict[str, Traffic]
    finite: bool


def step(case: Case) -> Found:
    """A step of a case on this rank."""
    torch.manual_seed(0)
    model = case.build()
    case.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    with CommunicationCounter() as counter:
        for i in range(case.steps):
            if case.last:
                model.set_requires_gradient_sync(i == case.steps - 1)
            loss_of(model, case.x).backward()
    optimizer.step()
    held = held_states(model, optimizer)
    shards = [p.to_local() for p in model.parameters()]
    states = [
        v.to_local().numel()
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.ndim
    ]
    return Found(
        (held.parameters, held.gradients, held.optimizer),
        (sum(s.numel() for s in shards), sum(states)),
        counter.traffic,
        all(bool(s.isfinite().all()) for s in shards),
    )


def all_steps(cases: dict[str, Case]) -> dict[str, Found]:
    return {name: step(case) for name, case in cases.items()}


def data_parallel() -> dict[str, object]:
    """DDP on this rank: traffic, bytes of the gradients and of the states."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        linear_layers(256, 256, 256), bucket_cap_mb=0.1
    )
    optimizer = OPTIMIZERS["adam"](model.parameters())
    x = torch.full((2, 256), float(dist.get_rank()))
    model(x).sum().backward()  # makes the buckets
    optimizer.zero_grad()
    with CommunicationCounter() as counter:
        with model.no_sync():
            model(x).sum().backward()
        waiting = counter.traffic
        model(x).sum().backward()
    optimizer.step()
    held = held_states(model, optimizer)
    return {
        "waiting": waiting,
        "traffic": counter.traffic,
        "sent": counter.sent(dist.get_world_size()),
        "others": dict(counter.others),
        "gradients": _stored(p.grad for p in model.parameters()),
        "held": (held.parameters, held.gradients, held.optimizer),
    }


def a_parameter_without_a_dimension() -> str:
    """What PyTorch says about it."""
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    except ValueError as error:
        return str(error)
    return ""


def moments(
    build: Callable[[], nn.Module],
    blocks: Callable[[nn.Module], Iterable[nn.Module]],
    x: torch.Tensor,
    stage: str = "zero-3",
    options: dict | None = None,
    summed: bool = False,
    mesh: DeviceMesh | None = None,
) -> dict[str, int]:
    """Bytes that this rank, real or not, holds at the moments of a step.

    Gradients of a micro-batch before may be there, to be added to. Without
    those of the loss. ``x`` has no rows, so nor have activations.
    """
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model, x = build(), torch.empty(x.shape, dtype=x.dtype)
    shard(model, blocks(model), stage, mesh=mesh, **(options or {}))
    optimizer = OPTIMIZERS["adam"](model.parameters())

    def step(mark: Callable[[str], None]) -> None:
        loss = model(x).float().sum()
        mark("forward")
        loss.backward()
        del loss
        torch.zeros(0)  # the tracker looks at each operator
        mark("backward")
        optimizer.step()
        mark("step")
        optimizer.zero_grad()

    step(lambda label: None)
    with PeakTracker(model, optimizer, x) as tracker:
        if summed:
            model(x).float().sum().backward()
        torch.zeros(0)
        tracker.mark("begin")
        step(tracker.mark)
    lines = tracker.timeline
    at = {label: index for index, label in tracker.marks}
    loss = 4  # bytes; as many for its gradient
    return {
        # Without the operators of the loss, which is there at the end.
        "forward": max(lines[at["begin"] : at["forward"] - 3]),
        "after_forward": lines[at["forward"] - 1] - loss,
        "backward": max(lines[at["forward"] : at["backward"]]) - 2 * loss,
        "step": lines[at["step"] - 1],
    }


def moments_again(times: int, *arguments: object) -> list[dict[str, int]]:
    return [moments(*arguments) for _ in range(times)]
