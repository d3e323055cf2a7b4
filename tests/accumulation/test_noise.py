"""Gradient variance and noise scale, against the exact statistics."""

from itertools import product
from math import inf, nan

import pytest
import torch
from accumulation_helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.accumulation import GradientNoise, gradient_noise
from tests.soak import examples


@pytest.mark.parametrize(
    ("size", "counts"), [(3, [1, 2]), (2, [1, 2, 3]), (4, [3, 1, 1])]
)
def test_unbiased_over_every_draw_there_is(size, counts):
    """The mean over all equally likely draws, not a Monte-Carlo."""
    generator = torch.Generator().manual_seed(0)
    each = torch.randn(size, 3, generator=generator, dtype=torch.float64) + 0.5
    estimates = [
        gradient_noise(
            [[part.mean(0)] for part in each[list(draw)].split(counts)], counts
        )
        for draw in product(range(size), repeat=sum(counts))
    ]
    mean = each.mean(0)
    for name, exact in (
        ("variance", (each - mean).square().sum(1).mean()),
        ("square_norm", mean.square().sum()),
    ):
        found = sum(getattr(e, name) for e in estimates) / len(estimates)
        assert found == pytest.approx(exact.item(), rel=1e-11)


@settings(max_examples=examples(5))
@given(st.integers(2, 8), st.integers(1, 20), st.integers(0, 10**6))
def test_equal_micro_batches_give_mccandlish_two_batch_formulas(k, n, seed):
    generator = torch.Generator().manual_seed(seed)
    small = torch.randn(k, 5, generator=generator, dtype=torch.float64) + 0.3
    g_small = small.square().sum(1).mean().item()  # mean over the k of them
    g_big = small.mean(0).square().sum().item()
    b_small, b_big = n, k * n
    square_norm = (b_big * g_big - b_small * g_small) / (b_big - b_small)
    variance = (g_small - g_big) / (1 / b_small - 1 / b_big)
    found = gradient_noise([[g] for g in small], [n] * k)
    assert found.variance == pytest.approx(variance, rel=1e-10)
    assert found.square_norm == pytest.approx(square_norm, abs=1e-10)
    if square_norm > 1e-6:
        assert found.scale == pytest.approx(variance / square_norm, rel=1e-6)


def test_the_parts_of_a_gradient_count_together():
    g = torch.arange(12.0)
    whole = gradient_noise([[g], [g.flip(0)]], [1, 3])
    parts = gradient_noise(
        [
            [g[:4].view(2, 2), g[4:].float()],
            (g.flip(0)[:4], g.flip(0)[4:].requires_grad_()),
        ],
        torch.tensor([1, 3]),
    )
    assert parts == whole


@pytest.mark.parametrize("size", [3e4, 1e-6])
def test_sums_in_double_precision(size):
    """In fp16 these squares would overflow, or vanish."""
    g = torch.full((10,), size, dtype=torch.float16)
    exact = g.double().square().sum().item()
    found = gradient_noise([[g], [2 * g]], [4, 4])
    assert found.variance == pytest.approx(2 * exact, rel=1e-12)
    assert found.square_norm == pytest.approx(2 * exact, rel=1e-12)


def test_the_scale_is_infinite_where_noise_dominates():
    found = gradient_noise([[torch.ones(4)], [-torch.ones(4)]], [3, 3])
    assert found.square_norm < 0
    assert found.scale == inf
    assert GradientNoise(square_norm=0.0, variance=1.0).scale == inf
    assert GradientNoise(square_norm=2.0, variance=1.0).scale == 0.5


GOOD = [torch.ones(2), torch.ones(1)]


@pytest.mark.parametrize(
    ("gradients", "counts", "message"),
    [
        (
            [GOOD],
            [1],
            "1 gradients and 1 counts: give one count for each, and at least "
            "two micro-batches",
        ),
        (
            [GOOD] * 2,
            [1] * 3,
            "2 gradients and 3 counts: give one count for each, and at least "
            "two micro-batches",
        ),
        (
            [GOOD, GOOD[:1]],
            [1, 1],
            "the gradients have 2, 3 numbers: use those of the same "
            "parameters",
        ),
        *(
            (
                [GOOD, [GOOD[0], torch.tensor([bad])], GOOD],
                [1] * 3,
                "the gradients of 1 of 3 micro-batches, number 1 first, are "
                "infinite or NaN: use finite ones, unscaled; leave out both "
                "gradient and count of a step that overflowed",
            )
            for bad in (nan, inf)
        ),
    ],
)
def test_what_makes_no_estimate(gradients, counts, message):
    with refused(ValueError, message):
        gradient_noise(gradients, counts)
