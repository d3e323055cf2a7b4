"""The ledger of any model, from the model itself."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import torch
from torch import nn

from membudget.checks import flag, module, whole
from membudget.internals import UnsupportedOperatorException
from membudget.ledger.lines import peak_lines
from membudget.ledger.recipes import States
from membudget.measuring import (
    PeakTracker,
    dry_run,
    format_bytes,
    replay,
    trace_step,
)
from membudget.measuring.allocator import Usage
from membudget.measuring.dry import no_large_mask
from membudget.measuring.fakes import SMALL, is_whole
from membudget.measuring.step import Loss, only_tensors, samples_of
from membudget.measuring.tracker import BEFORE


@dataclass(frozen=True)
class Account:
    """What one step of a model needs; nothing of it was allocated.

    Attributes:
        states: parameters and buffers, gradients, optimizer states; in
            inference there are no gradients.
        activations: bytes that autograd and variables hold when the forward
            pass of the first micro-batch is over.
        by_module: the activations by the module that made them; ``""`` is
            outside of all.
        peak: the most bytes alive, as they were requested.
        split: bytes at the peak by category.
        moment: the operator, module and phase of the peak; empty words
            where nothing needs more than what was there before.
        tracker: the dry run's tracker.
    """

    states: States
    activations: int
    by_module: dict[str, int]
    peak: int
    split: dict[str, int]
    moment: tuple[str, str, str]
    tracker: PeakTracker

    @cached_property
    def usage(self) -> Usage:
        """The same step in the blocks of PyTorch's allocator for CUDA.

        The peaks, in bytes, of what is requested, of the blocks that are
        allocated for it, and of the segments that are reserved, by
        :func:`membudget.measuring.replay`. Everything that exists before the
        step is allocated first, in the order of the tracker.
        """
        allocator = replay(self.tracker.events)
        return Usage(
            allocator.peak_requested,
            allocator.peak_allocated,
            allocator.peak_reserved,
        )


def account(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    keep_gradients: bool = False,
    inference: bool = False,
    on: torch.device | str = "cpu",
    estimate: bool = False,
) -> Account:
    """The ledger of a training step, or of inference, by a dry run.

    The loop of this account sets its gradients to None, and keeps alive what
    the loss function returns, nothing else. Say so where yours keeps more.
    Memory in kernels, workspaces and the CUDA context are not in it.

    Args:
        model: on any device; one on ``meta`` takes no memory.
        loss: called as ``loss(model, *batch)``; the mean loss, or a tuple
            that begins with it or an object that has it as ``loss``, which
            lives until the backward pass is over.
        *batch: tensors, on ``meta`` too, with the samples along their first
            dimension.
        optimizer: of the model's parameters; its states are made in the dry
            run.
        micro_batch: samples that run at once.
        keep_gradients: the gradients stay from step to step, as after
            ``zero_grad(set_to_none=False)``.
        inference: only ``loss(model, *batch)``, under
            ``torch.inference_mode()``; what it returns lives until the end.
        on: the device that ``meta`` stands for.
        estimate: do not refuse the operators of
            :data:`membudget.measuring.UNSURE`; the bytes may be too few.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a model that does not run without data, and what
            :func:`membudget.measuring.dry_run` refuses.
        RuntimeError: something compiled is called.
    """
    try:
        tracker = dry_run(
            model,
            loss,
            *batch,
            optimizer=optimizer,
            micro_batch=micro_batch,
            keep_gradients=keep_gradients,
            inference=inference,
            on=on,
            estimate=estimate,
        )
    except (RuntimeError, UnsupportedOperatorException) as error:
        unknown = NotImplementedError, UnsupportedOperatorException
        if not isinstance(error, unknown) and "fake impl" not in str(error):
            raise  # "fake impl" is missing from an operator of one's own
        raise ValueError(
            f"{type(model).__name__} does not run without data: {error}. Use "
            "operators that PyTorch knows on meta, or measure a real step "
            "with membudget.measuring.trace_step"
        ) from error
    marks = [index for index, label in tracker.marks if label == "backward"]
    marks.append(len(tracker.timeline))  # inference has no backward pass
    forward = tracker.at(marks[0] - 1)
    by_module: dict[str, int] = {}
    for a in forward:
        if a.category == "activations":
            name = a.operator.module
            by_module[name] = by_module.get(name, 0) + a.bytes
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = 0 if inference else sum(p.nbytes for p in trained)
    start = tracker.split(-1)
    moment = tracker.peak_moment
    at = tracker.operators[moment] if moment >= 0 else BEFORE
    return Account(
        states=States(start["parameters"], gradients, start["optimizer"]),
        activations=sum(by_module.values()),
        by_module=by_module,
        peak=tracker.peak,
        split=tracker.split(),
        moment=(at.name, at.module, at.phase),
        tracker=tracker,
    )


def largest_batch(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    limit: int,
    optimizer: torch.optim.Optimizer | None = None,
    keep_gradients: bool = False,
    inference: bool = False,
    on: torch.device | str = "cpu",
    check: bool = False,
) -> int:
    """The most samples whose step stays within a memory limit.

    Dry runs of 2, 4 and 7 samples give the peak as a maximum of straight
    lines (:func:`peak_lines`), which is solved for the batch; dry runs of
    the answer and of one sample more confirm it. Where they do not, or the
    bytes are not straight lines, dry runs of other sizes close in on it. If
    the step does not run with 1 sample, as under batch norm, it is asked for
    at least 2.

    Args:
        *batch: an example; its rows are repeated to each size, those of
            integers and booleans with their values while they take at most
            16 MiB.
        limit: bytes of tensors, up to 2⁶⁰. Leave a reserve for blocks,
            workspaces and the context.
        check: let real steps of the answer and of one sample more decide,
            on the model's device, with the example's data. A copy of the
            model takes them, and none goes beyond the limit. Needed where a
            dry run does not know the bytes of an operator.
        others: as for :func:`account`; ``micro_batch`` is what is asked for.

    Raises:
        ValueError: not even the smallest batch fits, an example whose
            tensors have no samples or not the same number, a check of what
            has no data, another limit, and what :func:`account` refuses.
        TypeError: a limit that is no whole number, a check that is not True
            or False, and what :func:`account` refuses.
    """
    limit = whole(limit, "limit", 1, 2**60)
    module(model), only_tensors(batch), flag(check, "check")
    samples_of(batch)
    if check and any(t.is_meta for t in [*model.parameters(), *batch]):
        raise ValueError(
            "the model or the example is on meta, and real steps are to "
            "check the answer: use a device and data, or no check"
        )
    kept = {"keep_gradients": keep_gradients, "inference": inference}

    @cache
    def dry(size: int) -> PeakTracker:
        parts = [_resized(t, size, _where(t, size)) for t in batch]
        how = {"optimizer": optimizer, "on": on, "estimate": check}
        try:
            return account(model, loss, *parts, **how, **kept).tracker
        except Exception as error:
            error.add_note(f"in a dry run, samples: {size}")
            raise

    def fits(size: int) -> bool:
        return dry(size).peak <= limit

    @cache
    def really_fits(size: int) -> bool:
        if dry(size).start > limit:
            return False
        copied, stepper = copy.deepcopy((model, optimizer))
        device = next((p.device for p in model.parameters()), None)
        parts = [_resized(t, size, device or t.device) for t in batch]
        try:
            trace_step(
                copied, loss, *parts, optimizer=stepper, budget=limit, **kept
            )
        except torch.OutOfMemoryError:
            return False
        return True

    least = _fewest(dry)
    if not fits(least):
        needs = f"{format_bytes(dry(least).peak)}, more"
    else:
        size = _last(fits, _guess(dry, limit), least)
        if not check:
            return size
        if really_fits(least):
            return _last(really_fits, size, least)
        needs = "more in reality"
    samples = "one sample" if least == 1 else f"{least} samples, the fewest,"
    raise ValueError(
        f"a step with {samples} needs {needs} than the limit of "
        f"{format_bytes(limit)}: use a smaller model or sample, activation "
        "checkpointing, or an optimizer with fewer states"
    )


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


def _fewest(dry: Callable[[int], PeakTracker]) -> int:
    """The fewest samples that run: 1 or 2."""
    try:
        dry(1)
    except Exception as error:
        try:
            dry(2)
        except Exception:
            raise error from None
        return 2
    return 1


def _guess(dry: Callable[[int], PeakTracker], limit: int) -> int:
    """The answer by straight lines, at least 2; 2 where there are none."""
    sizes = (2, 4, 7)
    timelines = [dry(size).timeline for size in sizes]
    try:
        lines = peak_lines(sizes, timelines)
    except ValueError:
        return 2
    most = [(limit - c) // slope for c, slope in lines if slope > 0]
    return max(2, min(most, default=2))


def _last(fits: Callable[[int], bool], guess: int, least: int) -> int:
    """A size that fits, while the next one does not.

    Args:
        guess: where to begin.
        least: a size that fits.
    """
    low, high, step = guess, guess + 1, 1
    while low > least and not fits(low):
        low, high, step = max(low - step, least), low, 2 * step
    while fits(high):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
