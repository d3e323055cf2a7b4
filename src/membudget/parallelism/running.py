"""A pipeline's step, run: on real ranks, or one rank alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import get_schedule_class

from membudget.checks import flag, function, instance, scalar_loss, whole
from membudget.internals import FakeTensorMode
from membudget.measuring import Allocation, PeakTracker
from membudget.models import GPT, Llama
from membudget.parallelism._private import (
    messages_kept,
    pipeline_stage,
    receive_buffers,
)
from membudget.parallelism.pipeline import cut, stages_of
from membudget.parallelism.tables import SCHEDULES, checked
from membudget.sharding._private import fake_group

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PipelineStep:
    """The step of one rank of a pipeline.

    Attributes:
        rank: of the pipeline.
        stages: the numbers of its stages.
        peak: the most bytes alive in the step, all of ``split`` together.
        split: bytes at the peak: ``"parameters"`` and ``"gradients"``;
            ``"buffers"``, what was there before the step, which are those
            for what the other ranks send, one for each micro-batch;
            ``"activations"``, made in forward passes, and
            ``"temporaries"``, all else.
        losses: of the micro-batches, on the rank with the last stage and
            with real tensors; elsewhere none.
        tracker: everything else; its mark is the step's beginning.
    """

    rank: int
    stages: tuple[int, ...]
    peak: int
    split: dict[str, int]
    losses: tuple[float, ...]
    tracker: PeakTracker

    @property
    def held(self) -> int:
        """Bytes at the peak beside parameters and gradients."""
        states = self.split["parameters"] + self.split["gradients"]
        return self.peak - states


def run_pipeline(
    build: Callable[[], GPT | Llama],
    loss: Loss,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    *,
    schedule: str,
    micro_batches: int,
    chunks: int | None = None,
) -> PipelineStep:
    """A pipeline's step on this rank, one of many; each of them calls it.

    It belongs into a worker of :class:`membudget.sharding.Ranks`, or of
    ``torchrun``. The default process group is the pipeline, and PyTorch runs
    the schedule. The first step makes buffers, gradients and connections;
    the second is tracked. It finds gradients there, as zeros.

    Args:
        build: makes the whole model, the same on each rank.
        loss: called as ``loss(logits, targets)``; the mean loss of a
            micro-batch. The gradients are those of the mean of these means.
        tokens, targets: of the whole step, on each rank; the first dimension
            is cut into micro-batches.
        schedule, micro_batches, chunks: as for :func:`table`.

    Raises:
        ValueError: a schedule, a model or a batch that cannot be cut so.
        RuntimeError: no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call it on ranks of "
            "membudget.sharding.Ranks, or simulate a rank with "
            "simulate_pipeline"
        )
    micro_batches = whole(micro_batches, "micro_batches")
    _whole_numbers(tokens, "tokens"), _whole_numbers(targets, "targets")
    if len(tokens) % micro_batches:
        raise ValueError(
            f"tokens is {list(tokens.shape)}: its first dimension must be a "
            f"multiple of the {micro_batches} micro-batches"
        )
    plan = schedule, micro_batches, chunks
    return _step(build, loss, tokens, targets, plan, zeroed=True, alone=False)


def simulate_pipeline(
    build: Callable[[], GPT | Llama],
    loss: Loss,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    *,
    schedule: str,
    ranks: int,
    micro_batches: int,
    rank: int = 0,
    chunks: int | None = None,
    zeroed: bool = True,
) -> PipelineStep:
    """What one rank of a pipeline needs; nothing is allocated.

    PyTorch's schedule runs on fake tensors, in a process group whose other
    ranks do not exist. To the byte it is what :func:`run_pipeline` measures
    on a CPU. What it does not see is what
    :func:`membudget.sharding.simulate_rank` does not.

    Args:
        build: makes the whole model, in the dtype in which it is stored.
        loss: called as ``loss(logits, targets)``; of a micro-batch.
        tokens, targets: of one micro-batch; ``meta`` will do.
        ranks, rank: of the pipeline.
        schedule, micro_batches, chunks: as for :func:`table`.
        zeroed: whether the gradients are there before the step, as zeros;
            otherwise its backward passes make them.

    Raises:
        ValueError: a schedule or a model that cannot be cut so.
        RuntimeError: this process is in a process group.
    """
    ranks, micro_batches, _ = checked(schedule, ranks, micro_batches, chunks)
    rank = whole(rank, "rank", 0, ranks - 1)
    batch = (
        _whole_numbers(tokens, "tokens"),
        _whole_numbers(targets, "targets"),
    )
    plan = schedule, micro_batches, chunks
    with fake_group(ranks, rank), messages_kept(), FakeTensorMode():
        x, y = (
            torch.empty((micro_batches * len(t), *t.shape[1:]), dtype=t.dtype)
            for t in batch
        )
        return _step(build, loss, x, y, plan, zeroed, alone=True)


def _step(
    build: Callable[[], GPT | Llama],
    loss: Loss,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    plan: tuple[str, int, int | None],
    zeroed: bool,
    alone: bool,
) -> PipelineStep:
    """The second of two steps of this rank, tracked."""
    function(build, "build"), function(loss, "loss"), flag(zeroed, "zeroed")
    schedule, micro_batches, _ = plan
    ranks, rank = dist.get_world_size(), dist.get_rank()
    _, _, chunks = checked(schedule, ranks, micro_batches, plan[2])
    last = ranks * chunks - 1
    numbers = stages_of(schedule, ranks, rank, chunks)
    model = build()
    parts = cut(model, last + 1)
    mine = [parts[i] for i in numbers]
    goes = _between(model, tokens[: len(tokens) // micro_batches], last)
    del model, parts  # the other ranks' stages go
    stages = [
        pipeline_stage(part, i, last + 1, goes(i), goes(i + 1), alone)
        for part, i in zip(mine, numbers, strict=True)
    ]
    engine = get_schedule_class(schedule)(
        stages[0] if SCHEDULES[schedule] == 1 else stages,
        n_microbatches=micro_batches,
        loss_fn=lambda *ends: scalar_loss(loss(*ends)),
    )
    losses: list[torch.Tensor] = []
    given = [tokens] if 0 in numbers else []
    wanted = dict(target=targets, losses=losses) if last in numbers else {}
    engine.step(*given, return_outputs=False, **wanted)
    for part in mine:
        part.zero_grad(set_to_none=not zeroed)
    losses.clear()
    with PeakTracker(*mine, *receive_buffers(stages)) as tracker:
        tracker.mark("step")
        engine.step(*given, return_outputs=False, **wanted)
    values = [] if alone else [value.item() for value in losses]
    return _found(tracker, rank, numbers, values)


def _whole_numbers(batch: torch.Tensor, name: str) -> torch.Tensor:
    """The batch, if it is batch × tokens of whole numbers."""
    instance(batch, torch.Tensor, name, "a tensor of whole numbers")
    if batch.ndim < 2 or batch.is_floating_point() or batch.is_complex():
        raise ValueError(
            f"{name} is {list(batch.shape)} of {batch.dtype}: use whole "
            "numbers, batch × tokens"
        )
    return batch


def _between(
    model: GPT | Llama, tokens: torch.Tensor, last: int
) -> Callable[[int], torch.Tensor]:
    """From a stage's number to an example of what it is called with."""
    vocabulary, width = model.head.weight.shape
    like = model.head.weight.new_empty(0)

    def goes(stage: int) -> torch.Tensor:
        if stage == 0:
            return tokens
        size = width if stage <= last else vocabulary
        return like.new_empty(*tokens.shape, size, requires_grad=True)

    return goes


def _found(
    tracker: PeakTracker,
    rank: int,
    numbers: Sequence[int],
    losses: Sequence[float],
) -> PipelineStep:
    begin = tracker.marks[0][0]
    tail = tracker.timeline[begin:]
    moment = begin + tail.index(max(tail))
    split = dict.fromkeys(
        ("parameters", "gradients", "buffers", "activations", "temporaries"), 0
    )
    for allocation in tracker.at(moment):
        split[_kind(allocation, begin)] += allocation.bytes
    return PipelineStep(
        rank, tuple(numbers), max(tail), split, tuple(losses), tracker
    )


def _kind(allocation: Allocation, begin: int) -> str:
    """Of what is alive in the step: states, or by when it was made."""
    if allocation.category in ("parameters", "gradients"):
        return allocation.category
    if allocation.birth < begin:
        return "buffers"
    return (
        "temporaries"
        if allocation.category == "temporaries"
        else "activations"
    )
