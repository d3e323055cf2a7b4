"""The exercises of chapter 11 against definitions that try everything, and
that of lab 5 against the whole batch."""

from random import Random

import pytest
import torch
from torch import nn

from membudget.exercises import planning as solutions


def plans(rng):
    """Random pairs, many of them with equal peaks or equal seconds."""
    count = rng.randint(1, 12)
    return [(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(count)]


def beats(one, other):
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def test_the_frontier_is_what_no_plan_beats():
    rng = Random(0)
    for _ in range(200):
        given = plans(rng)
        kept = {p for p in given if not any(beats(q, p) for q in given)}
        assert solutions.frontier(given) == sorted(kept)


@pytest.mark.parametrize("plan", [(5, 2, 1), (5, 5, 3), (4, 3, 0)])
def test_a_plan_leaves_the_gradient_of_the_whole_batch(plan):
    samples, micro_batch, checkpointed = plan
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))
    x, y = torch.randn(samples, 3).double(), torch.randint(3, (samples,))
    h = x
    for block in blocks:
        h = block(h)
    loss = nn.CrossEntropyLoss()
    right = torch.autograd.grad(loss(h, y), list(blocks.parameters()))
    solutions.planned_gradient(blocks, loss, x, y, micro_batch, checkpointed)
    for p, g in zip(blocks.parameters(), right, strict=True):
        torch.testing.assert_close(p.grad, g)
