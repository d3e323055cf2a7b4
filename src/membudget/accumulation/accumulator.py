"""An accumulator for real training loops."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import chain, pairwise
from math import ceil, inf, isfinite, log2
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from membudget.accumulation.partition import check_count, opened
from membudget.accumulation.snapshot import Snapshot
from membudget.checks import (
    instance,
    module,
    number,
    one_of,
    plain_step,
)
from membudget.stepping import backward, finite_loss, parameters_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class Report:
    """What happened in one window.

    Attributes:
        micro_batches: micro-batches that this rank ran.
        count: samples or tokens in the window, over all ranks.
        loss: mean loss over this rank's samples or tokens.
        norm: norm of the window's gradient before clipping.
        clipped: whether the gradient was clipped.
        stepped: False where the scaler met an overflow and skipped the step.
    """

    micro_batches: int
    count: float
    loss: float
    norm: float
    clipped: bool
    stepped: bool


class Accumulator:
    """Take optimizer steps with the gradient of several micro-batches.

    The gradient is Σ_k (n_k / N) ∇L_k with n_k the count of micro-batch k and
    N the count of all that came, so windows may be ragged or end early. It is
    normalised, unscaled and clipped once, after the last micro-batch. Until
    then it is in units of ``total``, or of a power of two not below the
    largest n_k: no mean loss is enlarged, in whatever order they come.

    Args:
        model: the model, plain or wrapped in ``DistributedDataParallel``;
            then the count is summed over the ranks, and gradients are
            synchronised in the last micro-batch only.
        optimizer: any optimizer with parameters whose ``step`` needs no
            closure.
        scaler: a ``torch.amp.GradScaler``, for fp16.
        max_norm: clip the window's gradient to this norm, above zero.
        reduction: whether the losses are a ``"mean"`` or a ``"sum"`` over
            the samples or tokens of their micro-batch.

    Raises:
        ValueError: a model of ``fully_shard``: its ranks gather parameters in
            each micro-batch, and one that fails leaves the others waiting.

    Example:
        >>> accumulator = Accumulator(model, optimizer, max_norm=1.0)
        >>> for micro_batches in windows(loader, steps=8):
        ...     with accumulator.window() as window:
        ...         for x, y in window.over(micro_batches):
        ...             window.backward(loss_fn(model(x), y), count=len(x))
        ...         report = window.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
        reduction: str = "mean",
    ) -> None:
        self.model = module(model)
        self.optimizer = plain_step(optimizer)
        kind, use = torch.amp.GradScaler | None, "a torch.amp.GradScaler"
        instance(scaler, kind, "scaler", f"{use} or None")
        if any(
            hasattr(part, "set_requires_gradient_sync")
            for part in model.modules()
        ):
            raise ValueError(
                "the model is sharded by fully_shard: a rank that fails in a "
                "micro-batch leaves the others waiting for its parameters. "
                "Choose the micro-batch before the first step "
                "(planning.largest_micro_batch) and accumulate in a loop of "
                "your own, or use DistributedDataParallel"
            )
        if not self.parameters():
            raise ValueError(
                "the optimizer has no parameters: "
                "give it those of the model that are to be trained"
            )
        if max_norm is None:
            max_norm = inf
        self.max_norm = number(max_norm, "max_norm", above=0, infinite=True)
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.reduction = one_of(reduction, ("mean", "sum"), "reduction")
        self.distributed = hasattr(model, "no_sync") and dist.is_initialized()
        self.process_group = getattr(model, "process_group", None)

    def window(self, total: float | None = None) -> "Window":
        """A window: the micro-batches of one optimizer step.

        Args:
            total: samples or tokens that this rank's window will hold, where
                it is known: more than that is then an error, and the losses
                are weighted n_k / total from the start. Fewer may come.
        """
        if total is not None:
            total = check_count(total, "total", "in the window")
        return Window(self, total)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer trains."""
        return parameters_of(self.optimizer)

    def _with_gradients(self) -> list[nn.Parameter]:
        """Those of the parameters that have a gradient."""
        found = [p for p in self.parameters() if p.grad is not None]
        if not found:
            raise RuntimeError(
                "no parameter of the optimizer has a gradient: give the "
                "optimizer the parameters of the model that made the loss"
            )
        return found

    def _step(self) -> bool:
        """Take the optimizer's step; False where an overflow forbids it."""
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before > 0

    def _over_ranks(self, value: float, op: "dist.ReduceOp") -> float:
        if not self.distributed:
            return value
        device = self.parameters()[0].device
        tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
        dist.all_reduce(tensor, op, group=self.process_group)
        return tensor.item()


def _undone_on_error(method):
    """Need an open window; let an error undo and close it."""

    @wraps(method)
    def guarded(self, *args, **kwargs):
        self._require_open()
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._undo()
            raise

    return guarded


class Window:
    """One optimizer step's micro-batches; made by :meth:`Accumulator.window`.

    Use it in a ``with`` block. An error inside the block closes it: gradients
    are cleared, buffers, scaler and random number generators (CPU and CUDA)
    are what they were at the block's start, and parameters and optimizer have
    not been touched yet, unless the optimizer's own ``step`` failed halfway.
    For that a window keeps a copy of every buffer of the model until the
    step; :func:`footprint` counts it. If only some of the ranks meet an
    error, the others wait for them: end the job then, or use
    :func:`recovering_step`.
    """

    def __init__(self, owner: Accumulator, total: float | None) -> None:
        self.owner = owner
        self.total = total
        self.micro_batches = 0
        self.count: float = 0
        self._used = False
        self._loss_sum = 0.0
        self._unit: float = 0
        self._count_of_ranks: float = 0
        self._norm: float | None = None
        self._synchronised = True
        self._loop: Generator | None = None
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> "Window":
        if self._used:
            raise RuntimeError(
                "this window was used before: "
                "ask the accumulator for a new one"
            )
        self._used = True
        owner = self.owner
        self._snapshot = Snapshot(
            owner.model, owner.parameters(), owner.scaler
        )
        grads = [p.grad for p in owner.parameters()]
        left = [g for g in grads if g is not None and g.any()]
        if left:
            self._undo()
            raise RuntimeError(
                f"{len(left)} parameters had gradients left over from "
                "before this window; they are cleared now. Call "
                "optimizer.zero_grad() after every step outside it"
            )
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._loop is not None:
            self._loop.close()
        if self._snapshot is None:
            return
        unused = self.micro_batches if self._norm is None else 0
        if error is not None or unused:
            self._undo()
        self._snapshot = None
        if error is None and unused:
            raise RuntimeError(
                f"the window was left with {unused} micro-batches that no "
                "step used: call window.step()"
            )

    def over(self, micro_batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the micro-batches; synchronise ranks in the last one only.

        On one rank this is a plain loop. On several, whose numbers of
        micro-batches may differ, it reads one ahead, to know the last.
        """
        self._require_open()
        stream = opened(micro_batches)
        if not self.owner.distributed:
            return stream
        loop = self._loop = self._synchronising(stream)
        return loop

    def _synchronising(
        self, micro_batches: Iterable[Item]
    ) -> Generator[Item, None, None]:
        for item, last in _with_last(micro_batches):
            self._synchronised = last
            with nullcontext() if last else self.owner.model.no_sync():
                yield item

    @_undone_on_error
    def backward(self, loss: torch.Tensor, count: float) -> None:
        """Add one micro-batch's gradient.

        Args:
            loss: scalar, the mean (or the sum: see ``reduction``) over the
                micro-batch; of several losses, their sum. Reading whether it
                is finite waits for the device once per micro-batch.
            count: samples or non-padding tokens in it, above zero.

        Raises:
            RuntimeError: the window is not open, or finished, or an optimizer
                steps in the backward pass; it is stopped before.
            ValueError: a loss that is not finite, or more than ``total``.
        """
        if self._norm is not None:
            raise RuntimeError(
                "the window's gradient is finished: run every micro-batch "
                "before window.finish()"
            )
        owner = self.owner
        count = check_count(count)
        value = finite_loss(loss)
        if self.total is not None and self.count + count > self.total:
            raise ValueError(
                f"{self.count + count} samples or tokens came, but "
                f"{self.total} were announced: pass the window's total, "
                "or None if it is not known"
            )
        self._use_unit(self.total or 2.0 ** ceil(log2(count)))
        mean = owner.reduction == "mean"
        loss = loss * ((count if mean else 1) / self._unit)
        backward(owner.scaler.scale(loss), owner.parameters())
        self.micro_batches += 1
        self.count += count
        self._loss_sum += value * (count if mean else 1)

    def _use_unit(self, unit: float) -> None:
        """Let ``param.grad`` be Σ_k n_k ∇L_k in a unit of at least this.

        Ranks agree before they add their gradients. A power of two divides
        the existing sum exactly (but for subnormal numbers).
        """
        owner, before = self.owner, self._unit
        self._unit = max(unit, before)
        if self._synchronised:
            self._unit = owner._over_ranks(self._unit, dist.ReduceOp.MAX)
        if 0 < before < self._unit:
            for parameter in owner.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(before / self._unit)

    @_undone_on_error
    def _reduce(self) -> None:
        """Average the ranks' gradients, where no backward pass did it."""
        owner, group = self.owner, self.owner.process_group
        self._synchronised = True
        self._use_unit(self._unit)
        trained = [p for p in owner.parameters() if p.requires_grad]
        made = [p.grad is not None for p in trained]
        somewhere = torch.tensor(made, device=trained[0].device).int()
        dist.all_reduce(somewhere, dist.ReduceOp.MAX, group=group)
        ranks = dist.get_world_size(group)
        for parameter, used in zip(trained, somewhere.tolist(), strict=True):
            if not used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(ranks)

    @_undone_on_error
    def finish(self) -> float:
        """Turn the sum into the window's gradient; return its norm.

        Normalises, unscales and clips ``param.grad``. :meth:`step` does this
        by itself; call it to look at the gradient first, or instead. Then
        clearing gradients, and the scaler's ``update``, are yours.

        Raises:
            RuntimeError: the window is empty or not open, the ranks' last
                micro-batch was not synchronised, no parameter has a
                gradient, or the gradient is not finite and there is no
                scaler to skip the step.
        """
        if self._norm is not None:
            return self._norm
        owner = self.owner
        if not self.micro_batches:
            raise RuntimeError(
                "the window is empty: run backward on at least one "
                "micro-batch before the step"
            )
        if owner.distributed and not self._synchronised:
            raise RuntimeError(
                "the gradients of the ranks were not synchronised: let "
                "the loop over window.over(...) run to its end"
            )
        parameters = owner._with_gradients()
        total = owner._over_ranks(self.count, dist.ReduceOp.SUM)
        ranks = owner._over_ranks(1, dist.ReduceOp.SUM)
        owner.scaler.unscale_(owner.optimizer)
        factor = self._unit * ranks / total
        if factor != 1:
            for parameter in parameters:
                parameter.grad.mul_(factor)
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        value = norm.item()
        if not isfinite(value) and not owner.scaler.is_enabled():
            raise RuntimeError(
                f"the window's gradient has norm {value}: lower the "
                "learning rate, or use a scaler if this is fp16"
            )
        if value > owner.max_norm:
            nn.utils.clip_grads_with_norm_(parameters, owner.max_norm, norm)
        self._count_of_ranks = total
        self._norm = value
        return value

    @_undone_on_error
    def step(self) -> Report:
        """Finish the gradient, take the optimizer's step, clear gradients.

        Raises:
            RuntimeError: as :meth:`finish`.
        """
        norm = self.finish()
        owner = self.owner
        stepped = owner._step()
        owner.optimizer.zero_grad()
        self._snapshot = None
        return Report(
            micro_batches=self.micro_batches,
            count=self._count_of_ranks,
            loss=self._loss_sum / self.count,
            norm=norm,
            clipped=norm > owner.max_norm,
            stepped=stepped,
        )

    def _require_open(self) -> None:
        if self._snapshot is None:
            raise RuntimeError(
                "the window is not open: use it inside "
                "`with accumulator.window() as window:`, once"
            )

    def _undo(self) -> None:
        """Go back to the window's start, and close it."""
        snapshot, self._snapshot = self._snapshot, None
        self.micro_batches, self.count = 0, 0
        if snapshot is not None:
            snapshot.restore()


def _with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item with whether it is the last one."""
    end: Any = object()
    for item, following in pairwise(chain(items, [end])):
        yield item, following is end
