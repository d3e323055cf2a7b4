"""The ledger widget: a card that a transformer's step fills, or overflows."""

from functools import partial
from typing import Any

import traitlets

from membudget.cards import CARDS
from membudget.checks import whole
from membudget.ledger import (
    PLANNED,
    PRESETS,
    RECIPES,
    Prediction,
    Transformer,
    predict,
    rules,
)
from membudget.widgets.base import Checked, Whole, Widget, format_bytes, later
from membudget.widgets.ledger_rows import MIXES, SHOWN, known, token_bytes

NONE = "none"
"""The card of a step that has no limit."""

NAMES = {
    "sgd": "SGD",
    "momentum": later("SGD with momentum"),
    "adam": later("Adam, AdamW"),
    "adam-8bit": later("Adam with 8-bit states"),
    "lion-8bit": later("Lion with 8-bit states"),
}
"""The optimizers in words: those of :data:`membudget.ledger.PLANNED`."""


class Ledger(Widget):
    """What a training step of a transformer needs, on a card.

    The step is that of :func:`membudget.ledger.predict`, with the batch
    split into micro-batches, by a GPU's :func:`membudget.ledger.rules`. But
    Adam works on all parameters at once on a card alone, or by ``foreach``.

    Args:
        model: one of :data:`membudget.widgets.ledger_rows.SHOWN`.
        batch: sequences, up to 1 024.
        tokens: of each: a power of two from 16 to 32 768, and at most as
            many as the model has learned positions.
        steps: accumulation steps, up to 64: the micro-batch is
            ``batch / steps``, rounded up.
        checkpointed: whether each block is checkpointed.
        recipe: one of :data:`membudget.widgets.ledger_rows.MIXES`.
        optimizer: one of :data:`membudget.ledger.PLANNED`.
        foreach: whether Adam works on all parameters at once without a card,
            too.
        card: one of :data:`membudget.cards.CARDS`, or ``"none"``.

    A model with fewer positions takes the tokens along.

    Example:
        >>> widget = Ledger("Llama 3 8B", batch=1, tokens=2048, recipe="bf16")
        >>> widget.shape.parameters
        8030261248
    """

    name = "ledger"
    positional = ("model",)
    named = ("batch", "tokens", "recipe", "optimizer", "card")

    model = traitlets.Enum(SHOWN, SHOWN[0]).tag(sync=True)
    batch = Checked(partial(whole, least=1, most=1024), 8).tag(sync=True)
    tokens = Whole(1024).tag(sync=True)
    steps = Checked(partial(whole, least=1, most=64), 1).tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    recipe = traitlets.Enum(list(MIXES), "fp32").tag(sync=True)
    optimizer = traitlets.Enum(list(PLANNED), "adam").tag(sync=True)
    foreach = traitlets.Bool(False).tag(sync=True)
    card = traitlets.Enum([NONE, *CARDS], "T4").tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, model: str = SHOWN[0], **settings: Any) -> None:
        self.set_trait("tables", _tables())
        super().__init__(model=model, **settings)

    @traitlets.validate("tokens")
    def _check_tokens(self, proposal: Any) -> int:
        tokens, stops = proposal["value"], self._stops
        if tokens not in stops:
            raise traitlets.TraitError(
                f"tokens is {tokens}: with {self.model} use a power of two "
                f"from {stops[0]} to {stops[-1]}"
            )
        return tokens

    @traitlets.observe("model")
    def _follow(self, change: Any) -> None:
        """Fewer positions take the tokens along."""
        self.tokens = min(self.tokens, self._stops[-1])

    @property
    def _stops(self) -> list[int]:
        return self.tables["models"][self.model]["tokens"]

    @property
    def shape(self) -> Transformer:
        """The network."""
        return PRESETS[self.model]

    @property
    def at_once(self) -> bool:
        """Whether the optimizer works on all parameters at once."""
        adam = self.optimizer == "adam"
        return adam and (self.foreach or self.card != NONE)

    @property
    def budget(self) -> int | None:
        """Bytes of the card for the step; None without a card."""
        return None if self.card == NONE else CARDS[self.card].usable

    @property
    def prediction(self) -> Prediction:
        """The step, row by row."""
        return predict(
            self.shape,
            self.batch,
            self.tokens,
            recipe=self.recipe,
            optimizer=self.optimizer,
            micro_batch=-(-self.batch // self.steps),
            checkpointed=self.checkpointed,
            **rules(self.shape, "cuda") | {"foreach": self.at_once},
        )

    def sentence(self) -> str:
        """The peak, and whether the card holds it."""
        peak = self.prediction.peak
        text = (
            f"{self.model}, {self.batch} × {self.tokens} tokens: the peak of "
            f"a training step is {format_bytes(peak)}"
        )
        if self.budget is None:
            return f"{text}."
        fits = "fits" if peak <= self.budget else "does not fit"
        return (
            f"{text}, which {fits} the {format_bytes(self.budget)} of the "
            f"{self.card}."
        )


def _tables() -> dict[str, Any]:
    """What the page has to know."""
    return {
        "models": known(),
        "token": token_bytes(),
        "recipes": [[name, f"{name}: {RECIPES[name].text}"] for name in MIXES],
        "optimizers": NAMES,
        "cards": {
            name: {"usable": card.usable, "bf16": card.bf16}
            for name, card in CARDS.items()
        },
    }
