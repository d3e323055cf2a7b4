"""What the ranks of the tests of expert parallelism do."""

import torch
import torch.distributed as dist

from membudget.measuring import SavedBytes
from membudget.parallelism import Mixture, expert_parallel

WIDTH, HIDDEN, EXPERTS, TOKENS = 16, 24, 8, 40


def mixture(active, factor=None, dtype=torch.float64):
    torch.manual_seed(0)
    made = Mixture(WIDTH, HIDDEN, EXPERTS, active, factor)
    return made.to(dtype)


def rows(ranks, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(2, ranks, TOKENS, WIDTH, dtype=dtype)


def farthest(active: int, factor: float | None) -> float:
    """From one process: results, gradients of rows, experts and router."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, dy = rows(ranks)
    whole, own = mixture(active, factor), mixture(active, factor)
    every = x.clone().requires_grad_()
    ys = torch.cat([whole(part) for part in every])  # limits are a rank's
    ys.backward(dy.flatten(0, 1))
    expert_parallel(own)
    mine = x[rank].clone().requires_grad_()
    y = own(mine)
    y.backward(dy[rank])
    dist.all_reduce(own.router.weight.grad)
    first = rank * EXPERTS // ranks
    pairs = [
        (y, ys.view(ranks, TOKENS, WIDTH)[rank]),
        (mine.grad, every.grad[rank]),
        (own.router.weight.grad, whole.router.weight.grad),
    ]
    for one, two in zip(own.experts, whole.experts[first:], strict=False):
        pairs += [
            (p.grad, q.grad)
            for p, q in zip(one.parameters(), two.parameters(), strict=True)
        ]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def tape(kind: str, active: int, factor: float | None) -> tuple[int, list]:
    """What a forward pass leaves for the backward pass, and the counts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, _ = rows(ranks, torch.float32)
    made = mixture(active, factor, torch.float32)
    if kind == "one":
        made.bias[:active] = 10
    if kind == "skewed":
        made.bias += torch.arange(EXPERTS) / 20
    expert_parallel(made)
    mine = x[rank].clone().requires_grad_()
    with SavedBytes(made, mine) as saved:
        made(mine)
    return saved.total, made.counts
