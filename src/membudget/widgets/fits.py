"""The front page's widget: does a model fit a card, and what makes it fit?"""

import traitlets

from membudget.cards import CARDS
from membudget.widgets.base import Widget, format_bytes
from membudget.widgets.fits_rows import (
    SIZES,
    STATES,
    SWITCHES,
    slowdowns,
    tables,
)


class Fits(Widget):
    """A card that a model's training step overflows, and five savings.

    The peak is :func:`membudget.planning.memory`'s, the time an estimate by
    the card's data sheet (:meth:`membudget.planning.Machine.of_card`).

    Args:
        model: one of :data:`membudget.widgets.fits_rows.SIZES`, which says
            how many tokens it is trained on, and over how many cards it can
            be shared.
        card: one of :data:`membudget.cards.CARDS`.
        cut: whether sequences run one at a time.
        forget: whether every block is checkpointed.
        half: whether precision is mixed, and not fp32.
        adapt: whether LoRA is trained over frozen weights in 4 bits, and not
            all weights.
        share: whether ZeRO-3 shares the step over several cards; beside an
            adapter they share the batch alone.

    Example:
        >>> Fits(cut=True, forget=True).fits
        True
    """

    name = "fits"

    model = traitlets.Enum(list(SIZES), "Llama 3.2 1B").tag(sync=True)
    card = traitlets.Enum(list(CARDS), "RTX 4090").tag(sync=True)
    cut = traitlets.Bool(False).tag(sync=True)
    forget = traitlets.Bool(False).tag(sync=True)
    half = traitlets.Bool(False).tag(sync=True)
    adapt = traitlets.Bool(False).tag(sync=True)
    share = traitlets.Bool(False).tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, **settings: object) -> None:
        self.set_trait("tables", tables())
        super().__init__(**settings)

    @property
    def place(self) -> int:
        """Of the savings among all combinations."""
        return STATES.index(tuple(getattr(self, key) for key in SWITCHES))

    @property
    def peak(self) -> int:
        """Bytes on a card at the worst moment of a step."""
        return sum(self.tables["models"][self.model]["peaks"][self.place])

    @property
    def budget(self) -> int:
        """Bytes of the card for the step."""
        return CARDS[self.card].usable

    @property
    def fits(self) -> bool:
        """Whether the card holds the peak."""
        return self.peak <= self.budget

    @property
    def slowdown(self) -> float:
        """GPU time of the step, as a multiple of the plain step's."""
        return slowdowns(self.model, self.card)[self.place]

    def sentence(self) -> str:
        """The peak, and whether the card holds it."""
        size = SIZES[self.model]
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{self.model}, trained with Adam on {size.batch} × {size.tokens} "
            f"tokens, needs {format_bytes(self.peak)} on a card, which {fits} "
            f"the {format_bytes(self.budget)} of the {self.card}."
        )

    def __repr__(self) -> str:
        on = [key for key in SWITCHES if getattr(self, key)]
        said = "".join(f", {key}=True" for key in on)
        return f"Fits(model={self.model!r}, card={self.card!r}{said})"
