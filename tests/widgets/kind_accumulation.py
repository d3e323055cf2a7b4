"""What the tests have to know of the accumulation widget."""

from itertools import product

from kind import Kind, flat

from membudget import widgets
from membudget.accumulation import NORMALISATIONS


def accumulation_controls(widget):
    first = ["micro_batch", "locked", "steps", "global_batch"]
    if widget.locked:
        first = ["locked", "micro_batch", "global_batch", "steps"]
    return {key: getattr(widget, key) for key in (*first, "normalisation")}


def accumulation_printed(widget):
    n = widget.numbers()
    hidden = {"micro_batch", "last_micro_batch", "weight", "last_weight"}
    return flat(n, *(key for key in n if key not in hidden))


KIND = Kind(
    "accumulation",
    widgets.Accumulation,
    "Memory during one window: an MLP on handwritten digits, with Adam",
    accumulation_controls,
    accumulation_printed,
    lambda widget: [],
    states=[
        {"micro_batch": size, "steps": steps}
        for size, steps in product((1, 16, 512), (1, 3, 32))
    ]
    + [
        {"normalisation": n, "locked": True, "global_batch": whole}
        | {"micro_batch": size}
        for n, whole in ((NORMALISATIONS[1], 512), (NORMALISATIONS[2], 500))
        for size in (1, 3, 40, 100, 130, 255, 256, 400, 511, 512)
    ]
    + [{"locked": False, "normalisation": NORMALISATIONS[0]}],
    given=[
        {
            **{"micro_batch": 700, "steps": 40, "samples": 5, "budget": 10},
            "normalisation": "no division",
        },
        {
            **{"micro_batch": 96, "global_batch": 500},
            "normalisation": "mean of means",
        },
    ],
    tabs=("micro_batch", "steps", "global_batch", "locked", "normalisation"),
    rest=("micro_batch", {"micro_batch": 133}),
    spoken={"micro_batch": "128 samples", "steps": "4"},
    columns=("bytes at the peak", "window", "whole batch"),
    parts=5,
    moves=[],
)
