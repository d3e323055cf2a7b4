"""A window that runs out of memory, and is run again in smaller pieces."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from membudget.accumulation._private import unsynchronised
from membudget.accumulation.accumulator import Accumulator, Report, Window
from membudget.accumulation.partition import partition
from membudget.checks import function, instance, whole
from membudget.measuring.out_of_memory import (
    forget,
    is_out_of_memory,
    wait_for_autograd,
)
from membudget.measuring.step import LOSS, Loss, only_tensors, samples_of

RAN, NO_MEMORY, FAILED = range(3)
"""What became of a rank's micro-batches; a later one is worse."""


@dataclass(frozen=True)
class Recovered:
    """A step, and what it took.

    Attributes:
        report: of the window that stepped.
        micro_batch: samples of its micro-batches.
        failures: windows before it that ran out of memory.
        lost: samples of this rank that ran in those, at least in part, and
            were thrown away.
    """

    report: Report
    micro_batch: int
    failures: int
    lost: int


def recovering_step(
    accumulator: Accumulator,
    loss: Loss,
    *batch: torch.Tensor,
    micro_batch: int,
    count: Callable[..., float] | None = None,
) -> Recovered:
    """An optimizer step that survives an out-of-memory error.

    After the error the window is undone, the micro-batch is halved, and the
    same samples run again: none is counted twice, and the weights are those
    of the micro-batches that came. With a loss that treats each sample by
    itself the gradient is that of the undisturbed step up to rounding.

    Ranks of ``DistributedDataParallel`` run their micro-batches without a
    word to each other. Then one small all-reduce tells whether all could, and
    others average the gradients, without the model's communication hooks. If
    one rank ran out of memory, all repeat their windows with half of the
    smallest micro-batch. What fails after that is not repeated.

    Args:
        accumulator: its model, optimizer, scaler and clipping are used.
        loss: called as ``loss(model, *part)``; the mean, or the sum if that
            is the accumulator's reduction.
        *batch: the step's samples, along the first dimension of each tensor.
        micro_batch: samples that run at once in the first attempt.
        count: called as ``count(*part)``; samples or tokens that count in a
            micro-batch. One that has none is left out. By default samples.

    Raises:
        ValueError: a batch without samples that count.
        torch.OutOfMemoryError: one sample does not fit.
        RuntimeError: the optimizer's step ran out of memory, another rank met
            an error, or what :class:`Window` raises.

    Example:
        >>> done = recovering_step(accumulator, loss, x, y, micro_batch=size)
        >>> size = done.micro_batch  # what fitted fits again
    """
    instance(accumulator, Accumulator, "accumulator", "an Accumulator")
    function(loss, "loss", LOSS)
    only_tensors(batch)
    size = min(whole(micro_batch, "micro_batch"), samples_of(batch))
    use = "a function of a micro-batch, or None"
    count = function(_samples if count is None else count, "count", use)
    failures = lost = 0
    while True:
        attempt = _Attempt(accumulator, loss, count, size)
        try:
            report = attempt.run(batch)
        except Exception as error:
            attempt.explain(error)
            forget(error)
        else:
            return Recovered(report, size, failures, lost)
        # The error is gone here, and with it what its frames held.
        wait_for_autograd(next(accumulator.model.parameters()).device)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        failures, lost = failures + 1, lost + attempt.started
        size = attempt.size // 2


class _OtherRank(RuntimeError):
    """This rank has to run its window again, because another one has."""


class _Attempt:
    """One window, in micro-batches of one size.

    Attributes:
        size: of the smallest micro-batch of all ranks, once they have agreed.
        started: samples that were begun.
        settled: whether it is too late to begin again.
    """

    def __init__(self, accumulator, loss, count, size) -> None:
        self.accumulator, self.loss, self.count = accumulator, loss, count
        self.size, self.started, self.settled = size, 0, False

    def run(self, batch: tuple[torch.Tensor, ...]) -> Report:
        owner = self.accumulator
        model, group = owner.model, owner.process_group
        with unsynchronised(model, group), owner.window() as window:
            window._synchronised = not owner.distributed
            error = self._micro_batches(window, batch)
            self._agree(error)
            if owner.distributed:
                window._reduce()
            window.finish()
            self.settled = True
            return window.step()

    def _micro_batches(
        self, window: Window, batch: tuple[torch.Tensor, ...]
    ) -> Exception | None:
        """Run them; an error is returned, for the other ranks to hear."""
        try:
            for part in partition(len(batch[0]), self.size):
                tensors = [tensor[part] for tensor in batch]
                if counted := self.count(*tensors):
                    self.started += len(tensors[0])
                    loss = self.loss(self.accumulator.model, *tensors)
                    window.backward(loss, counted)
                    del loss
            if not window.micro_batches:
                raise ValueError("no sample of the batch counts: leave it out")
        except Exception as error:
            return error
        return None

    def _agree(self, error: Exception | None) -> None:
        """Go on only if all ranks could run.

        Raises:
            Exception: this rank's own error, or that another has one.
        """
        state = RAN
        if error is not None:
            state = NO_MEMORY if is_out_of_memory(error) else FAILED
        worst = state
        if self.accumulator.distributed:
            most = dist.ReduceOp.MAX
            worst = self.accumulator._over_ranks(state, most)
            self.size = -int(self.accumulator._over_ranks(-self.size, most))
            self.settled = worst == RAN
        if error is not None and state == worst:
            raise error
        if worst == NO_MEMORY:
            raise _OtherRank("another rank ran out of memory")
        if worst == FAILED:
            raise RuntimeError("another rank met an error: look there")

    def explain(self, error: Exception) -> None:
        """Pass on what no smaller micro-batch can mend.

        Raises:
            Exception: the error, or one that says more.
        """
        short = is_out_of_memory(error)
        if not short and not isinstance(error, _OtherRank):
            raise error
        if self.settled:
            raise RuntimeError(
                "every micro-batch fitted, and then the step itself ran out "
                "of memory: a smaller micro-batch needs no less there. Some "
                "parameters may be updated already: go back to a checkpoint, "
                "and leave room for the optimizer's states and temporaries"
            ) from error
        if self.size == 1:
            raise torch.OutOfMemoryError(
                "one sample does not fit: checkpoint activations, shorten "
                "the sequences, or use less precision or a smaller model"
            ) from error


def _samples(*part: torch.Tensor) -> int:
    return len(part[0])
