"""The accumulated gradient is the whole batch's."""

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    accumulated,
    classifier,
    flat,
    gradients,
    losses_of,
    relative,
    run_window,
    samples,
    whole_gradient,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from membudget import data
from membudget.accumulation import (
    IGNORE,
    Accumulator,
    partition,
)
from membudget.models import mlp
from tests.soak import examples

# Relative to the whole batch's gradient. In bf16 one rounding is 2⁻⁹; eight
# linear layers' passes and the sum allow for sixteen of them.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-5}

seeds = st.integers(0, 10**6)
sizes_of = st.lists(st.integers(1, 12), min_size=1, max_size=10)
factors = st.sampled_from([None, 1, 1.5, 10])
reductions = st.sampled_from(["mean", "sum"])


@pytest.mark.parametrize("dtype", BOUNDS)
@settings(max_examples=examples(4))
@given(seeds, sizes_of, factors, reductions)
@example(0, [24, 24, 16], None, "mean")
@example(0, [1], None, "sum")
def test_the_gradient_of_the_whole_batch(
    dtype, seed, sizes, factor, reduction
):
    """``factor`` times as many samples as come are announced."""
    bound, n = BOUNDS[dtype], sum(sizes)
    model = classifier(seed, dtype=dtype)
    x, y = samples(n, seed, dtype=dtype)
    expected = whole_gradient(model, x, y)

    def loss_fn(output, labels):
        return F.cross_entropy(output, labels, reduction=reduction)

    gradient, report = accumulated(
        model,
        losses_of(model, x, y, sizes, loss_fn),
        factor and factor * n,
        reduction=reduction,
    )
    assert relative(gradient, expected) <= bound
    norm = flat(expected).norm().item()
    assert report.norm == pytest.approx(norm, rel=2 * bound)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    assert report.loss == pytest.approx(loss, rel=2 * bound)
    assert report.micro_batches == len(sizes)
    assert report.count == n
    assert report.stepped is True
    assert report.clipped is False


@settings(max_examples=examples(4))
@given(seeds, st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_by_tokens(seed, lengths, drawn):
    """Padded sequences, weighed by the tokens that are not padding."""
    if not any(lengths):
        lengths[0] = 3
    micro_batch = drawn.draw(st.integers(1, len(lengths)))
    total = drawn.draw(st.sampled_from([None, sum(lengths)]))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11))
    model.double()
    x = torch.randint(11, (len(lengths), 9))
    labels = torch.randint(11, x.shape)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = IGNORE

    def loss_fn(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    parts = partition(len(x), micro_batch)
    counts = [sum(lengths[part]) for part in parts]
    losses = (
        (loss_fn(model(x[part]), labels[part]), count)
        for part, count in zip(parts, counts, strict=True)
        if count  # a micro-batch of padding only is left out
    )
    gradient, report = accumulated(model, losses, total)
    expected = whole_gradient(model, x, labels, loss_fn)
    assert relative(gradient, expected) <= 1e-12
    assert report.count == sum(lengths)
    loss = loss_fn(model(x), labels).item()
    assert report.loss == pytest.approx(loss, rel=1e-12)


# Windows that end early --------------------------------------------------


@pytest.mark.parametrize("total", [None, 48, 64, 10**6])
def test_an_early_end_gives_the_gradient_of_what_came(total):
    """On one rank `over` is a plain loop, which reads nothing ahead."""
    model, read = classifier(), []
    x, y = samples(64)

    def loader():
        for part in partition(64, 24):
            read.append(part)
            yield part

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Accumulator(model, optimizer).window(total) as window:
        for part in window.over(loader()):
            assert read[-1] is part
            if part.stop == 64:
                break
            window.backward(F.cross_entropy(model(x[part]), y[part]), 24)
        window.finish()
        expected = whole_gradient(model, x[:48], y[:48])
        assert relative(gradients(model), expected) <= 1e-12
        report = window.step()
    assert (report.micro_batches, report.count) == (2, 48)


# Unusual models ----------------------------------------------------------


def test_parameters_that_are_not_trained_do_not_count_in_the_norm():
    model = classifier()
    x, y = samples(10)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    expected = flat(whole_gradient(model, x, y)[-2:]).norm().item()
    report = run_window(Accumulator(model, optimizer), x, y, [4, 4, 2])
    assert report.norm == pytest.approx(expected, rel=1e-12)
    assert all(p.grad is None for p in model[-1].parameters())


def test_a_one_element_loss_of_one_dimension():
    model = classifier()
    x, y = samples(8)
    losses = losses_of(model, x, y, [5, 3])
    gradient, _ = accumulated(model, ((loss[None], n) for loss, n in losses))
    assert relative(gradient, whole_gradient(model, x, y)) <= 1e-12


# To the last bit ---------------------------------------------------------


def dyadic(n, dtype):
    """Data and weights in sixteenths.

    Hidden values are then multiples of 2⁻⁸, outputs of 2⁻¹², and gradients
    of 2⁻¹⁹ at least, before the division by n. While 24 bits hold all of
    their sums, it does not matter in which order they are added.
    """
    torch.manual_seed(0)
    model = mlp(width=32, depth=2).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 16).round() / 16)
    images, labels = data.digits(dtype)
    target = F.one_hot(labels[:n], 10).to(dtype)
    return model, images[:n], target


def squared_error(output, target):
    return (output - target).square().sum()


def to_the_bit(n, sizes, loss_fn=squared_error, dtype=torch.float32):
    model, x, y = dyadic(n, dtype)
    whole = whole_gradient(
        model, x, y, lambda output, target: loss_fn(output, target) / n
    )
    losses = losses_of(model, x, y, sizes, loss_fn)
    gradient, _ = accumulated(model, losses, n, reduction="sum")
    return all(torch.equal(a, b) for a, b in zip(gradient, whole, strict=True))


@settings(max_examples=examples(4))
@given(st.sampled_from([1, 2, 16, 64]), st.data())
def test_dyadic_numbers_are_equal_to_the_last_bit(n, drawn):
    sizes, left = [], n
    while left:
        sizes.append(drawn.draw(st.integers(1, left)))
        left -= sizes[-1]
    assert to_the_bit(n, sizes)


def test_where_the_last_bit_differs():
    def cosh(output, target):
        return (output - target).cosh().sum()

    assert not to_the_bit(48, [24, 24])  # 1/48 is rounded
    assert not to_the_bit(64, [24, 24, 16], cosh)
    assert not to_the_bit(128, [64, 64])  # in the sum, beyond 24 bits
    assert to_the_bit(128, [64, 64], dtype=torch.float64)
