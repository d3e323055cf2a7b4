"""What a plan copies to the host and back, and what runs beside it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from membudget.ledger.walk import moved
from membudget.planning.counter import Counts, less
from membudget.planning.plan import Job, Plan
from membudget.planning.rows import Step, few_of, written


class Copy(NamedTuple):
    """Copies over the link between a device and the host, all alike.

    Attributes:
        times: how many there are in a step.
        size: bytes of each.
        beside: FLOPs, bytes and operators of what the device does meanwhile.
    """

    times: int
    size: int
    beside: Counts = (0, 0, 0)


class Left(NamedTuple):
    """Bytes that leave in the forward pass of a micro-batch.

    Attributes:
        rest: outside of the blocks.
        plain: of a block.
        again: of a checkpointed one.
    """

    rest: int
    plain: int
    again: int


def copies(
    job: Job, plan: Plan, size: int, forward: Counts, whole: Counts
) -> Iterator[Copy]:
    """Those of a micro-batch of this size whose saved tensors leave.

    What a block saved leaves during a forward pass of such a block, and comes
    back during a backward pass, of checkpointed ones with what is computed
    again. What is outside of the blocks, the loss's most of all, is needed at
    once, and nothing runs beside it.

    Args:
        job: of which the plan is.
        plan: that offloads.
        size: sequences.
        forward: what a block's forward pass does.
        whole: what its forward and its backward pass do.
    """
    left, again = left_of(job, plan, size), plan.checkpointed
    plain = job.depth - again
    yield Copy(plain, left.plain, forward)
    yield Copy(plain, left.plain, less(whole, forward))
    yield Copy(again, left.again, forward)
    yield Copy(again, left.again, whole)
    yield Copy(2, left.rest)


@lru_cache(10**4)
def left_of(job: Job, plan: Plan, size: int) -> Left:
    """The bytes of a micro-batch of this size."""
    step = Step(
        replace(job.network, depth=1),
        job.tokens,
        job.device,
        plan.recipe,
        plan.loss_chunks,
        plan.kept_attention,
        adapter=plan.adapter,
        offloaded=True,
    )
    again = plan.checkpointed
    plain = job.depth - again
    # blocks beyond the second of a kind are like it
    each = _left(step, 2, 0, size) - _left(step, 1, 0, size)
    most = 2 if few_of(step, job.depth) < job.depth else job.depth
    few = min(plain, most), min(again, most)
    once = _left(step, few[0], 2, size) - _left(step, few[0], 1, size)
    rest = _left(step, *few, size) - few[0] * each - few[1] * once
    return Left(rest, each, once)


@lru_cache(10**4)
def _left(step: Step, plain: int, again: int, size: int) -> int:
    return moved(written(step, again, plain + again, size))
