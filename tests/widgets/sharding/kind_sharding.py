"""What the tests have to know of the sharding widget."""

from itertools import product

import sharding_cases
from kind import Kind

from membudget import widgets
from membudget.widgets import format_bytes
from membudget.widgets.sharding import CARDS, MODELS, STAGE_NAMES

LONG = {
    "model": 2**40 - 1,
    "ranks": 1024,
    "stage": "zero-3",
    "recipe": "mixed-precision policy",
    "blocks": 128,
    "accumulation_steps": 16,
    "synchronise_last": True,
    "card": "A100 80 GB",
}
"""Long words of the sharding widget."""


def controls(widget):
    return {
        "model": widget.model if widget.model in MODELS else "own number",
        "parameters": widget.parameters,
        "ranks": widget.ranks.bit_length() - 1,
        "stage": STAGE_NAMES[widget.stage],
        "recipe": widget.recipe,
        "card": widget.card,
        "blocks": widget.blocks.bit_length() - 1,
        "accumulation_steps": widget.accumulation_steps.bit_length() - 1,
        "synchronise_last": widget.synchronise_last,
        "moment": 0,
    }


def printed(widget):
    found = {}
    for stage, of in sharding_cases.numbers(widget).items():
        of["gradients"] += of.pop("waiting")
        kept = of["parameters"] + of["gradients"] + of["optimizer"]
        of["most"] = kept + of.pop("borrowed")
        found |= {f"{stage}.{key}": size for key, size in of.items()}
    return found


def said(widget):
    total = format_bytes(widget.states().total)
    holds = "each holds" if widget.ranks > 1 else "it holds all"
    found = [f"{STAGE_NAMES[widget.stage]} on ", f"{holds} {total}"]
    if widget.borrowed():
        lent = format_bytes(widget.borrowed())
        found.append(f"borrows {lent} for a block")
    if widget.ranks > 1:
        found.append(f"sends {format_bytes(widget.sent())} per step")
    return found


def states():
    for state in sharding_cases.settings(2801):
        if state["accumulation_steps"] == 1:  # the box cannot be changed
            del state["synchronise_last"]
        yield state


KIND = Kind(
    "sharding",
    widgets.Sharding,
    "Model states of 7.5 B parameters: bf16 model, fp32 copy",
    controls,
    printed,
    said,
    states=[
        *states(),
        *({"card": card, "model": m} for m, card in product(MODELS, CARDS)),
        *({"stage": stage} for stage in STAGE_NAMES),
        *({"ranks": ranks} for ranks in (1, 2, 4, 8)),
    ],
    given=[LONG, {"ranks": 1, "card": "RTX 4090"}],
    tabs=("stage", "ranks", "play"),
    rest=("ranks", {"ranks": 1024}),
    spoken={"ranks": "64 ranks", "accumulation_steps": "1 accumulation step"},
    columns=("of each rank", *STAGE_NAMES.values()),
    parts=4,
    moves=[
        (
            chosen,
            [
                {"ranks": ranks, "accumulation_steps": steps}
                for ranks, steps in product((1, 4, 64, 1024), (1, 2, 16))
            ],
        )
        for chosen in (
            {"stage": "zero-2", "card": "RTX 4090"},
            {"stage": "ddp", "card": "A100 80 GB", "model": "Llama 3 8B"},
            LONG,
        )
    ],
    crossed=True,
)
