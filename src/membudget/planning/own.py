"""A job for any model whose blocks can be checkpointed.

The ledger does not know the model, so passes without data tell what a plan
needs and does: one micro-batch, forward and backward. Between two sizes the
bytes at each moment and the counts are taken to lie on straight lines, if the
largest pass confirms them to the byte. If not, every size runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property

import torch
from torch import nn

from membudget.checkpointing.running import each_checkpointed
from membudget.checks import (
    function,
    instance,
    listed,
    module,
    plain_step,
    told,
)
from membudget.ledger import States
from membudget.measuring import PeakTracker
from membudget.measuring.dry import Dry, Ran, refuse_unsure
from membudget.measuring.step import (
    LOSS,
    Loss,
    only_tensors,
    parts_of,
    samples_of,
)
from membudget.planning.counter import Counts, WorkCounter, added
from membudget.planning.plan import Plan, TrainedJob
from membudget.stepping import backward, parameters_of

OWN_AXES = ("micro_batch", "checkpointed")
"""What is free in a plan of an :class:`OwnJob`."""

Passed = tuple[list[int], Counts]
"""Bytes at each moment without the batch, and what was done."""


class OwnJob(TrainedJob):
    """A model of your own, its loss and its optimizer.

    A plan may choose the micro-batch and how many blocks are checkpointed,
    the first ones, each by itself. Everything else is the model's own.
    Nothing is allocated for an answer.

    Args:
        model: with trained parameters.
        loss: called as ``loss(model, *batch)``; the mean over samples that
            count alike, as for :func:`membudget.measuring.trace_step`.
        *batch: all samples of an optimizer step, along the first dimension of
            each tensor. They may be on ``meta``.
        optimizer: of the model's parameters; None where none steps.
        blocks: modules of the model, which it calls one after the other; a
            list of them, each once, or the ``ModuleList`` that holds them.

    Example:
        >>> job = OwnJob(model, loss, x, y, optimizer=optimizer,
        ...              blocks=model.layers)
        >>> search(job, 100 * 2**20, Machine.of_card("T4"))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *batch: torch.Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        blocks: nn.Module | Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.loss = module(model), function(loss, "loss", LOSS)
        only_tensors(batch)
        self.batch, self.examples = samples_of(batch), batch
        self.optimizer = optimizer
        if optimizer is not None:
            plain_step(optimizer)
        if isinstance(blocks, nn.Module):  # a ModuleList or Sequential
            blocks = list(blocks.children())
        names = {part: name for name, part in model.named_modules()}
        self.blocks: list[str] = []
        for block in listed(blocks, "blocks", "modules", 0):
            instance(block, nn.Module, "a block", "a module of the model")
            if block not in names or names[block] in self.blocks:
                raise ValueError(
                    f"a block, {type(block).__name__}, is not in the model or "
                    "comes twice: use modules of the model, each once"
                )
            self.blocks.append(names[block])

    @property
    def depth(self) -> int:
        """Blocks that can be checkpointed."""
        return len(self.blocks)

    @property
    def told(self) -> str:
        """The step's batch, in words."""
        return f"{self.batch} samples"

    def loss_of(self, plan: Plan) -> Loss:
        """The loss, with the plan's blocks checkpointed while it runs.

        For :func:`membudget.ledger.account` and other tools that take a loss;
        the plan's micro-batch is theirs to set.
        """
        instance(plan, Plan, "the plan", "a planning.Plan").share(self)
        return self._loss_with(plan.checkpointed)

    def _loss_with(self, checkpointed: int) -> Loss:
        def loss(model: nn.Module, *batch: torch.Tensor) -> object:
            names = self.blocks[:checkpointed]
            blocks = {name: model.get_submodule(name) for name in names}
            with each_checkpointed(blocks):
                return self.loss(model, *batch)

        return loss

    @cached_property
    def dry(self) -> "DryPasses":
        """Its passes without data."""
        return DryPasses(self)

    def _refuse(self, plan: Plan) -> None:
        plain = replace(plan, micro_batch=1, checkpointed=0)
        if plain != Plan(1):
            raise ValueError(
                f"the plan is {plan}, and an OwnJob's model and optimizer are "
                f"as they are: set {' and '.join(OWN_AXES)} alone, or change "
                "the model"
            )

    def _program(self, plan: Plan, share: int) -> str:
        chosen = f"{plan.micro_batch}, checkpointed={plan.checkpointed}"
        return (
            "from membudget import planning\n\n"
            "# job is your planning.OwnJob, and batches are your data\n"
            f"plan = planning.Plan({chosen})\n"
            "for batch in batches:\n"
            "    loss = planning.step(job, plan, *batch)\n"
        )


def step(job: OwnJob, plan: Plan, *batch: torch.Tensor) -> float:
    """One optimizer step by a plan: cut, checkpointed, weighted, stepped.

    The gradient is that of the whole batch, if the loss is a mean over
    samples that count alike. The last micro-batch may have fewer samples. The
    gradients are None before and after.

    Args:
        job: whose model and optimizer take the step.
        plan: one of its plans.
        *batch: as the job's; by default that one.

    Returns:
        The loss of the whole batch.

    Raises:
        ValueError: a job without an optimizer, or another number of samples
            than the job's.
        RuntimeError: an optimizer steps in the backward pass.
    """
    instance(job, OwnJob, "the job", "a planning.OwnJob")
    loss_of, model = job.loss_of(plan), job.model
    only_tensors(batch)
    batch = batch or job.examples
    if samples_of(batch) != job.batch:
        raise ValueError(
            f"the batch has {samples_of(batch)} samples, and the job "
            f"{job.batch}: hand over as many, or make a job for this batch"
        )
    if job.optimizer is None:
        raise ValueError(
            "the job has no optimizer: hand one over to planning.OwnJob"
        )
    model.zero_grad()
    total, size = 0.0, plan.micro_batch
    for start in range(0, job.batch, size):
        part = [t[start : start + size] for t in batch]
        value, kept = parts_of(loss_of(model, *part))
        if size < job.batch:
            value = value * (len(part[0]) / job.batch)
        backward(value, parameters_of(job.optimizer))
        total += value.item()
        del value, kept
    job.optimizer.step()
    model.zero_grad()
    return total


class DryPasses:
    """What the passes of a job need and do, without data.

    Args:
        job: whose model is copied without data, and so is its optimizer.
    """

    def __init__(self, job: OwnJob) -> None:
        self._job = job
        self._dry = Dry(job.model, *job.examples, optimizer=job.optimizer)
        storages = {t.untyped_storage() for t in job.examples}
        self._inputs = sum(storage.nbytes() for storage in storages)
        self._pass = cache(self._pass_of)
        self._straight = cache(self._is_straight)
        self._update, self._stepped = self._run(1, self._first)

    @property
    def states(self) -> States:
        """Bytes of the model's states."""
        return self._states

    def peak(self, plan: Plan) -> int:
        """The most bytes alive in an optimizer step of the plan."""
        of, size, again = self._job.batch, plan.micro_batch, plan.checkpointed
        found = [self._update]
        if size * 2 > of:
            found.append(max(self._at(again, size, False)[0]))
        if size < of:  # the second finds gradients
            found.append(max(self._at(again, min(size, of - size), True)[0]))
        return self._inputs + max(found)

    def counts(self, plan: Plan) -> Counts:
        """FLOPs, bytes and operators of an optimizer step of the plan."""
        of, size, again = self._job.batch, plan.micro_batch, plan.checkpointed
        if size == of:
            return added(
                [(1, self._pass(again, of, False)[1]), (1, self._stepped)]
            )
        full, rest = divmod(of, size)
        terms = [(1, self._stepped), (full, self._at(again, size, True)[1])]
        if rest:
            terms.append((1, self._at(again, rest, True)[1]))
        # the first adds to no gradients
        adding = [self._pass(0, 1, late)[1] for late in (True, False)]
        return added([*terms, (-1, adding[0]), (1, adding[1])])

    def _at(self, again: int, size: int, late: bool) -> Passed:
        """A micro-batch of any size."""
        anchors = (1, 2, 4, self._most(late), self._job.batch)
        if size in anchors or not self._straight(again, late):
            return self._pass(again, size, late)
        return told(self._line(again, size, late))

    def _most(self, late: bool) -> int:
        """Samples of the largest micro-batch that is one of several."""
        return self._job.batch // 2 if late else self._job.batch - 1

    def _is_straight(self, again: int, late: bool) -> bool:
        """Whether the largest lies on the line through 2 and 4 samples."""
        most = self._most(late)
        if most <= 4:
            return False
        return self._line(again, most, late) == self._pass(again, most, late)

    def _line(self, again: int, size: int, late: bool) -> Passed | None:
        two, four = (self._pass(again, n, late) for n in (2, 4))
        if len(two[0]) != len(four[0]):
            return None

        def line(a: int, b: int) -> int:
            return a + (size - 2) * (b - a) // 2

        flops, moved, operators = map(line, two[1], four[1])
        return list(map(line, two[0], four[0])), (flops, moved, operators)

    # Dry runs

    def _pass_of(self, again: int, size: int, late: bool) -> Passed:
        loss = self._job._loss_with(again)
        return self._run(size, self._micro_batch, loss=loss, late=late)

    def _run(
        self,
        size: int,
        run: Callable[..., Ran],
        loss: Loss | None = None,
        **how: object,
    ) -> Ran:
        batch = [t[:size].clone() for t in self._job.examples]
        loss = loss or self._job.loss
        return self._dry.trace(loss, *batch, run=run, **how)

    def _first(
        self, model: nn.Module, loss: Loss, *batch: torch.Tensor, optimizer
    ) -> tuple[int, Counts]:
        """Make gradients and the optimizer's states; then a step alone."""
        parts_of(loss(model, *batch))[0].backward()
        if optimizer is not None:
            optimizer.step()
        held = [model] if optimizer is None else [model, optimizer]
        with WorkCounter() as counter, PeakTracker(*held) as tracker:
            if optimizer is not None:
                optimizer.step()
        split = tracker.split(-1)
        self._states = States(
            split["parameters"], split["gradients"], split["optimizer"]
        )
        return tracker.peak, counter.counts

    def _micro_batch(
        self,
        model: nn.Module,
        loss: Loss,
        *batch: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        late: bool,
    ) -> Passed:
        """Forward and backward; the gradients are as before afterwards.

        Args:
            late: whether gradients are there, as after another micro-batch.
        """
        before = []
        if not late:
            before = [(p, p.grad) for p in model.parameters()]
            model.zero_grad()
        held = [model] if optimizer is None else [model, optimizer]
        # The counter takes some operators apart, unseen by what is inside it.
        with (
            WorkCounter() as counter,
            PeakTracker(*held, *batch) as tracker,
        ):
            value, more = parts_of(loss(model, *batch))
            if len(batch[0]) < self._job.batch:
                value = value * (len(batch[0]) / self._job.batch)
            value.backward()
            del value, more
        for p, gradient in before:
            p.grad = gradient
        refuse_unsure(tracker)
        inputs = sum(t.nbytes for t in batch)
        return [n - inputs for n in tracker.timeline], counter.counts
