"""The largest micro-batch that fits, before anything runs."""

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from membudget.checks import instance, whole
from membudget.ledger import largest_batch
from membudget.ledger.largest import largest_over_half
from membudget.measuring import format_bytes
from membudget.measuring.search import last_that
from membudget.measuring.step import Loss, only_tensors, samples_of
from membudget.planning.memory import input_bytes, peak
from membudget.planning.own import OwnJob
from membudget.planning.plan import JOBS, Plan, TrainedJob, as_job


def largest_micro_batch(
    what: TrainedJob | nn.Module,
    how: Plan | Loss,
    *batch: torch.Tensor,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> int:
    """The most samples that can run at once in a step, within a budget.

    Nothing is allocated, so nothing can run out of memory. Of a job and a
    plan the peaks are computed (:func:`membudget.planning.memory`). Of any
    other model, and of an :class:`OwnJob`, two dry runs tell them, as
    :func:`membudget.ledger.largest_batch` says: more samples are taken to
    need more bytes, the optimizer to step as after any other batch, and the
    loop to set its gradients to None and to keep nothing. The bytes are those
    of tensors. What an allocator rounds and a GPU's libraries keep comes on
    top.

    Args:
        what: the job, or a model.
        how: the job's plan, whose own ``micro_batch`` does not count; or the
            model's loss, called as ``loss(model, *batch)``.
        *batch: of a model: all samples of an optimizer step, along the first
            dimension of each tensor. They may be on ``meta``.
        budget: bytes on a rank.
        optimizer: of a model.

    Raises:
        TypeError: a batch or an optimizer besides a job.
        ValueError: not even one sample fits, a plan that is not one of the
            job's, or a model that ``largest_batch`` refuses.

    Example:
        >>> largest_micro_batch(job, Plan(1, checkpointed=2), budget=10**9)
        >>> largest_micro_batch(model, loss, x, y, budget=10**9)
    """
    budget = whole(budget, "budget")
    if not isinstance(what, TrainedJob):
        use = f"{JOBS}, or a module of PyTorch"
        instance(what, nn.Module, "what is trained", use)
        only_tensors(batch)
        return largest_batch(
            what,
            cast("Loss", how),
            *batch,
            limit=budget,
            of=samples_of(batch),
            optimizer=optimizer,
        )
    plan = cast("Plan", how)
    instance(plan, Plan, "the plan", "a planning.Plan")
    if batch or optimizer is not None:
        raise TypeError(
            "a job and its plan say all: leave out the batch and the "
            "optimizer, or hand over a model and its loss"
        )
    share = replace(plan, micro_batch=1).share(what)
    if isinstance(what, OwnJob):
        return largest_batch(
            what.model,
            what.loss_of(plan),
            *what.examples,
            limit=budget,
            of=share,
            optimizer=what.optimizer,
        )

    job = as_job(what)

    def needs(size: int, of: int = share) -> int:
        return peak(job, replace(plan, micro_batch=size), of)

    def fits(size: int) -> bool:
        return size <= share and needs(size) <= budget

    def first_fits(size: int) -> bool:
        """With one more sample, which needs less than the rest does."""
        of = min(size + 1, share)
        more = input_bytes(job, share) - input_bytes(job, of)
        return needs(size, of) + more <= budget

    size = largest_over_half(share, fits, first_fits)
    if size:
        return size
    if not fits(1):
        raise ValueError(
            f"a micro-batch of one sequence needs {format_bytes(needs(1))}, "
            f"and the budget is {format_bytes(budget)}: use a larger budget, "
            "or a plan that saves more (planning.search finds it)"
        )
    half = max(1, share // 2)
    return last_that(lambda n: n <= half and fits(n), 1, 1)
