"""What a window costs, against traces and brute force."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from membudget import accumulation
from membudget.accumulation import (
    Accumulator,
    Footprint,
    PeakLine,
    Plan,
    footprint,
    partition,
    peak_at,
    sample_weights,
)
from membudget.measuring import PeakTracker, optimizer_tensors
from membudget.models import GPT, mlp

# Footprints --------------------------------------------------------------


def optimizers():
    optim = torch.optim
    return {
        "SGD": lambda p: optim.SGD(p, lr=0.1),
        "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "Adam": lambda p: optim.Adam(p, lr=1e-3),
    }


def dense(optimizer):
    def build():
        model = mlp(8, 16, 4)
        return model, optimizers()[optimizer](model.parameters())

    def loss(model, n):
        return F.cross_entropy(
            model(torch.randn(n, 8)), torch.randint(10, (n,))
        )

    return build, loss


def transformer():
    def build():
        model = GPT(vocabulary=13, context=6, width=8, depth=2, heads=2)
        return model, torch.optim.AdamW(model.parameters())

    def loss(model, n):
        tokens = torch.randint(13, (n, 7))
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return build, loss


def convolution():
    def build():
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 3),
        )
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model, n):
        return model(torch.randn(n, 1, 8, 8)).square().mean()

    return build, loss


class FrozenBase(nn.Module):
    """A base in buffers, of which one is shared and one is a view."""

    def __init__(self):
        super().__init__()
        for name in ("one", "two"):
            self.register_buffer(name, torch.randn(16, 16).half())
        self.shared = nn.Module()
        self.shared.register_buffer("one", self.one)
        self.register_buffer("mask", torch.ones(1).expand(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for weight in (self.one, self.two, self.shared.one):
            x = (x @ weight.float()).tanh() * self.mask
        return self.head(x)


def frozen_base():
    def build():
        model = FrozenBase()
        return model, torch.optim.Adam(model.parameters())

    def loss(model, n):
        return model(torch.randn(n, 16)).square().mean()

    return build, loss


SETTINGS = {
    "MLP, SGD": dense("SGD"),
    "MLP, momentum": dense("momentum"),
    "MLP, Adam": dense("Adam"),
    "GPT, AdamW": transformer(),
    "convolution": convolution(),
    "frozen base": frozen_base(),
}
SIZES = [1, 2, 3, 5, 8, 16, 33, 64, 100, 256, 500, 1024]


def traced(build, loss, sizes):
    """The peak of a real window of micro-batches of these sizes."""
    model, optimizer = build()
    loss(model, 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    with PeakTracker(model, optimizer) as tracker:
        copies = [buffer.clone() for buffer in model.buffers()]
        for n in sizes:
            loss(model, n).backward()
        optimizer.step()
        optimizer.zero_grad()
        del copies
    assert tracker.live == tracker.start
    return tracker.peak


def copies(model):
    return sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_window_of_the_accumulator(name):
    """It holds the loss a second time, weighed."""
    build, loss = SETTINGS[name]
    found = footprint(build, loss)
    model, optimizer = build()
    accumulator = Accumulator(model, optimizer)
    for sizes in ([2], [8, 8]):
        with (
            PeakTracker(model, optimizer) as tracker,
            accumulator.window() as window,
        ):
            kept = tracker.live - tracker.start
            for n in sizes:
                window.backward(loss(model, n), n)
            window.step()
        assert kept == copies(model)
    assert 0 <= tracker.peak - found.peak(8, 2) <= 4


@pytest.mark.parametrize("name", SETTINGS)
def test_the_peak_is_known_to_the_byte_at_every_size(name):
    build, loss = SETTINGS[name]
    found = footprint(build, loss)
    for n in SIZES:
        assert found.peak(n, 1) == traced(build, loss, [n]), n
        assert found.peak(n, 2) == traced(build, loss, [n, n]), n
        assert found.peak(n, 7) == traced(build, loss, [n, n, n]), n
    assert len({line for line in (*found.alone, *found.later)}) > 1


@pytest.mark.parametrize("name", SETTINGS)
def test_windows_with_a_remainder(name):
    """Exact with two full micro-batches; with one, an upper bound."""
    build, loss = SETTINGS[name]
    found = footprint(build, loss)
    for n, rest in ((8, 3), (64, 1), (65, 64)):
        for steps in (3, 5):
            sizes = [n] * (steps - 1) + [rest]
            plan = Plan(sum(sizes), n, 10**4, found)
            assert plan.sizes == sizes
            assert plan.peak == traced(build, loss, sizes)
        peak = traced(build, loss, [n, rest])
        assert Plan(n + rest, n, 10**4, found).peak >= peak
        assert peak == max(found.peak(n, 1), found.peak(rest, 2))


@pytest.mark.parametrize("name", SETTINGS)
def test_what_lies_in_the_footprint(name):
    build, loss = SETTINGS[name]
    found = footprint(build, loss)
    model, optimizer = build()
    loss(model, 2).backward()
    optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    with PeakTracker(*model.parameters(), *model.buffers()) as tracker:
        pass
    assert found.parameters == tracker.start + copies(model)
    assert found.gradients == sum(p.nbytes for p in trained)
    kept = optimizer_tensors(optimizer)
    assert found.optimizer == sum(t.nbytes for t in kept)
    # Whatever the size, these are there at the peak.
    least = found.parameters + found.optimizer + found.gradients
    assert min(peak_at(found.alone, 1), peak_at(found.later, 1)) >= least
    # Later micro-batches hold the sum as well.
    for n in SIZES:
        grown = found.peak(n, 2) - found.peak(n, 1)
        assert 0 <= grown <= found.gradients


def test_states_of_the_optimizers():
    sizes = {}
    for name in optimizers():
        build, loss = dense(name)
        model, optimizer = build()
        assert optimizer_tensors(optimizer) == []
        loss(model, 2).backward()
        optimizer.step()
        weights = sum(p.nbytes for p in model.parameters())
        kept = optimizer_tensors(optimizer)
        sizes[name] = sum(t.nbytes for t in kept) / weights
    assert sizes["SGD"] == 0
    assert sizes["momentum"] == 1
    assert sizes["Adam"] == pytest.approx(2, rel=0.02)  # and its step counts


def test_other_sizes_to_trace_at_give_the_same():
    build, loss = SETTINGS["MLP, Adam"]
    assert footprint(build, loss) == footprint(build, loss, (5, 3))


def test_a_footprint_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    footprint(*SETTINGS["GPT, AdamW"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_step_that_runs_differently_at_the_two_sizes():
    build, loss = dense("SGD")

    def uneven(model, n):
        value = loss(model, n)
        return value * 2 if n == 4 else value

    with pytest.raises(ValueError, match="use sizes at which the step runs"):
        footprint(build, uneven)
    footprint(build, uneven, (2, 3))
    with pytest.raises(ValueError, match="runs alike"):
        footprint(build, uneven, (2, 3, 4))


def test_a_model_that_is_not_affine_in_the_batch():
    build, _ = dense("SGD")

    def contrastive(model, n):
        y = model(torch.randn(n, 8))
        return (y @ y.T).logsumexp(1).mean()  # n × n

    with pytest.raises(ValueError, match="not a constant plus a multiple"):
        footprint(build, contrastive)


# Plans -------------------------------------------------------------------

ONE = Footprint(
    parameters=40,
    gradients=40,
    optimizer=80,
    alone=[PeakLine(200, 0), PeakLine(150, 3)],
    later=[PeakLine(210, 0), PeakLine(190, 3)],
)
whole = st.integers(1, 200)


@settings(max_examples=300)
@given(
    whole,
    whole,
    st.integers(1, 2000),
    st.sampled_from(["window", "mean of means", "no division"]),
)
def test_a_plan_against_brute_force(batch, micro, samples, normalisation):
    plan = Plan(batch, micro, samples, ONE, normalisation)
    left, sizes = batch, []
    while left:
        sizes.append(min(micro, left))
        left -= sizes[-1]
    assert plan.sizes == sizes
    assert len(plan.sizes) == len(partition(batch, micro))
    weights = [plan.sample_weight(size) for size in sizes]
    assert weights == sample_weights(sizes, normalisation)
    largest = sizes[0]
    if len(sizes) == 1:
        assert plan.peak == max(200, 150 + 3 * largest) == plan.whole_peak
    else:
        assert plan.peak == max(210, 190 + 3 * largest)
    assert plan.whole_peak == max(200, 150 + 3 * batch)
    steps, seen = 0, 0
    while seen < samples:
        seen += batch
        steps += 1
    assert plan.steps_per_epoch == steps


def test_the_weights_of_a_plan_by_default_are_those_of_the_window():
    plan = Plan(64, 24, 1000, ONE)
    assert plan.sizes == [24, 24, 16]
    assert plan.sample_weight(24) == plan.sample_weight(16) == 1 / 64
    plan = dataclasses.replace(plan, normalisation="mean of means")
    assert (plan.sample_weight(24), plan.sample_weight(16)) == (1 / 72, 1 / 48)


def test_a_large_epoch_is_counted_exactly():
    """Steps are counted in whole numbers, not in floating point."""
    big = 10**17
    assert Plan(1, 1, big + 1, ONE).steps_per_epoch == big + 1


def test_a_long_window_is_not_cut_to_know_its_peak(monkeypatch):
    monkeypatch.delattr("membudget.accumulation.plan.partition")
    plan = Plan(10**30 + 1, 2, 10**30, ONE, "mean of means")
    assert (plan.steps, plan.largest, plan.last) == (5 * 10**29 + 1, 2, 1)
    assert plan.peak == 210
    assert plan.sample_weight(1) == pytest.approx(2e-30)


def test_a_normalisation_that_is_not_known():
    with pytest.raises(ValueError, match="there is no normalisation 'sum'"):
        Plan(8, 4, 100, ONE, "sum")


def test_plans_and_results_cannot_be_changed():
    made = filter(dataclasses.is_dataclass, vars(accumulation).values())
    frozen = {kind: kind.__dataclass_params__.frozen for kind in made}
    assert frozen[Plan] and frozen[accumulation.Report]
    assert all(frozen.values())
