"""The loss scale: what it saves from underflow, and how it is found."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from membudget.checks import (
    flag,
    instance,
    iterable,
    listed,
    number,
    whole,
)
from membudget.precision.formats import FORMATS, format_of

fp32 = FORMATS["fp32"].round


@dataclass(frozen=True)
class Lost:
    """What a format loses of numbers that were multiplied by a scale.

    Attributes:
        numbers: how many are not zero to begin with.
        below: share of them that becomes zero.
        subnormal: share that keeps fewer than all fraction bits.
        above: share that becomes infinite (or the largest number, in a
            format without infinities).
    """

    numbers: int
    below: float
    subnormal: float
    above: float


def lost(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    format: str = "fp16",
    scale: float = 1.0,
) -> Lost:
    """Count what ``scale`` × the numbers lose in a format.

    Args:
        tensors: fp32 or fp64 numbers, finite.
        format: one of :data:`membudget.precision.FORMATS`.
        scale: the loss scale, above zero.

    Raises:
        ValueError: numbers that are not finite.
    """
    kind, scale = format_of(format), float(number(scale, "scale", above=0))
    size = _magnitudes(tensors) * scale
    count = max(size.numel(), 1)
    normal = kind.smallest_normal - kind.smallest / 2
    zero = size <= kind.underflow
    return Lost(
        numbers=size.numel(),
        below=zero.sum().item() / count,
        subnormal=((size < normal) & ~zero).sum().item() / count,
        above=(size >= kind.overflow).sum().item() / count,
    )


def best_scale(
    tensors: torch.Tensor | Iterable[torch.Tensor], format: str = "fp16"
) -> float:
    """The largest power of two that makes none of the numbers too large.

    Raises:
        ValueError: numbers that are not finite, or all of them zero.
    """
    kind = format_of(format)
    size = _magnitudes(tensors)
    if not size.numel():
        raise ValueError(
            "all numbers are zero, so every scale will do: hand over the "
            "gradients of a backward pass"
        )
    largest = size.max().item()
    exponent = math.floor(math.log2(kind.overflow) - math.log2(largest)) + 1
    exponent = min(exponent, 1023)  # of fp64
    while largest * 2.0**exponent >= kind.overflow:
        exponent -= 1
    return 2.0**exponent


def binades(
    tensors: torch.Tensor | Iterable[torch.Tensor],
) -> dict[int, int]:
    """How many numbers have a size in [2^e, 2^(e + 1)), by e, ascending.

    Zeros are left out.

    Raises:
        ValueError: numbers that are not finite.
    """
    exponents = torch.frexp(_magnitudes(tensors))[1] - 1
    values, counts = exponents.unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class DynamicScale:
    """The rule by which ``torch.amp.GradScaler`` finds its loss scale.

    After a step with an overflow the scale is halved; after ``interval``
    steps in a row without one it is doubled (Micikevicius et al. 2018, arXiv
    1710.03740, section 3.2; the numbers are PyTorch's defaults).

    Args:
        start: the scale of the first step, in fp32 above 0.
        interval: steps.
    """

    start: float = 65536.0
    interval: int = 2000

    def __post_init__(self) -> None:
        number(fp32(number(self.start, "start")), "start in fp32", above=0)
        whole(self.interval, "interval")

    def scales(self, overflows: Sequence[bool]) -> list[float]:
        """The scale of each step, and last the one of the step to come.

        It is an fp32 number, and does not grow beyond the largest.

        Args:
            overflows: for each step whether it met an overflow.
        """
        overflows = [
            flag(overflow, "an overflow")
            for overflow in listed(overflows, "overflows", "True and False", 0)
        ]
        scales, clean = [fp32(self.start)], 0
        for overflow in overflows:
            scale, clean = scales[-1], 0 if overflow else clean + 1
            if overflow:
                scale = fp32(scale / 2)
            elif clean == self.interval:
                grown = fp32(scale * 2)
                scale, clean = grown if math.isfinite(grown) else scale, 0
            scales.append(scale)
        return scales


class ScaleTrace:
    """Write down the loss scale of every step of a loop.

    Args:
        scaler: the loop's scaler; its ``update`` is watched in the block.

    Attributes:
        scales: the scale of each step.
        overflows: for each step whether it was skipped because of an
            overflow: whether the scale fell.

    Raises:
        ValueError: a scaler that is switched off, or that is traced already.

    Example:
        >>> with ScaleTrace(scaler) as trace:
        ...     train()
        >>> trace.scales, trace.overflows
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        use = "the loop's torch.amp.GradScaler"
        instance(scaler, torch.amp.GradScaler, "scaler", use)
        if not scaler.is_enabled():
            raise ValueError(
                "the scaler is switched off (enabled=False) and has no "
                "scale: trace one that is enabled, for fp16"
            )
        self.scaler = scaler
        self.scales: list[float] = []
        self.overflows: list[bool] = []

    def __enter__(self) -> "ScaleTrace":
        if "update" in vars(self.scaler):
            raise ValueError(
                "the scaler is traced already: use one trace at a time"
            )
        update = self.scaler.update

        def traced(new_scale: float | torch.Tensor | None = None) -> None:
            before = self.scaler.get_scale()
            update(new_scale)
            self.scales.append(before)
            fell = self.scaler.get_scale() < before
            self.overflows.append(new_scale is None and fell)

        self.scaler.update = traced
        return self

    def __exit__(self, *error: object) -> None:
        del self.scaler.update


def _magnitudes(
    tensors: torch.Tensor | Iterable[torch.Tensor],
) -> torch.Tensor:
    """Sizes of the numbers that are not zero, in fp64."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    parts = []
    for tensor in iterable(tensors, "tensors", "tensors"):
        if not isinstance(tensor, torch.Tensor) or not (
            tensor.is_floating_point()
        ):
            raise TypeError(
                f"{getattr(tensor, 'dtype', type(tensor).__name__)} is no "
                "tensor of numbers with a fraction: hand over gradients"
            )
        if tensor.is_meta:
            raise ValueError(
                "a tensor on meta has no numbers: hand over gradients of a "
                "real backward pass"
            )
        parts.append(tensor.detach().flatten().to("cpu", torch.float64))
    size = torch.cat(parts).abs() if parts else torch.empty(0)
    if not size.isfinite().all():
        raise ValueError(
            "some numbers are infinite or NaN: measure gradients in fp32, "
            "without a loss scale"
        )
    return size[size > 0]
