"""What the tests have to know of the bits widget."""

from itertools import product

import precision_cases as cases
from kind import Kind

from membudget.precision import FORMATS
from membudget.widgets import Bits

NUMBERS = (
    *(0.1, 1.0, -3.5, 0.0, 65519.9, 65520.0, 460.0, -1e-5, 6e-8, 1e39),
    *(1.2345678901234567e-7, -1.2345678901234567e-40, 5e-324),
    *(2049.0, -1.2345678901234567e38, float("inf"), -float("inf")),
)


def controls(widget):
    return {"number": repr(widget.number), "format": widget.format}


def printed(widget):
    found = {}
    for name, kind in FORMATS.items():
        found[name] = kind.text(widget.number)
        found[f"{name}.value"] = kind.round(widget.number)
        found[f"{name}.error"] = cases.error_of(widget.number, name)
    return found


def said(widget):
    words = {"subnormal": "subnormal", "underflow": "lost to underflow"}
    words |= {"overflow": "too large for", "normal": "is exact in"}
    return {words[cases.kind_of(widget.number, name)] for name in FORMATS}


KIND = Kind(
    "bits",
    Bits,
    "One number in six formats",
    controls,
    printed,
    said,
    states=[
        {"number": number, "format": name}
        for name, number in product(FORMATS, NUMBERS)
    ],
    given=[
        {"number": -1e-8, "format": "fp8-e5m2"},
        {"number": -1.2345e-39, "format": "fp32"},
        {"number": float("inf")},
    ],
    tabs=("number", "format"),
    rest=None,
    spoken={},
    columns=("format", "stored", "kept", "bits"),
    parts=2,
    moves=[
        (
            {"number": 1.2345678901234567e-7},
            [
                {"number": 1.0, "format": "fp8-e5m2"},
                {"number": -1.2345e-39, "format": "fp32"},
                {"number": 1e39, "format": "bf16"},
            ],
        )
    ],
    crossed=True,
)
