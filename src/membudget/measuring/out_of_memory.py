"""Out of memory: what was there, what was asked for, what would fit."""

import gc
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from textwrap import fill
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from membudget.checks import device as checked_device
from membudget.checks import function, instance, plain_step, told, trained
from membudget.measuring.device import read_memory
from membudget.measuring.dry import dry_run
from membudget.measuring.monitor import process_limit
from membudget.measuring.search import last_that
from membudget.measuring.step import LOSS, Loss, only_tensors, samples_of
from membudget.measuring.storages import optimizer_tensors
from membudget.measuring.tracker import (
    Allocation,
    Operator,
    PeakTracker,
    by_category,
)
from membudget.measuring.units import format_bytes
from membudget.stepping import parameters_of

UNCHANGED = "as it is"
"""The name of the step without a change, in :attr:`Fit.change`."""


@dataclass(frozen=True)
class Group:
    """Allocations of one origin.

    Attributes:
        bytes: their sum.
        count: how many.
        category: one of ``CATEGORIES``.
        module: what was at work, or whose they are. The layers of a stack,
            whose paths differ in the first number, are one group with ``*``
            in its place.
        operator: what made them; empty for what was there before the block.
    """

    bytes: int
    count: int
    category: str
    module: str
    operator: str

    def __str__(self) -> str:
        times = f"{self.count} × " if self.count > 1 else ""
        made = f"of {self.module}" if self.module else "there before"
        if self.operator:
            made = f"by {self.operator}"
            made += f" in {self.module}" if self.module else ""
        return f"{times}{self.category}, {made}"


@dataclass(frozen=True)
class Fit:
    """Whether a step would have fitted: predicted peaks, in bytes.

    Attributes:
        change: its name; :data:`UNCHANGED` for the step as it is.
        full: peak with all samples at once; None without a prediction.
        micro_batch: samples in a micro-batch, the batch cut evenly into the
            fewest that fit; only where that number does not divide the batch
            has the last one fewer. All samples where they fit, None where not
            even one does.
        peak: peak with micro-batches of this size, their gradients summed;
            of one sample where none fits.
        problem: why there is no prediction; empty where there is one.
    """

    change: str
    full: int | None = None
    micro_batch: int | None = None
    peak: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.change}: no prediction, {self.problem}"
        text = f"{self.change}: {format_bytes(told(self.full))}"
        peak = format_bytes(told(self.peak))
        if self.micro_batch is None:
            if self.peak == self.full:
                return f"{text}, does not fit"
            return f"{text}; one sample at once: {peak}"
        if self.peak == self.full:
            return f"{text}, fits"
        return f"{text}; micro-batches of {self.micro_batch} fit: {peak}"


@dataclass(frozen=True)
class OutOfMemoryReport:
    """Why a step ran out of memory, and how it would not have.

    Attributes:
        operator: the operator at work, its module and its phase.
        asked: bytes that it asked for; None where that is not known.
        exact: whether ``asked`` is exact. Where it is not, it is the figure
            of CUDA's message: the segment that the allocator asked the driver
            for, rounded. What the operator asked for may be much smaller.
        live: bytes of each category at that moment.
        others: bytes in use that belong to nothing the block was told of.
        budget: bytes that can be in use.
        largest: what was alive, by origin, the largest first.
        samples: samples in the batch; 0 without a batch.
        fits: predictions for the step as it is and for each change.
        notes: what the failed step left behind, and what to mind.
    """

    operator: Operator
    asked: int | None
    exact: bool
    live: Mapping[str, int]
    others: int
    budget: int
    largest: tuple[Group, ...]
    samples: int
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]

    @property
    def in_use(self) -> int:
        """Bytes in use when the operator asked."""
        return sum(self.live.values()) + self.others

    @property
    def micro_batch(self) -> int | None:
        """:attr:`Fit.micro_batch` of the step as it is."""
        known = (f.micro_batch for f in self.fits if f.change == UNCHANGED)
        return next(known, None)

    def __str__(self) -> str:
        name, module, phase = self.operator
        at = " in ".join(filter(None, [name or "no operator", module]))
        asked = "an unknown size"
        if self.asked is not None:
            asked = "" if self.exact else "a segment of about "
            asked += format_bytes(self.asked)
        parts = {**self.live, "others": self.others}
        lines = [
            f"Out of memory: {at} ({phase or 'before the first operator'})",
            f"asked for {asked}, with {format_bytes(self.in_use)} of "
            f"{format_bytes(self.budget)} in use:",
            *_table((size, part) for part, size in parts.items() if size),
            "the largest of these:",
            *_table((group.bytes, str(group)) for group in self.largest[:5]),
        ]
        lines += [self.predictions()] if self.fits else []
        return "\n".join([*lines, *map(wrapped, self.notes)])

    def predictions(self) -> str:
        """The lines that say what would have fitted."""
        step = f" of {self.samples} samples" if self.samples else ""
        aside = ", without the others" if self.others else ""
        lines = [f"predicted peaks of a step{step}{aside}:"]
        lines += [wrapped(f"  {fit}", 4) for fit in self.fits]
        return "\n".join(lines)


def _table(rows: Iterable[tuple[int, str]]) -> Iterator[str]:
    for size, text in rows:
        yield wrapped(f"  {format_bytes(size):>8}  {text}", 14)


def wrapped(text: str, indent: int = 2) -> str:
    """A line of the report, in 79 columns."""
    return fill(
        text, 79, subsequent_indent=" " * indent, break_on_hyphens=False
    )


@dataclass(frozen=True)
class Predictor:
    """Says what of a step would have fitted into some bytes.

    Args:
        model: a model with trained parameters.
        batch: the samples, as for :class:`CatchOutOfMemory`; perhaps none.
        optimizer: the one that steps, if one does.
        device: where the step runs.
        room: bytes for it.
    """

    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    room: int

    def fit(self, change: str, loss: Loss) -> Fit:
        """The prediction for one way to compute the loss."""

        @cache
        def peak(size: int) -> int:
            return self.peak(loss, size)

        try:
            samples = samples_of(self.batch) if self.batch else 0
            return self._search(change, samples, peak)
        except Exception as error:  # a report must not fail with a change
            return Fit(change, problem=f"{type(error).__name__}: {error}")

    def _search(
        self, change: str, samples: int, peak: Callable[[int], int]
    ) -> Fit:
        full = peak(samples)
        if full <= self.room:
            return Fit(change, full, samples, full)
        if samples < 2 or peak(1) > self.room:
            return Fit(change, full, None, peak(min(1, samples)))
        size = half = -(-samples // 2)
        if peak(half) > self.room:
            # Peaks are nearly affine: the line through two is a guess.
            share = (self.room - peak(1)) / (peak(half) - peak(1))
            most = last_that(
                lambda size: size < half and peak(size) <= self.room,
                guess=1 + int(share * (half - 1)),
                least=1,
            )
            count = -(-samples // most)
            size = -(-samples // count)  # the last perhaps fewer
        return Fit(change, full, size, peak(size))

    def peak(self, loss: Loss, size: int) -> int:
        """Predicted peak with micro-batches of ``size``.

        Two of them are enough: those after the second are like it. What is
        cut off stays in the account, as the slices share its storage. Of
        tensors elsewhere, which a dry run puts on the device, only what the
        loss moves there counts.
        """
        cut = [t[: 2 * size] for t in self.batch]
        dry = dry_run(
            self.model,
            loss,
            *cut,
            optimizer=self.optimizer,
            micro_batch=size or None,
            device=self.device,
        )
        counts = PeakTracker(device=self.device)._counts
        elsewhere = [t for t in cut if not counts(t)]
        moved = sum(t[:size].nbytes - _span(t) for t in elsewhere)
        return dry.peak + moved


class CatchOutOfMemory:
    """Survive a step that does not fit, and learn what would have.

    A context manager around a training step. An out-of-memory error ends the
    block, is not passed on, and is explained in ``report``; every other
    exception is passed on. Afterwards nothing of the failed step is alive
    except what a variable of the block holds, which the report says: so bind
    neither losses nor outputs there. In particular

    * gradients that were made in the block are None again. Those that
      existed before stay; the report says if the block has changed them;
    * if an optimizer's step failed halfway, the states that it had just made
      are removed, so that the next step finds no half of them. What it had
      updated in place stays; the report says what, as far as PyTorch's
      version counters tell.

    The block runs under a :class:`PeakTracker`, at its cost in time.

    What would have fitted is predicted by :func:`dry_run`, without memory:
    for the loss as it is and for each change the peak of the whole batch
    and, where that is too much, of the fewest micro-batches that fit, cut
    evenly. Peaks include the optimizer's states, the gradients of the
    micro-batches before, and the whole batch.

    Args:
        model: a model with trained parameters.
        *batch: tensors with the samples along their first dimension, at
            least 1 and as many in each.
        loss: ``loss(model, *batch)`` as in the block; without it, only the
            changes are predicted.
        optimizer: the one that steps in the block.
        budget: bytes that may be alive, as for :class:`PeakTracker`: the
            device is simulated. By default nothing is simulated, and
            predictions are held against what the process can have when the
            block begins (:func:`process_limit`).
        changes: names of other ways to compute the same loss, each with its
            function, called as ``loss``.
        device: count only what is on it; by default the device of the first
            parameter.

    Attributes:
        report: an :class:`OutOfMemoryReport`; None where the block did not
            run out of memory.
        tracker: the block's :class:`PeakTracker`.

    Raises:
        ValueError: a change with the name :data:`UNCHANGED`, or a budget
            below what exists.

    Example:
        >>> guard = CatchOutOfMemory(
        ...     model, x, y, loss=loss, optimizer=optimizer
        ... )
        >>> with guard:
        ...     loss(model, x, y).backward()
        ...     optimizer.step()
        >>> if guard.report:
        ...     print(guard.report)
    """

    def __init__(
        self,
        model: nn.Module,
        *batch: torch.Tensor,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        budget: int | None = None,
        changes: Mapping[str, Loss] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        parameters = trained(model)
        if optimizer is not None:
            plain_step(optimizer)
        only_tensors(batch)
        self.samples = samples_of(batch) if batch else 0
        losses = {} if loss is None else {UNCHANGED: loss}
        changes = {} if changes is None else changes
        use = "a dictionary of names and functions"
        instance(changes, Mapping, "changes", use)
        for name, other in (*losses.items(), *changes.items()):
            instance(name, str, "the name of a change", "a string")
            function(other, f"the loss {name!r}", LOSS)
        if losses.keys() & changes.keys():
            raise ValueError(f"a change is called {UNCHANGED!r}: rename it")
        self.model, self.batch, self.optimizer = model, batch, optimizer
        self.losses = losses | dict(changes)
        self.device = (
            parameters[0].device if device is None else checked_device(device)
        )
        self.report: OutOfMemoryReport | None = None
        self._budget = budget
        self.tracker = self._watch()

    def _watch(self) -> "_Watch":
        existing = [self.model, *self.batch]
        if self.optimizer is not None:
            existing.append(self.optimizer)
        return _Watch(*existing, device=self.device, budget=self._budget)

    def __enter__(self) -> "CatchOutOfMemory":
        self.report = None
        self.tracker = self._watch()
        self._others = 0
        if self._budget is None:
            self._limit = process_limit(self.device)
            now = read_memory(self.device)
            used = now.process if now.requested is None else now.requested
            self._others = max(0, told(used) - self.tracker.start)
        else:
            self._limit = self._budget
        self._gradients = _Marks(
            p.grad for p in self._parameters() if p.grad is not None
        )
        self.tracker.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> bool:
        self.tracker.__exit__(kind, error, trace)
        if not is_out_of_memory(error):
            return False
        failure = self.tracker.failure_of(error)
        asked, exact = failure.asked, True
        if asked is None:
            asked, exact = asked_bytes(str(error))
        forget(error)
        del trace
        notes = [*self._restore(failure), *self._left_over()]
        if self.device.type == "cuda":
            notes.append(
                "CUDA's allocator rounds each request up and cannot always "
                "use what is free between others: leave a margin."
            )
        fits = tuple(self._predictor().fit(*x) for x in self.losses.items())
        self.report = OutOfMemoryReport(
            operator=failure.operator,
            asked=asked,
            exact=exact,
            live=by_category(failure.alive),
            others=self._others,
            budget=self._limit,
            largest=groups(failure.alive),
            samples=self.samples,
            fits=fits,
            notes=(*summary(fits, self.samples), *notes),
        )
        return True

    def _predictor(self) -> Predictor:
        room = self._limit - self._others
        return Predictor(
            self.model, self.batch, self.optimizer, self.device, room
        )

    def _parameters(self) -> list[nn.Parameter]:
        others = parameters_of(self.optimizer) if self.optimizer else []
        found = {id(p): p for p in [*self.model.parameters(), *others]}
        return list(found.values())

    # After a failed step

    def _restore(self, failure: "_Failure") -> Iterator[str]:
        trained = [p for p in self._parameters() if p.grad is not None]
        before = self._gradients.versions()
        for p in trained:
            if id(p.grad) not in before:
                p.grad = None
        kept = [p.grad for p in trained if p.grad is not None]
        if changed := self._gradients.changed(kept):
            yield (
                f"Gradients of {changed} parameters existed before and may "
                "hold a part of the failed step: clear them (zero_grad) "
                "before it is repeated."
            )
        if failure.step is not None:
            yield failure.step.undo()

    def _left_over(self) -> Iterator[str]:
        wait_for_autograd(self.device)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        held = [
            a
            for a in self.tracker.allocations
            if a.birth >= 0 and a.death is None
            if a.category not in ("parameters", "optimizer")
        ]
        if held:
            size = format_bytes(sum(a.bytes for a in held))
            yield (
                f"{size} of the failed step are still held by a variable "
                f"({groups(held)[0]}): delete it, and bind no loss and no "
                "output in the block."
            )


def _span(tensor: torch.Tensor) -> int:
    """Bytes of a storage of its own, with its strides."""
    alone = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    return alone.untyped_storage().nbytes()


def summary(fits: tuple[Fit, ...], samples: int) -> Iterator[str]:
    """What the predictions say together, in sentences."""
    known = [f for f in fits if not f.problem]
    if known and not any(f.micro_batch for f in known):
        yield "Nothing of this fits."
    if any(f.micro_batch not in (None, samples) for f in known):
        yield (
            "The gradients of micro-batches are summed by accumulation, and "
            "the optimizer steps after the last."
        )
    if any(f.change == UNCHANGED and f.micro_batch == samples for f in known):
        yield (
            "The loss fits as it is: the block holds more than it, or the "
            "allocator finds no block of that size."
        )


# What the tracker saw ------------------------------------------------------


class _Failure(NamedTuple):
    """An out-of-memory error inside an operator."""

    message: str
    operator: Operator
    asked: int | None
    alive: list[Allocation]
    step: "_Step | None"


class _Watch(PeakTracker):
    """A tracker that remembers what was alive when memory ran out.

    What was alive is gone, in part, when the exception arrives at the block:
    autograd has dropped its graph by then.
    """

    _failure: _Failure | None = None
    _step: "_Step | None" = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._failure = self._now(str(error))
            raise

    def failure_of(self, error: BaseException) -> _Failure:
        """What was alive when the error was raised; now, if not here."""
        failure = self._failure
        if failure is None or failure.message != str(error):
            failure = self._now(str(error))
        return failure

    def _now(self, message: str) -> _Failure:
        self._decide()
        now = len(self.timeline)
        alive, asked = [], None
        for number, _ in self._alive.values():
            allocation = self.allocations[number]
            if allocation.birth < now:
                alive.append(allocation)
            else:  # what the operator made, before it was refused
                asked = (asked or 0) + allocation.bytes
        return _Failure(message, self.current, asked, alive, self._step)

    def _step_begins(self, optimizer, args, kwargs) -> None:
        super()._step_begins(optimizer, args, kwargs)
        self._step = _Step(optimizer)

    def _step_ends(self, optimizer, args, kwargs) -> None:
        super()._step_ends(optimizer, args, kwargs)
        self._step = None


class _Marks:
    """Tensors as they are now, to be compared later; holds none of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._marks = [(TensorWeakRef(t), t._version) for t in tensors]

    def versions(self) -> dict[int, int]:
        """The version of each that is still there, by its id."""
        return {id(ref()): version for ref, version in self._marks}

    def changed(self, tensors: Iterable[torch.Tensor]) -> int:
        """How many are others by now, or were changed in place."""
        before = self.versions()
        return sum(before.get(id(t)) != t._version for t in tensors)


class _Step:
    """An optimizer when its step begins."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.known = {
            id(p): set(state) for p, state in optimizer.state.items()
        }
        self.parameters = _Marks(parameters_of(optimizer))
        self.states = _Marks(optimizer_tensors(optimizer))

    def undo(self) -> str:
        """Remove states that were made since; say what was updated."""
        state = self.optimizer.state
        for p in list(state):
            for key in set(state[p]) - self.known.get(id(p), set()):
                del state[p][key]
            if id(p) not in self.known:
                del state[p]
        parameters = parameters_of(self.optimizer)
        states = optimizer_tensors(self.optimizer)
        return (
            "The optimizer's step failed halfway, with "
            f"{self.parameters.changed(parameters)} of {len(parameters)} "
            f"parameters and {self.states.changed(states)} of {len(states)} "
            "states updated: load a saved state if there are any."
        )


def groups(allocations: Iterable[Allocation]) -> tuple[Group, ...]:
    """By category, module and operator, the largest sum first."""
    found: dict[tuple[str, str, str], list[Allocation]] = {}
    for a in allocations:
        path = a.operator.module
        stack = re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)
        found.setdefault((a.category, stack, a.operator.name), []).append(a)
    groups = []
    for (category, stack, name), members in found.items():
        paths = {a.operator.module for a in members}
        module = paths.pop() if len(paths) == 1 else stack
        size = sum(a.bytes for a in members)
        groups.append(Group(size, len(members), category, module, name))
    return tuple(sorted(groups, key=lambda group: -group.bytes))


# The error ----------------------------------------------------------------

_CPU = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")
_SHORT = re.compile("DefaultCPUAllocator: |CUBLAS_STATUS_ALLOC_FAILED")
_CUDA = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether CUDA, a tracker's budget or the CPU had no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and bool(_SHORT.search(str(error)))
    )


def asked_bytes(message: str) -> tuple[int | None, bool]:
    """Bytes asked for according to the message, and whether it is exact."""
    if found := _CPU.search(message):
        return int(found[1]), True
    if found := _CUDA.search(message):
        number, unit = found.groups()
        return round(float(number) * _UNITS[unit]), unit == "bytes"
    return None, False


def forget(error: BaseException) -> None:
    """Let go of what the functions that ended with it had in variables."""
    traceback.clear_frames(error.__traceback__)
    # A frame that was cleared still holds its function, with its closure.
    error.__traceback__ = error.__context__ = error.__cause__ = None


def wait_for_autograd(device: torch.device) -> None:
    """Wait until the thread of a GPU's backward passes has let go of an error.

    The caller learns of the error before that thread has left the functions
    that failed, such as a checkpoint's recomputation, with their tensors. A
    backward pass through an empty tensor is the next task of the same thread:
    when it is done, they are gone. On a CPU the caller is that thread.
    """
    if device.type == "cpu":
        return
    with torch.enable_grad():
        empty = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(empty.clone(), empty, torch.empty_like(empty))
