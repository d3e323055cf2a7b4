"""Number formats, computed from their bits."""

import math
from dataclasses import dataclass
from numbers import Real

import torch

from membudget.checks import flag, instance, number, one_of, whole


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    A number is a sign, an exponent field e and a fraction field f of m bits.
    With the bias 2^(exponent bits − 1) − 1 its value is

    - 2^(e − bias) · (1 + f / 2^m), a normal number, for e > 0;
    - 2^(1 − bias) · f / 2^m, a subnormal number or zero, for e = 0.

    In the formats of IEEE 754 (2019, section 3.4) the largest e stands for
    infinity (f = 0) and NaN. ``fp8-e4m3`` uses it for numbers, too, has no
    infinity, and its NaN has all bits set (Micikevicius et al. 2022, arXiv
    2209.05433, table 1).

    Attributes:
        name: a key of :data:`FORMATS`.
        exponent_bits: width of the exponent field.
        fraction_bits: width of the fraction field, m.
        bytes: in which a tensor stores a number. tf32 is how a GPU's matrix
            units read fp32 numbers: 19 bits of 32.
        dtype: PyTorch's, None for tf32.
        infinite: whether the format has infinities. Without them what is
            too large becomes the largest number, as PyTorch casts it since
            2.13; earlier versions make NaN of what is above ``overflow``.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    bytes: int
    dtype: torch.dtype | None
    infinite: bool = True

    def __post_init__(self) -> None:
        instance(self.name, str, "the name of a format", "a string")
        flag(self.infinite, "infinite")
        for name, least, most in (
            ("exponent_bits", 2, 8),
            ("fraction_bits", 1, 23),
            ("bytes", 0, 4),
        ):
            value = whole(getattr(self, name), name, least, most)
            object.__setattr__(self, name, value)
        if self.dtype is not None:
            use = "a torch.dtype or None"
            instance(self.dtype, torch.dtype, "dtype", use)

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def bits(self) -> int:
        """Sign, exponent and fraction."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = 2**self.exponent_bits - 1 - self.infinite
        last = 2**self.fraction_bits - 1 - (not self.infinite)
        return self.value(0, top, last)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all of its fraction bits."""
        return self.value(0, 1, 0)

    @property
    def smallest(self) -> float:
        """The smallest number above zero."""
        return self.value(0, 0, 1)

    @property
    def epsilon(self) -> float:
        """From 1 to the next number."""
        return self.spacing(1.0)

    @property
    def underflow(self) -> float:
        """The largest number that is rounded to zero."""
        return self.smallest / 2

    @property
    def overflow(self) -> float:
        """The smallest number that is too large; ``largest`` + half a step."""
        return self.largest + self.spacing(self.largest) / 2

    def spacing(self, x: float) -> float:
        """From |x|'s binade: the step between neighbouring numbers."""
        x = number(x, "x")
        lowest = 1 - self.bias
        exponent = max(math.frexp(x)[1] - 1, lowest) if x else lowest
        return 2.0 ** (exponent - self.fraction_bits)

    def round(self, x: float) -> float:
        """The format's number nearest to x; a tie goes to the even fraction.

        Args:
            x: infinities and NaN are allowed.
        """
        x = _any(x)
        if math.isnan(x):
            return x
        if not math.isfinite(x) or abs(x) >= self.overflow:
            top = math.inf if self.infinite else self.largest
            return math.copysign(top, x)
        step = self.spacing(x)
        return math.copysign(round(abs(x) / step) * step, x)

    def encode(self, x: float) -> tuple[int, int, int]:
        """Sign, exponent field and fraction field of x, rounded."""
        x = _any(x)
        all_ones = 2**self.exponent_bits - 1
        if math.isnan(x):
            quiet = 2 ** (self.fraction_bits - 1)
            return 0, all_ones, quiet if self.infinite else 2 * quiet - 1
        x = self.round(x)
        sign = int(math.copysign(1, x) < 0)
        if math.isinf(x):
            return sign, all_ones, 0
        steps = int(abs(x) / self.spacing(x))
        if steps < 2**self.fraction_bits:
            return sign, 0, steps
        exponent = math.frexp(x)[1] - 1 + self.bias
        return sign, exponent, steps - 2**self.fraction_bits

    def value(self, sign: int, exponent: int, fraction: int) -> float:
        """The number with these fields."""

        def field(value: int, name: str, width: int) -> int:
            return whole(value, f"the {name} of {self.name}", 0, 2**width - 1)

        sign = field(sign, "sign", 1)
        exponent = field(exponent, "exponent", self.exponent_bits)
        fraction = field(fraction, "fraction", self.fraction_bits)
        scale = -1.0 if sign else 1.0
        if exponent == 2**self.exponent_bits - 1:
            if self.infinite:
                return math.nan if fraction else scale * math.inf
            if fraction == 2**self.fraction_bits - 1:
                return math.nan
        part = fraction / 2**self.fraction_bits
        if exponent == 0:
            return scale * math.ldexp(part, 1 - self.bias)
        return scale * math.ldexp(1 + part, exponent - self.bias)

    def text(self, x: float) -> str:
        """The bits of x: sign, exponent and fraction, a blank between."""
        sign, exponent, fraction = self.encode(x)
        return (
            f"{sign} {exponent:0{self.exponent_bits}b} "
            f"{fraction:0{self.fraction_bits}b}"
        )


def _any(x: float) -> float:
    """The number, infinite or NaN or not."""
    if isinstance(x, Real) and x != x:
        return math.nan
    return number(x, "x", infinite=True)


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, 4, torch.float32),
        Format("tf32", 8, 10, 4, None),
        Format("bf16", 8, 7, 2, torch.bfloat16),
        Format("fp16", 5, 10, 2, torch.float16),
        Format("fp8-e4m3", 4, 3, 1, torch.float8_e4m3fn, infinite=False),
        Format("fp8-e5m2", 5, 2, 1, torch.float8_e5m2),
    )
}
"""The formats by name."""


def format_of(name: str) -> Format:
    """One of :data:`FORMATS`."""
    return FORMATS[one_of(name, FORMATS, "format")]
