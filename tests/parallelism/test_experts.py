"""Experts over ranks, against one process and against counted bytes."""

import experts_workers as work
import pytest
import torch

from membudget.parallelism import (
    Mixture,
    balance_loss,
    capacity,
    dropped,
    expert_parallel,
    received,
    row_bytes,
)
from membudget.sharding import Ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4, backend="gloo") as pool:
        yield pool


@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
@pytest.mark.few(3)
def test_four_ranks_are_one_process(four, active, factor):
    assert max(four.run(work.farthest, active, factor)) <= 1e-12


def _own(counts, most):
    """Bytes of a rank's own rows: back from their experts, and weighed."""
    kept = sum(min(n, most or n) for n in counts)
    return kept * (8 * work.WIDTH + OWN)


OWN = 20
"""Of each choice: its weight, its place in the order, and its token."""


@pytest.mark.parametrize("kind", ["even", "skewed", "one"])
@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.few(6)
def test_the_tape_follows_the_rows(four, kind, active, factor):
    found = four.run(work.tape, kind, active, factor)
    tapes, counts = zip(*found, strict=True)
    most = None
    if factor:
        most = capacity(work.TOKENS, work.EXPERTS, active, factor)
    rows = received(counts, most)
    row = row_bytes(work.WIDTH, work.HIDDEN, 4) + 16  # two places in orders
    rest = {
        held - here * row - _own(count, most)
        for held, here, count in zip(tapes, rows, counts, strict=True)
    }
    assert len(rest) == 1  # router and indices: the same on every rank
    if kind == "one" and not factor:
        assert rows[0] == 4 * work.TOKENS * active


def test_capacity_bounds_a_rank_whatever_the_routing():
    most = capacity(64, 8, 2, 1.25)
    assert most == 20
    worst = [[128, 0, 0, 0, 0, 0, 0, 0]] * 4
    assert received(worst) == [512, 0, 0, 0]
    assert received(worst, most) == [80, 0, 0, 0]
    assert dropped(worst, most) == 4 * 108
    even = [[16] * 8] * 4
    assert received(even, most) == [128] * 4 and dropped(even, most) == 0


def test_those_that_are_left_out_are_the_last_of_their_expert():
    mixture = Mixture(4, 8, 2, factor=0.5)
    mixture.bias[0] = 10
    x = torch.randn(8, 4)
    y = mixture(x)
    assert mixture.counts == [8, 0]
    assert (y[:2] != 0).all() and (y[2:] == 0).all()
    mixture.factor = None
    assert torch.allclose(mixture(x)[:2], y[:2])


def test_a_mixture_is_the_weighed_sum_of_its_experts():
    mixture = work.mixture(2)
    x = torch.randn(9, work.WIDTH, dtype=torch.float64)
    weights, chosen = mixture.route(x)
    expected = torch.stack(
        [
            sum(
                w * mixture.experts[e](row)
                for w, e in zip(ws, es, strict=True)
            )
            for row, ws, es in zip(x, weights, chosen.tolist(), strict=True)
        ]
    )
    assert (mixture(x) - expected).abs().max() <= 1e-12


def test_the_balance_loss_is_one_when_even_and_pulls_towards_it():
    even = torch.full((8, 4), 0.25)
    chosen = torch.arange(8)[:, None] % 4
    assert balance_loss(even, chosen) == 1
    logits = torch.randn(64, 4, dtype=torch.float64)
    logits[:, 0] += 2
    logits.requires_grad_()
    scores = logits.softmax(-1)
    loss = balance_loss(scores, scores.topk(1).indices)
    loss.backward()
    assert loss > 1.5
    assert logits.grad.sum(0)[0] > 0  # a step lowers the favourite


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: received([[1, 2, 3]] * 2), "3 experts .* 2 ranks"),
        (lambda: received([[1, 2], [3]]), "different numbers of experts"),
        (lambda: dropped([[1, -2]], 1), "a count is -2"),
        (lambda: capacity(8, 4, 5), "active is 5"),
        (lambda: capacity(8, 4, factor=0), "factor is 0"),
        (lambda: Mixture(4, 8, 2)(torch.ones(1, 2, 4)), "use rows × width"),
        (lambda: balance_loss(torch.ones(2, 3), torch.ones(2)), "use rows"),
    ],
)
def test_what_cannot_be_says_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_process_has_all_experts():
    mixture, x = work.mixture(2), torch.randn(5, work.WIDTH).double()
    expected = mixture(x)
    expert_parallel(mixture)
    assert torch.equal(mixture(x), expected)


def three_experts():
    expert_parallel(Mixture(4, 8, 3))


def test_experts_that_ranks_cannot_share_say_so():
    with (
        pytest.raises(RuntimeError, match=r"3 of 3 experts .* 4 ranks"),
        Ranks(4, backend="gloo") as pool,
    ):
        pool.run(three_experts)
