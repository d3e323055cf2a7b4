"""Gradient variance and noise scale, against the exact statistics."""

import re
from itertools import product
from math import inf, nan, sqrt

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import classifier, flat, samples, whole_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.accumulation import GradientNoise, gradient_noise


def population(size, dimensions, seed=0, spread=1.0):
    """Gradients of single samples, with |G|² and tr Σ of a random one."""
    generator = torch.Generator().manual_seed(seed)
    each = torch.randn(
        size, dimensions, generator=generator, dtype=torch.float64
    )
    each = spread * each + 0.5
    mean = each.mean(0)
    return (
        each,
        mean.square().sum().item(),
        (each - mean).square().sum(1).mean().item(),
    )


def estimate(each, draw, counts):
    """From the gradients of the drawn samples, in these micro-batches."""
    parts = each[list(draw)].split(list(counts))
    return gradient_noise([[part.mean(0)] for part in parts], counts)


@pytest.mark.parametrize(
    ("size", "counts"),
    [(3, [1, 1]), (3, [1, 2]), (3, [2, 2]), (2, [1, 2, 3]), (4, [3, 1, 1])],
)
def test_unbiased_over_every_draw_there_is(size, counts):
    """The mean over all equally likely draws, not a Monte-Carlo."""
    each, square_norm, variance = population(size, 3)
    estimates = [
        estimate(each, draw, counts)
        for draw in product(range(size), repeat=sum(counts))
    ]
    n = len(estimates)
    assert sum(e.variance for e in estimates) / n == pytest.approx(
        variance, rel=1e-12
    )
    assert sum(e.square_norm for e in estimates) / n == pytest.approx(
        square_norm, rel=1e-11
    )


@pytest.mark.parametrize("counts", [[16, 8, 4], [1, 1, 1, 25]])
def test_unbiased_on_a_model(counts):
    """Monte-Carlo over micro-batches of a classifier's real gradients."""
    model = classifier()
    x, y = samples(60)
    each = torch.stack(
        [
            flat(whole_gradient(model, x[i : i + 1], y[i : i + 1]))
            for i in range(len(x))
        ]
    )
    whole = flat(whole_gradient(model, x, y))
    torch.testing.assert_close(each.mean(0), whole, rtol=0, atol=1e-14)
    square_norm = whole.square().sum().item()
    variance = (each - whole).square().sum(1).mean().item()

    generator = torch.Generator().manual_seed(0)
    trials = 1500
    draws = torch.randint(
        len(x), (trials, sum(counts)), generator=generator
    ).tolist()
    estimates = [estimate(each, draw, counts) for draw in draws]
    for name, exact, scale in (
        ("variance", variance, variance),
        ("square_norm", square_norm, square_norm + variance / sum(counts)),
    ):
        found = torch.tensor(
            [getattr(e, name) for e in estimates], dtype=torch.float64
        )
        error = (found.std() / sqrt(trials)).item()
        assert error < 0.03 * scale  # the test can tell K - 1 from K
        assert abs(found.mean().item() - exact) < 4 * error


@settings(max_examples=100)
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


def test_identical_gradients_have_no_noise():
    g = torch.ones(4)
    found = gradient_noise([[g]] * 3, [5, 2, 9])
    assert found.variance == pytest.approx(0, abs=1e-28)
    assert found.square_norm == pytest.approx(4)
    assert found.scale == pytest.approx(0, abs=1e-28)


def test_the_scale_is_infinite_where_noise_dominates():
    found = gradient_noise([[torch.ones(4)], [-torch.ones(4)]], [3, 3])
    assert found.square_norm < 0
    assert found.scale == inf
    assert GradientNoise(square_norm=0.0, variance=1.0).scale == inf
    assert GradientNoise(square_norm=2.0, variance=1.0).scale == 0.5


@pytest.mark.parametrize("factor", [1, 3, 100])
def test_the_noise_scale_is_where_noise_equals_signal(factor):
    """A batch of `scale` samples has as much variance as signal."""
    noise = GradientNoise(square_norm=0.5 * factor, variance=8.0)
    assert noise.variance / noise.scale == pytest.approx(noise.square_norm)


@pytest.mark.parametrize(
    ("gradients", "counts"), [(1, 1), (2, 3), (3, 2), (0, 2)]
)
def test_two_micro_batches_are_needed_and_a_count_for_each(gradients, counts):
    message = (
        f"{gradients} gradients and {counts} counts: give one count for "
        "each, and at least two micro-batches"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gradient_noise([[torch.ones(2)]] * gradients, [1] * counts)


@pytest.mark.parametrize("bad", [nan, inf])
def test_gradients_that_are_not_finite(bad):
    message = (
        "the gradients of 1 of 3 micro-batches, number 1 first, are infinite "
        "or NaN: use finite ones, unscaled; leave out both gradient and count "
        "of a step that overflowed"
    )
    good = [torch.ones(2), torch.ones(1)]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gradient_noise([good, [good[0], torch.tensor([bad])], good], [1] * 3)


def test_bad_counts():
    g = [[torch.ones(2)]] * 2
    with pytest.raises(ValueError, match="count is 0: use the number"):
        gradient_noise(g, [1, 0])
    with pytest.raises(ValueError, match="counts is empty"):
        gradient_noise([], [])


def test_the_loss_of_a_batch_falls_as_predicted():
    """Variance of the mean gradient of B samples is tr Σ / B."""
    each, _, variance = population(50, 4, spread=2.0)
    generator = torch.Generator().manual_seed(2)
    for b in (2, 8):
        draws = torch.randint(50, (20000, b), generator=generator)
        means = each[draws].mean(1)
        found = (means - each.mean(0)).square().sum(1).mean().item()
        assert found == pytest.approx(variance / b, rel=0.05)


def test_cross_entropy_is_the_mean_that_the_estimator_expects():
    model = classifier()
    x, y = samples(12)
    parts = [slice(0, 4), slice(4, 12)]
    gradients = [whole_gradient(model, x[p], y[p]) for p in parts]
    each = torch.stack(
        [
            flat(whole_gradient(model, x[i : i + 1], y[i : i + 1]))
            for i in range(12)
        ]
    )
    by_hand = gradient_noise([[each[p].mean(0)] for p in parts], [4, 8])
    found = gradient_noise(gradients, [4, 8])
    assert found.variance == pytest.approx(by_hand.variance, rel=1e-12)
    loss = F.cross_entropy(model(x), y)
    mean = flat(torch.autograd.grad(loss, list(model.parameters())))
    assert found.square_norm + found.variance / 12 == pytest.approx(
        mean.square().sum().item(), rel=1e-12
    )
