"""Training loops that go wrong in known ways, and data to try them on."""

import torch
from torch import nn

from membudget.exercises.core import Case
from membudget.models import mlp

MicroBatch = tuple[torch.Tensor, torch.Tensor]

NO_DIVISION = (
    "the sum of the mean losses is not divided at all, so it grows with the "
    "number of micro-batches: the mean over n of all N weighs n/N."
)
SUMMED = (
    "the losses are summed over the window, and not divided by its count N."
)
DIVIDED_AGAIN = (
    "the mean loss is divided by the count n of its micro-batch once more; "
    "its weight is n/N."
)
DIVIDED_TWICE = (
    "the losses are weighted by n/N and then divided by the number of "
    "micro-batches as well: n/N alone is the weight."
)


def weighing(count: str, total: str, number: str) -> str:
    """Mistakes of a loop that weighs a loss by ``count / total``.

    Args:
        count: of samples in a micro-batch, as the solution has it.
        total: of samples in the window.
        number: of micro-batches.
    """
    return f"""
        * {count} / {total} => / {number}
            the mean of each micro-batch is divided by the number of
            micro-batches. That is right only if all have the same count; the
            mean over n of all N weighs n/N.
        * {count} / {total} =>
            {NO_DIVISION}
        {count} / {total} => {count}
            {SUMMED}
        * {count} / {total} => / {count}
            {DIVIDED_AGAIN}
        * {count} / {total} => * {count} / {total} / {number}
            {DIVIDED_TWICE}
        """


STEP_EACH = (
    "the optimizer steps after every micro-batch: step once, after the last "
    "one of the window."
)
NO_CLIP = (
    "the step is taken with the unclipped gradient: `clip_grad_norm_` comes "
    "after the last micro-batch and before the step."
)
CLIP = "clip_grad_norm_(model.parameters(), max_norm)"
CLIPPING = f"""
    {CLIP} => torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
        `clip_grad_value_` cuts each number by itself; `clip_grad_norm_` keeps
        the direction.
    {CLIP} => \
        norm = {CLIP.replace("max_norm", "1e9")}; \
        [p.grad.mul_(max_norm / norm) for p in model.parameters()]
        the gradient is brought to the norm max_norm even where it is shorter:
        clipping never lengthens it.
    """
"""Mistakes of a loop that clips."""

NO_UPDATE = """
    scaler.update() =>
        the loss scale stays as it was: call `scaler.update()` once, after the
        step.
    """
NOT_FP16 = """
    torch.float16 => enabled=False
    or torch.float16 => torch.bfloat16
        the forward pass does not run in fp16: put it under
        `torch.autocast("cpu", torch.float16)`.
    """
OVERFLOW = (
    "an overflow must skip the step: `scaler.step(optimizer)` does, "
    "`optimizer.step()` does not."
)
AMP = f"""
    {CLIP} =>
    or scaler.unscale_(optimizer) =>
    {CLIP} =>
        {NO_CLIP}
    {CLIPPING}
    scaler.unscale_(optimizer) =>
    or scaler.unscale_(optimizer) => {CLIP}
    {CLIP} => scaler.unscale_(optimizer)
        the gradient is clipped while it is still multiplied by the loss
        scale, so nearly every step is cut to a fraction of itself: call
        `scaler.unscale_(optimizer)` before `clip_grad_norm_`.
    {NO_UPDATE}
    scaler.step(optimizer) => optimizer.step()
        {OVERFLOW}
    {NOT_FP16}
    """
"""Mistakes of a loop that scales, clips and steps, in fp16."""


def samples(*sizes: int) -> list[MicroBatch]:
    """Micro-batches that differ: later ones hold larger values."""
    return [
        (
            torch.randn(size, 4, dtype=torch.float64) * (1 + k),
            torch.randint(3, (size,)),
        )
        for k, size in enumerate(sizes)
    ]


def batch(size: int) -> MicroBatch:
    """One micro-batch of samples that differ."""
    x, y = map(torch.cat, zip(*samples(*[1] * size), strict=True))
    return x, y


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
