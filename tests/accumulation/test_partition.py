"""Cutting and weighing, against the definitions."""

import re
from fractions import Fraction
from math import inf, nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget.accumulation import (
    IGNORE,
    NORMALISATIONS,
    mean_of_means_error,
    partition,
    sample_weights,
    token_counts,
    weights,
    windows,
)

whole = st.integers(1, 500)
counts_of = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def says(text):
    """The whole message, literally."""
    return f"^{re.escape(text)}$"


# partition ---------------------------------------------------------------


@settings(max_examples=300)
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


def test_the_slices_cut_a_tensor():
    x = torch.arange(64)
    parts = [x[part] for part in partition(64, 24)]
    assert [len(part) for part in parts] == [24, 24, 16]
    assert torch.equal(torch.cat(parts), x)


def test_partition_takes_other_whole_numbers():
    assert partition(np.int64(5), np.int32(2)) == partition(5, 2)
    assert all(type(part.stop) is int for part in partition(np.int64(5), 2))


def test_more_micro_batches_than_anybody_has():
    assert len(partition(10**7, 10)) == 10**6
    message = (
        "10000001 samples in micro-batches of 10 make more than 1000000 "
        "micro-batches: use larger ones"
    )
    with pytest.raises(ValueError, match=says(message)):
        partition(10**7 + 1, 10)


# weights -----------------------------------------------------------------


@settings(max_examples=300)
@given(counts_of)
@example([24, 24, 16])
@example([512, 32, 64, 128])
def test_weights_are_shares_of_the_window(counts):
    exact = weights([Fraction(n) for n in counts])
    assert sum(exact) == 1
    assert exact == [Fraction(n, sum(counts)) for n in counts]
    assert weights(counts) == [float(share) for share in exact]


@settings(max_examples=300)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_weighted_means_make_the_mean_of_the_window(counts):
    """The theorem, in rational numbers: any values, any partition."""
    values = [Fraction((7 * i * i + 3) % 101, 9) for i in range(sum(counts))]
    means, start = [], 0
    for n in counts:
        means.append(sum(values[start : start + n]) / n)
        start += n
    shares = weights([Fraction(n) for n in counts])
    mean = sum(w * m for w, m in zip(shares, means, strict=True))
    assert mean == sum(values) / len(values)


@settings(max_examples=300)
@given(counts_of)
@example([24, 24, 16])
def test_the_weight_of_a_sample(counts):
    exact = [Fraction(n) for n in counts]
    k, total = len(counts), sum(counts)
    expected = {
        "window": [Fraction(1, total)] * k,
        "mean of means": [Fraction(1, k * n) for n in counts],
        "no division": [Fraction(1, n) for n in counts],
    }
    mass = {"window": 1, "mean of means": 1, "no division": k}
    assert set(expected) == set(NORMALISATIONS)
    for name in NORMALISATIONS:
        assert sample_weights(exact, name) == expected[name]
        assert sample_weights(counts, name) == [
            float(weight) for weight in expected[name]
        ]
        summed = sum(
            n * w
            for n, w in zip(exact, sample_weights(exact, name), strict=True)
        )
        assert summed == mass[name]
    assert sample_weights(counts) == sample_weights(counts, "window")


def test_the_three_normalisations_agree_where_they_must():
    assert sample_weights([8, 8], "mean of means") == sample_weights([8, 8])
    assert sample_weights([5], "no division") == sample_weights([5])
    assert sample_weights([4, 8], "mean of means") != sample_weights([4, 8])


def test_unknown_normalisations_are_named():
    with pytest.raises(
        ValueError,
        match=says(
            "there is no normalisation 'mean': use one of window, mean of "
            "means, no division"
        ),
    ):
        sample_weights([1, 2], "mean")


# mean_of_means_error -----------------------------------------------------


def test_the_worked_values():
    assert mean_of_means_error([512, 32, 64, 128]) == pytest.approx(
        1.267, abs=5e-4
    )
    assert mean_of_means_error([24, 24, 16]) == pytest.approx(
        sqrt(1 / 27), abs=1e-15
    )
    assert sqrt(1 / 27) == pytest.approx(0.19245, abs=5e-6)


@settings(max_examples=200)
@given(counts_of, st.integers(1, 50))
def test_equal_micro_batches_have_no_error(counts, n):
    assert mean_of_means_error([n] * len(counts)) == pytest.approx(
        0, abs=1e-12
    )
    error = mean_of_means_error(counts)
    assert (error > 1e-9) == (len(set(counts)) > 1)
    # Only the proportions and the number of samples matter: n times as many
    # samples in each micro-batch change nothing.
    assert mean_of_means_error([n * c for c in counts]) == pytest.approx(
        error, rel=1e-9, abs=1e-12
    )


@settings(max_examples=200)
@given(counts_of)
def test_the_law_from_the_weights_of_the_samples(counts):
    """The squared error is Σ (difference of the weights)² over the samples,
    relative to Σ (window weight)² = 1/N."""
    right = sample_weights([Fraction(n) for n in counts])
    wrong = sample_weights([Fraction(n) for n in counts], "mean of means")
    squared = sum(
        n * (a - b) ** 2 for n, a, b in zip(counts, wrong, right, strict=True)
    ) * sum(counts)
    assert mean_of_means_error(counts) == pytest.approx(
        sqrt(squared), rel=1e-12, abs=1e-12
    )


@pytest.mark.parametrize(
    "counts", [[24, 24, 16], [512, 32, 64, 128], [1, 2, 3, 4], [100, 1]]
)
def test_the_law_against_a_monte_carlo_in_pure_noise(counts):
    generator = torch.Generator().manual_seed(1)
    trials, dimensions = 400, 50
    number = trials * dimensions
    wrong = torch.zeros(number, dtype=torch.float64)
    right = torch.zeros(number, dtype=torch.float64)
    for n in counts:
        noise = torch.randn(
            n, number, generator=generator, dtype=torch.float64
        )
        wrong += noise.mean(0) / len(counts)
        right += noise.sum(0) / sum(counts)
    squares = (wrong - right).square(), right.square()
    measured = (squares[0].mean() / squares[1].mean()).sqrt().item()
    # A mean square of n normal numbers has the relative deviation sqrt(2/n),
    # its root half of that; two of them, five deviations.
    tolerance = 5 * sqrt(2 / number) / 2 * sqrt(2)
    assert tolerance < 0.04
    assert measured == pytest.approx(
        mean_of_means_error(counts), rel=tolerance
    )


# Errors of the counts ----------------------------------------------------

BAD_COUNTS = [
    0,
    -1,
    0.0,
    -2.5,
    nan,
    inf,
    torch.tensor(0),
]


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize(
    "function", [weights, sample_weights, mean_of_means_error]
)
def test_a_count_that_cannot_be_a_weight(function, bad):
    with pytest.raises(
        ValueError,
        match=says(
            f"count is {bad!r}: use the number of samples, or of "
            "non-padding tokens, in the micro-batch, above zero (leave out a "
            "micro-batch that holds padding only)"
        ),
    ):
        function([4, bad])


@pytest.mark.parametrize(
    "function", [weights, sample_weights, mean_of_means_error]
)
def test_no_counts(function):
    with pytest.raises(
        ValueError,
        match=says("counts is empty: use 1 counts or more"),
    ):
        function([])


def test_counts_may_be_numbers_of_other_kinds():
    kinds = [
        [1, 3],
        [1.0, 3.0],
        np.array([1, 3]),
        np.array([1.0, 3.0], dtype=np.float32),
        torch.tensor([1, 3]),
        (torch.tensor(1), torch.tensor([3.0])),
    ]
    for counts in kinds:
        assert weights(counts) == [0.25, 0.75]


# token_counts ------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.integers(1, 7),
)
def test_tokens_that_are_not_padding(lengths, micro_batch):
    labels = torch.full((len(lengths), 9), IGNORE)
    for row, length in zip(labels, lengths, strict=True):
        row[:length] = torch.arange(length)  # label 0 is not padding
    parts = partition(len(lengths), micro_batch)
    counts = token_counts(labels, parts)
    assert counts == [sum(lengths[part]) for part in parts]
    assert sum(counts) == sum(lengths)
    assert all(type(n) is int for n in counts)


def test_ignore_is_what_cross_entropy_ignores():
    logits = torch.randn(4, 3)
    labels = torch.tensor([1, IGNORE, 2, IGNORE])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    kept = torch.nn.functional.cross_entropy(logits[[0, 2]], labels[[0, 2]])
    assert torch.equal(loss, kept)


# windows -----------------------------------------------------------------


@settings(max_examples=300)
@given(st.integers(0, 60), st.integers(1, 70))
@example(10, 4)
@example(0, 3)
def test_windows_keep_every_micro_batch_in_order(length, steps):
    groups = list(windows(iter(range(length)), steps))
    assert [i for group in groups for i in group] == list(range(length))
    sizes = [len(group) for group in groups]
    assert sizes[:-1] == [steps] * (len(groups) - 1)
    assert all(1 <= size <= steps for size in sizes)
    assert len(groups) == -(-length // steps)


def test_windows_read_no_further_than_the_window_they_give():
    """A loader behind them is not asked for the next window's batches."""
    read = []

    def loader():
        for i in range(10):
            read.append(i)
            yield i

    stream = windows(loader(), 3)
    assert read == []
    assert next(stream) == [0, 1, 2]
    assert read == [0, 1, 2]


def test_windows_open_their_loader_once():
    """A seeded one would shuffle again."""
    opened = []

    class Loader:
        def __iter__(self):
            opened.append(self)
            return iter(range(3))

    assert list(windows(Loader(), 2)) == [[0, 1], [2]]
    assert len(opened) == 1


def test_windows_can_be_asked_again():
    batches = [1, 2, 3]
    assert list(windows(batches, 2)) == list(windows(batches, 2))


@pytest.mark.parametrize("bad", [0, -1])
def test_windows_refuse_bad_steps_at_once(bad):
    with pytest.raises(
        ValueError,
        match=says(f"steps is {bad!r}: use a whole number of at least 1"),
    ):
        windows([1, 2, 3], bad)  # not only when it is iterated
