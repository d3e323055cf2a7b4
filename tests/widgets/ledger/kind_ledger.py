"""What the tests have to know of the ledger widget."""

from itertools import product

import ledger_cases
from kind import Kind, flat

from membudget import widgets
from membudget.ledger import PLANNED
from membudget.widgets import format_bytes
from membudget.widgets.ledger_rows import MIXES

BATCHES = [
    n for n in range(1, 1025) if n <= 16 or n % 2 ** (n.bit_length() - 3) == 0
]
"""The values of the slider of sequences."""


def controls(widget):
    stops = widget.tables["models"][widget.model]["tokens"]
    return {
        "model": widget.model,
        "batch": max(i for i, n in enumerate(BATCHES) if n <= widget.batch),
        "card": widget.card,
        "tokens": stops.index(widget.tokens),
        "steps": min(widget.steps, widget.batch),
        "recipe": widget.recipe,
        "optimizer": widget.optimizer,
        "checkpointed": widget.checkpointed,
        "foreach": widget.at_once,
    }


def printed(widget):
    n = ledger_cases.numbers(widget)
    found = flat(n, "parameters", "states") | {"peak": n["peak"]["bytes"]}
    if widget.budget:
        found["largest"] = n["largest"]
    for bar in ledger_cases.BARS:
        found[f"{bar}.bytes"] = n[bar]["bytes"]
        found |= {f"{bar}.{c}": v for c, v in n[bar]["split"].items()}
    return found


def said(widget):
    n = ledger_cases.numbers(widget)
    found = [f" {format_bytes(n['peak']['bytes'])} at the peak"]
    if widget.budget:
        fits = n["peak"]["bytes"] <= widget.budget
        found.append(f"It {'fits' if fits else 'does not fit'} the ")
        most = n["largest"]
        found.append(f"at most {most} s" if most else "not even one")
    return found


KIND = Kind(
    "ledger",
    widgets.Ledger,
    "Memory of one training step",
    controls,
    printed,
    said,
    states=[
        {"card": card, "batch": batch, "checkpointed": checkpointed}
        for card, batch, checkpointed in product(
            ("T4", "none", "A100 80 GB"), (1, 10, 320), (True, False)
        )
    ]
    + [{"recipe": recipe} for recipe in MIXES]
    + [{"optimizer": optimizer} for optimizer in reversed(PLANNED)]
    + [{"card": "none"}, {"foreach": True}, {"steps": 20}, {"tokens": 16}]
    + [{"model": "Llama 3.2 1B"}, {"tokens": 2048}, {"card": "RTX 4090"}],
    given=[
        {
            **{"model": "Llama 3.2 1B", "batch": 5, "tokens": 4096},
            **{"checkpointed": True, "recipe": "master", "steps": 2},
            "card": "H100 80 GB",
        },
        {"model": "GPT-2 XL 1.5B", "batch": 1, "tokens": 256},
        {"batch": 300, "card": "none", "foreach": True},
    ],
    tabs=("model", "batch", "card"),
    rest=("batch", {"batch": 13}),
    spoken={"batch": "8 sequences", "tokens": "1024 tokens"},
    columns=("worst moment of", *ledger_cases.BARS),
    parts=6,
    moves=[
        (
            {"model": "Llama 3 70B"},
            [
                {"batch": batch, "steps": steps, "checkpointed": on}
                for batch, steps, on in product(
                    (1, 320), (1, 16), (True, False)
                )
            ],
        )
    ],
)
