"""The exercises on planning, of the chapter and of the lab."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.loops import weighing
from membudget.exercises.observe import answer, planned_gradients

PLANS = [(9, 10), (5, 14), (4, 17), (5, 12), (7, 12), (3, 20), (6, 12)]
"""Peaks and seconds: three are equally fast, and two have equal peaks."""


def frontier(plans):
    best, kept = float("inf"), []
    for peak, seconds in sorted(plans):
        if seconds < best:
            best = seconds
            kept.append((peak, seconds))
    return kept


check_frontier = Exercise(
    frontier,
    cases=[
        given(plans=[(5, 14), *PLANS, (8, 18), (10, 11)]),
        given(plans=[(1, 9), (2, 8), (3, 7)]),
        given(plans=[(3, 7), (2, 7), (1, 7)]),
    ],
    observe=answer,
    mistakes="""
        if seconds < best => if seconds <= best
            this keeps plans that need more bytes and are no faster.
        sorted(plans) => plans
            take the plans by rising peak: sort them first.
        sorted(plans) => sorted(plans, key=lambda plan: plan[1])
            this goes by rising seconds, so only the fastest is kept: sort by
            the peak.
        sorted(plans) => sorted(plans, reverse=True)
            this begins with the largest peak: begin with the smallest.
        best = seconds => pass
        or if seconds < best => if True
            a plan must be faster than all that are kept: remember the best
            seconds, and leave out the others.
        """,
    shown=(
        "Sort once, go through once: a million plans are no trouble. The "
        "answer to every budget is on it."
    ),
)


def planned_gradient(blocks, loss, x, y, micro_batch, checkpointed):
    for start in range(0, len(x), micro_batch):
        h, target = (t[start : start + micro_batch] for t in (x, y))
        for place, block in enumerate(blocks):
            if place < checkpointed:
                h = checkpoint(block, h, use_reentrant=False)
            else:
                h = block(h)
        (loss(h, target) * len(h) / len(x)).backward()


def _plan(samples: int, micro_batch: int, checkpointed: int) -> Case:
    def make() -> tuple:
        blocks = [
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
            for _ in range(4)
        ]
        x = torch.randn(samples, 4, dtype=torch.float64)
        x *= torch.arange(1, samples + 1)[:, None]  # later ones differ
        y = torch.randint(4, (samples,))
        return blocks, F.cross_entropy, x, y, micro_batch, checkpointed

    return Case(
        f"4 blocks, {checkpointed} of them checkpointed, {samples} samples, "
        f"micro_batch = {micro_batch}",
        make,
    )


RUN = "h = checkpoint(block, h, use_reentrant=False)"

check_planned_gradient = Exercise(
    planned_gradient,
    cases=[_plan(8, 2, 2), _plan(10, 4, 1), _plan(6, 6, 4), _plan(4, 1, 0)],
    observe=planned_gradients,
    mistakes=f"""
        {weighing("len(h)", "len(x)", "len(range(0, len(x), micro_batch))")}
        {RUN} => h = block(h)
            no block runs again in the backward pass: checkpoint the first
            `checkpointed` ones.
        place < checkpointed => place <= checkpointed
            one block too many is checkpointed: the first one has the number
            0.
        place < checkpointed => place >= len(blocks) - checkpointed
            the last blocks are checkpointed: the plan says the first ones.
        place < checkpointed => True
            every block is checkpointed: the plan says how many.
        range(0, len(x), micro_batch) => range(0, len(x), len(x))
        t[start : start + micro_batch] => t
            all samples run at once: cut the batch into micro-batches.
        range(0, len(x), micro_batch) => \
        range(0, len(x) - micro_batch + 1, micro_batch)
            the last micro-batch is left out: where the batch cannot be
            divided it has fewer samples, and it counts.
        """,
    shown=(
        "This is what `planning.step` does before the optimizer's step: "
        "chapter 3 outside, chapter 4 inside."
    ),
)
