"""Every operator alone: what it saves, and its peak, to the byte."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ledger_helpers import DTYPES, alone

from membudget.ledger import operators as op
from membudget.models import attention, rotary, rotate

SHAPES = [(1, 1), (3, 8), (2, 3, 4, 6)]
SIZES = [4, 2]
GRID = list(product(SHAPES, SIZES))


def count(shape):
    return torch.Size(shape).numel()


def of_x(run, write, shape, weights, trained, itemsize=4, cast=None):
    """Saved by an operator of x and weights; x is trained, or the batch."""
    batch = torch.rand(shape).to(DTYPES[itemsize])

    def first(tensors):
        return tensors if trained else (tensors[-1], *tensors[:-1])

    return alone(
        lambda *tensors: run(*first(tensors)),
        lambda paper, *tensors: write(paper, *first(tensors)),
        *([shape] if trained else []),
        weights=weights,
        batch=[] if trained else [batch],
        itemsize=itemsize,
        cast=cast,
    )


# Matrix products ---------------------------------------------------------


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("shape", "outputs"), [((1, 1), 1), ((3, 8), 7), ((2, 3, 4, 6), 1)]
)
@pytest.mark.parametrize(("s", "cast"), [(4, None), (2, None), (4, 2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_linear(shape, outputs, s, cast, bias, trained):
    """Its input, unless that is the batch; the weight is there anyway. Under
    autocast copies in 16 bits of its input and, for the input's gradient, of
    its weight. The bias's copy is not saved."""
    weights = [(outputs, shape[-1]), *([(outputs,)] if bias else [])]
    saved = of_x(
        F.linear,
        lambda paper, x, w, *b: op.linear(paper, x, w, outputs, *b),
        shape,
        weights,
        trained,
        s,
        cast,
    )
    if cast is None:
        assert saved == (s * count(shape) if trained else 0)
    else:
        assert saved == 2 * count(shape) + 2 * trained * count(weights[0])


@pytest.mark.few(6)
@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("stride", "groups", "side"), [(2, 1, 4), (1, 2, 8)])
def test_convolution(s, bias, trained, stride, groups, side):
    """Its input, where that is not the batch."""
    picture, weight = (3, 4, 8, 8), (6, 4 // groups, 3, 3)
    saved = of_x(
        partial(F.conv2d, stride=stride, padding=1, groups=groups),
        lambda paper, x, w, *b: op.convolution(
            paper, x, w, 3 * 6 * side**2, *b
        ),
        picture,
        [weight, *([(6,)] if bias else [])],
        trained,
        s,
    )
    assert saved == (s * count(picture) if trained else 0)


# Sums, products, activation functions ------------------------------------

OF_EACH_NUMBER = {
    # the function, its row, how many tensors it takes and how many it saves
    "add": (torch.add, op.add, 2, 0),
    "mul": (torch.mul, op.multiply, 2, 2),
    "a number times": (lambda x: 3 * x, op.scale, 1, 0),
    "divided by a number": (lambda x: x / 3, op.scale, 1, 0),
    **{
        name: (getattr(torch, name), partial(op.of_output, name=name), 1, 1)
        for name in ("relu", "tanh", "sigmoid")
    },
    **{
        name: (getattr(F, name), partial(op.of_input, name=name), 1, 1)
        for name in ("gelu", "silu")
    },
    # a mask, on a CPU of the dtype of its input
    "dropout": (lambda x: F.dropout(x, 0.1), op.dropout, 1, 1),
    "softmax": (lambda x: x.softmax(-1), op.softmax, 1, 1),
}


@pytest.mark.few(24)
@pytest.mark.parametrize(("shape", "s"), GRID)
@pytest.mark.parametrize("name", OF_EACH_NUMBER)
def test_operators_of_each_number(name, shape, s):
    run, write, takes, saves = OF_EACH_NUMBER[name]
    saved = alone(run, write, *[shape] * takes, itemsize=s)
    assert saved == saves * s * count(shape)


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(
    ("shape", "other"),
    [((2, 5, 8), (5, 8)), ((3, 8), (8,)), ((4, 8), (1, 8)), ((1, 8), (8,))],
)
def test_add_of_a_smaller_tensor(shape, other, s):
    """Nothing; its gradient is a sum, for which there is a tensor more, and
    a copy where there is but one sample to add up."""
    write = partial(op.add, broadcast=True)
    assert alone(torch.add, write, shape, other, itemsize=s) == 0


def test_add_of_a_tensor_that_is_not_trained():
    """Nothing."""
    assert alone(torch.add, op.add, (3, 8), batch=[torch.rand(3, 8)]) == 0


def test_add_of_two_dtypes():
    """Nothing; the sum is of the wider dtype, and so is its gradient."""

    def write(paper, x):
        half = op.cast(paper, x, 2)
        return op.add(paper, x, half)

    def run(x):
        half = x.bfloat16()
        return x + half

    assert alone(run, write, (3, 8)) == 0


# Products of matrices, norms, pooling, attention, the loss ----------------


class Case(NamedTuple):
    """One operator: the function, its row, and what it saves.

    That is a number of numbers of the dtype of what it is given, and of bytes
    whatever the dtype. ``places`` is the shape of a batch of whole numbers.
    """

    run: Callable
    write: Callable
    shapes: list[tuple[int, ...]]
    numbers: int
    bytes: int = 0
    weights: Sequence[tuple[int, ...]] = ()
    places: tuple[int, ...] = ()


def turned(paper, x):
    turns = op.constant(paper, 5 * 6 // 2, 8)
    return op.rotate_pairs(paper, x, turns, fused=False)


CASES = {
    "product of matrices: both": Case(
        torch.matmul,
        partial(op.matmul, elements=3 * 5 * 7),
        [(3, 5, 2), (3, 2, 7)],
        3 * (5 * 2 + 2 * 7),
    ),
    **{
        f"to {size} bytes: nothing": Case(
            partial(torch.Tensor.to, dtype=dtype),
            partial(op.cast, itemsize=size),
            [(3, 8)],
            0,
        )
        for size, dtype in DTYPES.items()
    },
    "layer norm: its input, and mean and 1/σ of each token": Case(
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        op.layer_norm,
        [(2, 3, 8)],
        2 * 3 * 8 + 2 * 2 * 3,
        weights=[(8,), (8,)],
    ),
    # its input is a copy in a 16-bit model
    "RMS norm: in fp32 its input, it normalised, 1/rms of each token": Case(
        lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
        op.rms_norm,
        [(2, 3, 8)],
        0,
        4 * (2 * 2 * 3 * 8 + 2 * 3),
        weights=[(8,)],
    ),
    "batch norm: its input, and mean and 1/σ of each channel": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        op.batch_norm,
        [(2, 4, 5, 3)],
        2 * 4 * 5 * 3 + 2 * 4,
        weights=[(4,), (4,)],
    ),
    "max pool: its input, and 8 bytes for the place of each maximum": Case(
        lambda x: F.max_pool2d(x, 3, 1),
        partial(op.max_pool, elements=2 * 4 * 4 * 4),
        [(2, 4, 6, 6)],
        2 * 4 * 6 * 6,
        8 * 2 * 4 * 4 * 4,
    ),
    "mean over a picture: nothing": Case(
        partial(F.adaptive_avg_pool2d, output_size=1),
        partial(op.mean, elements=2 * 4),
        [(2, 4, 6, 6)],
        0,
    ),
    "embedding: nothing, its places are the batch": Case(
        lambda table, x: F.embedding(x, table),
        partial(op.embedding, width=8),
        [],
        0,
        weights=[(11, 8)],
        places=(2, 5),
    ),
    "cross-entropy: log-probabilities, and the number of targets": Case(
        F.cross_entropy, op.cross_entropy, [(3, 10)], 3 * 10 + 1, places=(3,)
    ),
    **{
        f"attention, {h} of {kv} heads: q, k, v, output, 4 bytes a row": Case(
            partial(
                F.scaled_dot_product_attention,
                is_causal=True,
                enable_gqa=kv < h,
            ),
            partial(op.fused_attention, statistics=b * h * t),
            [(b, h, t, d), (b, kv, t, d), (b, kv, t, d)],
            b * t * d * (2 * h + 2 * kv),
            4 * b * h * t,
        )
        for b, h, kv, t, d in [(2, 4, 4, 3, 6), (1, 4, 2, 5, 8)]
    },
    "rotary positions: 8 bytes for each pair of a token": Case(
        lambda x: rotate(x, rotary(5, 6)),
        turned,
        [(2, 4, 5, 6)],
        0,
        8 * 5 * 6 // 2,
    ),
    "rows of a table: nothing, their places are the batch": Case(
        lambda x, places: x[places],
        partial(op.take, elements=5 * 8),
        [(3, 8)],
        0,
        places=(5,),
    ),
    "rows times a number each: both": Case(
        torch.mul, op.weigh, [(3, 8), (3, 1)], 3 * 8 + 3
    ),
    "sum of neighbouring rows: nothing": Case(
        lambda x: x.view(3, 2, 8).sum(dim=1),
        partial(op.sum_of, elements=3 * 8),
        [(6, 8)],
        0,
    ),
    "repeated heads: nothing": Case(
        partial(torch.repeat_interleave, repeats=4, dim=1),
        partial(op.repeat, times=4),
        [(2, 3, 4, 8)],
        0,
    ),
}


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_an_operator(name, s):
    run, write, shapes, numbers, more, weights, places = CASES[name]
    batch = [torch.zeros(places, dtype=torch.long)] if places else []
    saved = alone(
        run, write, *shapes, weights=weights, batch=batch, itemsize=s
    )
    assert saved == s * numbers + more


def test_cross_entropy_under_autocast():
    """The log-probabilities in fp32."""
    saved = alone(
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
        lambda paper, x, w, y: op.cross_entropy(
            paper, op.linear(paper, x, w, 10), y
        ),
        (30, 8),
        weights=[(10, 8)],
        batch=[torch.zeros(30, dtype=torch.long)],
        cast=2,
    )
    assert saved == 2 * 30 * 8 + 2 * 10 * 8 + 4 * 30 * 10 + 4


@pytest.mark.few(8)
@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    ("b", "h", "t", "d"),
    [(2, 4, 3, 6), (3, 2, 64, 8), (2, 8, 1, 4), (1, 3, 16, 4), (2, 1, 32, 4)],
)
def test_attention(s, dropout, b, h, t, d):
    """Copies of q, k and v, the mask of t² bytes, and the softmax; with
    dropout also its mask, of the scores' dtype on a CPU, and its output."""
    n = b * t * h * d

    def run(qkv):
        parts = qkv.chunk(3, dim=-1)
        q, k, v = (p.view(b, t, h, d).transpose(1, 2) for p in parts)
        drop = torch.nn.Dropout(0.1 if dropout else 0)
        y = attention(q, k, v, drop if dropout else lambda weights: weights)
        return y.transpose(1, 2).reshape(b, t, h * d)

    def write(paper, qkv):
        q, k, v = op.split(paper, qkv, (n, n, n))
        y = op.unfused_attention(
            paper,
            q,
            k,
            v,
            scores=b * h * t * t,
            tokens=t,
            drop=dropout,
            folds=1 in (b, h),
        )
        return y if 1 in (h, t) else op.contiguous(paper, y)

    saved = alone(run, write, (b, t, 3 * h * d), itemsize=s)
    scores = b * h * t * t
    assert saved == s * (3 * n + scores * (3 if dropout else 1)) + t * t
