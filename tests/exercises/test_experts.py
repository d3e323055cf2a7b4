"""The solutions on experts, against the room and a mixture that runs."""

import torch

from membudget.exercises.experts import with_capacity, worst_bytes
from membudget.parallelism import Mixture, received


def test_the_worst_rank_is_the_one_of_the_counts():
    torch.manual_seed(0)
    routing = [tuple(torch.randperm(8)[:2].tolist()) for _ in range(40)]
    parts = [routing[10 * rank : 10 * rank + 10] for rank in range(4)]
    counts = [
        [sum(expert in chosen for chosen in part) for expert in range(8)]
        for part in parts
    ]
    assert worst_bytes(routing, 8, 4, 6) == 6 * max(received(counts))


def test_a_mixture_drops_as_many():
    torch.manual_seed(0)
    mixture, rows = Mixture(4, 8, 4, 2, factor=1.0), []
    x = torch.randn(30, 4)
    for expert in mixture.experts:
        expert.register_forward_hook(lambda _, x, y: rows.append(len(y)))
    mixture(x)
    most, dropped = with_capacity(mixture.counts, 30, 2, 1.0)
    assert max(rows) == most and sum(rows) == 60 - dropped < 60
