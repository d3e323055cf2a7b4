"""Training loops that can go wrong in known ways, and data to try them on.

``run`` is a window's backward passes, ``step`` the whole optimizer step. Each
is right as it is; a keyword argument turns one thing wrong.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from membudget.exercises.core_old import Case
from membudget.models import mlp

MicroBatch = tuple[torch.Tensor, torch.Tensor]
Window = Sequence[MicroBatch]
Weigh = Callable[[int, Sequence[int]], float]
Mistake = tuple[str, dict]

NO_DIVISION = (
    "the sum of the mean losses is not divided at all, so it grows with the "
    "number of micro-batches: the mean over n of all N weighs n/N."
)
WEIGHTS: list[Mistake] = [
    (
        "the mean of each micro-batch is divided by the number of "
        "micro-batches. That is right only if all have the same count; the "
        "mean over n of all N weighs n/N.",
        {"weigh": lambda n, counts: 1 / len(counts)},
    ),
    (NO_DIVISION, {"weigh": lambda n, counts: 1}),
    (
        "the losses are summed over the window, and not divided by its count "
        "N.",
        {"weigh": lambda n, counts: n},
    ),
    (
        "the mean loss is divided by the count n of its micro-batch once "
        "more; its weight is n/N.",
        {"weigh": lambda n, counts: 1 / n},
    ),
    (
        "the losses are weighted by n/N and then divided by the number of "
        "micro-batches as well: n/N alone is the weight.",
        {"weigh": lambda n, counts: n / sum(counts) / len(counts)},
    ),
]
STEP_EACH = (
    "the optimizer steps after every micro-batch: step once, after the last "
    "one of the window."
)
CLIP_EACH = (
    "the gradient is clipped after every micro-batch, while its sum is not "
    "complete: clip once, after the last one."
)
NO_CLIP = (
    "the step is taken with the unclipped gradient: `clip_grad_norm_` comes "
    "after the last micro-batch and before the step."
)
STEPS: list[Mistake] = [
    (STEP_EACH, {"each": "unscale clip step update wipe", "end": ""}),
    (STEP_EACH, {"each": "unscale clip step update", "end": "wipe"}),
    (CLIP_EACH, {"each": "clip", "end": "unscale step update wipe"}),
    (CLIP_EACH, {"each": "clip"}),
    (NO_CLIP, {"end": "unscale step update wipe"}),
    (
        "`clip_grad_value_` cuts each number by itself; `clip_grad_norm_` "
        "keeps the direction.",
        {"end": "unscale cut step update wipe"},
    ),
    (
        "the gradient is brought to the norm max_norm even where it is "
        "shorter: clipping never lengthens it.",
        {"end": "unscale normalise step update wipe"},
    ),
]


def share(n: int, counts: Sequence[int]) -> float:
    """The right weight of a mean over ``n`` of all samples or tokens."""
    return n / sum(counts)


def mean_loss(model: nn.Module, *batches: MicroBatch) -> torch.Tensor:
    """Mean cross-entropy over all samples, or all non-padding tokens."""
    logits = [model(x).flatten(0, -2) for x, _ in batches]
    labels = [y.flatten() for _, y in batches]
    return F.cross_entropy(torch.cat(logits), torch.cat(labels))


def run(
    model: nn.Module,
    micro_batches: Window,
    weigh: Weigh = share,
    window: Window = (),
    count: Callable[[torch.Tensor], int] = len,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    dtype: torch.dtype | None = None,
) -> None:
    """Add up the gradients of micro-batches.

    Args:
        model: left with the sum in ``param.grad``.
        micro_batches: those that run.
        weigh: the weight of a mean loss, from its count and all counts.
        window: those that the counts are taken from, if others.
        count: of one micro-batch's labels.
        backward: called with each weighted loss.
        dtype: of autocast, which is left before each backward pass; None
            for none.
    """
    counts = [count(y) for _, y in window or micro_batches]
    for x, y in micro_batches:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = mean_loss(model, (x, y)) * weigh(count(y), counts)
        backward(loss)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: Window,
    max_norm: float,
    weigh: Weigh = share,
    each: str = "",
    end: str = "unscale clip step update wipe",
    dtype: torch.dtype | None = torch.float16,
    scaled: bool = True,
) -> None:
    """Run a window and step.

    Args:
        model: its parameters change.
        optimizer: of the model.
        scaler: if it is disabled, so is autocast.
        micro_batches: the window.
        max_norm: to clip to.
        weigh: as in :func:`run`.
        each: actions after every micro-batch.
        end: actions after the last one.
        dtype: of autocast.
        scaled: whether the losses are.
    """

    def normalise() -> None:
        norm = get_total_norm([p.grad for p in model.parameters()])
        for parameter in model.parameters():
            parameter.grad *= max_norm / norm

    actions = {
        "unscale": lambda: scaler.unscale_(optimizer),
        "clip": lambda: clip_grad_norm_(model.parameters(), max_norm),
        "cut": lambda: clip_grad_value_(model.parameters(), max_norm),
        "normalise": normalise,
        "step": lambda: scaler.step(optimizer),
        "plain": optimizer.step,
        "update": scaler.update,
        "wipe": optimizer.zero_grad,
    }

    def do(names: str) -> None:
        for name in names.split():
            actions[name]()

    def backward(loss: torch.Tensor) -> None:
        (scaler.scale(loss) if scaled else loss).backward()
        do(each)

    cast = dtype if scaler.is_enabled() else None
    run(model, micro_batches, weigh, backward=backward, dtype=cast)
    do(end)


def unscaled(step: Callable) -> Callable:
    """The same step without a scaler."""

    def plain(model, optimizer, micro_batches, max_norm, **change):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        step(model, optimizer, scaler, micro_batches, max_norm, **change)

    return plain


def samples(*sizes: int) -> list[MicroBatch]:
    """Micro-batches that differ: later ones hold larger values."""
    return [
        (
            torch.randn(size, 4, dtype=torch.float64) * (1 + k),
            torch.randint(3, (size,)),
        )
        for k, size in enumerate(sizes)
    ]


def whole(window: Window) -> MicroBatch:
    """A window as one batch."""
    x, y = map(torch.cat, zip(*window, strict=True))
    return x, y


def largest(window: Window, *rest: object) -> int:
    """Samples in the largest micro-batch."""
    return max(len(x) for x, _ in window)


def small_model() -> nn.Module:
    """A multilayer perceptron for :func:`samples`, in fp64."""
    return mlp(inputs=4, width=8, depth=2, outputs=3).double()


def step_case(name: str, value: float, *sizes: int) -> Case:
    """Model, SGD, micro-batches of some sizes, and one more number."""

    def make() -> tuple:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, samples(*sizes), value

    told = f"micro-batches of {list(sizes)} samples, {name} = {value}"
    return Case(told, make)
