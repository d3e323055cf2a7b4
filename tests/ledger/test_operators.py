"""Every operator alone: what it saves, and its peak, to the byte."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from ledger_helpers import alone

from membudget.ledger import operators as op
from membudget.models import attention, rotary, rotate

SHAPES = [(1, 1), (3, 8), (2, 5, 16), (2, 3, 4, 6)]
SIZES = [4, 2]
GRID = list(product(SHAPES, SIZES))


def count(shape):
    return torch.Size(shape).numel()


def rand(*shape, itemsize=4):
    return torch.rand(shape).to(
        {4: torch.float32, 2: torch.bfloat16}[itemsize]
    )


# Matrix products ---------------------------------------------------------


@pytest.mark.parametrize(("shape", "s"), GRID)
@pytest.mark.parametrize("outputs", [1, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(shape, s, outputs, bias):
    """Its input; the weight is a parameter and there anyway."""
    *_, inputs = shape
    saved = alone(
        lambda x, w, b=None: F.linear(x, w, b),
        lambda paper, x, w, b=None: op.linear(paper, x, w, outputs, b),
        shape,
        weights=[(outputs, inputs), *([(outputs,)] if bias else [])],
        itemsize=s,
    )
    assert saved == s * count(shape)


@pytest.mark.parametrize(("shape", "s"), GRID)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_on_the_batch(shape, s, bias):
    """Nothing of its own: its input is the batch, which is there anyway."""
    saved = alone(
        lambda w, *rest: F.linear(rest[-1], w, *rest[:-1]),
        lambda paper, w, *rest: op.linear(paper, rest[-1], w, 7, *rest[:-1]),
        weights=[(7, shape[-1]), *([(7,)] if bias else [])],
        batch=[rand(*shape, itemsize=s)],
        itemsize=s,
    )
    assert saved == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_under_autocast(shape, bias):
    """Copies in 16 bits of its input and, for the input's gradient, of its
    weight. The bias's copy is not saved."""
    weights = [(7, shape[-1]), *([(7,)] if bias else [])]
    saved = alone(
        lambda x, w, b=None: F.linear(x, w, b),
        lambda paper, x, w, b=None: op.linear(paper, x, w, 7, b),
        shape,
        weights=weights,
        cast=2,
    )
    assert saved == 2 * count(shape) + 2 * count(weights[0])


@pytest.mark.parametrize("bias", [False, True])
def test_linear_on_the_batch_under_autocast(bias):
    """The copy of its input; the weight's is let go with autocast."""
    saved = alone(
        lambda w, *rest: F.linear(rest[-1], w, *rest[:-1]),
        lambda paper, w, *rest: op.linear(paper, rest[-1], w, 7, *rest[:-1]),
        weights=[(7, 8), *([(7,)] if bias else [])],
        batch=[rand(5, 8)],
        cast=2,
    )
    assert saved == 2 * 5 * 8


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(("b", "n", "m", "k"), [(1, 2, 3, 4), (3, 5, 2, 7)])
def test_matmul(s, b, n, m, k):
    """Both factors."""
    saved = alone(
        torch.matmul,
        lambda paper, x, y: op.matmul(paper, x, y, b * n * k),
        (b, n, m),
        (b, m, k),
        itemsize=s,
    )
    assert saved == s * b * (n * m + m * k)


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("stride", "groups", "side"), [(1, 1, 8), (2, 1, 4), (1, 2, 8)]
)
def test_convolution(s, bias, trained, stride, groups, side):
    """Its input, where that is not the batch."""
    picture, weight = (3, 4, 8, 8), (6, 4 // groups, 3, 3)
    settings = {"stride": stride, "padding": 1, "groups": groups}
    rest = [weight, *([(6,)] if bias else [])]

    def run(*tensors):
        x, w, *b = _first(tensors, trained)
        return F.conv2d(x, w, *b, **settings)

    def write(paper, *tensors):
        x, w, *b = _first(tensors, trained)
        return op.convolution(paper, x, w, 3 * 6 * side**2, *b)

    saved = alone(
        run,
        write,
        *([picture] if trained else []),
        weights=rest,
        batch=[] if trained else [rand(*picture, itemsize=s)],
        itemsize=s,
    )
    assert saved == (s * count(picture) if trained else 0)


def _first(tensors, trained):
    """The picture first; the batch comes last."""
    return tensors if trained else (tensors[-1], *tensors[:-1])


# Sums, products, activation functions ------------------------------------


@pytest.mark.parametrize(("shape", "s"), GRID)
def test_add(shape, s):
    """Nothing."""
    assert alone(torch.add, op.add, shape, shape, itemsize=s) == 0


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(
    ("shape", "other"), [((2, 5, 8), (5, 8)), ((3, 8), (8,)), ((4, 8), (1, 8))]
)
def test_add_of_a_smaller_tensor(shape, other, s):
    """Nothing; its gradient is a sum, for which there is a tensor more."""
    assert alone(torch.add, broadcast, shape, other, itemsize=s) == 0


def broadcast(paper, x, y):
    return op.add(paper, x, y, broadcast=True)


@pytest.mark.parametrize("s", SIZES)
def test_add_of_a_tensor_with_fewer_dimensions_and_one_sample(s):
    """Nothing; though no number is added up, the gradient is a copy."""
    assert alone(torch.add, broadcast, (1, 5, 8), (5, 8), itemsize=s) == 0


def test_add_of_a_tensor_that_is_not_trained():
    """Nothing."""
    x = rand(3, 8)
    assert alone(torch.add, op.add, (3, 8), batch=[x]) == 0


def test_add_of_two_dtypes():
    """Nothing; the sum is of the wider dtype, and so is its gradient."""

    def write(paper, x):
        half = op.cast(paper, x, 2)
        return op.add(paper, x, half)

    def run(x):
        half = x.bfloat16()
        return x + half

    assert alone(run, write, (3, 8)) == 0


@pytest.mark.parametrize(("shape", "s"), GRID)
@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid"])
def test_relu_tanh_and_sigmoid(shape, s, name):
    """Their output."""
    saved = alone(
        getattr(torch, name),
        lambda paper, x: op.of_output(paper, x, name),
        shape,
        itemsize=s,
    )
    assert saved == s * count(shape)


@pytest.mark.parametrize(("shape", "s"), GRID)
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_gelu_and_silu(shape, s, name):
    """Their input."""
    saved = alone(
        getattr(F, name),
        lambda paper, x: op.of_input(paper, x, name),
        shape,
        itemsize=s,
    )
    assert saved == s * count(shape)


@pytest.mark.parametrize(("shape", "s"), GRID)
def test_product(shape, s):
    """Both factors."""
    saved = alone(torch.mul, op.multiply, shape, shape, itemsize=s)
    assert saved == 2 * s * count(shape)


@pytest.mark.parametrize(("shape", "s"), GRID)
@pytest.mark.parametrize("run", [lambda x: x / 3, lambda x: 3 * x])
def test_product_with_a_number(shape, s, run):
    """Nothing."""
    assert alone(run, op.scale, shape, itemsize=s) == 0


@pytest.mark.parametrize(("shape", "s"), GRID)
def test_dropout(shape, s):
    """A mask, on a CPU of the dtype of its input."""
    saved = alone(lambda x: F.dropout(x, 0.1), op.dropout, shape, itemsize=s)
    assert saved == s * count(shape)


@pytest.mark.parametrize(("shape", "s"), GRID)
def test_softmax(shape, s):
    """Its output."""
    saved = alone(lambda x: x.softmax(-1), op.softmax, shape, itemsize=s)
    assert saved == s * count(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("s", "to"), [(4, 2), (2, 4), (4, 4), (2, 2)])
def test_cast(shape, s, to):
    """Nothing."""
    dtype = {4: torch.float32, 2: torch.bfloat16}[to]
    saved = alone(
        lambda x: x.to(dtype),
        lambda paper, x: op.cast(paper, x, to),
        shape,
        itemsize=s,
    )
    assert saved == 0


# Norms -------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "s"), GRID)
def test_layer_norm(shape, s):
    """Its input, and mean and 1/σ of each token in its own dtype."""
    *rows, width = shape
    saved = alone(
        lambda x, w, b: F.layer_norm(x, (width,), w, b),
        op.layer_norm,
        shape,
        weights=[(width,), (width,)],
        itemsize=s,
    )
    assert saved == s * count(shape) + 2 * s * count(rows)


@pytest.mark.parametrize(("shape", "s"), GRID)
def test_rms_norm(shape, s):
    """In fp32 its input (a copy in a 16-bit model), the normalised input,
    and 1/rms of each token."""
    *rows, width = shape
    saved = alone(
        lambda x, w: F.rms_norm(x, (width,), w, 1e-5),
        op.rms_norm,
        shape,
        weights=[(width,)],
        itemsize=s,
    )
    assert saved == 2 * 4 * count(shape) + 4 * count(rows)


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (2, 4, 3, 3), (1, 16, 5, 2)])
def test_batch_norm(shape, s):
    """Its input, and mean and 1/σ of each channel."""
    if shape == (2, 4, 1, 1):
        shape = (3, 4, 1, 1)
    channels = shape[1]
    saved = alone(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        op.batch_norm,
        shape,
        weights=[(channels,), (channels,)],
        itemsize=s,
    )
    assert saved == s * count(shape) + 2 * s * channels


# Pooling, embedding, loss ------------------------------------------------


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(
    ("kernel", "stride", "side"), [(2, 2, 3), (3, 1, 4), (6, 6, 1)]
)
def test_max_pool(s, kernel, stride, side):
    """Its input, and 8 bytes for the place of each maximum."""
    shape, elements = (2, 4, 6, 6), 2 * 4 * side**2
    saved = alone(
        lambda x: F.max_pool2d(x, kernel, stride),
        lambda paper, x: op.max_pool(paper, x, elements),
        shape,
        itemsize=s,
    )
    assert saved == s * count(shape) + 8 * elements


@pytest.mark.parametrize("s", SIZES)
def test_mean_over_a_picture(s):
    """Nothing."""
    saved = alone(
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda paper, x: op.mean(paper, x, 2 * 4),
        (2, 4, 6, 6),
        itemsize=s,
    )
    assert saved == 0


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("places", [(1,), (7,), (2, 5)])
def test_embedding(s, places):
    """Nothing of its own: the places are the batch."""
    saved = alone(
        lambda table, x: F.embedding(x, table),
        lambda paper, table, x: op.embedding(paper, table, x, 8),
        weights=[(11, 8)],
        batch=[torch.zeros(places, dtype=torch.long)],
        itemsize=s,
    )
    assert saved == 0


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (3, 10), (20, 4)])
def test_cross_entropy(s, rows, classes):
    """The log-probabilities, and the number of targets as a number."""
    saved = alone(
        F.cross_entropy,
        op.cross_entropy,
        (rows, classes),
        batch=[torch.zeros(rows, dtype=torch.long)],
        itemsize=s,
    )
    assert saved == s * rows * classes + s


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


# Attention ---------------------------------------------------------------

HEADS = [
    (2, 4, 4, 3, 6),
    (1, 4, 2, 5, 8),
    (3, 6, 1, 4, 2),
    (2, 2, 2, 64, 8),
]
"""Batch, heads, heads of keys, tokens, numbers of each."""


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(("b", "h", "kv", "t", "d"), HEADS)
def test_fused_attention(s, b, h, kv, t, d):
    """q, k, v, its output, and 4 bytes for each head of a token."""
    saved = alone(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=kv < h
        ),
        lambda paper, q, k, v: op.fused_attention(paper, q, k, v, b * h * t),
        (b, h, t, d),
        (b, kv, t, d),
        (b, kv, t, d),
        itemsize=s,
    )
    assert saved == s * b * t * d * (2 * h + 2 * kv) + 4 * b * h * t


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


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize(("b", "h", "t", "d"), [(2, 4, 3, 6), (1, 3, 5, 2)])
def test_rotary_positions(s, b, h, t, d):
    """The turns, 8 bytes for each pair of a token."""

    def run(x):
        return rotate(x, rotary(t, d))

    def write(paper, x):
        turns = op.constant(paper, t * d // 2, 8)
        return op.rotate_pairs(paper, x, turns, fused=False)

    saved = alone(run, write, (b, h, t, d), itemsize=s)
    assert saved == 8 * t * d // 2


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("times", [2, 4])
def test_repeated_heads(s, times):
    """Nothing."""
    saved = alone(
        lambda x: x.repeat_interleave(times, dim=1),
        lambda paper, x: op.repeat(paper, x, times),
        (2, 3, 4, 8),
        itemsize=s,
    )
    assert saved == 0
