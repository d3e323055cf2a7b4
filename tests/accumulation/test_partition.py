"""Cutting and weighing, against the definitions."""

import sys
from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
import torch
from accumulation_helpers import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget.accumulation import (
    mean_of_means_error,
    partition,
    weights,
    windows,
)
from tests.soak import examples

whole = st.integers(1, 500)
counts_of = st.lists(st.integers(1, 1000), min_size=1, max_size=40)

# partition ---------------------------------------------------------------


@settings(max_examples=examples(10))
@given(whole, whole)
@example(1, 1)
@example(64, 24)
@example(7, 500)
def test_every_sample_is_in_exactly_one_micro_batch(total, micro_batch):
    parts = partition(total, micro_batch)
    covered = [i for part in parts for i in range(total)[part]]
    assert covered == list(range(total))
    sizes = [len(range(total)[part]) for part in parts]
    assert all(part.step is None for part in parts)
    assert sizes[:-1] == [micro_batch] * (len(parts) - 1)
    assert sizes[-1] == (total % micro_batch or min(total, micro_batch))
    assert len(parts) == -(-total // micro_batch)


def test_more_micro_batches_than_anybody_has(monkeypatch):
    message = (
        "10000001 samples in micro-batches of 10 make more than 1000000 "
        "micro-batches: use larger ones"
    )
    with refused(ValueError, message):
        partition(10**7 + 1, 10)
    monkeypatch.setattr(sys.modules[partition.__module__], "MOST", 3)
    assert len(partition(30, 10)) == 3


# weights -----------------------------------------------------------------


@settings(max_examples=examples(10))
@given(counts_of)
@example([24, 24, 16])
@example([512, 32, 64, 128])
def test_weights_are_shares_of_the_window(counts):
    exact = weights([Fraction(n) for n in counts])
    assert exact == [Fraction(n, sum(counts)) for n in counts]
    assert weights(counts) == [float(share) for share in exact]


def test_counts_may_be_numbers_of_other_kinds():
    for counts in (
        np.array([1.0, 3.0], dtype=np.float32),
        torch.tensor([1, 3]),
        (torch.tensor(1), torch.tensor([3.0])),
    ):
        assert weights(counts) == [0.25, 0.75]


def test_a_micro_batch_of_padding_only_has_no_weight():
    message = (
        "count is 0: use the number of samples, or of non-padding tokens, in "
        "the micro-batch, above zero (leave out a micro-batch that holds "
        "padding only)"
    )
    with refused(ValueError, message):
        weights([4, 0])


# mean_of_means_error -----------------------------------------------------


def test_the_worked_values():
    assert round(mean_of_means_error([512, 32, 64, 128]), 3) == 1.267
    assert round(mean_of_means_error([24, 24, 16]), 5) == 0.19245


@settings(max_examples=examples(10))
@given(counts_of)
def test_the_law_from_the_weights_of_the_samples(counts):
    """The squared error is Σ (difference of the weights)² over the samples,
    relative to Σ (window weight)² = 1/N."""
    total, k = Fraction(sum(counts)), len(counts)
    squared = 0
    for n in counts:
        squared += total * n * (1 / Fraction(k * n) - 1 / total) ** 2
    assert mean_of_means_error(counts) == pytest.approx(
        sqrt(squared), rel=1e-12, abs=1e-12
    )


def test_the_law_against_a_monte_carlo_in_pure_noise():
    counts, number = [1, 2, 3, 4], 20_000
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(sum(counts), number, generator=generator)
    right = noise.mean(0)
    wrong = sum(part.mean(0) for part in noise.split(counts)) / len(counts)
    measured = ((wrong - right).square().mean() / right.square().mean()).sqrt()
    # A mean square of n normal numbers has the relative deviation sqrt(2/n),
    # its root half of that; two of them, five deviations.
    tolerance = 5 * sqrt(2 / number) / 2 * sqrt(2)
    assert tolerance < 0.04
    law = mean_of_means_error(counts)
    assert measured.item() == pytest.approx(law, rel=tolerance)


# windows -----------------------------------------------------------------


@settings(max_examples=examples(10))
@given(st.integers(0, 60), st.integers(1, 70))
@example(10, 4)
@example(0, 3)
def test_windows_keep_every_micro_batch_in_order(length, steps):
    groups = list(windows(iter(range(length)), steps))
    assert [i for group in groups for i in group] == list(range(length))
    sizes = [len(group) for group in groups]
    assert sizes[:-1] == [steps] * (len(groups) - 1)
    assert all(1 <= size <= steps for size in sizes)


def test_windows_read_no_further_than_the_window_they_give():
    """A seeded loader would shuffle again, if it were opened again."""
    read = []

    def loader():
        read.append("opened")
        for i in range(7):
            read.append(i)
            yield i

    class Loader:
        __iter__ = staticmethod(loader)

    stream = windows(Loader(), 3)
    assert next(stream) == [0, 1, 2]
    assert read == ["opened", 0, 1, 2]
    assert list(stream) == [[3, 4, 5], [6]]
    assert read.count("opened") == 1


def test_windows_refuse_bad_steps_at_once():
    with refused(ValueError, "steps is 0: use a whole number of at least 1"):
        windows([1, 2, 3], 0)  # not only when it is iterated
