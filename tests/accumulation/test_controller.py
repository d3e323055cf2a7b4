"""The reactive controller: its rule, and that it changes no batch."""

from random import Random

import pytest
import torch
from accumulation_helpers import (
    classifier,
    flat,
    relative,
    run_window,
    samples,
)

from membudget.accumulation import (
    Accumulator,
    Controller,
    partition,
    weights,
)


@pytest.mark.parametrize(
    ("size", "peak", "after"),
    [
        (50, 81, 40),  # too full
        (50, 80, 50),  # the range's ends belong to it
        (50, 60, 50),
        (50, 59, 60),  # room
        (50, 200, 40),
        (99, 0, 100),  # no more than the most
        (1, 99, 1),  # no less than one
        (4, 10, 5),  # 4.8 rounded down would stay for ever
        (4, 90, 3),
    ],
)
def test_the_rule(size, peak, after):
    controller = Controller(size, budget=100, most=100)
    assert controller(peak) == controller.micro_batch == after


def test_it_goes_on_from_what_ran():
    controller = Controller(64, budget=100, most=64)
    assert controller(70, micro_batch=16) == 16
    assert controller(10) == 19


def chosen(rng, total, steps):
    """Micro-batches of a run with peaks at random."""
    controller = Controller(rng.randint(1, total), budget=100, most=total)
    for _ in range(steps):
        yield controller.micro_batch
        controller(rng.randrange(130))


def test_the_batch_is_exact_in_every_step_of_50_runs():
    sizes = set()
    for seed in range(50):
        rng = Random(seed)
        total = rng.randint(2, 500)
        for size in chosen(rng, total, 40):
            sizes.add(size)
            parts = partition(total, size)
            seen = [i for p in parts for i in range(p.start, p.stop)]
            assert seen == list(range(total))
            assert max(p.stop - p.start for p in parts) <= size
            ours = weights([p.stop - p.start for p in parts])
            assert abs(sum(ours) - 1) < 1e-12
    assert len(sizes) > 100


def test_it_does_not_change_the_trajectory():
    x, y = samples(60)

    def trained(sizes):
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        accumulator = Accumulator(model, optimizer)
        losses = []
        for size in sizes:
            parts = partition(60, size)
            cut = [p.stop - p.start for p in parts]
            losses.append(run_window(accumulator, x, y, cut).loss)
        return losses, [p.detach().clone() for p in model.parameters()]

    changing = list(chosen(Random(0), 60, 20))
    assert len(set(changing)) > 5
    (ours, moved), (fixed, expected) = trained(changing), trained([60] * 20)
    assert fixed[-1] < 0.7 * fixed[0]
    torch.testing.assert_close(ours, fixed, rtol=1e-9, atol=0)
    assert relative(moved, expected) < 1e-9
    assert flat(expected).isfinite().all()
