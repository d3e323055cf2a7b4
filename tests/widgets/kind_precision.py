"""What the tests have to know of the precision widget."""

from itertools import product

import precision_cases
from kind import GIB, Kind, flat

from membudget.widgets.precision import SCALED


def precision_controls(widget):
    budget = widget.budget
    return {
        "number": repr(widget.number),
        "format": widget.format,
        "scale": widget.scale.bit_length() - 1,
        "batch": widget.account["batches"].index(widget.batch),
        "checkpointed": widget.checkpointed,
        "budget": "" if budget is None else repr(budget / GIB),
    }


def precision_printed(widget):
    n = widget.numbers()
    found = flat(n, "gradients", "below", "subnormal", "above", "best")
    for name, of in n["formats"].items():
        found[name] = of["bits"]
        found[f"{name}.value"] = of["value"]
        found[f"{name}.error"] = of["error"]
    for recipe, of in n["recipes"].items():
        found[f"{recipe}.bytes"] = of["bytes"]
    return found


def precision_states():
    numbers = (
        *(0.1, 1.0, -3.5, 0.0, 65519.9, 65520.0, 460.0, -1e-5, 6e-8, 1e39),
        *(1.2345678901234567e-7, -1.2345678901234567e-40, 5e-324),
        *(2049.0, -1.2345678901234567e-39, -1.2345678901234567e38),
        *(float("inf"), -float("inf")),
    )
    yield from ({"number": x} for x in numbers)
    for name, exponent in product(SCALED, (0, 1, 13, 24)):
        yield {"format": name, "scale": 2**exponent}
    recipes = precision_cases.widget().numbers()["recipes"]
    peaks = [of["bytes"] for of in recipes.values()]
    budgets = [None, 1024, *peaks, peaks[0] - 1, 9 * GIB, 2**50]
    budgets += [max(peaks) * share // 20 for share in range(1, 26, 3)]
    for batch, on in product((1, 8, 20), (False, True)):
        yield {"batch": batch, "checkpointed": on, "budget": None}
    yield from ({"budget": budget} for budget in budgets)


KIND = Kind(
    "precision",
    precision_cases.widget,
    "One number in six formats",
    precision_controls,
    precision_printed,
    lambda widget: [],
    states=list(precision_states()),
    given=[
        {
            **{"number": -1e-8, "format": "fp8-e5m2", "scale": 2**7},
            **{"batch": 20, "checkpointed": True, "budget": 3 * 2**19},
            "label": "mine <&>",
        },
        precision_cases.SETTINGS[2],
        precision_cases.SETTINGS[1] | {"number": -1.2345e-39},
    ],
    tabs=("number", "scale", "format", "best", "batch", "budget"),
    rest=("scale", {"scale": 2**5}),
    spoken={"scale": "2 to the power of 0", "batch": "batch 8"},
    columns=("recipe", "bytes per parameter", "peak", "of fp32’s", "moment"),
    parts=6,
    moves=[
        (
            precision_cases.SETTINGS[1],
            [
                {"number": 1.2345678901234567e-7},
                {"number": 1.0, "format": "fp8-e5m2", "scale": 2**24},
                {"number": 1e-5, "format": "bf16", "budget": 100 * GIB},
                {"format": "fp16", "scale": 2**20, "budget": 1_610_000},
                {"checkpointed": True, "budget": 1024},
            ],
        )
    ],
    crossed=True,
)
