"""The recipes widget: one weight's bytes by recipe, and the step in a card."""

from functools import cache, partial
from typing import Any

import traitlets

from membudget.cards import CARDS
from membudget.checks import whole
from membudget.ledger import GPT2, OPTIMIZERS, RECIPES, predict, rules
from membudget.widgets.base import Checked, Widget, format_bytes, later

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
)
"""The categories of what is alive, from the left of the card to its right."""

BATCHES = (1, 2, 4, 8, 16, 32)
"""Among which the reader can choose."""

TOKENS = 1024
"""Of a sequence."""


def _batch(value: Any, name: str) -> int:
    value = whole(value, name)
    if value not in BATCHES:
        raise ValueError(f"{name} is {value}: use one of {BATCHES}")
    return value


class Recipes(Widget):
    """What one weight takes under a recipe, and the whole step in a card.

    The step is GPT-2's with Adam, at its peak, as
    :func:`membudget.ledger.predict` gives it by a GPU's rules.

    Args:
        recipe: one of :data:`membudget.ledger.RECIPES`.
        batch: one of :data:`BATCHES`, of sequences of :data:`TOKENS`.
        card: one of :data:`membudget.cards.CARDS`.
        checkpointed: whether each block is.

    Attributes:
        account: what the widget shows, for every recipe and batch.

    Example:
        >>> Recipes("autocast", card="RTX 4090")
    """

    name = "recipes"
    positional = ("recipe",)
    named = ("batch", "card", "checkpointed")

    recipe = traitlets.Enum(list(RECIPES), "fp32").tag(sync=True)
    batch = Checked(_batch, 16).tag(sync=True)
    card = traitlets.Enum(list(CARDS), "RTX 4080").tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    account = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, recipe: str = "fp32", **traits: Any) -> None:
        super().__init__(recipe=recipe, **traits)

    @traitlets.default("account")
    def _whole_account(self) -> dict[str, Any]:
        return _account()

    def sentence(self) -> str:
        """The peak in fp32, under autocast, and what the card has."""
        row = BATCHES.index(self.batch)
        rows = self.account["peaks"][int(self.checkpointed)][row]
        full, low = (format_bytes(sum(parts)) for parts in rows[:2])
        usable = format_bytes(CARDS[self.card].usable)
        return (
            f"{self.account['name']}, batch {self.batch}: the peak of a "
            f"training step is {full} in fp32 and {low} under autocast. The "
            f"{self.card} has {usable}."
        )


@cache
def _account() -> dict[str, Any]:
    """The peak of every batch and recipe, plain and checkpointed."""
    step = partial(predict, GPT2, **rules(GPT2, "cuda"))
    moments = [
        [
            [
                step(b, TOKENS, recipe=r, checkpointed=on).at_peak
                for r in RECIPES
            ]
            for b in BATCHES
        ]
        for on in (False, True)
    ]
    return {
        "name": later("GPT-2 124M, 1024 tokens"),
        "weights": GPT2.parameters,
        "batches": list(BATCHES),
        "recipes": list(RECIPES),
        "tiles": [_tiles(recipe) for recipe in RECIPES],
        "peaks": [
            [[[m.split[p] for p in PARTS] for m in row] for row in rows]
            for rows in moments
        ],
        "phases": [[[m.phase for m in r] for r in rows] for rows in moments],
        "cards": [
            {"name": name, "usable": card.usable, "bf16": card.bf16}
            for name, card in CARDS.items()
        ],
    }


def _tiles(recipe: str) -> list[int]:
    """Bytes of a weight, its copy for products, its gradient, its fp32 copy
    and each of Adam's numbers; 0 for what the recipe has not.
    """
    r = RECIPES[recipe]
    kept = [r.stepped] * OPTIMIZERS["adam"].numbers
    return [r.parameters, r.autocast or 0, r.gradients, r.master, *kept]
