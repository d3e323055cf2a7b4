"""Cut a batch into micro-batches, and weigh them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import sqrt
from typing import TypeVar

from membudget.checks import listed, number, refused, shown, whole

Item = TypeVar("Item")

IGNORE = -100
"""The label of a padding token, as in ``torch.nn.functional.cross_entropy``.
"""

NORMALISATIONS = ("window", "mean of means", "no division")
"""What the summed micro-batch losses are divided by: the window's count; each
micro-batch's own count and then the number of micro-batches; each
micro-batch's own count only."""

MOST = 10**6
"""Micro-batches in a window."""


def partition(total: int, micro_batch: int) -> list[slice]:
    """Cut ``total`` samples into micro-batches of ``micro_batch``.

    The last one takes the remainder, so every sample is in exactly one.

    Args:
        total: samples in the batch, at least 1.
        micro_batch: samples in a full micro-batch, at least 1; more than
            ``total`` gives one micro-batch. There are a million at most.

    Returns:
        Slices into the batch, in order.
    """
    total = whole(total, "total")
    micro_batch = whole(micro_batch, "micro_batch")
    if -(-total // micro_batch) > MOST:
        raise ValueError(
            f"{total} samples in micro-batches of {micro_batch} make more "
            f"than {MOST} micro-batches: use larger ones"
        )
    return [
        slice(start, min(start + micro_batch, total))
        for start in range(0, total, micro_batch)
    ]


def weights(counts: Sequence[float]) -> list[float]:
    """Weight of each micro-batch's *mean* loss: its share of the window.

    With ``counts`` n₁ … n_K and N their sum, the weights n_k / N make the
    weighted sum of the micro-batch means the mean over the window.

    Args:
        counts: samples, or non-padding tokens, in each micro-batch, above
            zero.
    """
    counts = _counts(counts)
    total = sum(counts)
    return [count / total for count in counts]


def mean_of_means_error(counts: Sequence[float]) -> float:
    """Expected relative error of the mean of means, in pure noise.

    If the samples' gradients are independent with mean zero and equal
    covariance, the difference between the mean of the micro-batch means and
    the mean over all N samples has the root-mean-square norm, relative to
    the latter's,

        sqrt(N · Σ_k (1/K - n_k/N)² / n_k).

    A gradient with a common mean makes the error smaller.

    Args:
        counts: as for :func:`weights`.
    """
    counts = _counts(counts)
    total = sum(counts)
    return sqrt(
        total * sum((1 / len(counts) - n / total) ** 2 / n for n in counts)
    )


def windows(micro_batches: Iterable[Item], steps: int) -> Iterator[list[Item]]:
    """Group a stream of micro-batches into windows of ``steps``.

    The last window is shorter where the stream ends early; it is not
    dropped.

    Args:
        micro_batches: any iterable, a ``DataLoader`` for example.
        steps: accumulation steps, at least 1.
    """
    steps = whole(steps, "steps")
    stream = opened(micro_batches)

    def groups() -> Iterator[list[Item]]:
        while window := list(islice(stream, steps)):
            yield window

    return groups()


def opened(micro_batches: Iterable[Item]) -> Iterator[Item]:
    """The way through the micro-batches; a seeded loader shuffles once."""
    try:
        return iter(micro_batches)
    except TypeError:
        raise refused(
            "micro_batches", micro_batches, "an iterable of micro-batches"
        ) from None


def check_count(
    count: float, name: str = "count", where: str = "in the micro-batch"
) -> float:
    """The count, if it can be a weight: finite, and above zero."""
    try:
        return number(count, name, above=0)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} is {shown(count)}: use the number of samples, or of "
            f"non-padding tokens, {where}, above zero (leave out a "
            "micro-batch that holds padding only)"
        ) from None


def _counts(counts: Sequence[float]) -> list[float]:
    return [check_count(count) for count in listed(counts, "counts", "counts")]
