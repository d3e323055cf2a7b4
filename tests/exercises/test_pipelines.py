"""The solutions on pipelines, against PyTorch's tables and one process."""

import pytest
import torch
import torch.nn.functional as F

from membudget.exercises import check_one_by_one
from membudget.exercises.pipelines import (
    fewest_micro_batches,
    one_by_one,
    step_loss,
)
from membudget.parallelism import Operation, replay, table


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("below", [0.1, 0.25])
def test_with_so_many_the_bubble_is_below_and_with_one_less_not(ranks, below):
    m = fewest_micro_batches(ranks, below)
    assert replay(table("GPipe", ranks, m)).bubble < below
    if m > 1:
        assert replay(table("GPipe", ranks, m - 1)).bubble >= below - 1e-12


@pytest.mark.parametrize(("ranks", "m"), [(2, 2), (4, 8), (4, 5), (7, 20)])
def test_the_order_is_pytorchs(ranks, m):
    rows = tuple(
        tuple(
            Operation(text[0], rank, int(text[1:]))
            for text in one_by_one(ranks, m, rank)
        )
        for rank in range(ranks)
    )
    assert rows == table("1F1B", ranks, m)
    assert replay(rows).peaks == [ranks - r for r in range(ranks)]


@pytest.mark.parametrize("row", [["F0", "X0"], [("F", 0)], ["F"], "F0"])
def test_another_kind_of_list_is_told_so(row):
    assert "F0" in check_one_by_one.judge(lambda ranks, m, rank: row).text


@pytest.mark.parametrize("home", [0, 3])
def test_the_loss_of_the_step_is_that_of_all_labels_at_once(home):
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 5), torch.randint(5, (40,))
    sizes = [3, 17, 20]
    means = [
        F.cross_entropy(a, b).item()
        for a, b in zip(logits.split(sizes), targets.split(sizes), strict=True)
    ]
    by_rank = [means if rank == home else [] for rank in range(4)]
    whole = F.cross_entropy(logits, targets).item()
    assert step_loss(by_rank, sizes) == pytest.approx(whole, rel=1e-5)
    assert abs(sum(means) / 3 - whole) > 1e-3
