"""Experiments on schedules."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from membudget import schedules
from membudget.checkpointing import (
    Checkpointed,
    Stage,
    equal_segments,
    no_segments,
    profile,
    simulate,
)
from membudget_experiments.checkpointing import _phase, _step, traced
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import SCHEDULES_GPT
from membudget_experiments.workload import META, Workload, workspace


@experiment(
    sizes=SCHEDULES_GPT,
    units={
        "way": "first (blocks are checkpointed), equal (segments) or optimal",
        "number": "of those blocks, of segments, or the budget in per cent "
        "of what the activations take without checkpointing",
        "seconds": "s for a step, each repeat",
        "requested": "bytes, peak of a step",
        "allocated": "bytes, peak of a step",
        "reserved": "bytes, peak of a step",
        "workspace": "bytes that libraries hold in the allocator",
    },
    over="runs",
    compares={"requested": "bytes"},
)
def schedules_gpt(
    device: torch.device,
    *,
    shape: dict,
    batch: int,
    runs: list[list],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Time and peak bytes of a step of a GPT along the frontier.

    ``runs`` are pairs of a way and a number. ``first`` makes each of the
    first blocks a segment, and none is the plain step; ``equal`` cuts the
    blocks into equal segments; ``optimal`` is the schedule of
    :func:`membudget.schedules.optimal_segments` for a budget. It is computed
    before anything is measured, from a profile on ``meta``, with the
    attention of a CPU. The norm, the head and the loss are the last stage of
    that profile: the last block's tape is alive beside theirs, and a
    schedule for the blocks alone does not know.

    A step and its two predictions are those of ``segments_gpt``.
    """
    stages = profiled(Workload("gpt", shape, META, batch))
    chosen = [segments_for(stages, way, number) for way, number in runs]
    _, plain = traced(Scheduled("gpt", shape, META, batch), device.type)
    rows = []
    for (way, number), segments in zip(runs, chosen, strict=True):
        meta = Scheduled("gpt", shape, META, batch, segments)
        run, flops = traced(meta, device.type)
        rows.append(
            {
                "way": way,
                "number": number,
                "segments": segments,
                "bytes": run.peak,
                "phase": _phase(run, run.peak - 1),
                "alive": run.start,
                "flops": flops,
                "time": round(flops / plain, 6),
            }
        )
    yield {"peak": rows}
    held = workspace(Workload("gpt", shape, device, 1))
    for (way, number), segments in zip(runs, chosen, strict=True):
        work = Scheduled("gpt", shape, device, batch, segments)
        sample = _step(work, warm_up, repeats)
        yield {"way": way, "number": number, **sample, "workspace": held}


@dataclass(frozen=True)
class Scheduled(Workload):
    """A GPT whose blocks are checkpointed in these segments.

    Args:
        segments: as :data:`membudget.checkpointing.Segments`; None for no
            checkpointing.
    """

    segments: list | None = None

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model, which has no dropout, and its Adam."""
        network, optimizer = super().build()
        network.blocks = Checkpointed(
            network.blocks,
            segments=self.segments or no_segments(self.shape["depth"]),
            preserve_rng_state=False,
        )
        return network, optimizer


class Tail(nn.Module):
    """What follows the blocks of a GPT: its norm, its head and the loss.

    Args:
        network: the GPT.
        targets: batch × tokens.
    """

    def __init__(self, network: nn.Module, targets: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.head = network.norm, network.head
        self.register_buffer("targets", targets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the losses."""
        logits = self.head(self.norm(x)).flatten(0, -2)
        return F.cross_entropy(logits, self.targets.flatten(), reduction="sum")


def profiled(work: Workload) -> list[Stage]:
    """The blocks of a GPT and its tail, in a step without gradients before.

    Args:
        work: a GPT without segments, on any device.
    """
    network, _ = work.build()
    place = work.window, work.shape["context"]
    with work.device:
        targets = torch.zeros(place, dtype=torch.long)
        x = torch.zeros(*place, work.shape["width"], requires_grad=True)
    tail = Tail(network, targets)
    return profile(*network.blocks, tail, x=x, gradients=False)


def segments_for(stages: list[Stage], way: str, number: int) -> list:
    """The segments of the blocks in a run of ``schedules_gpt``."""
    *blocks, _ = range(len(stages))
    if way == "first":
        return schedules.every_first(len(blocks), number)
    if way == "equal":
        return equal_segments(len(blocks), number)
    plain = simulate(stages, no_segments(len(stages))).peak
    best = schedules.optimal_segments(stages, plain * number // 100)
    return best[:-1]  # the tail goes backward at once, so it keeps its tape
