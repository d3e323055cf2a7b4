"""Training loops that go wrong in known ways, and data to try them on."""

import torch
from torch import nn

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

    These are expressions, as the solution has them, and so is ``number``,
    that of the micro-batches.
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
