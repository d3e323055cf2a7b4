"""The solutions of chapter 10's exercises, against PyTorch's own ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from membudget.exercises.tensor_parallel import fewest_ranks, mlp_of_rank
from membudget.ledger import Transformer
from membudget.parallelism import tensor_tape
from membudget.sharding import Ranks

from .judging import accepts, rejects


def torchs(x, up, down, bias):
    """What PyTorch's own rank makes of it."""
    model = nn.Sequential(
        nn.Linear(6, 24, bias=False), nn.GELU(), nn.Linear(24, 6)
    )
    with torch.no_grad():
        for own, given in zip(
            model.parameters(), (up.T, down.T, bias), strict=True
        ):
            own.copy_(given)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    y = parallelize_module(model, mesh, plan)(x)
    return y.detach().clone()  # waits for the all-reduce


def test_the_sum_is_what_pytorchs_ranks_have():
    torch.manual_seed(0)
    shapes = (5, 6), (6, 24), (24, 6), (6,)
    tensors = [torch.rand(shape) for shape in shapes]
    total = sum(mlp_of_rank(*tensors, rank, 2) for rank in range(2))
    with Ranks(2) as two:
        for found in two.run(torchs, *tensors):
            torch.testing.assert_close(found, total)


def test_other_answers():
    def shared(x, up, down, bias, rank, ranks):
        hidden = up.shape[1] // ranks
        own = slice(rank * hidden, (rank + 1) * hidden)
        return F.gelu(x @ up[:, own]) @ down[own] + bias / ranks

    accepts("mlp_of_rank", shared)
    rejects("mlp_of_rank", lambda *_: 7, "return a tensor on each rank")


def test_a_sum_before_the_nonlinearity_is_another_function():
    """Why the first matrix is not cut by its rows."""
    torch.manual_seed(0)
    x, up = torch.rand(5, 6) - 0.5, torch.rand(6, 24)
    halves = zip(x.chunk(2, 1), up.chunk(2, 0), strict=True)
    parts = sum(F.gelu(a @ b) for a, b in halves)
    assert not torch.allclose(parts, F.gelu(x @ up), atol=1e-2)


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("most", (2.5, 3.1, 5, 6.1, 9.5, 17))
def test_the_fewest_ranks_are_those_of_the_law(most, sequence):
    """A block so wide that the rest, beside the units, is nothing."""
    shape = Transformer(256, 2**18, 1, 2**10, 64)
    ranks = fewest_ranks(most, sequence)
    unit = 64 * shape.width * 4
    fits = [
        n
        for n in (1, 2, 4, 8, 16, 32, 64)
        if tensor_tape(shape, 1, 64, n, sequence) <= most * unit
    ]
    assert bool(fits) == (0 < ranks <= 64)
    assert all(n >= ranks for n in fits)
    assert not fits or fits[0] < 2 * ranks
