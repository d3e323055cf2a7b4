"""What the tests have to know of the loss-scale widget."""

from itertools import product

import precision_cases as cases
from kind import Kind

from membudget.precision import FORMATS, best_scale, lost
from membudget.widgets import lossscale

GIVEN = {}
"""The gradients of a widget, by the histogram that it makes of them."""


def make(gradients=None, **arguments):
    gradients = cases.GRADIENTS[0] if gradients is None else gradients
    widget = lossscale.LossScale(
        gradients, **({"label": "a test"} | arguments)
    )
    GIVEN[str(widget.histogram)] = gradients
    return widget


def controls(widget):
    exponent = round(lossscale.log2(widget.scale))
    return {"scale": exponent, "format": widget.format}


def printed(widget):
    found = {}
    gradients = GIVEN[str(widget.histogram)]
    for name in lossscale.FORMATS:
        of = lost(gradients, name, widget.scale)
        found[f"{name}.below"] = of.below
        found[f"{name}.subnormal"] = of.subnormal
        found[f"{name}.above"] = of.above
        best = best_scale(gradients, name)
        found[f"{name}.best"] = round(lossscale.log2(best))
    return found


def said(widget):
    found = printed(widget)
    above, best = (found[f"{widget.format}.{k}"] for k in ("above", "best"))
    infinite = FORMATS[widget.format].infinite
    words = [f"In {widget.format} at a loss scale of "]
    words += ["a scaler would skip"] if above and infinite else []
    return words + (["beyond the slider"] if not -12 <= best <= 24 else [])


KIND = Kind(
    "lossscale",
    make,
    "Gradients × loss scale in fp16: a test",
    controls,
    printed,
    said,
    states=[
        {"format": name, "scale": 2.0**exponent}
        for name, exponent in product(
            lossscale.FORMATS, (0, -12, -3, 1, 13, 24)
        )
    ],
    given=[
        {"format": "fp8-e5m2", "scale": 2**7, "label": "mine <&>"},
        {"gradients": cases.GRADIENTS[2]},
        {"gradients": cases.GRADIENTS[1], "scale": 2**20},
        {"gradients": cases.GRADIENTS[4], "format": "fp8-e4m3"},
    ],
    tabs=("scale", "format", "best"),
    rest=("scale", {"scale": 2**5}),
    spoken={"scale": "2 to the power of 0"},
    columns=(
        *("format", "underflow", "subnormal", "overflow"),
        "largest scale without overflow",
    ),
    parts=3,
    moves=[
        (
            {"gradients": cases.GRADIENTS[1]},
            [
                {"scale": 2**24, "format": "fp8-e5m2"},
                {"scale": 2**-12, "format": "bf16"},
                {"scale": 2**20, "format": "fp16"},
            ],
        )
    ],
)
