"""Experiments on offloading."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from membudget.measuring import FlopCounter, PeakTracker
from membudget.measuring import optimizer_tensors as states
from membudget.offloading import HostMemory, Offload
from membudget_experiments.checkpointing import Segmented, attention_of
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import OFFLOAD
from membudget_experiments.workload import (
    META,
    Workload,
    peak_bytes,
    seconds,
    workspace,
)


@experiment(
    sizes=OFFLOAD,
    units={
        "variant": "plain, offloaded, checkpointed (each block) or both",
        "seconds": "s for a step, each repeat",
        "out": "bytes that left in a step",
        "back": "bytes that came back in a step",
        "copying": "s to copy what leaves out and back, and nothing else",
        "requested": "bytes, peak of a step",
        "allocated": "bytes, peak of a step",
        "reserved": "bytes, peak of a step",
        "workspace": "bytes that libraries hold in the allocator",
    },
    over="variants",
    compares={"requested": "bytes", "out": "out", "back": "back"},
)
def offload(
    device: torch.device,
    *,
    shape: dict,
    batch: int,
    variants: list[str],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Peak bytes, bytes moved and time of a step of a GPT, offloaded or not.

    A step is forward, backward and Adam, whose states are there before it
    begins. What leaves is what autograd saves, each storage once, but for the
    parameters (:class:`membudget.offloading.Offload`); in ``both`` that is
    the blocks' inputs, and what embeddings, head and loss save.

    Predicted from the same step on ``meta``: bytes out and back, and the peak
    under the :class:`membudget.measuring.PeakTracker`; on a CPU exact, up to
    the few bytes that an operator asks for and frees before it returns. A
    GPU copies beside the computation, and the storages that are on their way
    are not in the prediction. The time is that of the FLOPs of the matrix
    products as a multiple of the plain step's: what it is if all copies
    hide, which they can where the FLOP/s of the device by the bytes/s of its
    link are at most ``flops_a_byte``, the FLOPs of a forward pass by the
    bytes that leave.
    """
    rows = [
        _predicted(_work(variant, shape, META, batch), variant, device.type)
        for variant in variants
    ]
    plain = _plain_flops(shape, batch, device.type)
    for row in rows:
        row["time"] = round(row["flops"] / plain, 6)
    yield {"steps": rows}
    held = workspace(Workload("gpt", shape, device, 1))
    for variant in variants:
        work = _work(variant, shape, device, batch)
        sample = _measured(work, warm_up, repeats)
        yield {"variant": variant, **sample, "workspace": held}


@dataclass(frozen=True)
class Moved(Segmented):
    """A workload whose saved tensors wait in the host's memory.

    Args:
        moves: whether they do.
    """

    moves: bool = False

    def step(
        self, network: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, int]:
        """A step of the whole window; bytes out and back."""
        watch = Offload(network) if self.moves else nullcontext()
        with watch:
            loss = self.loss(network, self.window)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (watch.out, watch.back) if self.moves else (0, 0)


def _work(
    variant: str, shape: dict, device: torch.device, batch: int
) -> Moved:
    count = shape["depth"] if variant in ("checkpointed", "both") else 0
    moves = variant in ("offloaded", "both")
    return Moved("gpt", shape, device, batch, count, moves)


def _predicted(work: Moved, variant: str, kind: str) -> dict:
    """What a step on ``meta`` tells of one on a device of a kind."""
    network, optimizer = work.build()
    counted = None if kind == "cpu" else "meta"
    with attention_of(kind):
        work.step(network, optimizer)  # makes Adam's states
        alive = [*network.parameters(), *states(optimizer)]
        with (
            PeakTracker(*alive, device=counted) as run,
            FlopCounter() as flops,
        ):
            out, back = work.step(network, optimizer)
        with FlopCounter() as forward, torch.no_grad():
            work.loss(network, work.window)
    return {
        "variant": variant,
        "bytes": run.peak,
        "alive": run.start,
        "out": out,
        "back": back,
        "flops": flops.total,
        "flops_a_byte": round(forward.total / out, 1) if out else None,
    }


def _plain_flops(shape: dict, batch: int, kind: str) -> int:
    return _predicted(_work("plain", shape, META, batch), "plain", kind)[
        "flops"
    ]


def _measured(work: Moved, warm_up: int, repeats: int) -> dict:
    """Seconds, bytes moved and peak bytes of a step, anew."""
    gc.collect()
    network, optimizer = work.build()
    moved: list[tuple[int, int]] = []

    def train() -> None:
        moved[:] = [work.step(network, optimizer)]

    train()  # makes Adam's states
    alive = [*network.parameters(), *states(optimizer)]
    peak = peak_bytes(train, work.device, sum(t.nbytes for t in alive))
    ((out, back),) = moved
    return {
        "seconds": seconds(train, work.device, warm_up, repeats),
        "out": out,
        "back": back,
        "copying": _copying(out, work.device, warm_up, repeats),
        **peak,
    }


LARGEST = 256 << 20
"""Bytes that are copied at once when copies alone are timed."""


def _copying(
    size: int, device: torch.device, warm_up: int, repeats: int
) -> list[float] | None:
    """Seconds to copy so many bytes out and back, each repeat."""
    if not size:
        return None
    part = min(size, LARGEST)
    data = torch.zeros(part, dtype=torch.uint8, device=device)
    slot = HostMemory().slot(part, device)

    def copy() -> None:
        slot.write(data)
        slot.read(data)

    times = seconds(copy, device, warm_up, repeats)
    return [round(time * size / part, 9) for time in times]
