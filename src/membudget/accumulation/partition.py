"""Cut a batch into micro-batches, and weigh them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import isfinite, sqrt
from numbers import Integral, Real
from typing import TypeVar

import torch

Item = TypeVar("Item")

IGNORE = -100
"""The label of a padding token, as in ``torch.nn.functional.cross_entropy``.
"""

NORMALISATIONS = ("window", "mean of means", "no division")
"""What the summed micro-batch losses are divided by: the window's count; each
micro-batch's own count and then the number of micro-batches; each
micro-batch's own count only."""


def partition(total: int, micro_batch: int) -> list[slice]:
    """Cut ``total`` samples into micro-batches of ``micro_batch``.

    The last one takes the remainder, so every sample is in exactly one.

    Args:
        total: samples in the batch, at least 1.
        micro_batch: samples in a full micro-batch, at least 1; more than
            ``total`` gives one micro-batch.

    Returns:
        Slices into the batch, in order.

    Raises:
        ValueError: a size that is not a whole number of at least 1.
    """
    total = _whole(total, "total")
    micro_batch = _whole(micro_batch, "micro_batch")
    return [
        slice(start, min(start + micro_batch, total))
        for start in range(0, total, micro_batch)
    ]


def weights(counts: Sequence[float]) -> list[float]:
    """Weight of each micro-batch's *mean* loss: its share of the window.

    With ``counts`` n₁ … n_K and N their sum, the weights n_k / N make the
    weighted sum of the micro-batch means the mean over the window.

    Args:
        counts: samples, or non-padding tokens, in each micro-batch.

    Raises:
        ValueError: no counts, or a count that is not above zero.
    """
    counts = _counts(counts)
    total = sum(counts)
    return [count / total for count in counts]


def sample_weights(
    counts: Sequence[float], normalisation: str = "window"
) -> list[float]:
    """Weight that one sample of each micro-batch has in the gradient.

    Args:
        counts: samples, or non-padding tokens, in each micro-batch.
        normalisation: one of :data:`NORMALISATIONS`.

    Returns:
        One weight for each micro-batch. With ``"window"`` they are all 1/N;
        with ``"mean of means"`` 1/(K·n_k); with ``"no division"`` 1/n_k.

    Raises:
        ValueError: bad counts, or an unknown normalisation.
    """
    counts = _counts(counts)
    total, steps = sum(counts), len(counts)
    return [sample_weight(n, total, steps, normalisation) for n in counts]


def sample_weight(
    count: float, total: float, steps: int, normalisation: str
) -> float:
    """One of :func:`sample_weights`, in a window of ``total`` samples."""
    if normalisation == "window":
        return 1 / total
    if normalisation == "mean of means":
        return 1 / (steps * count)
    if normalisation == "no division":
        return 1 / count
    raise ValueError(
        f"unknown normalisation {normalisation!r}: "
        f"use one of {', '.join(map(repr, NORMALISATIONS))}"
    )


def mean_of_means_error(counts: Sequence[float]) -> float:
    """Expected relative error of the mean of means, in pure noise.

    If the samples' gradients are independent with mean zero and equal
    covariance, the difference between the mean of the micro-batch means and
    the mean over all N samples has the root-mean-square norm, relative to
    the latter's,

        sqrt(N · Σ_k (1/K - n_k/N)² / n_k).

    A gradient with a common mean makes the error smaller.

    Raises:
        ValueError: no counts, or a count that is not above zero.
    """
    counts = _counts(counts)
    total = sum(counts)
    return sqrt(
        total * sum((1 / len(counts) - n / total) ** 2 / n for n in counts)
    )


def token_counts(
    labels: torch.Tensor, micro_batches: Iterable[slice]
) -> list[int]:
    """Count the tokens of each micro-batch that are not padding.

    Args:
        labels: integer labels, samples first; padding is :data:`IGNORE`.
        micro_batches: slices along the first dimension.
    """
    return [int((labels[part] != IGNORE).sum()) for part in micro_batches]


def windows(micro_batches: Iterable[Item], steps: int) -> Iterator[list[Item]]:
    """Group a stream of micro-batches into windows of ``steps``.

    The last window is shorter where the stream ends early; it is not
    dropped.

    Args:
        micro_batches: any iterable, a ``DataLoader`` for example.
        steps: accumulation steps, at least 1.

    Raises:
        ValueError: ``steps`` is not a whole number of at least 1.
    """
    steps = _whole(steps, "steps")

    def groups() -> Iterator[list[Item]]:
        iterator = iter(micro_batches)
        while window := list(islice(iterator, steps)):
            yield window

    return groups()


def _whole(value: int, name: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} is {value!r}: use a whole number of at least 1"
        )
    return int(value)


def check_count(
    count: float, name: str = "count", where: str = "in the micro-batch"
) -> float:
    """Return ``count``; raise ``ValueError`` if it cannot be a weight."""
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    if (
        not isinstance(count, Real)
        or isinstance(count, bool)
        or not isfinite(count)
        or count <= 0
    ):
        raise ValueError(
            f"{name} is {count!r}: use the number of samples, or of "
            f"non-padding tokens, {where}, above zero (leave out a "
            "micro-batch that holds padding only)"
        )
    return count


def _counts(counts: Sequence[float]) -> list[float]:
    if not len(counts):
        raise ValueError("counts is empty: give one count per micro-batch")
    return [check_count(count) for count in counts]
