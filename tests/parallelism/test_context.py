"""A sequence over ranks, against one process, masks and counted bytes."""

from itertools import product

import context_workers as work
import pytest
import torch

from membudget import models, parallelism
from membudget.parallelism import (
    ORDERS,
    context_buffers,
    context_parallel,
    context_traffic,
    places,
    ring_attention,
    tiles,
)
from membudget.sharding import Ranks, simulate_rank

CASES = [*product([2, 4], ORDERS)]


@pytest.fixture(scope="module")
def pools():
    found = {n: Ranks(n, backend="gloo") for n in (2, 4)}
    yield found
    for pool in found.values():
        pool.close()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.few(3)
def test_the_ring_is_whole_attention(pools, ranks, kv, order):
    assert max(pools[ranks].run(work.farthest, order, kv)) <= 1e-12


@pytest.mark.parametrize(("ranks", "order"), CASES)
@pytest.mark.few(2)
def test_a_models_mean_gradient_is_that_of_one_process(pools, ranks, order):
    for loss, gradient in pools[ranks].run(work.whole_step, order):
        assert loss <= 1e-12 and gradient <= 1e-12


@pytest.mark.parametrize("order", ORDERS)
def test_one_process_is_a_rank_alone(order):
    q, k, v, _ = work.heads()
    found = ring_attention(q, k, v, order)
    assert (found - work.by_hand(q, k, v)).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "order"), CASES)
@pytest.mark.few(3)
def test_buffers_and_traffic_are_the_laws(pools, ranks, order, dtype):
    sent = context_traffic(ranks, 0.5, itemsize=dtype.itemsize)
    for row in pools[ranks].run(work.attention_alone, order, dtype):
        assert row["held"] == pytest.approx(context_buffers(ranks, 0.5))
        assert row["sent"] == pytest.approx(sent)


def simulated(ranks):
    batch = [torch.empty(1, work.TOKENS // ranks, dtype=torch.long)] * 2
    found = simulate_rank(
        lambda: models.Llama(64, work.WIDTH, 2, 4, 2, 176),
        lambda model, mesh: context_parallel(model, group=mesh.get_group()),
        work.loss_of,
        batch[0],
        batch[1].clone(),
        ranks=ranks,
    )
    start = found.tracker.start
    return found.after_forward - start, found.peak - start


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.few(1)
def test_a_simulated_rank_is_a_real_one_to_the_byte(pools, ranks):
    real = pools[ranks].run(work.step_bytes, "zigzag")
    # A real step has gradients only after its backward pass.
    assert simulated(ranks)[0] == real[0][0]
    assert {row[0] for row in real} == {real[0][0]}


def test_the_tape_is_cut_into_as_many_parts_as_there_are_ranks():
    one, many = simulated(1)[0], simulated(16)[0]
    assert many == pytest.approx(one / 16, rel=2e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_tiles_are_what_the_mask_leaves(ranks, order):
    tokens = 4 * ranks
    own = [places(tokens, ranks, rank, order) for rank in range(ranks)]
    assert torch.equal(torch.cat(own).sort().values, torch.arange(tokens))
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    expected = [[int(mask[q][:, k].sum()) for k in own] for q in own]
    assert tiles(tokens, ranks, order) == expected


def test_zigzag_is_even_and_the_other_order_nearly_twice_the_mean():
    work_of = [sum(row) for row in tiles(64, 8)]
    assert len(set(work_of)) == 1
    uneven = [sum(row) for row in tiles(8000, 8, "contiguous")]
    assert max(uneven) / (sum(uneven) / 8) == pytest.approx(15 / 8, rel=1e-3)


def test_laws():
    assert context_buffers(1) == context_traffic(1) == 0
    assert context_buffers(8, 0.25) == 2 * 2 * 0.25 / 8
    assert context_buffers(2, 0.25) == context_buffers(2, 0.25, "all-gather")
    assert context_buffers(8, 0.25, "all-gather") == 7 * 2 * 0.25 / 8
    # A ring sends as much however many there are, an all-to-all less.
    assert context_traffic(1000) == pytest.approx(6, rel=0.01)
    assert context_traffic(1000, itemsize=2) == pytest.approx(8, rel=0.01)
    assert context_traffic(8, itemsize=8) == context_traffic(8)
    assert context_traffic(8, way="all-gather") == 6 * 7 / 8
    assert context_traffic(8, way="all-to-all") == 8 * 7 / 64


SHAPE = torch.ones(1, 2, 3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: places(10, 4, 0), "10 tokens cannot be cut into 8 pieces"),
        (lambda: places(10, 4, 0, "contiguous"), "multiple of 4"),
        (lambda: tiles(8, 2, "striped"), "no order 'striped'"),
        (lambda: context_buffers(4, 0.5, "all-to-all"), "no way"),
        (lambda: context_traffic(4, 2), "kv is 2"),
        (lambda: ring_attention(SHAPE, SHAPE, SHAPE), "an even number"),
        (lambda: ring_attention(SHAPE[0], SHAPE, SHAPE), "3 dimensions"),
        (lambda: ring_attention(*[SHAPE.to("meta")] * 3), "runs on a CPU"),
        (
            lambda: ring_attention(SHAPE[:, :1], SHAPE, SHAPE, "contiguous"),
            "heads of k and v that divide those of q",
        ),
        (
            lambda: context_parallel(models.Llama(fused=False)),
            "attention is not fused",
        ),
    ],
)
def test_what_cannot_be_says_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_with_learned_positions_says_so():
    with pytest.raises(TypeError, match="positions are rotary"):
        parallelism.context_parallel(models.GPT())
