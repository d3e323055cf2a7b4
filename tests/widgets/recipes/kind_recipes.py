"""What the tests have to know of the recipes widget."""

from functools import cache
from itertools import cycle, product

from kind import Kind

from membudget import ledger
from membudget.cards import CARDS
from membudget.ledger import GPT2, RECIPES, predict
from membudget.widgets import Recipes, format_bytes
from membudget.widgets.recipes import BATCHES, TOKENS


def controls(widget):
    return {
        "recipe": widget.recipe,
        "batch": BATCHES.index(widget.batch),
        "card": widget.card,
        "checkpointed": widget.checkpointed,
    }


@cache
def step(recipe, batch, checkpointed):
    return predict(
        *(GPT2, batch, TOKENS),
        recipe=recipe,
        checkpointed=checkpointed,
        **ledger.rules(GPT2, "cuda"),
    )


def peaks(widget):
    return {r: step(r, widget.batch, widget.checkpointed) for r in RECIPES}


def printed(widget):
    found = {}
    for recipe, of in peaks(widget).items():
        states = ledger.bytes_per_parameter(recipe)
        found[f"{recipe}.states"] = states.total
        found[f"{recipe}.bytes"] = of.peak
        found[f"{recipe}.phase"] = of.at_peak.phase
    return found


HALVED = {
    "fp32": "each of a weight’s numbers takes 4 bytes",
    "autocast": "no tile halves, and the 16-bit copy is new",
    "bf16": "the weight, gradient, Adam’s mean and Adam’s square halve",
    "master": "the weight and gradient halve, and the fp32 copy is new",
    "master-fp32-gradients": "the weight halves, and the fp32 copy is new",
}


def said(widget):
    found = peaks(widget)[widget.recipe]
    left = CARDS[widget.card].usable - found.peak
    fits = f"it fits, {format_bytes(left)} free"
    words = [
        HALVED[widget.recipe],
        f"The peak is {format_bytes(found.peak)}",
        fits if left >= 0 else f"{format_bytes(-left)} too much",
    ]
    if widget.recipe != "fp32" and found.at_peak.phase == "optimizer":
        words.append("At the peak, Adam’s update")
    return words


STATES = [
    {"recipe": recipe, "batch": batch, "card": card, "checkpointed": on}
    for recipe, (card, batch, on) in zip(
        cycle(RECIPES), product(CARDS, (1, 8, 32), (False, True)), strict=False
    )
]

KIND = Kind(
    "recipes",
    Recipes,
    "Predicted peak of a training step: GPT-2 124M, 1024 tokens",
    controls,
    printed,
    said,
    states=STATES,
    given=[
        {"recipe": "master", "batch": 1, "card": "T4"},
        {"checkpointed": True, "card": "RTX 4090"},
    ],
    tabs=("recipe", "batch", "checkpointed"),
    rest=("batch", {"batch": 32}),
    spoken={"batch": "batch 16"},
    columns=("recipe", "bytes per parameter", "peak", "of fp32’s", "moment"),
    parts=5,
    moves=[
        (
            {"recipe": recipe},
            [
                {"batch": batch, "card": card, "checkpointed": on}
                for batch, card, on in product(
                    (1, 32), ("T4", "A100 80 GB"), (False, True)
                )
            ],
        )
        for recipe in ("autocast", "master")
    ],
)
