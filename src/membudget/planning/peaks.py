"""The peaks of very many plans, fast, and equal to what `memory` says.

At each moment of a step, what is alive is a constant and a multiple of the
micro-batch, and both grow by as much with each block: of those that are
checkpointed, and of those that are not. Blocks between the first and the last
of a kind are alike, and what is alive at them lies between. So networks of one
to three blocks, with two small micro-batches, tell the peak of any depth at
any micro-batch. Where attention is not fused, one sequence alone is looked at
by itself; so is each micro-batch where the loss's chunks are not all alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from membudget.ledger import RECIPES, Prediction, Transformer
from membudget.ledger import operators as op
from membudget.ledger.walk import walk
from membudget.planning.memory import (
    family_of,
    input_bytes,
    load,
    passes,
    placed,
    sharded_of,
    states_of,
    workspace,
)
from membudget.planning.own import OwnJob
from membudget.planning.plan import Plan, TrainedJob, as_job
from membudget.sharding import PLACES


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
    job = as_job(job)
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
        how = job.network, family, device
        sharded = sharded_of(*how, False)
        stepped = sharded.step.total + sharded.workspace
        return inputs + max(
            stepped,
            *(
                scaled + _sharded(step, blocks, part, (*how, summed))
                for part, summed, scaled in passes(share, size)
            ),
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


def _sharded(
    step: Step, blocks: tuple[int, int], size: int, how: tuple
) -> int:
    """The most that a rank of FSDP2 holds in a micro-batch, the batch aside.

    Args:
        step, blocks, size: as for :func:`_most`.
        how: arguments of :func:`membudget.planning.memory.sharded_of`.
    """
    sharded = sharded_of(*how)
    waits = sharded.waits, sharded.gathered

    def needs(size: int) -> torch.Tensor:
        cells = _at_places(step, blocks, size, waits)
        return _at_spots(how, blocks, tuple(map(len, cells))) + torch.cat(
            cells
        )

    return _largest(needs, step, size)


def _most(step: Step, blocks: tuple[int, int], size: int) -> int:
    """The most that this many sequences need, with the gradients they make.

    Args:
        step: with them.
        blocks: how many are checkpointed, and how many are not.
        size: sequences.
    """
    return _largest(partial(_extended, step, blocks), step, size)


def _largest(
    needs: Callable[[int], torch.Tensor], step: Step, size: int
) -> int:
    """The most of what is needed at each moment, by sequences."""
    least = 1 if step.network.fused else 2
    if size <= least + 1 or step.tokens % (step.loss_chunks or 1):
        return int(needs(size).max())
    one, more = needs(least), needs(least + 1)
    return int((one + (size - least) * (more - one)).max())


@lru_cache(10**5)
def _extended(step: Step, blocks: tuple[int, int], size: int) -> torch.Tensor:
    """What a network with this many blocks needs at each moment; those at the
    blocks between are left out."""
    return by_depth(lambda few: _moments(step, few, size), blocks)


def by_depth(
    needs: Callable[[tuple[int, int]], torch.Tensor], blocks: tuple[int, int]
) -> torch.Tensor:
    """What is affine in the blocks of each kind."""
    again, straight = blocks
    few = min(again, 1), min(straight, 1)
    base = found = needs(few)
    for count, more in (
        (again, (few[0] + 1, few[1])),
        (straight, (few[0], few[1] + 1)),
    ):
        if count > 1:
            found = found + (count - 1) * (needs(more) - base)
    return found


@lru_cache(10**4)
def _moments(step: Step, blocks: tuple[int, int], size: int) -> torch.Tensor:
    """What is needed at each moment in the order of the places: outside the
    blocks, at the first and at the last block of each kind."""
    places: list[list[int]] = [[] for _ in range(5)]
    for moment in _walked(step, blocks, size).moments:
        made = 0 if step.kept else moment.split["gradients"]
        for place in _places(moment.row, blocks):
            places[place].append(load(moment) + made)
    return torch.tensor([needed for place in places for needed in place])


# FSDP2


def spots(blocks: tuple[int, int]) -> list[tuple[str, int]]:
    """Where a step under FSDP2 can be at its worst: places, and of those of
    a block the blocks' numbers.

    What is held and what a micro-batch needs change by as much from block to
    block, but at the first and the last ones and where those that are
    checkpointed end. In the forward pass both only grow.
    """
    depth = sum(blocks)
    ends = range(blocks[0] - 2, blocks[0] + 1), range(depth - 3, depth)
    edges = {0, 1}.union(*ends)
    found = []
    for place in PLACES:
        numbers: Iterable[int] = [0]
        if place in ("return", "backward"):
            numbers = sorted(edges & set(range(depth)))
        elif place in ("enter", "forward"):
            numbers = sorted({0, depth - 1})
        found += [(place, number) for number in numbers]
    return found


@lru_cache(10**4)
def _at_spots(
    how: tuple, blocks: tuple[int, int], counts: tuple[int, ...]
) -> torch.Tensor:
    """What is held at each of the spots, as often as it has moments."""
    sharded = sharded_of(*how)
    held = [
        sharded.places[place][number].beside + sharded.newest
        for place, number in spots(blocks)
    ]
    return torch.tensor(held).repeat_interleave(torch.tensor(counts))


@lru_cache(10**4)
def _at_places(
    step: Step, blocks: tuple[int, int], size: int, waits: tuple[int, int]
) -> list[torch.Tensor]:
    """What a micro-batch needs beside it, at the moments of each spot."""

    def at(few: tuple[int, int], place: str, number: int) -> torch.Tensor:
        return _placed(step, few, size, waits)[place, number]

    return [
        at_spot(partial(at, place=place), blocks, place, number)
        for place, number in spots(blocks)
    ]


def at_spot(
    at: Callable[..., torch.Tensor],
    blocks: tuple[int, int],
    place: str,
    number: int,
) -> torch.Tensor:
    """What is needed at a spot of a network of any depth.

    Args:
        at: called with the blocks of a small network, and with the number of
            one of them; what is needed there.
        blocks, place, number: of the network, and the spot.
    """
    once, kept = blocks
    if place not in BLOCKS:
        return by_depth(lambda few: at(few, number=0), blocks)
    kind, before = (0, 0) if number < once else (1, once)
    after = min(blocks[kind] - 1 - (number - before), 1)

    def near(place: int, few: int = 0) -> torch.Tensor:
        if kind:
            return at((few, place + 1 + after), number=few + place)
        return at((place + 1 + after, min(kept, 1)), number=place)

    def along(few: int) -> torch.Tensor:
        far = number - before
        if far < 2:
            return near(far, few)
        return near(1, few) + (far - 1) * (near(2, few) - near(1, few))

    found = along(min(before, 1))
    if before > 1:
        found = found + (before - 1) * (along(2) - found)
    return found


BLOCKS = ("enter", "forward", "return", "backward")
"""Places of a block."""


@lru_cache(10**4)
def _placed(
    step: Step, blocks: tuple[int, int], size: int, waits: tuple[int, int]
) -> dict[tuple[str, int], torch.Tensor]:
    """What is needed at each place of a network with few blocks."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, number, moment, made in placed(_walked(step, blocks, size)):
        needed = load(moment) + made * waits[0] // waits[1]
        found.setdefault((place, number), []).append(needed)
    return {spot: torch.tensor(needed) for spot, needed in found.items()}


# The small networks


@lru_cache(10**4)
def _walked(step: Step, blocks: tuple[int, int], size: int) -> Prediction:
    """A micro-batch of a network with few blocks."""
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
    return walk([paper], gradients=int(step.kept))


def _places(row: str, blocks: tuple[int, int]) -> list[int]:
    """0 outside the blocks; 1 and 2, 3 and 4 at the first and the last block
    of each kind, which may be the same one."""
    if not row.startswith("blocks."):
        return [0]
    number = int(row.split(".")[1].split()[0])
    edges = (0, blocks[0] - 1, blocks[0], sum(blocks) - 1)
    kind = (0, 1) if number < blocks[0] else (2, 3)
    return [place + 1 for place in kind if edges[place] == number]
