"""The recipes widget: the peak of a training step, by recipe and card."""

from collections.abc import Sequence
from typing import Any

import traitlets

from membudget.cards import CARDS
from membudget.checks import listed
from membudget.ledger import (
    GPT2,
    PRESETS,
    RECIPES,
    Chain,
    Transformer,
    bytes_per_parameter,
    predict,
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

    As :func:`membudget.ledger.predict` gives it, with a GPU's rules unless
    they are changed.

    Args:
        network: what is trained.
        tokens: of a sequence; not used for a ``Chain``.
        batches: ascending batches among which one can choose, at most
            :data:`MOST_BATCHES`.
        batch: one of ``batches``; by default 8, or else the first.
        card: one of :data:`membudget.cards.CARDS`; ``""`` for none.
        checkpointed: whether each block (or segment of a ``Chain``) is.
        lists: whose operator lists autocast follows, ``"cpu"`` or ``"cuda"``.
        foreach: whether the optimizer works on all parameters at once.

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

    batch = Whole(8).tag(sync=True)
    card = traitlets.Enum(["", *CARDS], "").tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    account = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(
        self,
        network: Transformer | Chain = GPT2,
        tokens: int = 1024,
        batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
        *,
        batch: int | None = None,
        card: str = "",
        checkpointed: bool = False,
        lists: str = "cuda",
        foreach: bool = True,
    ) -> None:
        account = _account(network, tokens, batches, lists, foreach)
        self.set_trait("account", account)
        if batch is None:
            batch = 8 if 8 in account["batches"] else account["batches"][0]
        super().__init__(batch=batch, card=card, checkpointed=checkpointed)

    @traitlets.validate("batch")
    def _check_batch(self, proposal: Any) -> int:
        batch, batches = proposal["value"], self.account["batches"]
        if batch not in batches:
            raise traitlets.TraitError(
                f"batch is {batch!r}: use one of {batches}, or hand over "
                "other batches"
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

    def __repr__(self) -> str:
        return (
            f"Recipes(batch={self.batch}, card={self.card!r}, "
            f"checkpointed={self.checkpointed})"
        )


def _account(
    network: Transformer | Chain,
    tokens: int,
    batches: Sequence[int],
    lists: str,
    foreach: bool,
) -> dict[str, Any]:
    """The peak of every batch and recipe, plain and checkpointed."""
    batches = listed(batches, "batches", "numbers", 0)
    if not (
        1 <= len(batches) <= MOST_BATCHES
        and all(type(batch) is int and batch >= 1 for batch in batches)
        and batches == sorted(set(batches))
    ):
        raise ValueError(
            f"batches is {batches}: use 1 to {MOST_BATCHES} ascending whole "
            "numbers, such as (1, 2, 4)"
        )
    sizes = () if isinstance(network, Chain) else (tokens,)
    rules = {"lists": lists, "foreach": foreach}

    def steps(checkpointed: bool) -> list[list[Any]]:
        rules["checkpointed"] = checkpointed
        return [
            [
                predict(network, b, *sizes, recipe=r, **rules).at_peak
                for r in RECIPES
            ]
            for b in batches
        ]

    moments = [steps(False), steps(True)]
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
        "phases": [
            [[m.phase for m in row] for row in rows] for rows in moments
        ],
        "cards": [
            {"name": name, "usable": card.usable, "bf16": card.bf16}
            for name, card in CARDS.items()
        ],
        "rules": "a GPU’s" if foreach and lists == "cuda" else "a CPU’s",
    }


def _name(network: Transformer | Chain, tokens: int) -> str:
    if isinstance(network, Chain):
        count = sum(p.numel() for p in network.model.parameters())
        return f"A chain of {count:,} parameters"
    known = [name for name, of in PRESETS.items() if of == network]
    name = f"A transformer of {network.parameters:,} parameters"
    return f"{known[0] if known else name}, {tokens} tokens"
