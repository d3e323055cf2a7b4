"""Out of memory in the middle of a window: the same step, once."""

import gc
import weakref
from random import Random

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    everything,
    refused,
    relative,
    samples,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from membudget.accumulation import IGNORE, Accumulator, recovering_step
from membudget.measuring import PeakTracker


class Faults(TorchDispatchMode):
    """Runs out of memory at the operators with these numbers."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.operators = set(at), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        if self.operators in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Injected.")
        return func(*args, **(kwargs or {}))


def loss(model, x, y):
    return F.cross_entropy(model(x), y, ignore_index=IGNORE)


def half(model, x, y):
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    return F.cross_entropy(output.float(), y)


def rig(scale=0.0, dtype=torch.float64):
    model = classifier(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", scale) if scale else None
    return Accumulator(model, optimizer, scaler=scaler)


def step(*faults, accumulator, x, y, size=8, loss=loss, **options):
    """A step with these faults; the parameters' movement and what it took."""
    before = [p.detach().clone() for p in accumulator.model.parameters()]
    with Faults(*faults) as seen:
        done = recovering_step(
            accumulator, loss, x, y, micro_batch=size, **options
        )
    after = accumulator.model.parameters()
    moved = [p.detach() - q for p, q in zip(after, before, strict=True)]
    return moved, done, seen.operators


@pytest.mark.parametrize("scale", [0.0, 2.0**10])
def test_100_of_100_faults_leave_the_gradient_as_it_was(scale):
    x, y = samples(21)
    expected, _, operators = step(accumulator=rig(scale), x=x, y=y)
    stepping = operators - step_operators(scale)
    for seed in range(50):  # and with a scaler 50 more
        rng = Random(f"{scale} {seed}")
        faults = rng.sample(range(1, stepping), rng.randint(1, 3))
        accumulator = rig(scale)
        moved, done, _ = step(*faults, accumulator=accumulator, x=x, y=y)
        assert relative(moved, expected) < 1e-12, faults
        assert done.report.count == 21
        assert 1 <= done.failures <= 3
        assert done.micro_batch == 8 >> done.failures
        assert 0 < done.lost <= 21 * done.failures
        if scale:  # its state, too: a skipped step would have halved it
            assert accumulator.scaler.get_scale() == scale
            assert accumulator.scaler.state_dict()["_growth_tracker"] == 1


def step_operators(scale):
    """Operators from the optimizer's step on."""
    accumulator = rig(scale)
    x, y = samples(4)
    with accumulator.window() as window:
        window.backward(loss(accumulator.model, x, y), 4)
        window.finish()
        with Faults() as seen:
            window.step()
    return seen.operators


def test_under_autocast():
    x, y = samples(21, dtype=torch.float32)
    rigs = [rig(2.0**10, torch.float32) for _ in range(2)]
    expected, *_ = step(accumulator=rigs[0], x=x, y=y, size=2, loss=half)
    moved, done, _ = step(
        30, 60, accumulator=rigs[1], x=x, y=y, size=8, loss=half
    )
    assert done.micro_batch == 2
    assert relative(moved, expected) < 1e-6


def test_nothing_is_left_of_the_window_that_failed():
    """Buffers, random numbers, and what the error's frames held."""
    x, y = samples(16)
    kept = []

    def watched(model, x, y):
        hidden = model[0](x)
        kept.append(weakref.ref(hidden))
        if len(x) == 8 and len(kept) > 1:
            gc.collect()
            raise torch.OutOfMemoryError("another process took it")
        if len(x) == 4:
            assert all(ref() is None for ref in kept[:2])
        return F.cross_entropy(model[1:](hidden), y)

    def noisy():
        torch.manual_seed(3)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        model = nn.Sequential(*layers, nn.Linear(8, 5)).double()
        return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))

    once, again = noisy(), noisy()
    torch.manual_seed(4)
    done = recovering_step(again, watched, x, y, micro_batch=8)
    assert (done.failures, done.lost, done.micro_batch) == (1, 16, 4)
    torch.manual_seed(4)
    recovering_step(once, loss, x, y, micro_batch=4)
    states = (everything(a.model, a.optimizer) for a in (once, again))
    assert differences(*states) == []


def test_under_a_budget_it_finds_what_fits():
    x, y = samples(64)
    accumulator = rig()
    existing = accumulator.model, accumulator.optimizer, x, y

    def tracked(size, budget=None):
        with PeakTracker(*existing, budget=budget) as tracker:
            return tracker, recovering_step(
                accumulator, loss, x, y, micro_batch=size
            )

    tracked(64)  # makes the optimizer's states
    budget = tracked(16)[0].peak
    tracker, done = tracked(64, budget)
    assert (done.micro_batch, done.failures) == (16, 2)
    assert tracker.peak <= budget


def test_tokens_are_the_weights_and_padding_is_left_out():
    x, y = samples(10)
    y[3:9] = IGNORE
    tokens = {"count": lambda x, y: (y != IGNORE).sum().item()}
    expected, *_ = step(accumulator=rig(), x=x, y=y, size=10, **tokens)
    moved, done, _ = step(3, accumulator=rig(), x=x, y=y, size=5, **tokens)
    assert done.micro_batch == 2 and done.report.micro_batches == 3
    assert done.report.count == 4
    assert relative(moved, expected) < 1e-12
    y[:] = IGNORE
    with refused(ValueError, "no sample of the batch counts: leave it out"):
        step(accumulator=rig(), x=x, y=y, **tokens)


# Where it ends -----------------------------------------------------------


def test_one_sample_that_does_not_fit():
    x, y = samples(6)
    accumulator = rig()
    start = everything(accumulator.model, accumulator.optimizer)
    with pytest.raises(torch.OutOfMemoryError, match=r"^one sample does not"):
        step(*range(1, 9), accumulator=accumulator, x=x, y=y, size=4)
    after = everything(accumulator.model, accumulator.optimizer)
    assert differences(start, after) == []
    assert all(p.grad is None for p in accumulator.parameters())


def test_an_optimizer_without_room_is_no_matter_of_samples():
    x, y = samples(6)
    *_, operators = step(accumulator=rig(), x=x, y=y)
    with pytest.raises(RuntimeError, match=r"^every micro-batch fitted, and"):
        step(operators, accumulator=rig(), x=x, y=y)


def test_other_errors_pass():
    x, y = samples(6)

    def wrong(model, x, y):
        raise KeyError("of the loop's own")

    with pytest.raises(KeyError, match="of the loop's own"):
        step(accumulator=rig(), x=x, y=y, loss=wrong)
