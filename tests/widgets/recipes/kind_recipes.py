"""What the tests have to know of the recipes widget."""

from functools import cache
from itertools import product

from kind import Kind

from membudget import ledger
from membudget.cards import CARDS
from membudget.ledger import GPT2, RECIPES, predict
from membudget.widgets import Recipes, format_bytes
from membudget.widgets.recipes import BATCHES, TOKENS


def controls(widget):
    return {
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


def said(widget):
    found = {recipe: of.peak for recipe, of in peaks(widget).items()}
    words = [f"{format_bytes(found['fp32'])} in fp32"]
    if peaks(widget)["master"].at_peak.phase == "optimizer":
        words += ["master peaks in the optimizer’s step"]
    if not widget.card:
        return words
    card = CARDS[widget.card]
    fit = [name for name, peak in found.items() if peak <= card.usable]
    return [*words, *(fit or ["none fits"])]


KIND = Kind(
    "recipes",
    Recipes,
    "Predicted peak of a training step: GPT-2 124M, 1024 tokens",
    controls,
    printed,
    said,
    states=[
        {"batch": batch, "card": card, "checkpointed": on}
        for card, batch, on in product(["", *CARDS], (1, 8, 32), (False, True))
    ],
    given=[
        {"batch": 16, "checkpointed": True, "card": "T4"},
        {"card": "RTX 4090"},
    ],
    tabs=("batch", "card", "checkpointed"),
    rest=("batch", {"batch": 32}),
    spoken={"batch": "batch 8"},
    columns=("recipe", "bytes per parameter", "peak", "of fp32’s", "moment"),
    parts=5,
    moves=[
        (
            {},
            [
                {"batch": batch, "card": card, "checkpointed": on}
                for batch, card, on in product(
                    (1, 32), ("T4", "A100 80 GB"), (False, True)
                )
            ],
        )
    ],
)
