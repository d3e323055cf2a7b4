"""The recipes widget: the peak of a training step, by recipe and card."""

from functools import cache, partial
from typing import Any

import traitlets

from membudget.cards import CARDS
from membudget.checks import whole
from membudget.ledger import (
    GPT2,
    RECIPES,
    bytes_per_parameter,
    predict,
    rules,
)
from membudget.widgets.base import Checked, Widget, format_bytes

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
)
"""The categories of what is alive, from the left of a bar to its right."""

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
    """The peak of a step of GPT-2 with Adam, by recipe, beside a card.

    As :func:`membudget.ledger.predict` gives it, by a GPU's rules.

    Args:
        batch: one of :data:`BATCHES`, of sequences of :data:`TOKENS`.
        card: one of :data:`membudget.cards.CARDS`; ``""`` for none.
        checkpointed: whether each block is.

    Attributes:
        account: what the widget shows, for every batch.

    Example:
        >>> Recipes(card="RTX 4090")
    """

    name = "recipes"
    named = ("batch", "card", "checkpointed")

    batch = Checked(_batch, 8).tag(sync=True)
    card = traitlets.Enum(["", *CARDS], "").tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    account = traitlets.Dict(read_only=True).tag(sync=True)

    @traitlets.default("account")
    def _whole_account(self) -> dict[str, Any]:
        return _account()

    def sentence(self) -> str:
        """The least and the largest peak."""
        row = BATCHES.index(self.batch)
        rows = self.account["peaks"][int(self.checkpointed)][row]
        peaks = [sum(parts) for parts in rows]
        least = list(RECIPES)[peaks.index(min(peaks))]
        return (
            f"{self.account['name']}, batch {self.batch}: the peak of a "
            f"training step is {format_bytes(peaks[0])} in fp32 and least in "
            f"{least}, {format_bytes(min(peaks))}."
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
    states = [bytes_per_parameter(recipe) for recipe in RECIPES]
    return {
        "name": f"GPT-2 124M, {TOKENS} tokens",
        "batches": list(BATCHES),
        "recipes": list(RECIPES),
        "states": [[s.parameters, s.gradients, s.optimizer] for s in states],
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
