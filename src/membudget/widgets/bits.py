"""The bits widget: one number in six formats, bit by bit."""

from typing import Any

import traitlets

from membudget.checks import number
from membudget.precision import FORMATS
from membudget.widgets.base import Checked, Widget


def _number(value: Any, name: str) -> float:
    return float(number(value, name, infinite=True))


class Bits(Widget):
    """What each of :data:`membudget.precision.FORMATS` keeps of a number.

    The reader types a number, drags it over the ranges of the formats, or
    flips the bits of one format.

    Args:
        number: any but NaN.
        format: the one whose bits can be flipped.

    Example:
        >>> Bits(0.1, "fp16")
    """

    name = "bits"
    positional = ("number", "format")

    number = Checked(_number, 0.1).tag(
        sync=True,
        to_json=lambda value, widget: repr(value).replace("inf", "Infinity"),
        from_json=lambda text, widget: float(text),
    )
    format = traitlets.Enum(list(FORMATS), "fp16").tag(sync=True)
    formats = traitlets.List(read_only=True).tag(sync=True)

    def __init__(
        self, number: float = 0.1, format: str = "fp16", **traits: Any
    ) -> None:
        super().__init__(number=number, format=format, **traits)

    @traitlets.default("formats")
    def _formats(self) -> list[dict[str, Any]]:
        """What the module has to know of them."""
        return [
            {
                "name": name,
                "exponent": of.exponent_bits,
                "fraction": of.fraction_bits,
                "infinite": of.infinite,
                "smallest": of.smallest,
                "normal": of.smallest_normal,
                "largest": of.largest,
                "overflow": of.overflow,
            }
            for name, of in FORMATS.items()
        ]

    def sentence(self) -> str:
        """What the chosen format stores of the number."""
        kind = FORMATS[self.format]
        return (
            f"{self.number:.9g} in {self.format} is {kind.text(self.number)}, "
            f"which is the number {kind.round(self.number):.9g}."
        )
