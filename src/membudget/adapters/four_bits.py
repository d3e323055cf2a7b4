"""NF4: frozen weights in 4 bits, and what computing with them keeps.

Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3; bit for bit as
bitsandbytes stores them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from membudget.checks import flag, instance, shown

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 levels: quantiles of a normal distribution over the outermost one
(QLoRA, appendix E)."""

BLOCK = 64
"""Weights that share a scale, the largest size among them."""

GROUP = 256
"""Scales that share an fp32 number where they are in 8 bits themselves."""

_LEAST = 1e-38
"""Stands in for the scale of a block of zeros."""


def bits_per_weight(double: bool = True) -> float:
    """Bits of a weight with its share of the scales.

    With an fp32 scale for each block 4 + 32 / 64 = 4.5. With double
    quantisation 4 + 8 / 64 + 32 / (64 · 256) = 4.127, and 32 for each tensor,
    the mean of its scales, which is left out here.

    Args:
        double: whether the scales are in 8 bits themselves.
    """
    if flag(double, "double"):
        return 4 + 8 / BLOCK + 32 / (BLOCK * GROUP)
    return 4 + 32 / BLOCK


class FourBits(NamedTuple):
    """A weight in 4 bits, made by :func:`quantise`.

    Attributes:
        codes: indices into :data:`NF4`, two in a byte, the first in its upper
            half; uint8, of half as many bytes as there are weights.
        scales: one for each block; fp32, or uint8 with double quantisation.
        coarse: of double quantisation: the scale of each group of scales,
            fp32; else None.
        mean: of double quantisation: what was subtracted from the scales
            before, fp32, without a dimension; else None.
        shape: the weight's.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    coarse: torch.Tensor | None
    mean: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.nbytes for t in self if isinstance(t, torch.Tensor))

    def fine(self) -> torch.Tensor:
        """The scale of each block, in fp32."""
        if self.coarse is None or self.mean is None:
            return self.scales
        levels = _eight_bits().to(self.scales.device)
        scales = levels.index_select(0, self.scales.int())
        coarse = self.coarse[:, None].expand(-1, GROUP).flatten()
        return scales.mul_(coarse[: len(scales)]).add_(self.mean)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the codes stand for, computed in fp32.

        Args:
            dtype: of floating-point numbers.

        Returns:
            A new tensor of the weight's shape.

        Raises:
            ValueError: a dtype of whole numbers.
        """
        instance(dtype, torch.dtype, "dtype", "a torch.dtype")
        if not dtype.is_floating_point:
            raise ValueError(
                f"dtype is {dtype}: use one of floating-point numbers, such "
                "as torch.bfloat16"
            )
        levels = torch.tensor(NF4, device=self.codes.device)
        of_a_byte = torch.cartesian_prod(levels, levels)
        numbers = F.embedding(self.codes.int(), of_a_byte).view(-1, BLOCK)
        numbers *= self.fine()[:, None]
        return numbers.view(self.shape).to(dtype)


def quantise(weight: torch.Tensor, double: bool = True) -> FourBits:
    """A weight in NF4, block by block.

    Each block of 64 is divided by the largest size in it, its scale, and each
    of its numbers becomes the index of the nearest level. With double
    quantisation the scales, less their mean, are in 8 bits, in groups of 256,
    by the levels of Dettmers 2016 (arXiv 1511.04561).

    Args:
        weight: frozen; of any shape, in which 64 divides the number of
            weights; of finite floating-point numbers.
        double: whether the scales are in 8 bits themselves.

    Raises:
        TypeError: no tensor.
        ValueError: a tensor on meta, of whole numbers, with infinities or
            NaN, of another size, or one that is trained.
    """
    flag(double, "double")
    numbers = _quantisable(weight).float().reshape(-1, BLOCK)
    codes, scales = _nearest(numbers, torch.tensor(NF4))
    high, low = codes.view(-1, 2).unbind(1)
    packed, shape = (high << 4) | low, tuple(weight.shape)
    if not double:
        return FourBits(packed, scales, None, None, shape)
    mean = scales.mean()
    filled = F.pad(scales - mean, (0, -len(scales) % GROUP))
    small, coarse = _nearest(filled.view(-1, GROUP), _eight_bits())
    small = small.flatten()[: len(scales)].clone()
    return FourBits(packed, small, coarse, mean, shape)


def _nearest(
    rows: torch.Tensor, levels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each number over its row's largest size, the nearest level's index.

    And those sizes. Times the inverse, as bitsandbytes does it: a division
    would round differently now and then.
    """
    largest = rows.abs().amax(1)
    inverse = 1 / largest.clamp(min=_LEAST)
    between = ((levels[:-1] + levels[1:]) / 2).to(rows.device)
    codes = torch.bucketize(rows * inverse[:, None], between)
    return codes.to(torch.uint8), largest


@cache
def _eight_bits() -> torch.Tensor:
    """256 levels from -1 to 1 over seven decades, finer where larger."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        levels += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(levels))


def _quantisable(weight: torch.Tensor) -> torch.Tensor:
    """The weight, detached, if it can be put in 4 bits."""
    instance(weight, torch.Tensor, "weight", "a tensor")
    if weight.requires_grad:
        raise ValueError(
            "the weight is trained (requires_grad), and 4 bits have no "
            "gradient: freeze it, weight.requires_grad_(False), and train an "
            "adapter beside it"
        )
    if not weight.is_floating_point():
        raise ValueError(
            f"the weight is {weight.dtype}: use one of floating-point numbers"
        )
    if weight.is_meta:
        raise ValueError(
            "the weight is on meta and has no numbers to look at: load it "
            "first, and take bits_per_weight() for its bytes alone"
        )
    if not weight.numel() or weight.numel() % BLOCK:
        raise ValueError(
            f"the weight has shape {shown(tuple(weight.shape))}, "
            f"{weight.numel()} numbers: use a number that {BLOCK}, a block's, "
            "divides, or leave this weight in 16 bits"
        )
    if not weight.isfinite().all():
        raise ValueError(
            "the weight has infinities or NaN, and a block of them has no "
            "scale: use finite numbers"
        )
    return weight.detach()


class Quantised4(nn.Module):
    """A linear layer without a bias, its frozen weight in 4 bits.

    Its scales are in 8 bits. Its tensors are buffers: no optimizer sees them,
    and they move with the model but are not cast by ``model.bfloat16()``.

    Args:
        weight: of shape (outputs, inputs), frozen, as :func:`quantise` takes
            it.
        plain: dequantise by ordinary operators. Then autograd keeps each
            dequantised weight until the backward pass. Otherwise nothing is
            kept: the backward pass dequantises again.

    Raises:
        TypeError: no tensor.
        ValueError: a weight that is no matrix, or that :func:`quantise`
            refuses.

    Example:
        >>> linear.requires_grad_(False)
        >>> frozen = Quantised4(linear.weight)
    """

    def __init__(self, weight: torch.Tensor, plain: bool = False) -> None:
        super().__init__()
        self.plain = flag(plain, "plain")
        bits = quantise(weight)
        if len(bits.shape) != 2:
            raise ValueError(
                f"the weight has shape {shown(bits.shape)}: use a matrix, "
                "(outputs, inputs)"
            )
        self.out_features, self.in_features = bits.shape
        for name in ("codes", "scales", "coarse", "mean"):
            self.register_buffer(name, getattr(bits, name))

    @property
    def bits(self) -> FourBits:
        """The weight, as it lies here."""
        shape = (self.out_features, self.in_features)
        return FourBits(self.codes, self.scales, self.coarse, self.mean, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the dequantised weight, in x's dtype.

        Args:
            x: of shape (…, inputs), of floating-point numbers.

        Raises:
            TypeError: no tensor.
            ValueError: another width, or whole numbers.
        """
        instance(x, torch.Tensor, "x", "a tensor")
        if x.shape[-1:] != (self.in_features,) or not x.is_floating_point():
            raise ValueError(
                f"x is {x.dtype} of shape {shown(tuple(x.shape))}: use "
                f"floating-point numbers of shape (…, {self.in_features})"
            )
        if self.plain:
            return F.linear(x, self.bits.dequantise(x.dtype))
        return _Product.apply(x, self.bits)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "Quantised4":
        """Move the buffers; their bits stay as they are."""

        def moved(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return fn(t)
            return fn(t.view(torch.int32)).view(t.dtype)

        return super()._apply(moved, recurse)


class _Product(torch.autograd.Function):
    """x times a transposed weight, which is dequantised each time anew."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bits: FourBits) -> torch.Tensor:
        ctx.bits = bits  # the layer's own tensors, no others
        return F.linear(x, bits.dequantise(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.bits.dequantise(gradient.dtype), None
