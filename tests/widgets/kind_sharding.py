"""What the tests have to know of the sharding widget."""

from itertools import product

import sharding_cases
from kind import Kind

from membudget import widgets
from membudget.widgets.sharding import CARDS, MODELS, STAGE_NAMES

LONG = {
    "model": 2**40 - 1,
    "ranks": 1024,
    "stage": "zero-3",
    "recipe": "master-fp32-gradients",
    "accumulation_steps": 16,
    "synchronise_last": True,
    "card": "141 GB",
}
"""A long sentence of the sharding widget."""


def sharding_controls(widget):
    return {
        "model": widget.model if widget.model in MODELS else "own",
        "parameters": widget.parameters,
        "ranks": widget.ranks.bit_length() - 1,
        "stage": widget.stage,
        "recipe": widget.recipe,
        "card": widget.card,
        "accumulation_steps": widget.accumulation_steps.bit_length() - 1,
        "synchronise_last": widget.synchronise_last,
    }


def sharding_printed(widget):
    found = {}
    for stage, of in widget.numbers()["stages"].items():
        split = of["split"]
        found[f"{stage}.parameters"] = split["parameters"]
        found[f"{stage}.gradients"] = split["gradients"] + split["waiting"]
        found[f"{stage}.optimizer"] = split["optimizer"]
        found[f"{stage}.sent"] = of["sent"]
    return found


def sharding_states():
    for state in list(sharding_cases.settings(sharding_cases.GRID))[::1889]:
        if state["accumulation_steps"] == 1:  # the box cannot be changed
            del state["synchronise_last"]
        yield state


KIND = Kind(
    "sharding",
    widgets.Sharding,
    "Model states per rank: 7.5 B parameters, master, 64 ranks",
    sharding_controls,
    sharding_printed,
    lambda widget: [],
    states=[
        *sharding_states(),
        *({"card": card, "model": m} for m, card in product(MODELS, CARDS)),
        *({"stage": stage} for stage in STAGE_NAMES),
    ],
    given=[LONG, {"ranks": 1, "card": "24 GB"}],
    tabs=(
        *("model", "parameters", "ranks", "stage", "recipe", "card"),
        "accumulation_steps",
    ),
    rest=("ranks", {"ranks": 1024}),
    spoken={"ranks": "64 ranks", "accumulation_steps": "1 accumulation step"},
    columns=("stage", "parameters", "gradients", "optimizer states", "sent"),
    parts=4,
    moves=[
        (
            chosen,
            [
                {"ranks": ranks, "accumulation_steps": steps}
                | ({"synchronise_last": last} if steps > 1 else {})
                for ranks, steps, last in product(
                    (1, 4, 64, 1024), (1, 2, 16), (False, True)
                )
            ],
        )
        for chosen in (
            {"stage": "zero-2", "card": "24 GB"},
            {"stage": "ddp", "card": "80 GB", "model": "Llama 3 8B"},
            LONG,
        )
    ],
    crossed=True,
)
