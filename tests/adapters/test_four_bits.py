"""NF4 against its definition, its own bytes, and bitsandbytes."""

import re
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.adapters import (
    BLOCK,
    GROUP,
    NF4,
    FourBits,
    Quantised4,
    bits_per_weight,
    quantise,
)
from membudget.measuring import PeakTracker, witness

torch.set_num_threads(1)

BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16, torch.float16)
SHAPES = [(64,), (3, 64), (40, 64), (512, 512), (300, 320), (2, 4, 8)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
either = pytest.mark.parametrize("double", [False, True])


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(shape, generator=generator)).to(dtype)


# What 4 bits hold


def test_levels_are_quantiles_over_the_outermost():
    outermost = 1 - (1 / 30 + 1 / 32) / 2  # Yoshida 2023, arXiv 2306.06965
    below = torch.linspace(1 - outermost, 0.5, 8, dtype=torch.float64)
    above = torch.linspace(0.5, outermost, 9, dtype=torch.float64)
    points = torch.special.ndtri(torch.cat([below[:-1], above]))
    levels = torch.tensor(NF4, dtype=torch.float64)
    torch.testing.assert_close(points / points[-1], levels, rtol=0, atol=1e-6)


def test_each_number_becomes_the_nearest_level():
    weight = normal(64, 64)
    blocks = weight.double().view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4, dtype=torch.float64)
    far = (blocks[..., None] / scales[..., None] - levels).abs()
    found = quantise(weight, double=False).dequantise(torch.float64)
    mine = (found.view(-1, BLOCK) - blocks).abs() / scales
    torch.testing.assert_close(mine, far.amin(2), rtol=0, atol=1e-6)


def test_the_first_of_two_lies_in_the_upper_half_of_a_byte():
    weight = torch.zeros(BLOCK)
    weight[:2] = torch.tensor([-3.0, 3.0])
    bits = quantise(weight, double=False)
    assert bits.codes[0] == 0x0F
    assert set(bits.codes[1:].tolist()) == {0x77}
    assert bits.scales.tolist() == [3]
    assert bits.dequantise(torch.float32).tolist() == weight.tolist()


@either
def test_a_block_of_zeros(double):
    bits = quantise(torch.zeros(2, BLOCK), double)
    assert not bits.dequantise(torch.float32).any()


@each_shape
def test_numbers_on_levels_stay_as_they_are(shape):
    bits = quantise(normal(*shape), double=False)
    again = quantise(bits.dequantise(torch.float32), double=False)
    assert torch.equal(again.codes, bits.codes)
    assert torch.equal(again.scales, bits.scales)


def test_double_quantisation_moves_a_scale_by_little():
    weight = normal(2048, 64)
    one, two = quantise(weight, double=False), quantise(weight)
    assert torch.equal(one.codes, two.codes)
    spread = (one.scales - one.scales.mean()).abs().amax()
    # neighbouring levels of 8 bits are at most 0.0141 apart, but for 1
    assert (one.fine() - two.fine()).abs().amax() <= 0.0071 * spread


# Bytes


@either
@each_shape
def test_bytes(shape, double):
    bits = quantise(normal(*shape, dtype=BF16), double)
    count = torch.Size(shape).numel()
    blocks = count // BLOCK
    scales = blocks + 4 * ceil(blocks / GROUP) + 4 if double else 4 * blocks
    tensors = [t for t in bits if isinstance(t, torch.Tensor)]
    held = sum(t.untyped_storage().nbytes() for t in tensors)
    assert bits.nbytes == held == count // 2 + scales


@either
def test_bits_per_weight(double):
    count = 4 * BLOCK * GROUP
    bits = quantise(normal(count), double)
    assert bits_per_weight(double) == 8 * (bits.nbytes - 4 * double) / count


# bitsandbytes


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not here to compare with"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_shape
def test_codes_and_values_are_those_of_bitsandbytes(bnb, shape, dtype):
    weight = normal(*shape, dtype=dtype)
    weight[:1] = 0
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    bits = quantise(weight, double=False)
    assert torch.equal(bits.codes, packed.view(-1))
    assert torch.equal(bits.scales, state.absmax)
    theirs = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(bits.dequantise(dtype), theirs.view(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_shape
def test_scales_in_8_bits_are_those_of_bitsandbytes(bnb, shape, dtype):
    weight = normal(*shape, dtype=dtype)
    packed, state = bnb.functional.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=True
    )
    bits = quantise(weight)
    assert torch.equal(bits.coarse, state.state2.absmax)
    assert torch.equal(bits.mean, state.offset)
    # Its kernel for a CPU rounds to one of 65 536 numbers before it looks for
    # the nearest level; what it does with fp64 looks at once.
    scales = quantise(weight, double=False).scales - state.offset
    exact, _ = torch.ops.bitsandbytes.quantize_blockwise.default(
        scales.double(), state.state2.code, GROUP
    )
    if len(scales) > 1:  # one scale is its own mean, and its code no matter
        assert torch.equal(bits.scales, exact.view(-1))
    taken = FourBits(
        packed.view(-1), state.absmax, bits.coarse, bits.mean, bits.shape
    )
    theirs = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(taken.dequantise(dtype), theirs.view(shape))


def their_layer(bnb, weight):
    layer = bnb.nn.Linear4bit(
        *reversed(weight.shape), bias=False, compute_dtype=BF16
    )
    held = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    layer.weight = held._quantize("cpu")
    return layer


def test_a_layer_computes_what_that_of_bitsandbytes_does(bnb):
    weight = normal(128, 192, dtype=BF16)
    mine, theirs = Quantised4(weight), their_layer(bnb, weight)
    mine.scales.copy_(theirs.weight.quant_state.absmax)
    for one, other in zip(passed(mine), passed(theirs), strict=True):
        assert torch.equal(one, other)


def test_bitsandbytes_dequantises_in_2_bytes_a_weight(bnb):
    weight = normal(512, 512, dtype=BF16)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    most = witness(lambda: bnb.functional.dequantize_4bit(packed, state))
    assert most == 2 * weight.numel()


# Computing with it


def passed(layer, shape=(2, 5, 192)):
    """What comes out, and the gradient of what went in."""
    x = normal(*shape, dtype=BF16).requires_grad_()
    y = layer(x)
    y.backward(normal(*y.shape, dtype=BF16, seed=1))
    return y.detach(), x.grad


@pytest.mark.parametrize("plain", [False, True])
def test_gradients_are_those_of_the_dequantised_weight(plain):
    layer = Quantised4(normal(128, 192), plain=plain)
    weight = layer.bits.dequantise(BF16)
    expected = passed(lambda x: F.linear(x, weight))
    for one, other in zip(passed(layer), expected, strict=True):
        assert torch.equal(one, other)


class Adapted(nn.Module):
    """A layer, and a LoRA of rank 2 beside it."""

    def __init__(self, base, width):
        super().__init__()
        self.base = base
        self.a = nn.Linear(width, 2, bias=False, dtype=BF16)
        self.b = nn.Linear(2, width, bias=False, dtype=BF16)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def chain(layers, width=256, rows=8):
    """A step of a chain, and what is there before it."""
    model = nn.Sequential(*[Adapted(layer, width) for layer in layers])
    x = normal(rows, width, dtype=BF16)

    def step():
        model(x).float().square().mean().backward()
        model.zero_grad()

    return model, x, step


def above(chained):
    """The most bytes above the start, by the tracker and the witness."""
    *before, step = chained
    with PeakTracker(*before) as tracker:
        step()
    assert witness(step) == tracker.peak - tracker.start
    return tracker.peak - tracker.start


def kept(chained):
    model, x, _ = chained
    with PeakTracker(model, x) as tracker:
        y = model(x)
        assert y.requires_grad
        return tracker.live - tracker.start


def test_the_plain_way_keeps_each_dequantised_weight():
    def layers(plain):
        weights = [normal(256, 256, seed=seed) for seed in range(5)]
        return [Quantised4(w, plain=plain) for w in weights]

    plain, function = chain(layers(True)), chain(layers(False))
    # no gradient goes to the data: the first layer's weight is not kept
    assert kept(plain) - kept(function) == 4 * 256**2 * 2
    assert above(plain) - above(function) > 2 * 256**2 * 2


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_dequantising_takes_6_bytes_a_weight_for_bf16(dtype):
    bits = quantise(normal(512, 512))
    most = witness(lambda: bits.dequantise(dtype))
    scales = 4 * 512**2 // BLOCK
    assert 6 * 512**2 <= most <= 6 * 512**2 + 2 * scales


def test_nothing_is_trained_and_no_cast_changes_it():
    layer = Quantised4(normal(64, 128))
    before = layer.bits
    assert not list(layer.parameters())
    layer.bfloat16().half().to(torch.float64)
    for one, other in zip(layer.bits[:4], before[:4], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert (layer.out_features, layer.in_features) == (64, 128)


def test_state_and_device():
    one, two = (Quantised4(normal(64, 128, seed=s)) for s in (0, 1))
    two.load_state_dict(one.state_dict())
    x = normal(3, 128)
    assert torch.equal(one(x), two(x))
    assert two.to("meta")(x.to("meta")).shape == (3, 64)


# What is refused


@pytest.mark.parametrize(
    ("weight", "error", "says"),
    [
        ([1.0] * 64, TypeError, "use a tensor"),
        (nn.Linear(64, 64).weight, ValueError, "4 bits have no gradient"),
        (torch.ones(64, dtype=torch.int64), ValueError, "is torch.int64"),
        (torch.ones(64, device="meta"), ValueError, "is on meta"),
        (torch.ones(3, 65), ValueError, "195 numbers: use a number that 64"),
        (torch.ones(0, 64), ValueError, "0 numbers: use a number that 64"),
        (torch.full((64,), torch.inf), ValueError, "infinities or NaN"),
        (torch.full((64,), torch.nan), ValueError, "infinities or NaN"),
    ],
)
def test_refused_weights(weight, error, says):
    for make in (quantise, Quantised4):
        with pytest.raises(error, match=re.escape(says)):
            make(weight)


def test_refused_otherwise():
    with pytest.raises(ValueError, match="use a matrix"):
        Quantised4(torch.ones(64))
    layer = Quantised4(torch.ones(2, 64))
    for x in (torch.ones(3, 2), torch.ones(64, dtype=torch.int64)):
        with pytest.raises(ValueError, match=re.escape("(…, 64)")):
            layer(x)
    with pytest.raises(ValueError, match="floating-point"):
        layer.bits.dequantise(torch.uint8)
