"""The recipes widget: the peak of a training step, by recipe and card."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import traitlets

from membudget.cards import CARDS
from membudget.checks import listed, whole
from membudget.ledger import (
    GPT2,
    PRESETS,
    RECIPES,
    Chain,
    Transformer,
    bytes_per_parameter,
    predict,
    rules,
)
from membudget.widgets.base import Whole, Widget, format_bytes

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
)
"""The categories of what is alive, from the left of a bar to its right."""

MOST_BATCHES = 12


class Recipes(Widget):
    """The peak of a training step with Adam, by recipe, beside a card.

    As :func:`membudget.ledger.predict` gives it, by a GPU's rules.

    Args:
        network: what is trained.
        tokens: of a sequence; not used for a ``Chain``.
        batches: ascending batches among which one can choose, at most
            :data:`MOST_BATCHES`.
        batch: one of ``batches``; by default 8, or else the first.
        card: one of :data:`membudget.cards.CARDS`; ``""`` for none.
        checkpointed: whether each block (or segment of a ``Chain``) is.

    Attributes:
        account: what the widget shows, for every batch.

    Raises:
        traitlets.TraitError: batch, card or checkpointed is not as said
            above (the widget stays as it was).
        ValueError: sizes for which there is no step.
        TypeError: another network.

    Example:
        >>> Recipes(card="RTX 4090")
    """

    name = "recipes"
    named = ("batch", "card", "checkpointed")

    batch = Whole().tag(sync=True)
    card = traitlets.Enum(["", *CARDS], "").tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    account = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(
        self,
        network: Transformer | Chain = GPT2,
        tokens: int = 1024,
        batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
        **traits: Any,
    ) -> None:
        self.set_trait("account", _account(network, tokens, batches))
        super().__init__(**traits)

    @traitlets.default("batch")
    def _some_batch(self) -> int:
        batches = self.account["batches"]
        return 8 if 8 in batches else batches[0]

    @traitlets.validate("batch")
    def _check_batch(self, proposal: Any) -> int:
        batch, batches = proposal["value"], self.account["batches"]
        if batch not in batches:
            raise traitlets.TraitError(
                f"batch is {batch}: use one of {batches}, or other batches"
            )
        return batch

    def sentence(self) -> str:
        """The least and the largest peak."""
        row = self.account["batches"].index(self.batch)
        rows = self.account["peaks"][int(self.checkpointed)][row]
        peaks = [sum(parts) for parts in rows]
        least = list(RECIPES)[peaks.index(min(peaks))]
        return (
            f"{self.account['name']}, batch {self.batch}: the peak of a "
            f"training step is {format_bytes(peaks[0])} in fp32 and least in "
            f"{least}, {format_bytes(min(peaks))}."
        )


def _account(
    network: Transformer | Chain, tokens: int, batches: Sequence[int]
) -> dict[str, Any]:
    """The peak of every batch and recipe, plain and checkpointed."""
    batches = [
        whole(batch, "one of batches")
        for batch in listed(batches, "batches", "numbers")
    ]
    whole(len(batches), "the number of batches", 1, MOST_BATCHES)
    if batches != sorted(set(batches)):
        raise ValueError(f"batches is {batches}: use ascending numbers")
    sizes = () if isinstance(network, Chain) else (tokens,)
    step = partial(predict, network, **rules(network, "cuda"))
    moments = [
        [
            [
                step(b, *sizes, recipe=r, checkpointed=on).at_peak
                for r in RECIPES
            ]
            for b in batches
        ]
        for on in (False, True)
    ]
    states = [bytes_per_parameter(recipe) for recipe in RECIPES]
    return {
        "name": _name(network, tokens),
        "batches": batches,
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


def _name(network: Transformer | Chain, tokens: int) -> str:
    if isinstance(network, Chain):
        count = sum(p.numel() for p in network.model.parameters())
        return f"A chain of {count:,} parameters"
    known = [name for name, of in PRESETS.items() if of == network]
    name = f"A transformer of {network.parameters:,} parameters"
    return f"{known[0] if known else name}, {tokens} tokens"
