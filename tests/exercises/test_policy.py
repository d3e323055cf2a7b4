"""The exercises of lab 6 against the whole batch, and by what they do."""

import pytest
import torch
from torch import nn

from membudget.exercises import policy as solutions


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_chunks_in_parts_leave_the_gradient_of_the_whole(micro_batch):
    """Also where a micro-batch has no real action."""
    torch.manual_seed(0)
    policy = nn.Linear(2, 3).double()
    x, actions = torch.randn(5, 2).double(), torch.randn(5, 3).double()
    real = torch.arange(3) < torch.tensor([3, 1, 0, 0, 2])[:, None]
    solutions.chunk_gradient(policy, x, actions, real, micro_batch)
    error = (policy(x) - actions).abs()[real].mean()
    right = torch.autograd.grad(error, list(policy.parameters()))
    for parameter, gradient in zip(policy.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_loop_looks_again_after_so_many_actions():
    looks, done = [], []

    def plan(state):
        looks.append(state)
        return [10, 20, 30]

    def move(state, action):
        done.append(action)
        return state + action

    assert solutions.closed_loop(plan, move, 0, look=2, steps=5) == 70
    assert looks == [0, 30, 60] and done == [10, 20, 10, 20, 10]
