"""What the tests have to know of the ledger widget."""

from itertools import product

from kind import GIB, Kind, flat

from membudget import widgets
from membudget.ledger import OPTIMIZERS, RECIPES
from membudget.widgets.ledger import BARS, SHAPE

PLACES = {
    "batch": [*range(1, 17)]
    + [2**i + 2**i // 8 * j for i in range(4, 10) for j in range(1, 9)],
    "tokens": [2**i for i in range(4, 16)],
    "steps": [*range(1, 17)]
    + [2**i + 2**i // 4 * j for i in (4, 5) for j in range(1, 5)],
}
"""The values of the ledger's sliders; one from elsewhere is added."""


def ledger_controls(widget):
    """The shape follows from the preset."""
    unused = {"gpt": ("kv_heads", "hidden"), "llama": ("context",)}
    keys = ("preset", *SHAPE, "recipe", "optimizer")
    found = {
        key: getattr(widget, key)
        for key in keys
        if key not in unused[widget.family]
    }
    for key, places in PLACES.items():
        value = getattr(widget, key)
        found[key] = sorted({*places, value}).index(value)
    for key in ("checkpointed", "fused", "foreach"):
        found[key] = getattr(widget, key)
    return found | {"budget": widget.budget}


def ledger_printed(widget):
    n = widget.numbers()
    found = flat(n, "parameters", "states") | {"peak": n["peak"]["bytes"]}
    if widget.budget:
        found["largest"] = n["largest"]
    for bar in BARS:
        found[f"{bar}.bytes"] = n[bar]["bytes"]
        found |= {f"{bar}.{c}": v for c, v in n[bar]["split"].items()}
    return found


KIND = Kind(
    "ledger",
    widgets.Ledger,
    "Memory at the worst moment",
    ledger_controls,
    ledger_printed,
    lambda widget: [],
    states=[
        {"preset": preset, "budget": budget, "batch": batch}
        | {"checkpointed": checkpointed}
        for preset, budget, batch, checkpointed in product(
            ("Llama 3 70B", "GPT-2 124M"),
            (0, 15 * GIB, 140 * GIB),
            (1, 10, 288),
            (True, False),
        )
    ]
    + [{"recipe": recipe} for recipe in RECIPES]
    + [{"optimizer": optimizer} for optimizer in OPTIMIZERS]
    + [{"fused": False}, {"foreach": True}, {"steps": 20}, {"tokens": 16}]
    + [{"preset": "Mistral 7B"}, {"tokens": 2048}],
    given=[
        {
            **{"preset": "Llama 3 8B", "batch": 5, "tokens": 3000, "steps": 2},
            **{"checkpointed": True, "fused": False, "foreach": True},
            **{"recipe": "master", "budget": 137 * GIB},
        },
        {"preset": "Llama 2 7B", "batch": 3},
    ],
    tabs=(
        *("preset", "batch", "tokens", "steps", "recipe", "optimizer"),
        *("budget", "checkpointed", "fused", "foreach"),
    ),
    rest=("batch", {"batch": 13}),
    spoken={"batch": "8 sequences", "tokens": "1024 tokens"},
    columns=("worst moment of", *BARS),
    parts=6,
    moves=[
        (
            {"preset": "Llama 3 70B", "budget": 15 * GIB},
            [
                {"batch": batch, "steps": steps, "checkpointed": on}
                for batch, steps, on in product(
                    (1, 288), (1, 16), (True, False)
                )
            ],
        )
    ],
)
