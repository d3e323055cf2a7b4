"""The peaks of very many plans, fast, and equal to what `memory` says.

At each moment of a step, what is alive is a constant and a multiple of the
micro-batch, and both grow by as much with each block: of those that are
checkpointed, and of those that are not. Blocks between the first and the last
of a kind are alike, and what is alive at them lies between. So networks of one
to three blocks, with micro-batches of two and three sequences, tell the peak
of any depth at any micro-batch. One sequence alone is looked at by itself, and
so is each micro-batch where the chunks of the loss are not all alike.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from membudget.ledger import (
    RECIPES,
    PaperMoment,
    PeakLine,
    Transformer,
    peak_at,
    peak_lines,
    walk,
)
from membudget.ledger import operators as op
from membudget.planning.memory import (
    family_of,
    input_bytes,
    load,
    phases_of,
    states_of,
    workspace,
)
from membudget.planning.plan import Job, Plan


@dataclass(frozen=True)
class Step:
    """A micro-batch, forward and backward, of a network of any depth.

    Attributes:
        network, tokens, lists: as for :func:`membudget.ledger.predict`; the
            network's depth does not count.
        recipe: of precision.
        loss_chunks: into which its tokens are cut.
        scaled: whether its loss is multiplied by its share of the batch.
        kept: whether gradients are there before.
    """

    network: Transformer
    tokens: int
    lists: str
    recipe: str
    loss_chunks: int | None
    scaled: bool = False
    kept: bool = False


def peak(job: Job, plan: Plan, share: int) -> int:
    """As :func:`membudget.planning.memory`.

    Args:
        job: what is trained.
        plan: one of its plans.
        share: sequences of each rank.
    """
    size, recipe = plan.micro_batch, plan.recipe
    family, foreach = family_of(plan), job.device == "cuda"
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
    )
    blocks = plan.checkpointed, job.network.depth - plan.checkpointed
    if plan.stage != "ddp":
        return inputs + max(
            held.total + further + _most(step, blocks, size, phases, False)
            for phases, held, further in phases_of(
                job.network, family, foreach, several
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
    update = held.gradients + workspace(job.network, family, foreach)
    return inputs + held.parameters + held.optimizer + max(most, update)


WHOLE = ("forward", "backward", "recomputation")
"""The phases of a micro-batch."""


def _most(
    step: Step,
    blocks: tuple[int, int],
    size: int,
    phases: tuple[str, ...] = WHOLE,
    gradients: bool = True,
) -> int:
    """The most that so many sequences need in these phases.

    Args:
        step: with them.
        blocks: how many are checkpointed, and how many are not.
        size: sequences.
        phases: of the step; there may be none.
        gradients: whether those that the step makes count.
    """
    if not phases:
        return 0
    sizes = (size,)
    if size > 1 and step.tokens % (step.loss_chunks or 1) == 0:
        sizes = (2, 3)
    return peak_at(_lines(step, blocks, sizes, phases, gradients), size)


@lru_cache(10**5)
def _lines(step, blocks, sizes, phases, gradients) -> list[PeakLine]:
    """Their maximum is the most; for one size it is the most itself."""
    loads = [
        [
            bare + gradients * made
            for phase, bare, made in _extended(step, blocks, size)
            if phase in phases
        ]
        for size in sizes
    ]
    if len(sizes) == 1:
        return [PeakLine(max(loads[0]), 0)]
    return peak_lines(sizes, loads)


@lru_cache(10**4)
def _extended(
    step: Step, blocks: tuple[int, int], size: int
) -> list[tuple[str, int, int]]:
    """The moments of a network with so many blocks, without those between."""
    few = tuple(min(count, 1) for count in blocks)
    base = _moments(step, few, size)
    found = [list(moment) for moment in base]
    for kind, count in enumerate(blocks):
        if count < 2:
            continue
        more = _moments(
            step, tuple(n + (i == kind) for i, n in enumerate(few)), size
        )
        for moment, one, two in zip(found, base, more, strict=True):
            for part in (1, 2):
                moment[part] += (count - 1) * (two[part] - one[part])
    return [tuple(moment) for moment in found]


@lru_cache(10**4)
def _moments(
    step: Step, blocks: tuple[int, int], size: int
) -> list[tuple[str, int, int]]:
    """Phase, load and gradients at each moment, by place.

    Places are outside the blocks, and at the first and the last block of a
    kind, which may be the same one.
    """
    recipe, checkpointed = RECIPES[step.recipe], blocks[0]
    paper = replace(step.network, depth=sum(blocks)).write(
        size,
        step.tokens,
        itemsize=recipe.parameters,
        autocast=recipe.autocast,
        lists=step.lists,
        checkpointed=checkpointed,
        loss_chunks=step.loss_chunks,
    )
    if step.scaled:
        op.scale(paper, paper.rows[-1].makes[0])
    predicted = walk([paper], gradients=int(step.kept))
    places: list[list[tuple[str, int, int]]] = [[] for _ in range(5)]
    for moment in predicted.moments:
        made = 0 if step.kept else moment.split["gradients"]
        for place in _places(moment, blocks):
            places[place].append((moment.phase, load(moment), made))
    return sum(places, [])


def _places(moment: PaperMoment, blocks: tuple[int, int]) -> list[int]:
    """0 outside the blocks; 1 to 4 at the first and last of each kind."""
    if not moment.row.startswith("blocks."):
        return [0]
    number = int(moment.row.split(".")[1].split()[0])
    edges = (0, blocks[0] - 1, blocks[0], sum(blocks) - 1)
    kind = (0, 1) if number < blocks[0] else (2, 3)
    return [place + 1 for place in kind if edges[place] == number]
