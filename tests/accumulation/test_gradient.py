"""The accumulated gradient is the whole batch's."""

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    accumulated_gradient,
    classifier,
    flat,
    gradients,
    relative,
    run_window,
    samples,
    slices,
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
    token_counts,
)
from membudget.models import mlp

# Relative to the whole batch's gradient. In bf16 one rounding is 2⁻⁹; eight
# linear layers' passes and the sum allow for sixteen of them.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-5}

seeds = st.integers(0, 10**6)
sizes_of = st.lists(st.integers(1, 12), min_size=1, max_size=10)
factors = st.sampled_from([None, 1, 1.5, 10])
reductions = st.sampled_from(["mean", "sum"])


def check(dtype, seed, sizes, factor, reduction):
    """Compare with the whole batch; ``factor`` many samples are announced."""
    bound, n = BOUNDS[dtype], sum(sizes)
    model = classifier(seed, dtype=dtype)
    x, y = samples(n, seed, dtype=dtype)
    expected = whole_gradient(model, x, y)
    total = None if factor is None else factor * n
    gradient, report = accumulated_gradient(
        model, x, y, sizes, total=total, reduction=reduction
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


@settings(max_examples=250)
@given(seeds, sizes_of, factors, reductions)
@example(0, [24, 24, 16], None, "mean")
@example(0, [1], None, "sum")
def test_in_fp64(seed, sizes, factor, reduction):
    check(torch.float64, seed, sizes, factor, reduction)


@settings(max_examples=250)
@given(seeds, sizes_of, factors, reductions)
@example(0, [24, 24, 16], None, "mean")
def test_in_fp32(seed, sizes, factor, reduction):
    check(torch.float32, seed, sizes, factor, reduction)


@settings(max_examples=200)
@given(seeds, sizes_of, factors, reductions)
def test_in_bf16(seed, sizes, factor, reduction):
    check(torch.bfloat16, seed, sizes, factor, reduction)


@settings(max_examples=50)
@given(seeds, sizes_of, factors)
def test_under_autocast(seed, sizes, factor):
    """Parameters in fp32, matrix products in bf16."""
    model, n = classifier(seed, dtype=torch.float32), sum(sizes)
    x, y = samples(n, seed, dtype=torch.float32)

    def loss_fn(output, labels):
        return F.cross_entropy(output.float(), labels)

    def autocast(function, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*args, **kwargs)

    expected = autocast(whole_gradient, model, x, y, loss_fn)
    gradient, _ = autocast(
        accumulated_gradient,
        model,
        x,
        y,
        sizes,
        total=None if factor is None else factor * n,
        loss_fn=loss_fn,
    )
    assert all(g.dtype == torch.float32 for g in gradient)
    assert relative(gradient, expected) <= BOUNDS[torch.bfloat16]


@settings(max_examples=200)
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

    expected = whole_gradient(model, x, labels, loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = partition(len(x), micro_batch)
    counts = token_counts(labels, parts)
    with Accumulator(model, optimizer).window(total) as window:
        for part, count in zip(parts, counts, strict=True):
            if count:  # a micro-batch of padding only is left out
                loss = loss_fn(model(x[part]), labels[part])
                window.backward(loss, count)
        window.finish()
        gradient = gradients(model)
        report = window.step()
    assert relative(gradient, expected) <= 1e-12
    assert report.count == sum(lengths)
    assert report.loss == pytest.approx(
        loss_fn(model(x), labels).item(), rel=1e-12
    )


def test_counts_need_not_be_whole_numbers():
    """Weighted samples: the counts are the sums of their weights."""
    model = classifier()
    x, y = samples(10)
    weight = torch.rand(10, dtype=torch.float64) + 0.1

    def weighted(part):
        each = F.cross_entropy(model(x[part]), y[part], reduction="none")
        return (each * weight[part]).sum() / weight[part].sum()

    expected = torch.autograd.grad(
        weighted(slice(0, 10)), list(model.parameters())
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Accumulator(model, optimizer).window() as window:
        for part in slices([3, 3, 4]):
            window.backward(weighted(part), count=weight[part].sum())
        window.finish()
        assert relative(gradients(model), expected) <= 1e-12
        window.step()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)]
)
@pytest.mark.parametrize("sizes", [[24, 24, 16], [64], [1] * 64, [50, 14]])
def test_on_the_digits(dtype, bound, sizes):
    torch.manual_seed(0)
    model = mlp(width=64).to(dtype)
    images, labels = data.digits(dtype)
    x, y = images[:64], labels[:64]
    expected = whole_gradient(model, x, y)
    gradient, _ = accumulated_gradient(model, x, y, sizes)
    assert relative(gradient, expected) <= bound


def test_naive_division_is_not_the_whole_gradient():
    """What the window's weights are there for."""
    model = classifier()
    x, y = samples(64)
    sizes = [24, 24, 16]
    expected = whole_gradient(model, x, y)
    naive = [torch.zeros_like(g) for g in expected]
    for part in slices(sizes):
        for total, g in zip(
            naive, whole_gradient(model, x[part], y[part]), strict=True
        ):
            total += g / len(sizes)
    assert relative(naive, expected) > 0.01


# Windows that end early --------------------------------------------------


def test_an_early_end_gives_the_gradient_of_what_came():
    model = classifier()
    x, y = samples(64)
    expected = whole_gradient(model, x[:48], y[:48])
    for total in (None, 64, 10**6, 48):
        gradient, report = accumulated_gradient(
            model, x, y, [24, 24], total=total
        )
        assert relative(gradient, expected) <= 1e-12
        assert report.count == 48


def test_breaking_out_of_the_loop_ends_the_window_early():
    model = classifier()
    x, y = samples(64)
    expected = whole_gradient(model, x[:48], y[:48])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Accumulator(model, optimizer).window() as window:
        for part in window.over(partition(64, 24)):
            if part.stop == 64:
                break
            window.backward(F.cross_entropy(model(x[part]), y[part]), 24)
        window.finish()
        assert relative(gradients(model), expected) <= 1e-12
        assert window.step().micro_batches == 2


def test_over_is_a_plain_loop():
    """Nothing is read ahead: the next batch may need what this one made."""
    model = classifier()
    x, y = samples(6)
    order = []

    def loader():
        for i in range(3):
            order.append(f"read {i}")
            yield slice(2 * i, 2 * i + 2)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Accumulator(model, optimizer).window() as window:
        for i, part in enumerate(window.over(loader())):
            window.backward(F.cross_entropy(model(x[part]), y[part]), 2)
            order.append(f"ran {i}")
        window.step()
    assert order == [f"{did} {i}" for i in range(3) for did in ("read", "ran")]


# Unusual models ----------------------------------------------------------


def test_frozen_parameters_stay_without_gradient():
    model = classifier()
    model[0].requires_grad_(False)
    frozen = [p.clone() for p in model[0].parameters()]
    x, y = samples(10)
    expected = whole_gradient(model, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with Accumulator(model, optimizer).window() as window:
        for part in slices([4, 4, 2]):
            loss = F.cross_entropy(model(x[part]), y[part])
            window.backward(loss, len(y[part]))
        window.finish()
        trained = [
            p.grad.clone() for p in model.parameters() if p.grad is not None
        ]
        window.step()
    assert len(trained) == 4
    assert relative(trained, expected) <= 1e-12
    for p, before in zip(model[0].parameters(), frozen, strict=True):
        assert p.grad is None
        assert torch.equal(p, before)


def test_parameters_that_are_not_trained_do_not_count_in_the_norm():
    model = classifier()
    x, y = samples(10)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    last = list(model[-1].parameters())
    expected = flat(whole_gradient(model, x, y)[-2:]).norm().item()
    report = run_window(Accumulator(model, optimizer), x, y, [4, 4, 2])
    assert report.norm == pytest.approx(expected, rel=1e-12)
    assert all(p.grad is None for p in last)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x).tanh())

    torch.manual_seed(0)
    model = Tied().double()
    x, y = torch.randint(11, (20,)), torch.randint(11, (20,))
    expected = whole_gradient(model, x, y)
    gradient, report = accumulated_gradient(model, x, y, [7, 7, 6])
    assert len(gradient) == 1
    assert relative(gradient, expected) <= 1e-12
    assert report.norm == pytest.approx(
        flat(expected).norm().item(), rel=1e-12
    )


def two_headed():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "trunk": nn.Linear(6, 5),
            "even": nn.Linear(5, 1),
            "odd": nn.Linear(5, 1),
            "never": nn.Linear(5, 1),
        }
    )
    return model.double()


@pytest.mark.parametrize("order", [[0, 1, 0], [1, 1, 0], [0, 0, 0]])
def test_parameters_unused_in_some_micro_batches(order):
    model = two_headed()
    x, _ = samples(9)
    sizes = [4, 3, 2]

    def loss(part, head):
        hidden = model["trunk"](x[part]).tanh()
        return model[("even", "odd")[head]](hidden).square().mean()

    parts = slices(sizes)
    total = sum(
        n / 9 * loss(part, head)
        for n, part, head in zip(sizes, parts, order, strict=True)
    )
    parameters = list(model.parameters())
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with Accumulator(model, optimizer).window() as window:
        for n, part, head in zip(sizes, parts, order, strict=True):
            window.backward(loss(part, head), n)
        window.finish()
        for ours, theirs in zip(gradients(model), expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert relative([ours], [theirs]) <= 1e-12
        window.step()


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Tanh())
    model.double()
    x = torch.randint(5, (10,))

    def loss_fn(part):
        return model(x[part]).square().sum(1).mean()

    dense = nn.Embedding.from_pretrained(model[0].weight.detach(), False)
    dense(x).tanh().square().sum(1).mean().backward()
    norm = dense.weight.grad.norm().item()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, max_norm=norm / 2)
    with accumulator.window() as window:
        for part in slices([4, 4, 2]):
            window.backward(loss_fn(part), len(x[part]))
        assert window.finish() == pytest.approx(norm, rel=1e-12)
        clipped = model[0].weight.grad.to_dense()
        torch.testing.assert_close(
            clipped, dense.weight.grad / 2, rtol=1e-5, atol=1e-12
        )
        assert window.step().clipped


def test_a_one_element_loss_of_one_dimension():
    model = classifier()
    x, y = samples(8)
    expected = whole_gradient(model, x, y)
    gradient, _ = accumulated_gradient(
        model, x, y, [5, 3], loss_fn=lambda o, t: F.cross_entropy(o, t)[None]
    )
    assert relative(gradient, expected) <= 1e-12


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
    gradient, _ = accumulated_gradient(
        model, x, y, sizes, total=n, reduction="sum", loss_fn=loss_fn
    )
    return all(torch.equal(a, b) for a, b in zip(gradient, whole, strict=True))


@pytest.mark.parametrize("n", [1, 2, 16, 64])
@pytest.mark.parametrize("micro_batch", [1, 7, 16, 24, 32, 100])
def test_dyadic_numbers_are_equal_to_the_last_bit(n, micro_batch):
    sizes = [part.stop - part.start for part in partition(n, micro_batch)]
    assert to_the_bit(n, sizes)


def bits_needed(n):
    """To hold the sum over any of the n samples, in any order, exactly."""
    model, x, y = dyadic(n, torch.float64)
    each = [whole_gradient(model, x[i], y[i], squared_error) for i in range(n)]
    most = 0.0
    for gradient in map(torch.stack, zip(*each, strict=True)):
        unit = 2.0
        while ((gradient / unit) % 1).any():
            unit /= 2
        signed = torch.stack([gradient, -gradient]).clamp(min=0)
        most = max(most, (signed.sum(1).max() / unit).log2().item())
    return most


def test_why_64_samples_are_exact_in_fp32_and_128_are_not():
    assert 23 < bits_needed(64) < 24 < bits_needed(128) < 25


@settings(max_examples=60)
@given(st.data())
def test_dyadic_numbers_for_any_partition(drawn):
    left, sizes = 64, []
    while left:
        sizes.append(drawn.draw(st.integers(1, left)))
        left -= sizes[-1]
    assert to_the_bit(64, sizes)


@pytest.mark.parametrize("sizes", [[24, 24], [16, 32], [7] * 6 + [6]])
def test_forty_eight_samples_are_not(sizes):
    assert not to_the_bit(48, sizes)


@pytest.mark.parametrize("sizes", [[64, 64], [24] * 5 + [8]])
def test_a_hundred_and_twenty_eight_need_more_bits(sizes):
    assert not to_the_bit(128, sizes)
    assert to_the_bit(128, sizes, dtype=torch.float64)


def test_another_loss_is_not():
    def cosh(output, target):
        return (output - target).cosh().sum()

    assert not to_the_bit(64, [24, 24, 16], cosh)
