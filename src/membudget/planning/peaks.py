"""The peaks of very many plans, fast, and equal to what `memory` says.

At each moment of a step, what is alive is a constant and a multiple of the
micro-batch, and both grow by as much with each block: of those that are
checkpointed, and of those that are not. Blocks between the first and the last
of a kind are alike, and what is alive at them lies between. So networks of one
to three blocks, with two small micro-batches, tell the peak of any depth at
any micro-batch. Where attention is not fused, one sequence alone is looked at
by itself; so is each micro-batch where the loss's chunks are not all alike.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from membudget.ledger import (
    RECIPES,
    PaperMoment,
    Transformer,
    walk,
)
from membudget.ledger import operators as op
from membudget.planning.memory import (
    family_of,
    held_in,
    input_bytes,
    load,
    parts_of,
    states_of,
    workspace,
)
from membudget.planning.own import OwnJob
from membudget.planning.plan import Plan, TrainedJob
from membudget.sharding import PARTS


@dataclass(frozen=True)
class Step:
    """A micro-batch, forward and backward, of a network of any depth.

    Attributes:
        network, tokens: as for :func:`membudget.ledger.predict`; the
            network's depth does not count.
        device: whose rules count.
        recipe: of precision.
        loss_chunks: into which its tokens are cut.
        kept_attention: whether checkpointed blocks keep attention's results.
        scaled: whether its loss is multiplied by its share of the batch.
        kept: whether gradients are there before.
    """

    network: Transformer
    tokens: int
    device: str
    recipe: str
    loss_chunks: int | None
    kept_attention: bool
    scaled: bool = False
    kept: bool = False


def peak(job: TrainedJob, plan: Plan, share: int) -> int:
    """As :func:`membudget.planning.memory`.

    Args:
        job: what is trained.
        plan: one of its plans.
        share: sequences of each rank.
    """
    if isinstance(job, OwnJob):
        return job.dry.peak(plan)
    size, recipe = plan.micro_batch, plan.recipe
    family, device = family_of(plan), job.device
    several = size < share
    inputs = input_bytes(job, share)
    late = recipe == "master-fp32-gradients"
    if plan.stage != "ddp":
        recipe = "master" if late else recipe
    step = Step(
        replace(job.network, depth=1),
        job.tokens,
        job.device,
        recipe,
        plan.loss_chunks,
        plan.kept_attention,
    )
    blocks = plan.checkpointed, job.network.depth - plan.checkpointed
    if plan.stage != "ddp":
        return inputs + max(
            held.total + further + _most(step, blocks, size, (part,), False)
            for part, held, further in held_in(
                job.network, family, device, several
            )
        )
    held = states_of(job.network, family)
    kept = late or plan.ranks > 1
    step = replace(step, scaled=several, kept=kept)
    later = replace(step, kept=True)
    if kept or size * 2 <= share:  # the second has the gradients beside it
        most = held.gradients + _most(later, blocks, size)
    else:
        most = _most(step, blocks, size)
        if several:
            last = held.gradients + _most(later, blocks, share - size)
            most = max(most, last)
    update = held.gradients + workspace(job.network, family, device)
    return inputs + held.parameters + held.optimizer + max(most, update)


def _most(
    step: Step,
    blocks: tuple[int, int],
    size: int,
    parts: tuple[str, ...] = PARTS,
    gradients: bool = True,
) -> int:
    """The most that so many sequences need in these parts.

    Args:
        step: with them.
        blocks: how many are checkpointed, and how many are not.
        size: sequences.
        parts: of the step; the optimizer's needs none.
        gradients: whether those that the step makes count.
    """
    if parts == ("optimizer",):
        return 0
    least = 1 if step.network.fused else 2
    if size <= least + 1 or step.tokens % (step.loss_chunks or 1):
        return int(_extended(step, blocks, size, parts, gradients).max())
    one, more = (
        _extended(step, blocks, n, parts, gradients)
        for n in (least, least + 1)
    )
    return int((one + (size - least) * (more - one)).max())


@lru_cache(10**5)
def _extended(
    step: Step,
    blocks: tuple[int, int],
    size: int,
    parts: tuple[str, ...],
    gradients: bool,
) -> torch.Tensor:
    """What a network with so many blocks needs at each moment; those at the
    blocks between are left out."""
    few = tuple(min(count, 1) for count in blocks)
    base = found = _moments(step, few, size, parts, gradients)
    for kind, count in enumerate(blocks):
        if count > 1:
            more = tuple(n + (i == kind) for i, n in enumerate(few))
            further = _moments(step, more, size, parts, gradients) - base
            found = found + (count - 1) * further
    return found


@lru_cache(10**4)
def _moments(
    step: Step,
    blocks: tuple[int, int],
    size: int,
    parts: tuple[str, ...],
    gradients: bool,
) -> torch.Tensor:
    """What is needed at each moment in the order of the places: outside the
    blocks, at the first and at the last block of each kind."""
    places: list[list[int]] = [[] for _ in range(5)]
    moments = _walked(step, blocks, size)
    for part, moment in zip(parts_of(moments), moments, strict=True):
        if part in parts:
            made = 0 if step.kept else moment.split["gradients"]
            for place in _places(moment.row, blocks):
                places[place].append(load(moment) + gradients * made)
    return torch.tensor([needed for place in places for needed in place])


@lru_cache(10**4)
def _walked(
    step: Step, blocks: tuple[int, int], size: int
) -> tuple[PaperMoment, ...]:
    """The moments of a micro-batch of a network with few blocks."""
    recipe = RECIPES[step.recipe]
    paper = replace(step.network, depth=sum(blocks)).write(
        size,
        step.tokens,
        itemsize=recipe.parameters,
        autocast=recipe.autocast,
        lists=step.device,
        kernels=step.device,
        checkpointed=blocks[0],
        loss_chunks=step.loss_chunks,
        kept_attention=step.kept_attention,
    )
    if step.scaled:
        op.scale(paper, paper.rows[-1].makes[0])
    return walk([paper], gradients=int(step.kept)).moments


def _places(row: str, blocks: tuple[int, int]) -> list[int]:
    """0 outside the blocks; 1 and 2, 3 and 4 at the first and the last block
    of each kind, which may be the same one."""
    if not row.startswith("blocks."):
        return [0]
    number = int(row.split(".")[1].split()[0])
    edges = (0, blocks[0] - 1, blocks[0], sum(blocks) - 1)
    kind = (0, 1) if number < blocks[0] else (2, 3)
    return [place + 1 for place in kind if edges[place] == number]
