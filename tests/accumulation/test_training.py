"""Real training: optimizers, clipping, the scaler, loaders."""

import copy

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    everything,
    flat,
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

optim = torch.optim

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "AMSGrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-2, fused=True),
    "Adam, foreach": lambda p: optim.Adam(p, lr=1e-2, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
}
WINDOWS = [[24, 24, 16], [7] * 9 + [1], [64]]


def train_whole(model, optimizer, batches, max_norm=None):
    """The loop that the accumulator has to equal; returns the norms."""
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        norms.append(norm.item())
    return norms


def batches_of(count, n=64, dtype=torch.float64):
    return [samples(n, seed, dtype=dtype) for seed in range(count)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_windows_end_where_three_whole_batches_do(name):
    make, batches = OPTIMIZERS[name], batches_of(3)
    whole, model = classifier(), classifier()
    train_whole(whole, make(whole.parameters()), batches)
    accumulator = Accumulator(model, make(model.parameters()))
    for (x, y), sizes in zip(batches, WINDOWS, strict=True):
        run_window(accumulator, x, y, sizes)
        assert all(p.grad is None for p in model.parameters())
    moved = relative(model.parameters(), classifier().parameters())
    assert moved > 1e-3
    assert relative(model.parameters(), whole.parameters()) <= 1e-9 * moved


def test_muon_which_takes_matrices_only():
    if not hasattr(optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")

    def make(model):
        model = model.float()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return optim.Muon(matrices, lr=0.01)

    batches = batches_of(3, dtype=torch.float32)
    whole, model = classifier(), classifier()
    optimizer = make(whole)
    train_whole(whole, optimizer, batches)
    accumulator = Accumulator(model, make(model))
    for (x, y), sizes in zip(batches, WINDOWS, strict=True):
        model.zero_grad()  # the vectors are not the optimizer's
        run_window(accumulator, x, y, sizes)
    # Muon orthogonalises in bf16, where a last bit may round either way.
    assert relative(model.parameters(), whole.parameters()) <= 1e-3


def test_several_groups_and_frozen_parameters():
    def make(model):
        model[0].requires_grad_(False)
        return optim.AdamW(
            [
                {"params": model[0].parameters()},
                {"params": model[2].parameters(), "lr": 1e-3},
                {"params": [model[4].bias], "weight_decay": 0.0},
                {"params": [model[4].weight]},
                {"params": []},
            ],
            lr=1e-2,
        )

    whole, model = classifier(), classifier()
    optimizer = make(whole)
    accumulator = Accumulator(model, make(model))
    for (x, y), sizes in zip(batches_of(3), WINDOWS, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        optimizer.step()
        run_window(accumulator, x, y, sizes)
    assert relative(model.parameters(), whole.parameters()) <= 1e-12
    start = classifier()
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[4].weight, start[4].weight)


def test_a_learning_rate_schedule_counts_windows():
    model = classifier()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    accumulator = Accumulator(model, optimizer)
    for x, y in batches_of(3):
        run_window(accumulator, x, y, [32, 32])
        schedule.step()  # warns if the optimizer has not stepped
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_gradients_set_to_zero_instead_of_none_are_no_leftovers():
    model = classifier()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x, y = samples(64)
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)
    expected = flat(whole_gradient(model, x, y)).norm().item()
    report = run_window(Accumulator(model, optimizer), x, y, [24, 24, 16])
    assert report.norm == pytest.approx(expected, rel=1e-12)


# Clipping ----------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_clipping_is_that_of_the_whole_batch(share):
    batches = batches_of(3)
    whole, model = classifier(), classifier()
    first = flat(whole_gradient(whole, *batches[0])).norm().item()
    max_norm = share * first
    norms = train_whole(
        whole, optim.SGD(whole.parameters(), lr=0.5), batches, max_norm
    )
    accumulator = Accumulator(
        model, optim.SGD(model.parameters(), lr=0.5), max_norm=max_norm
    )
    for (x, y), sizes, norm in zip(batches, WINDOWS, norms, strict=True):
        report = run_window(accumulator, x, y, sizes)
        assert report.norm == pytest.approx(norm, rel=1e-10)
        assert report.clipped is (norm > max_norm)
    assert relative(model.parameters(), whole.parameters()) <= 1e-12


@pytest.mark.parametrize("max_norm", [1e6, float("inf"), None])
def test_a_small_gradient_is_not_clipped(max_norm):
    whole, model = classifier(), classifier()
    train_whole(whole, optim.SGD(whole.parameters(), lr=0.5), batches_of(1))
    accumulator = Accumulator(
        model, optim.SGD(model.parameters(), lr=0.5), max_norm=max_norm
    )
    report = run_window(accumulator, *samples(64), [24, 24, 16])
    assert report.clipped is False
    assert relative(model.parameters(), whole.parameters()) <= 1e-12


def test_clipping_each_micro_batch_would_differ():
    """So the test above can tell where the clipping stands."""
    model = classifier()
    x, y = samples(64)
    max_norm = 0.5 * flat(whole_gradient(model, x, y)).norm().item()
    clipped = 0
    for part in slices([24, 24, 16]):
        gradient = whole_gradient(model, x[part], y[part])
        norm = nn.utils.get_total_norm(gradient).item()
        n = len(y[part]) / 64
        clipped = clipped + n * flat(gradient) * min(1, max_norm / norm)
    whole = flat(whole_gradient(model, x, y))
    whole *= max_norm / whole.norm()
    assert (clipped - whole).norm() > 0.01 * whole.norm()


def test_a_step_after_each_micro_batch_is_another_update():
    """To first order in the rate, as the parameters move in the window."""
    x, y = samples(64)
    errors = []
    for rate in (1e-2, 1e-3):
        model = classifier()
        start = flat(model.parameters())
        once = -rate * flat(whole_gradient(model, x, y))
        optimizer = optim.SGD(model.parameters(), lr=rate)
        for part in slices([24, 24, 16]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[part]), y[part])
            (loss * len(y[part]) / 64).backward()
            optimizer.step()
        early = flat(model.parameters()) - start
        errors.append(((early - once).norm() / once.norm()).item())
    assert errors[0] > 1e-4
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


def test_finish_shows_the_clipped_gradient_and_step_does_not_clip_again():
    model = classifier()
    x, y = samples(64)
    norm = flat(whole_gradient(model, x, y)).norm().item()
    accumulator = Accumulator(
        model, optim.SGD(model.parameters(), lr=0.1), max_norm=norm / 4
    )
    with accumulator.window() as window:
        for part in slices([40, 24]):
            loss = F.cross_entropy(model(x[part]), y[part])
            window.backward(loss, len(y[part]))
        assert window.finish() == pytest.approx(norm, rel=1e-12)
        seen = flat(p.grad for p in model.parameters())
        assert seen.norm().item() == pytest.approx(norm / 4, rel=1e-4)
        assert window.finish() == pytest.approx(norm, rel=1e-12)
        again = flat(p.grad for p in model.parameters())
        assert torch.equal(seen, again)
        report = window.step()
    assert report.norm == pytest.approx(norm, rel=1e-12)
    assert report.clipped is True


def test_finish_instead_of_step_leaves_the_gradient():
    model = classifier()
    x, y = samples(64)
    before = copy.deepcopy(model.state_dict())
    expected = whole_gradient(model, x, y)
    with Accumulator(model, optim.SGD(model.parameters(), 1)).window() as w:
        for part in slices([40, 24]):
            loss = F.cross_entropy(model(x[part]), y[part])
            w.backward(loss, len(y[part]))
        w.finish()
    assert relative([p.grad for p in model.parameters()], expected) <= 1e-12
    assert differences(before, model.state_dict()) == []


# The scaler --------------------------------------------------------------


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


def start(scaler=None, lr=0.5, **options):
    model = classifier(dtype=torch.float32)
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, Accumulator(model, optimizer, scaler=scaler, **options)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_scaled_window_is_an_unscaled_one(max_norm):
    plain, without = start(max_norm=max_norm)
    model, scaled = start(torch.amp.GradScaler("cpu"), max_norm=max_norm)
    for (x, y), sizes in zip(
        batches_of(3, dtype=torch.float32), WINDOWS, strict=True
    ):
        expected = half_window(without, x, y, sizes)
        report = half_window(scaled, x, y, sizes)
        assert report.stepped is True
        assert report.norm == pytest.approx(expected.norm, rel=2e-3)
        assert report.clipped is expected.clipped is (max_norm is not None)
        assert report.loss == pytest.approx(expected.loss, rel=2e-3)
    moved = relative(
        model.parameters(), classifier(dtype=torch.float32).parameters()
    )
    # fp16 keeps 11 bits; the scale moves tiny gradients out of its floor.
    assert moved > 0.01
    assert relative(model.parameters(), plain.parameters()) <= 5e-3 * moved


def test_in_fp32_a_scale_of_a_power_of_two_changes_no_bit():
    plain, without = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, scaled = start(scaler)
    for x, y in batches_of(3, dtype=torch.float32):
        run_window(without, x, y, [24, 24, 16])
        run_window(scaled, x, y, [24, 24, 16])
    assert differences(plain.state_dict(), model.state_dict()) == []


def test_an_overflow_skips_the_step_and_halves_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model, accumulator = start(scaler)
    before = everything(model, accumulator.optimizer)
    x, y = samples(64, dtype=torch.float32)
    report = half_window(accumulator, x, y, [24, 24, 16])
    assert report.stepped is False
    assert report.micro_batches == 3 and report.count == 64
    assert differences(before, everything(model, accumulator.optimizer)) == []
    assert scaler.get_scale() == 2.0**39
    assert all(p.grad is None for p in model.parameters())
    skipped = 1
    while not half_window(accumulator, x, y, [24, 24, 16]).stepped:
        skipped += 1
    assert 10 < skipped < 40
    assert scaler.get_scale() == 2.0 ** (40 - skipped)
    assert differences(before, everything(model, accumulator.optimizer))


def test_a_scale_that_fell_to_zero_takes_no_step():
    """It stays there: to see it fall is not enough."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-149)
    model, accumulator = start(scaler)
    before = everything(model, accumulator.optimizer)
    x, y = samples(8, dtype=torch.float32)

    def loss_fn(output, labels):
        bad = (0 * model[0].weight).sum().sqrt()  # 0 · ∞ in backward
        return F.cross_entropy(output, labels) + bad

    for _ in range(2):
        report = run_window(accumulator, x, y, [8], loss_fn=loss_fn)
        assert report.stepped is False and scaler.get_scale() == 0
    assert differences(before, everything(model, accumulator.optimizer)) == []


@pytest.mark.parametrize("sizes", [[1, 1023], [1023, 1]])
def test_a_short_micro_batch_does_not_enlarge_the_others(sizes):
    """In whatever order they come, and without a total."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    _, accumulator = start(scaler)
    x, y = samples(1024, dtype=torch.float32)
    assert half_window(accumulator, x, y, sizes).stepped


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_overflow_in_any_micro_batch_skips_the_whole_window(position):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model, accumulator = start(scaler)
    before = everything(model, accumulator.optimizer)
    x, y = samples(9, dtype=torch.float32)
    with accumulator.window() as window:
        for i, part in enumerate(slices([4, 3, 2])):
            loss_fn = overflowing(model) if i == position else F.cross_entropy
            loss = loss_fn(model(x[part]), y[part])
            window.backward(loss, len(y[part]))
        report = window.step()
    assert report.stepped is False
    assert differences(before, everything(model, accumulator.optimizer)) == []
    assert scaler.get_scale() == 2.0**15


def test_the_scale_grows_after_its_interval():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    _, accumulator = start(scaler)
    x, y = samples(8, dtype=torch.float32)
    scales = []
    for _ in range(5):
        assert run_window(accumulator, x, y, [4, 4]).stepped is True
        scales.append(scaler.get_scale())
    assert scales == [8, 16, 16, 32, 32]


def test_a_disabled_scaler_is_no_scaler():
    plain, without = start()
    model, disabled = start(torch.amp.GradScaler("cpu", enabled=False))
    for x, y in batches_of(3, dtype=torch.float32):
        expected = run_window(without, x, y, [24, 24, 16])
        assert run_window(disabled, x, y, [24, 24, 16]) == expected
    assert differences(plain.state_dict(), model.state_dict()) == []


def test_a_fused_optimizer_that_looks_for_the_overflow_itself():
    def train(scaler, overflow=False):
        model = classifier(dtype=torch.float32)
        optimizer = optim.Adam(model.parameters(), lr=1e-2, fused=True)
        accumulator = Accumulator(model, optimizer, scaler=scaler)
        x, y = samples(64, dtype=torch.float32)
        loss_fn = overflowing(model) if overflow else F.cross_entropy
        stepped = [
            run_window(accumulator, x, y, [24, 40], loss_fn=loss_fn).stepped
            for _ in range(3)
        ]
        return model.state_dict(), stepped

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10)

    plain, _ = train(None)
    scaled, stepped = train(scaler())
    assert stepped == [True] * 3
    assert differences(plain, scaled) == []
    untouched, stepped = train(scaler(), overflow=True)
    assert stepped == [False] * 3
    start = classifier(dtype=torch.float32).state_dict()
    assert differences(untouched, start) == []


# Loaders -----------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_an_epoch_of_a_loader_with_a_ragged_last_window(
    n, micro_batch, steps, announce
):
    """The same as whole batches of micro_batch × steps, the rest included."""
    x, y = samples(n)
    loader = DataLoader(TensorDataset(x, y), batch_size=micro_batch)
    whole, model = classifier(), classifier()
    large = DataLoader(TensorDataset(x, y), batch_size=micro_batch * steps)
    train_whole(whole, optim.SGD(whole.parameters(), lr=0.1), large)
    accumulator = Accumulator(model, optim.SGD(model.parameters(), lr=0.1))
    counts, reports = [], []
    for group in windows(loader, steps):
        total = micro_batch * steps if announce else None
        with accumulator.window(total) as window:
            for images, labels in window.over(group):
                loss = F.cross_entropy(model(images), labels)
                window.backward(loss, len(images))
            reports.append(window.step())
        counts.append(reports[-1].count)
    assert sum(counts) == n
    assert len(counts) == len(large)
    assert relative(model.parameters(), whole.parameters()) <= 1e-12
