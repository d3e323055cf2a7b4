"""The loss-scale widget: gradients by binade between two walls."""

from collections.abc import Iterable
from math import log2
from typing import Any

import torch
import traitlets

from membudget.checks import iterable, number
from membudget.precision import best_scale, binades, format_of, lost
from membudget.widgets.base import Checked, Widget

FORMATS = ("fp16", "bf16", "fp8-e5m2", "fp8-e4m3")
"""Among which the reader can choose."""

LEAST, MOST = -12, 24
"""The loss scale is 2 to the power of these at least and at most."""

MOST_BINADES = 56
"""Of the histogram; the first holds what is smaller, too."""


def _scale(value: Any, name: str) -> float:
    if number(value, name) not in [2.0**e for e in range(LEAST, MOST + 1)]:
        raise ValueError(
            f"{name} is {value!r}: use a power of two, from 2**{LEAST} to "
            f"2**{MOST}"
        )
    return int(value) if value >= 1 else float(value)


class LossScale(Widget):
    """What a format loses of gradients, for every loss scale.

    Gradients by binade, which the loss scale moves between two walls: what
    a format makes zero, and what is too large for it
    (:func:`membudget.precision.lost`).

    Args:
        gradients: finite fp32 tensors, not all zero.
        format: one of :data:`FORMATS`.
        scale: the loss scale, a power of two from 2**-12 to 2**24.
        label: what the gradients are of, in a few words; shown as text.

    Attributes:
        histogram: what the widget shows, for every format and scale.

    Example:
        >>> widget = LossScale([p.grad for p in model.parameters()])
        >>> widget.scale = 2**16
    """

    name = "lossscale"
    named = ("format", "scale")

    format = traitlets.Enum(FORMATS, "fp16").tag(sync=True)
    scale = Checked(_scale, 1).tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    histogram = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(
        self, gradients: Iterable[torch.Tensor], **traits: Any
    ) -> None:
        self.set_trait("histogram", _histogram(gradients))
        super().__init__(**traits)

    def sentence(self) -> str:
        """What is lost at this scale."""
        row = round(log2(self.scale)) - LEAST
        below, _, above = self.histogram["lost"][self.format][row]
        count = self.histogram["gradients"]
        return (
            f"At a loss scale of {self.scale:g}, {self.format} makes zero of "
            f"{below / count:.1%} of {count:,} gradients, and {above:,} are "
            "too large."
        )


def _histogram(gradients: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Gradients by binade, and how many are lost at every scale.

    ``lost``: for each format and scale how many become zero, how many
    subnormal, and how many are too large. ``limits``: log2 of where that
    begins.
    """
    if isinstance(gradients, torch.Tensor):
        gradients = [gradients]
    gradients = list(iterable(gradients, "gradients", "tensors"))
    for tensor in gradients:
        dtype = getattr(tensor, "dtype", type(tensor).__name__)
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"gradients hold {dtype}: use tensors in fp32; 16 bits have "
                "lost what is to be shown"
            )
    best = {f: round(log2(best_scale(gradients, f))) for f in FORMATS}
    counts = binades(gradients)
    last = max(counts)
    start = max(min(counts), last - MOST_BINADES + 1)
    below = sum(n for e, n in counts.items() if e < start)
    bars = [counts.get(e, 0) for e in range(start, last + 1)]
    count = sum(bars) + below
    return {
        "gradients": count,
        "zeros": sum(g.numel() for g in gradients) - count,
        "start": start,
        "counts": [bars[0] + below, *bars[1:]],
        "merged": below > 0,
        "formats": list(FORMATS),
        "lost": {f: _lost(gradients, f) for f in FORMATS},
        "limits": {f: _limits(f) for f in FORMATS},
        "saturates": [f for f in FORMATS if not format_of(f).infinite],
        "best": best,
        "scales": [LEAST, MOST],
    }


def _lost(gradients: list[torch.Tensor], name: str) -> list[list[int]]:
    """How many are below, subnormal and above, at every scale."""
    sizes = torch.cat([g.detach().flatten().double() for g in gradients])
    found = [lost(sizes, name, 2.0**e) for e in range(LEAST, MOST + 1)]
    shares = [(of.below, of.subnormal, of.above) for of in found]
    count = found[0].numbers
    return [[round(count * share) for share in row] for row in shares]


def _limits(name: str) -> list[float]:
    kind = format_of(name)
    ends = kind.underflow, kind.smallest_normal, kind.overflow
    return [log2(end) for end in ends]
