"""What a window costs, against traces and brute force."""

import dataclasses
from fractions import Fraction
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from membudget import accumulation
from membudget.accumulation import (
    NORMALISATIONS,
    Accumulator,
    Footprint,
    PeakLine,
    Plan,
    footprint,
)
from membudget.measuring import PeakTracker, optimizer_tensors
from membudget.models import GPT, mlp
from tests.soak import SOAK, examples

# Footprints --------------------------------------------------------------

optim = torch.optim


def labelled(model, n):
    return F.cross_entropy(model(torch.randn(n, 8)), torch.randint(10, (n,)))


def next_tokens(model, n):
    tokens = torch.randint(13, (n, 7))
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def mean_square(*shape):
    return lambda model, n: model(torch.randn(n, *shape)).square().mean()


def convolution():
    frozen = nn.Conv2d(1, 4, 3, padding=1).requires_grad_(False)
    return nn.Sequential(
        frozen,
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


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


def setting(model, loss, optimizer, **options):
    """What a footprint is made of."""

    def build():
        made = model()
        return made, optimizer(made.parameters(), **options)

    return build, loss


small = partial(mlp, 8, 16, 4)
gpt = partial(GPT, vocabulary=13, context=6, width=8, depth=2, heads=2)
SETTINGS = {
    "MLP, SGD": setting(small, labelled, optim.SGD, lr=0.1),
    "MLP, Adam": setting(small, labelled, optim.Adam),
    "GPT, AdamW": setting(gpt, next_tokens, optim.AdamW),
    "convolution": setting(
        convolution, mean_square(1, 8, 8), optim.SGD, lr=0.1, momentum=0.9
    ),
    "frozen base": setting(FrozenBase, mean_square(16), optim.Adam),
}
SIZES = [1, 2, 3, 5, 8, 16, 33, 64, 100, 256, 500, 1024]
if not SOAK:
    SIZES = [1, 5, 256]
of_each_setting = pytest.mark.parametrize("name", SETTINGS)


@cache
def found(name):
    return footprint(*SETTINGS[name])


def traced(name, *sizes):
    """The peak of a real window of micro-batches of these sizes."""
    build, loss = SETTINGS[name]
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


@of_each_setting
def test_a_window_of_the_accumulator(name):
    """It holds the loss a second time, weighed."""
    build, loss = SETTINGS[name]
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
    assert 0 <= tracker.peak - found(name).peak(8, 2) <= 4


@of_each_setting
def test_the_peak_is_known_to_the_byte_at_every_size(name):
    for n in SIZES:
        assert found(name).peak(n, 1) == traced(name, n), n
        assert found(name).peak(n, 2) == traced(name, n, n), n
        assert found(name).peak(n, 7) == traced(name, n, n, n), n


@of_each_setting
def test_windows_with_a_remainder(name):
    for n, rest in ((8, 3), (64, 1), (65, 64)):
        for sizes in [n, n, rest], [n, rest]:
            plan = Plan(sum(sizes), n, 10**4, found(name))
            assert plan.sizes == sizes
            assert plan.peak == traced(name, *sizes)


@of_each_setting
def test_what_lies_in_the_footprint(name):
    build, loss = SETTINGS[name]
    model, optimizer = build()
    loss(model, 2).backward()
    optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    with PeakTracker(*model.parameters(), *model.buffers()) as tracker:
        pass
    assert found(name).parameters == tracker.start + copies(model)
    assert found(name).gradients == sum(p.nbytes for p in trained)
    kept = optimizer_tensors(optimizer)
    assert found(name).optimizer == sum(t.nbytes for t in kept)


def test_states_of_the_optimizers():
    plain, adam = found("MLP, SGD"), found("MLP, Adam")
    assert plain.optimizer == 0
    step_counts = 4 * len(list(small().parameters()))
    assert adam.optimizer == 2 * adam.parameters + step_counts


def test_a_footprint_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    footprint(*SETTINGS["MLP, SGD"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_build_that_makes_something_else():
    message = (
        "build returned 3 things: use a pair, the model and its optimizer"
    )
    with refused(ValueError, message):
        footprint(lambda: (small(), None, None), labelled)


def test_a_model_that_is_not_affine_in_the_batch():
    build, _ = SETTINGS["MLP, SGD"]

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


@settings(max_examples=examples(10))
@given(whole, whole, st.integers(1, 2000), st.sampled_from(NORMALISATIONS))
def test_a_plan_against_brute_force(batch, micro, samples, normalisation):
    plan = Plan(batch, micro, samples, ONE, normalisation)
    left, sizes = batch, []
    while left:
        sizes.append(min(micro, left))
        left -= sizes[-1]
    assert plan.sizes == sizes
    for n in sizes:
        share = {
            "window": Fraction(1, batch),
            "mean of means": Fraction(1, len(sizes) * n),
            "no division": Fraction(1, n),
        }
        assert set(share) == set(NORMALISATIONS)
        assert plan.sample_weight(n) == float(share[normalisation])
    if len(sizes) == 1:
        assert plan.peak == max(200, 150 + 3 * batch) == plan.whole_peak
    else:
        after = micro if len(sizes) > 2 else sizes[-1]
        assert plan.peak == max(210, 150 + 3 * micro, 190 + 3 * after)
    assert plan.whole_peak == max(200, 150 + 3 * batch)
    assert plan.steps_per_epoch == len(range(0, samples, batch))


def test_the_weights_of_a_plan_by_default_are_those_of_the_window():
    plan = Plan(64, 24, 1000, ONE)
    assert plan.sample_weight(24) == plan.sample_weight(16) == 1 / 64


def test_a_large_epoch_is_counted_exactly():
    """Steps are counted in whole numbers, not in floating point."""
    big = 10**17
    assert Plan(1, 1, big + 1, ONE).steps_per_epoch == big + 1


def test_a_long_window_is_not_cut_to_know_its_peak():
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
