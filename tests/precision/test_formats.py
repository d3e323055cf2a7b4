"""Formats from their bits, held against PyTorch's tensors and fractions."""

import math
from fractions import Fraction
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision_helpers import same, says

from membudget.precision import FORMATS, Format
from tests.soak import examples, part_of
from tests.versions import here

STORED = [name for name, kind in FORMATS.items() if kind.dtype is not None]
SMALL = [name for name in STORED if name != "fp32"]
WHOLE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def split(kind, pattern):
    """Sign, exponent field and fraction field of a bit pattern."""
    fraction = pattern & (2**kind.fraction_bits - 1)
    exponent = pattern >> kind.fraction_bits & (2**kind.exponent_bits - 1)
    return pattern >> (kind.bits - 1), exponent, fraction


def patterns(kind, numbers):
    """The bit patterns of fp32 numbers after PyTorch cast them."""
    cast = torch.tensor(numbers).to(kind.dtype)
    return cast.view(WHOLE[kind.bytes]).to(torch.int64).tolist()


@cache
def fp32_numbers():
    """fp32 numbers of all sizes, and more of those near the small formats."""
    generator = torch.Generator().manual_seed(0)
    count = examples(100)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    found = bits.to(torch.int32).view(torch.float32).tolist()
    size = torch.randint(-30, 30, (count,), generator=generator)
    near = torch.randn(count, generator=generator) * 2.0**size
    found += near.tolist()
    return [x for x in found if not math.isnan(x)]


def as_fp32(x):
    return torch.tensor(x, dtype=torch.float64).float().item()


def neighbours(x):
    """The fp32 numbers just below x, x itself and just above."""
    t = torch.tensor(x)
    return [
        torch.nextafter(t, torch.tensor(-math.inf)).item(),
        t.item(),
        torch.nextafter(t, torch.tensor(math.inf)).item(),
    ]


def ties(kind):
    """Half-way between two neighbours of a format, in fp32, and beside."""
    found = []
    fields = [0, 1, 2, 2**kind.fraction_bits - 2, 2**kind.fraction_bits - 1]
    for exponent in range(2**kind.exponent_bits - 1):
        for fraction in fields:
            low = kind.value(0, exponent, fraction)
            half = low + kind.spacing(low) / 2 if low else kind.smallest / 2
            if as_fp32(half) == half:
                found += neighbours(half)
    return found


# Against PyTorch ---------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_bit_patterns(name):
    """All of 8 bits, and in a soak all of 16."""
    kind = FORMATS[name]
    every = patterns(kind, fp32_numbers())
    if name in SMALL:
        every = part_of(range(2**kind.bits), Random(0), 4000)
    raw = torch.tensor(every).to(WHOLE[kind.bytes])
    theirs = raw.view(kind.dtype).double().tolist()
    for pattern, x in zip(every, theirs, strict=True):
        fields = split(kind, pattern)
        assert same(kind.value(*fields), x), fields
        assert same(kind.round(x), x), fields
        if not math.isnan(x):
            assert kind.encode(x) == fields


@pytest.mark.parametrize("name", SMALL)
def test_rounding_is_pytorchs(name):
    kind = FORMATS[name]
    numbers = fp32_numbers() + ties(kind)
    numbers += [0.0, math.inf, *neighbours(as_fp32(kind.largest))]
    numbers += [*neighbours(kind.overflow), *neighbours(kind.underflow)]
    numbers += [-x for x in numbers]
    theirs = torch.tensor(numbers).to(kind.dtype).double().tolist()
    encoded = patterns(kind, numbers)
    nan_above = math.inf
    if not kind.infinite and here("e4m3 has an overflow"):
        nan_above = kind.overflow
    for x, y, pattern in zip(numbers, theirs, encoded, strict=True):
        if abs(x) > nan_above:
            assert math.isnan(y) and abs(kind.round(x)) == kind.largest
            continue
        assert same(kind.round(x), y), x
        assert kind.encode(x) == split(kind, pattern), x


def test_rounding_fp64_to_fp32_is_pytorchs():
    kind = FORMATS["fp32"]
    generator = torch.Generator().manual_seed(1)
    count = examples(60)
    size = torch.randint(-152, 130, (count,), generator=generator)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    x = (x * 2.0 ** size.double()).tolist()
    x += [kind.overflow, kind.largest, kind.smallest, kind.underflow]
    x += [math.nextafter(kind.overflow, 0), math.nextafter(kind.underflow, 1)]
    x += [2.0**200, 5e-324, 0.0, math.inf]
    x += [1.5 * kind.smallest, 1 + 2.0**-24, 1 + 3 * 2.0**-24]
    x += [-number for number in x]
    theirs = torch.tensor(x, dtype=torch.float64).float().double().tolist()
    for number, y in zip(x, theirs, strict=True):
        assert same(kind.round(number), y), number


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_nan(name):
    kind = FORMATS[name]
    assert math.isnan(kind.round(math.nan))
    assert math.isnan(kind.value(*kind.encode(math.nan)))
    if kind.dtype is not None:
        cast = torch.tensor([math.nan]).to(kind.dtype).double()
        assert math.isnan(cast.item())


@pytest.mark.parametrize("name", STORED)
def test_extremes_are_pytorchs(name):
    kind = FORMATS[name]
    info = torch.finfo(kind.dtype)
    assert kind.largest == info.max == -info.min
    assert kind.smallest_normal == info.smallest_normal
    assert kind.epsilon == info.eps
    assert kind.bits == info.bits == 8 * kind.bytes
    assert kind.bytes == torch.empty(0, dtype=kind.dtype).element_size()


def test_the_extremes_that_everybody_quotes():
    fp16 = FORMATS["fp16"]
    assert (fp16.largest, fp16.overflow) == (65504, 65520)
    assert (fp16.smallest_normal, fp16.smallest) == (2.0**-14, 2.0**-24)
    assert fp16.underflow == 2.0**-25
    assert fp16.epsilon == 2.0**-10 == FORMATS["tf32"].epsilon
    assert FORMATS["fp8-e4m3"].largest == 448
    assert FORMATS["fp8-e5m2"].largest == 57344
    widths = {name: (f.bias, f.bits, f.bytes) for name, f in FORMATS.items()}
    assert widths == {
        "fp32": (127, 32, 4),
        "tf32": (127, 19, 4),
        "bf16": (127, 16, 2),
        "fp16": (15, 16, 2),
        "fp8-e4m3": (7, 8, 1),
        "fp8-e5m2": (15, 8, 1),
    }


# Thresholds, from both sides ---------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_what_becomes_zero_and_what_is_too_large(name):
    kind = FORMATS[name]
    least, edge = kind.underflow, kind.overflow
    top = math.inf if kind.infinite else kind.largest
    for x, y in (
        (least, 0),
        (math.nextafter(least, 1), kind.smallest),
        (math.nextafter(edge, 0), kind.largest),
        (edge, top),
        (math.inf, top),
    ):
        assert kind.round(x) == y == -kind.round(-x)


@pytest.mark.parametrize("name", FORMATS)
def test_spacing_is_the_distance_of_neighbours(name):
    kind = FORMATS[name]
    last = 2**kind.exponent_bits - 2
    for exponent in (0, 1, 2, kind.bias - 1, kind.bias, kind.bias + 1, last):
        low = kind.value(0, exponent, 1)
        high = kind.value(0, exponent, 2)
        for x in (low, (low + high) / 2, kind.value(0, exponent, 0)):
            assert kind.spacing(x) == high - low == kind.spacing(-x)
    assert kind.spacing(0.0) == kind.smallest == kind.spacing(kind.smallest)


# Against a reference of its own ------------------------------------------


def nearest(x, exponent_bits, fraction_bits, infinite=True):
    """Round with fractions: the candidates, their distance, the even one."""
    bias = 2 ** (exponent_bits - 1) - 1
    x, sign = Fraction(abs(x)), math.copysign(1, x)
    exponent = 1 - bias
    while x >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - fraction_bits)
    low = x // step
    below, above = x - low * step, (low + 1) * step - x
    up = above < below or (above == below and low % 2)
    found = (low + 1 if up else low) * step
    if infinite and found >= Fraction(2) ** (bias + 1):
        return sign * math.inf
    return sign * float(found)


@pytest.mark.parametrize("name", ["tf32", "fp8-e5m2"])
def test_rounding_by_fractions(name):
    kind = FORMATS[name]
    step, half = kind.epsilon, kind.spacing(kind.largest) / 2
    numbers = [1 + k * step / 4 for k in range(17)]
    numbers += [kind.smallest * k / 4 for k in range(17)]
    numbers += [kind.largest - half * k / 4 for k in range(-9, 9)]
    numbers += [2 - step / 4, 2 - step / 2, 1 - step / 4, 1 - step / 8]
    for x in filter(math.isfinite, numbers + fp32_numbers()):
        for value in (x, -x):
            y = nearest(value, kind.exponent_bits, kind.fraction_bits)
            assert same(kind.round(value), y), value


@settings(max_examples=examples(10))
@given(
    st.floats(width=32, allow_nan=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from(sorted(FORMATS)),
)
def test_what_rounding_has_to_be(other, x, name):
    kind = FORMATS[name]
    y = kind.round(x)
    assert same(kind.round(y), y)
    assert same(kind.round(-x), -y)
    assert math.copysign(1, y) == math.copysign(1, x)
    if abs(x) < kind.overflow:
        assert abs(x - y) <= kind.spacing(x) / 2
    if math.isfinite(y):
        assert same(kind.value(*kind.encode(x)), y)
    low, high = sorted((x, other))
    assert kind.round(low) <= kind.round(high)


def test_any_format_can_be_made():
    """fp4 (e2m1) has no infinity and no NaN in use, e3m2 has both."""
    e3m2 = Format("fp6", 3, 2, 1, None)
    found = sorted({e3m2.value(0, e, f) for e in range(7) for f in range(4)})
    assert found[:6] == [0, 0.0625, 0.125, 0.1875, 0.25, 0.3125]
    assert e3m2.largest == found[-1] == 14
    assert (e3m2.smallest, e3m2.smallest_normal) == (0.0625, 0.25)
    assert (e3m2.underflow, e3m2.overflow) == (0.03125, 15)


# Text --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "x", "text"),
    [
        ("fp16", 1.0, "0 01111 0000000000"),
        ("fp16", -0.0, "1 00000 0000000000"),
        ("fp16", 65520.0, "0 11111 0000000000"),
        ("bf16", 0.1, "0 01111011 1001101"),
        ("bf16", -3.0, "1 10000000 1000000"),
        ("fp8-e4m3", math.inf, "0 1111 110"),
        ("fp8-e4m3", math.nan, "0 1111 111"),
        ("tf32", 1 + 2.0**-10, "0 01111111 0000000001"),
    ],
)
def test_the_bits_as_text(name, x, text):
    assert FORMATS[name].text(x) == text


# Fields ------------------------------------------------------------------


def test_fields_that_do_not_fit():
    mosts = {"sign": 1, "exponent": 31, "fraction": 1023}
    for place, (name, most) in enumerate(mosts.items()):
        fields = [0, 0, 0]
        fields[place] = most + 1
        message = (
            f"the {name} of fp16 is {most + 1}: use a whole number from 0 to "
            f"{most}"
        )
        with pytest.raises(ValueError, match=says(message)):
            FORMATS["fp16"].value(*fields)
