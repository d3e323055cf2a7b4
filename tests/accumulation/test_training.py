"""Real training: optimizers, clipping, the scaler, loaders."""

from functools import partial
from math import inf

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    flat,
    gradients,
    losses_of,
    relative,
    run_window,
    samples,
    slices,
    whole_gradient,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from membudget.accumulation import Accumulator, windows
from tests.soak import examples

optim = torch.optim

OPTIMIZERS = {
    "SGD": dict(lr=0.1, momentum=0.9, nesterov=True),
    "Adam": dict(lr=1e-2, fused=True),
    "AdamW": dict(lr=1e-2, weight_decay=0.1, foreach=True),
    "Adafactor": dict(lr=1e-2),
    "Rprop": dict(lr=1e-2),
    "ASGD": dict(lr=0.1),
}
WINDOWS = [[24, 24, 16], [7] * 9 + [1], [64]]


def whole_step(model, optimizer, x, y, max_norm=inf):
    """What a window has to equal; returns the norm before clipping."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm.item()


def train(make, max_norm=None):
    """Three windows end where three whole batches do.

    Returns the model and, for each window, its report and the norm of the
    whole batch's gradient.
    """
    whole, model = classifier(), classifier()
    optimizer = make(whole)
    accumulator = Accumulator(model, make(model), max_norm=max_norm)
    found = []
    for seed, sizes in enumerate(WINDOWS):
        x, y = samples(64, seed)
        norm = whole_step(whole, optimizer, x, y, max_norm or inf)
        found.append((run_window(accumulator, x, y, sizes), norm))
        assert all(p.grad is None for p in model.parameters())
    moved = relative(model.parameters(), classifier().parameters())
    assert moved > 1e-3
    assert relative(model.parameters(), whole.parameters()) <= 1e-9 * moved
    return model, found


def sgd(model, lr=0.5):
    return optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_windows_end_where_three_whole_batches_do(name):
    kind = getattr(optim, name)
    train(lambda model: kind(model.parameters(), **OPTIMIZERS[name]))


def test_several_groups_and_frozen_parameters():
    def make(model):
        model[0].requires_grad_(False)
        groups = [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr": 1e-3},
            {"params": [model[4].bias], "weight_decay": 0.0},
            {"params": [model[4].weight]},
            {"params": []},
        ]
        return optim.AdamW(groups, lr=1e-2)

    model, _ = train(make)
    start = classifier()
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[4].weight, start[4].weight)


# Clipping ----------------------------------------------------------------


@pytest.mark.parametrize("share", [None, inf, 1e6, 0.999, 0.01])
def test_clipping_is_that_of_the_whole_batch(share):
    """To a share of the first whole batch's norm."""
    first = flat(whole_gradient(classifier(), *samples(64))).norm().item()
    max_norm = share and share * first
    _, found = train(sgd, max_norm)
    for report, norm in found:
        assert report.norm == pytest.approx(norm, rel=1e-10)
        assert report.clipped is (norm > (max_norm or inf))
    assert found[0][0].clipped is (share is not None and share < 1)


def test_finish_shows_the_clipped_gradient_and_step_does_not_clip_again():
    model = classifier()
    x, y = samples(64)
    norm = flat(whole_gradient(model, x, y)).norm().item()
    accumulator = Accumulator(model, sgd(model), max_norm=norm / 4)
    with accumulator.window() as window:
        for loss, count in losses_of(model, x, y, [40, 24]):
            window.backward(loss, count)
        assert window.finish() == pytest.approx(norm, rel=1e-12)
        seen = flat(gradients(model))
        assert seen.norm().item() == pytest.approx(norm / 4, rel=1e-4)
        assert window.finish() == pytest.approx(norm, rel=1e-12)
        assert torch.equal(seen, flat(gradients(model)))
        report = window.step()
    assert report.norm == pytest.approx(norm, rel=1e-12)
    assert report.clipped is True


def test_finish_instead_of_step_leaves_the_gradient():
    model = classifier()
    x, y = samples(64)
    with Accumulator(model, sgd(model)).window() as window:
        for loss, count in losses_of(model, x, y, [40, 24]):
            window.backward(loss, count)
        window.finish()
    assert relative(gradients(model), whole_gradient(model, x, y)) <= 1e-12
    start = classifier().state_dict()
    assert differences(start, model.state_dict()) == []


# The scaler --------------------------------------------------------------

scaler_at = partial(torch.amp.GradScaler, "cpu")
fp32_samples = partial(samples, dtype=torch.float32)


def half_window(accumulator, x, y, sizes):
    """A window in fp16 autocast; the loss in fp32."""
    with accumulator.window() as window:
        for part in slices(sizes):
            with torch.autocast("cpu", torch.float16):
                output = accumulator.model(x[part])
            loss = F.cross_entropy(output.float(), y[part])
            window.backward(loss, len(y[part]))
        return window.step()


def overflowing(model):
    """A loss that is finite, and whose gradient is not, in fp32."""

    def loss_fn(output, labels):
        extra = 1e30 * (model[0].weight.sum() * 1e10).sin()
        return F.cross_entropy(output, labels) + extra

    return loss_fn


def start(scaler=None, make=sgd, **options):
    model = classifier(dtype=torch.float32)
    return model, Accumulator(model, make(model), scaler=scaler, **options)


def fused(model):
    """It looks for the overflow itself."""
    return optim.Adam(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("enabled", [True, False])
def test_in_fp32_a_scale_of_a_power_of_two_changes_no_bit(make, enabled):
    """Not where the gradient is clipped, either."""
    plain, without = start(make=make, max_norm=0.05)
    scaler = scaler_at(0.5, enabled=enabled)
    model, scaled = start(scaler, make, max_norm=0.05)
    for seed in range(3):
        x, y = fp32_samples(64, seed)
        expected = run_window(without, x, y, [24, 24, 16])
        assert expected.clipped and expected.stepped
        assert run_window(scaled, x, y, [24, 24, 16]) == expected
    assert differences(plain.state_dict(), model.state_dict()) == []


def untouched(model):
    return differences(start()[0].state_dict(), model.state_dict()) == []


def test_an_overflow_skips_the_step_and_halves_the_scale():
    scaler = scaler_at(2.0**40)
    model, accumulator = start(scaler)
    skipped, stepped = 0, False
    while not stepped:
        assert scaler.get_scale() == 2.0 ** (40 - skipped)
        assert untouched(model)
        report = half_window(accumulator, *fp32_samples(64), [24, 24, 16])
        assert report.micro_batches == 3 and report.count == 64
        assert all(p.grad is None for p in model.parameters())
        stepped = report.stepped
        skipped += not stepped
    assert 10 < skipped < 40
    assert not untouched(model)


@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("position", [0, 1])
def test_an_overflow_in_any_micro_batch_skips_the_whole_window(position, make):
    scaler = scaler_at(2.0**16)
    model, accumulator = start(scaler, make)
    x, y = fp32_samples(9)
    with accumulator.window() as window:
        for i, part in enumerate(slices([5, 4])):
            loss_fn = overflowing(model) if i == position else F.cross_entropy
            window.backward(loss_fn(model(x[part]), y[part]), len(y[part]))
        assert window.step().stepped is False
    assert untouched(model)
    assert scaler.get_scale() == 2.0**15


def test_a_scale_that_fell_to_zero_takes_no_step():
    """It stays there: to see it fall is not enough."""
    scaler = scaler_at(2.0**-149)
    model, accumulator = start(scaler)

    def loss_fn(output, labels):
        bad = (0 * model[0].weight).sum().sqrt()  # 0 · ∞ in backward
        return F.cross_entropy(output, labels) + bad

    for _ in range(2):
        report = run_window(
            accumulator, *fp32_samples(8), [8], loss_fn=loss_fn
        )
        assert report.stepped is False and scaler.get_scale() == 0
    assert untouched(model)


@pytest.mark.parametrize("sizes", [[1, 1023], [1023, 1]])
def test_a_short_micro_batch_does_not_enlarge_the_others(sizes):
    """In whatever order they come, and without a total."""
    _, accumulator = start(scaler_at(2.0**14))
    assert half_window(accumulator, *fp32_samples(1024), sizes).stepped


# Loaders -----------------------------------------------------------------


@settings(max_examples=examples(4))
@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_an_epoch_of_a_loader_with_a_ragged_last_window(
    n, micro_batch, steps, announce
):
    """The same as whole batches of micro_batch × steps, the rest included."""
    dataset = TensorDataset(*samples(n))
    loader = DataLoader(dataset, batch_size=micro_batch)
    large = DataLoader(dataset, batch_size=micro_batch * steps)
    whole, model = classifier(), classifier()
    optimizer = sgd(whole)
    for x, y in large:
        whole_step(whole, optimizer, x, y)
    accumulator = Accumulator(model, sgd(model))
    counts = []
    for group in windows(loader, steps):
        total = micro_batch * steps if announce else None
        with accumulator.window(total) as window:
            for images, labels in window.over(group):
                loss = F.cross_entropy(model(images), labels)
                window.backward(loss, len(images))
            counts.append(window.step().count)
    assert sum(counts) == n
    assert len(counts) == len(large)
    assert relative(model.parameters(), whole.parameters()) <= 1e-12
