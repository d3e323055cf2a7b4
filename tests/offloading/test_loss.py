"""The page on losses in pieces: its laws, by both rulers."""

import math

import pytest
import torch
import torch.nn.functional as F

from membudget.measuring import PeakTracker, witness
from membudget.models import chunked_loss
from tests.exercises.pages import namespace

PAGE = namespace("chunks_for")
N, V, H = 512, 2048, 64
MIB = 2**20


def setting(dtype=torch.float32):
    torch.manual_seed(0)
    W = (torch.randn(V, H) / H**0.5).to(dtype).requires_grad_()
    x = torch.randn(N, H).to(dtype).requires_grad_()
    return x, W, torch.randint(V, (N,))


def peaks(loss, dtype=torch.float32):
    """The tracker's, and the allocator's."""
    x, W, y = setting(dtype)

    def step():
        loss(x, W, y).backward()
        x.grad = W.grad = None

    with PeakTracker(x, W, y) as tracker:
        step()
    return tracker.peak - tracker.start, witness(step)


def plain(x, W, y):
    return F.cross_entropy((x @ W.T).float(), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_loss_takes_three_tensors(dtype):
    """Also in bf16, if the logits are cast to fp32."""
    peak, most = peaks(plain, dtype)
    assert peak == most
    assert 0 <= peak - 3 * 4 * N * V < 64


@pytest.mark.parametrize("chunks", [2, 4, 8, 16, 32, 64])
def test_the_law_of_checkpointed_chunks(chunks):
    """Each checkpoint keeps the state of the random numbers, which is made
    without an operator: the allocator alone sees it."""

    def in_pieces(x, W, y):
        return PAGE["in_pieces"](x, W, y, chunks)

    peak, most = peaks(in_pieces)
    state = torch.get_rng_state().nbytes
    assert peak <= most <= peak + chunks * state
    rows = N // chunks
    in_loss = 4 * (3 * rows * V + H * V + (N - rows) * H)
    in_sum = 4 * (3 * H * V + 2 * rows * H)
    assert 0 <= peak - max(in_loss, in_sum) < 64 + 8 * chunks

    def packaged(x, W, y):
        return chunked_loss(lambda rows: rows @ W.T, x[None], y[None], chunks)

    assert peaks(packaged)[0] == peak


@pytest.mark.parametrize("chunks", [1, 2, 8, 32, 128])
def test_the_law_of_fused_chunks(chunks):
    peak, most = peaks(lambda *a: PAGE["fused"](*a, chunks))
    assert peak == most
    law = 8 * N // chunks * V + 4 * H * (V + N)
    assert 0 <= peak - law < 64 + 24 * N // chunks


def test_without_a_checkpoint_all_log_probabilities_wait():
    peak, most = peaks(PAGE["cut"])
    assert peak == most
    assert 4 * N * V < peak < 6 * N * V


@pytest.mark.parametrize("way", ["in_pieces", "fused"])
@pytest.mark.parametrize("chunks", [1, 3, 7, 64])
def test_gradients_are_the_plain_ones(way, chunks):
    """Whether or not the chunks divide the tokens."""
    x, W, y = (t[: N // 2 + 1] if t.shape[0] == N else t for t in setting())
    x = x.detach().requires_grad_()
    mine = torch.autograd.grad(PAGE[way](x, W, y, chunks), (x, W))
    right = torch.autograd.grad(plain(x, W, y), (x, W))
    for a, b in zip(mine, right, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_fused_refuses_a_second_backward_pass():
    loss = PAGE["fused"](*setting())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("n", "v", "h"), [(256, 256, 64), (256, 64, 128), (16, 1024, 128)]
)
def test_the_most_that_chunks_can_save(n, v, h):
    r = 1 / (h / n + h / v)
    W = torch.randn(v, h, requires_grad=True)
    x = torch.randn(n, h, requires_grad=True)
    y = torch.randint(v, (n,))

    def step():
        plain(x, W, y).backward()
        x.grad = W.grad = None

    floor = 4 * h * (n + v)
    assert math.isclose(witness(step) / floor, max(3 * r, 1 + r), rel_tol=1e-3)


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="from torch 2.13 on"
)
def test_pytorchs_own_takes_both_gradients_twice():
    """The tracker sees one operator: what it takes inside, it does not."""

    def own(size):
        options = size and torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=size
        )
        return peaks(lambda *a: F.linear_cross_entropy(*a, options=options))

    twice = 2 * 4 * H * (V + N)
    assert own(None) == peaks(plain)
    assert own(8)[0] == own(N)[0]
    assert 0 <= own(8)[1] - twice < 64
    assert own(N)[1] > 4 * N * V + twice / 2
