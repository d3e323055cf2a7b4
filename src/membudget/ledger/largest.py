"""The largest batch that a memory limit allows, for any model."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import inf, prod

import torch
from torch import nn

from membudget.checks import flag, function, trained, whole
from membudget.measuring import PeakTracker, format_bytes, witness
from membudget.measuring.dry import Dry, Ran, no_large_mask, refuse_unsure
from membudget.measuring.fakes import SMALL, is_whole
from membudget.measuring.search import last_that
from membudget.measuring.step import (
    LOSS,
    Loss,
    Step,
    only_tensors,
    parts_of,
    samples_of,
)

PRIMES = (251, 31, 7)
"""Samples of the dry run that tells what grows with them: the first of which
the example's integers keep their values."""


def largest_batch(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    limit: int,
    of: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    check: bool = False,
) -> int:
    """The most samples whose step stays within a memory limit.

    A dry run of a prime number of samples tells which tensors grow with it:
    those whose bytes it divides. So the peak is a maximum of straight lines,
    and a dry run of the largest that should fit confirms it to the byte.
    Where it does not, dry runs of other sizes close in on the answer, which
    always is one of them. More samples are taken to need more bytes, and the
    optimizer's step as many after every batch. If the step does not run with
    1 sample, as under batch norm, it is asked for at least 2.

    Args:
        model, loss, optimizer: as for :func:`account`.
        *batch: an example; its rows are repeated to each size, those of
            integers and booleans with their values while they take at most
            16 MiB.
        limit: bytes of tensors, from 1 to 2⁶⁰. Leave a reserve for blocks,
            workspaces and the context.
        of: samples of an optimizer step, up to 2⁴⁰, of which the answer is the
            micro-batch, the last one perhaps smaller. All of them are alive,
            and every micro-batch but the first finds gradients.
        check: let real steps of the answer and of one sample more decide,
            on the model's device, with the example's data, by its allocator
            (:func:`membudget.measuring.witness`). A copy of the model takes
            them, and the largest goes a little beyond the limit. Needed where
            a dry run does not know the bytes of an operator.

    Raises:
        ValueError: not even the smallest batch fits, an example whose
            tensors have no samples or not the same number, a check of what
            has no data, and what :func:`account` refuses.
    """
    limit = whole(limit, "limit", 1, 2**60)
    if of is not None:
        of = whole(of, "of", 1, 2**40)
    flag(check, "check"), function(loss, "loss", LOSS)
    trained(model)
    only_tensors(batch)
    samples_of(batch)
    if check and any(t.is_meta for t in [*model.parameters(), *batch]):
        raise ValueError(
            "the model or the example is on meta, and real steps are to "
            "check the answer: use a device and data, or no check"
        )
    dry = Dry(model, *batch, optimizer=optimizer, on="cpu")
    steps = _Steps(model, dry, loss, batch, of, estimate=check)

    size = steps.largest(limit)
    if size and not check:
        return size
    real = _RealSteps(steps, optimizer)
    least = steps.least
    if not size:
        needs = f"{format_bytes(steps.peak(least))}, more"
    elif real.peak(least) <= limit:
        return real.largest(limit, size, least)
    else:
        needs = "more in reality"
    samples = "one sample" if least == 1 else f"{least} samples, the fewest,"
    raise ValueError(
        f"a step with {samples} needs {needs} than the limit of "
        f"{format_bytes(limit)}: use a smaller model or sample, activation "
        "checkpointing, or an optimizer with fewer states"
    )


class _RealSteps:
    """Real steps of a copy of the model, seen only by the allocator."""

    def __init__(
        self, dry: "_Steps", optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.dry, self.of, self.optimizer = dry, dry.of, optimizer
        self.device = next(dry.model.parameters()).device
        self._peaks: dict[int, float] = {}

    def peak(self, size: int) -> float:
        """The most bytes of a step; without end, where it does not run."""
        if size not in self._peaks:
            try:
                self._peaks[size] = self.dry.start(size) + self._above(size)
            except torch.OutOfMemoryError:
                self._peaks[size] = inf
        return self._peaks[size]

    def _above(self, size: int) -> int:
        """Of a step, beyond what exists before it."""
        model, stepper = copy.deepcopy((self.dry.model, self.optimizer))
        rows = partial(_resized, size=self.of or size, device=self.device)
        parts = tuple(rows(t) for t in self.dry.batch)
        cut = size if self.of else None
        step = Step(model, self.dry.loss, parts, stepper, micro_batch=cut)
        model.zero_grad()
        return witness(step, self.device)

    def largest(self, limit: int, guess: int, least: int) -> int:
        """The most samples that fit, from a guess on; ``least`` do."""

        def fits(size: int) -> bool:
            return size <= (self.of or size) and self.peak(size) <= limit

        if guess > least and fits(guess):
            more = (self.peak(guess) - self.peak(least)) / (guess - least)
            if more:  # bytes that a sample needs
                guess += int((limit - self.peak(guess)) / more)
        return last_that(fits, min(guess, self.of or guess), least)


class _Steps:
    """Dry steps of one model, of any size.

    The first makes the optimizer's states. The optimizer's step needs as
    much after every batch, so it runs once more alone, and no other time.
    """

    def __init__(
        self,
        model: nn.Module,
        dry: Dry,
        loss: Loss,
        batch: tuple[torch.Tensor, ...],
        of: int | None,
        estimate: bool,
    ) -> None:
        self.model, self.dry, self.loss, self.batch = model, dry, loss, batch
        self.of, self.estimate = of, estimate
        self._peaks: dict[int, int] = {}
        self._row = sum(t[:1].nbytes for t in batch)
        whole = sum(t[:1].nbytes for t in batch if is_whole(t))
        prime = next((p for p in PRIMES if p * whole <= SMALL), PRIMES[-1])
        for size in (prime, 2, 1):
            try:
                tracker, last = self._dry(size, self._first, size)
                break
            except Exception:
                if size == 1:
                    raise
        held = last.split(-1)
        self.gradients = held["gradients"]
        self.static = last.start - self.gradients - size * self._row
        self._update = last.peak - size * self._row
        self._first_lines = self._lines = []
        if size == prime:
            made = held["optimizer"] - tracker.split(-1)["optimizer"]
            self._first_lines = _lines(tracker, prime, made)
            self._lines = self._first_lines
            if of:
                self._lines = _lines(tracker, prime, made, self.gradients)

    def inputs(self, size: int) -> int:
        """Bytes of the batch of a step with this many samples at once."""
        return self._row * (self.of or size)

    def start(self, size: int) -> int:
        """Bytes before a step."""
        return self.static + self.inputs(size)

    def peak(self, size: int) -> int:
        """The most bytes of a step with this many samples at once."""
        if size not in self._peaks:
            sizes: tuple[int, ...] = (size,)
            late = False
            if self.of and 2 * size <= self.of:
                late = True  # the second is as large, and finds gradients
            elif self.of and size < self.of:
                sizes = size, self.of - size
            ran = self._dry(self.of or size, self._passes, *sizes, late=late)
            most = max(ran.peak, self._update + self.inputs(size))
            self._peaks[size] = most
        return self._peaks[size]

    def line(self, size: int, first: bool = False) -> int:
        """The same by the lines; ``first`` for a first micro-batch alone."""
        lines = self._first_lines if first else self._lines
        most = max(constant + slope * size for constant, slope in lines)
        return max(most, self._update) + self.inputs(size)

    # Dry runs

    def _dry(
        self, samples: int, run: Callable[..., Ran], *sizes: int, **how: object
    ) -> Ran:
        parts = [_resized(t, samples, _where(t, samples)) for t in self.batch]
        try:
            return self.dry.trace(
                self.loss, *parts, run=run, sizes=sizes, **how
            )
        except Exception as error:
            error.add_note(f"in a dry run, samples: {max(sizes)}")
            raise

    def _first(
        self,
        model: nn.Module,
        loss: Loss,
        *batch: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        sizes: tuple[int, ...],
    ) -> tuple[PeakTracker, PeakTracker]:
        """A pass, and the optimizer's step with all its states."""
        ran = self._passes(
            model, loss, *batch, optimizer=optimizer, sizes=sizes
        )
        if optimizer:
            optimizer.step()  # makes the states
        existing = [model, *([optimizer] if optimizer else []), *batch]
        with PeakTracker(*existing) as last:
            if optimizer:
                optimizer.step()
        return ran, last

    def _passes(
        self,
        model: nn.Module,
        loss: Loss,
        *batch: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        sizes: tuple[int, ...],
        late: bool = False,
    ) -> PeakTracker:
        """Micro-batches, forward and backward; gradients stay.

        Args:
            sizes: of the micro-batches, from the first sample on.
            late: whether the first finds gradients.
        """
        if not late:
            model.zero_grad()
        existing = [model, *([optimizer] if optimizer else []), *batch]
        with PeakTracker(*existing) as tracker:
            start = 0
            for size in sizes:
                tracker.mark("forward")
                part = batch
                if size < len(batch[0]):
                    part = tuple(t[start : start + size] for t in batch)
                start += size
                value, kept = parts_of(loss(model, *part))
                if self.of and size < self.of:
                    value = value * (size / self.of)
                value.backward()
                del value, kept
        if not self.estimate:
            refuse_unsure(tracker)
        return tracker

    # The largest

    @property
    def least(self) -> int:
        """The fewest samples that run: 1 or 2."""
        try:
            self.peak(1)
        except Exception as error:
            try:
                self.peak(2)
            except Exception:
                raise error from None
            return 2
        return 1

    def largest(self, limit: int) -> int:
        """The most samples that fit; 0 if none do."""

        def fits(size: int) -> bool:
            below = self._lines and self._peaks.get(size - 1)
            if below and below == self.line(size - 1) and not by_line(size):
                return False  # by lines that are confirmed
            return size <= most and self.peak(size) <= limit

        def by_line(size: int, first: bool = False) -> bool:
            return not self._lines or self.line(size, first) <= limit

        most = self.of or 2**60
        if self.of:
            first = partial(by_line, first=True) if self._lines else fits
            size = largest_over_half(most, fits, first)
            if size:
                return size
            most //= 2
        guess, least = 2, 1
        if self._lines:
            guess = last_that(lambda n: n <= most and by_line(n), 1, 1)
        if guess == 1:
            guess = least = self.least
        size = last_that(fits, min(guess, most), least) if most >= least else 0
        if size > least:
            return size
        least = self.least
        return least * (most >= least and fits(least))


def _lines(
    tracker: PeakTracker, prime: int, more: int, late: int | None = None
) -> list[tuple[int, int]]:
    """Constant and slope of the bytes at each moment, without the batch.

    What grows with the samples is what their number divides.

    Args:
        tracker: of a micro-batch without gradients.
        prime: samples of it.
        more: bytes that were not there yet.
        late: bytes of the gradients that a later micro-batch finds. It adds
            its own to them, one after the other.
    """
    end = len(tracker.timeline)
    changes = [[0] * (end + 2) for _ in range(2)]
    changes[0][0] = more + (late or 0)
    for a in tracker.allocations:
        if a.birth < 0 and a.category == "inputs":
            continue
        slope, rest = divmod(a.bytes, prime)
        kind, size = (0, a.bytes) if rest else (1, slope)
        death = end if a.death is None else a.death
        if late is not None and a.category == "gradients":
            death = a.birth + 1
        changes[kind][a.birth + 1] += size
        changes[kind][death + 1] -= size
    return list(set(zip(*map(accumulate, changes), strict=True)))


def largest_over_half(
    of: int, fits: Callable[[int], bool], first_fits: Callable[[int], bool]
) -> int:
    """The largest micro-batch of more than half the samples; 0 for none.

    The second one finds gradients, and is smaller the larger the first is.
    So the first alone says how large it may be, and then the step whether it
    is large enough.

    Args:
        of: samples of the step.
        fits: whether the step with a micro-batch fits.
        first_fits: whether its first micro-batch alone does.
    """
    if first_fits(of) and fits(of):
        return of
    least = of // 2 + 1
    if least < of and first_fits(least):
        size = last_that(lambda n: n < of and first_fits(n), least, least)
        if fits(size):
            return size
    return 0


def _where(tensor: torch.Tensor, size: int) -> torch.device | str:
    """Where a dry run gets that many rows: on meta unless it reads them."""
    needed = size * prod(tensor.shape[1:]) * tensor.itemsize
    no_large_mask(tensor, needed)
    return tensor.device if is_whole(tensor) and needed <= SMALL else "meta"


def _resized(
    tensor: torch.Tensor, size: int, device: torch.device | str
) -> torch.Tensor:
    """That many rows of a tensor, repeated, in its memory format."""
    row = torch.empty_like(tensor[:1], device="meta", requires_grad=False)
    made = torch.empty_strided(
        (size, *row.shape[1:]),
        (prod(row.shape[1:]), *row.stride()[1:]),
        dtype=tensor.dtype,
        device=device,
    )
    if not made.is_meta:
        rows = torch.arange(size, device=tensor.device) % len(tensor)
        made.copy_(tensor.detach()[rows])
    return made.requires_grad_(tensor.requires_grad)
