"""The planner: every way to train a model within a budget."""

from functools import partial
from typing import Any

import traitlets

from membudget.cards import CARDS
from membudget.checks import whole
from membudget.ledger import OPTIMIZERS, PLANNED, PRESETS, RECIPES, Adapter
from membudget.planning import (
    STAGES,
    Answer,
    Choice,
    Job,
    Machine,
    Plan,
    search,
)
from membudget.planning.machine import EFFICIENCY, LAUNCH
from membudget.planning.memory import static
from membudget.widgets.base import Checked, Widget, format_bytes, later
from membudget.widgets.planning_rows import (
    ADAPTERS,
    MIXES,
    RANKS,
    SHOWN,
    UNDER,
    adapter_of,
    known,
)

MIB = 2**20

ANY = "any"
"""Of an axis that is not locked."""

ALL = "all"
"""Weights are trained, without an adapter."""

CHUNKS = (ANY, "none", "2", "4", "8", "16")
"""What the loss's lock may be."""

LARGEST = 256
"""Sequences of a step."""

LABELS = (
    later("fp32: everything in fp32"),
    later("autocast: fp32 parameters"),
    later("bf16: everything in bf16"),
    later("master: bf16 model"),
    later("SGD with momentum"),
    later("Adam, AdamW"),
    later("Adam with 8-bit states"),
    later("Lion with 8-bit states"),
    later("LoRA of rank 16 in all linear layers"),
    later("LoRA of rank 16 in all linear layers over 4 bits"),
)
"""Of the tables, as the page shows them: those with words in them."""

SIZES = (0, 1, 2, 4, 8, 16)
"""What the micro-batch's lock may be."""


def power(value: Any, name: str, most: int) -> int:
    """A power of two.

    Raises:
        TypeError, ValueError: it is none, or too large.
    """
    value = whole(value, name, most=most)
    if value & (value - 1):
        raise ValueError(
            f"{name} is {value}: use a power of two from 1 to {most}"
        )
    return value


class Planning(Widget):
    """Which plans fit a card, at the least slowdown.

    The answer is that of :func:`membudget.planning.search`, for a machine of
    :meth:`membudget.planning.Machine.of_card`.

    Args:
        model: one of :data:`membudget.widgets.planning_rows.SHOWN`.
        card: one of :data:`membudget.cards.CARDS`.
        ranks: how many cards share the batch: a power of two up to 64.
        budget: MiB for a card; 0 for what a step can have of the card.
        batch: sequences of a step: a power of two up to 256. There are at
            least as many as ranks.
        tokens: of each: one of
            :data:`membudget.widgets.planning_rows.TOKENS` for the model.
        recipe: one of :data:`membudget.widgets.planning_rows.MIXES`, or
            ``"any"``. With an adapter it does not count: the frozen weights
            are in bf16, the adapter in fp32.
        trained: ``"all"`` weights, or one of
            :data:`membudget.widgets.planning_rows.ADAPTERS`.
        optimizer: one of :data:`membudget.ledger.PLANNED`.
        checkpointed: ``"any"``, ``"none"`` or ``"all"``.
        chunks: ``"any"``, ``"none"`` or a number as text.
        micro: the micro-batch's lock; 0 for none.
        stage: ``"any"`` or one of :data:`membudget.planning.STAGES`. On one
            card, with 8-bit states and with an adapter it does not count.
        pick: which plan is shown: that of the locks if there are any, the
            best three, then the frontier.

    Raises:
        traitlets.TraitError: one of them is not as said above (the widget
            stays as it was).
        TypeError: an argument that is none of these.

    Example:
        >>> widget = Planning("Llama 3 8B", card="H100 80 GB", ranks=8)
        >>> print(widget.answer)
    """

    name = "planning"

    model = traitlets.Enum(list(SHOWN), "Llama 3 8B").tag(sync=True)
    card = traitlets.Enum(list(CARDS), "A100 80 GB").tag(sync=True)
    ranks = Checked(partial(power, most=RANKS[-1]), 1).tag(sync=True)
    budget = Checked(partial(whole, least=0, most=2**22), 0).tag(sync=True)
    batch = Checked(partial(power, most=LARGEST), 16).tag(sync=True)
    tokens = Checked(whole, 8192).tag(sync=True)
    recipe = traitlets.Enum([ANY, *MIXES], "autocast").tag(sync=True)
    trained = traitlets.Enum([ALL, *ADAPTERS], ALL).tag(sync=True)
    optimizer = traitlets.Enum(list(PLANNED), "adam").tag(sync=True)
    checkpointed = traitlets.Enum([ANY, "none", "all"], ANY).tag(sync=True)
    chunks = traitlets.Enum(list(CHUNKS), ANY).tag(sync=True)
    micro = traitlets.Enum(list(SIZES), 0).tag(sync=True)
    stage = traitlets.Enum([ANY, *STAGES], ANY).tag(sync=True)
    pick = Checked(partial(whole, least=0, most=10**6), 0).tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, model: str = "Llama 3 8B", **settings: Any) -> None:
        self.set_trait("tables", _tables())
        if isinstance(model, str) and model in SHOWN:
            settings.setdefault("tokens", known()[model]["tokens"][-1])
        super().__init__(model=model, **settings)

    @traitlets.validate("tokens")
    def _check_tokens(self, proposal: Any) -> int:
        tokens, stops = proposal["value"], self._stops
        if tokens not in stops:
            raise traitlets.TraitError(
                f"tokens is {tokens}: with {self.model} use one of "
                f"{', '.join(map(str, stops))}"
            )
        return tokens

    @traitlets.observe("model")
    def _follow(self, change: Any) -> None:
        """A long sequence stays one, and a short one, too."""
        if self.tokens not in self._stops:
            old = known().get(change["old"], {}).get("tokens", self._stops)
            self.tokens = self._stops[0 if self.tokens == old[0] else -1]

    @property
    def _stops(self) -> list[int]:
        return known()[self.model]["tokens"]

    @property
    def job(self) -> Job:
        """What is trained."""
        batch = max(self.batch, self.ranks)
        return Job(SHOWN[self.model], self.tokens, batch)

    @property
    def bytes(self) -> int:
        """The budget of a card."""
        return (self.budget or CARDS[self.card].usable // MIB) * MIB

    @property
    def free(self) -> dict[str, Any]:
        """Locks of the problem, as :func:`membudget.planning.search` takes
        them: the axes that the reader's switches leave free."""
        recipes, adapter = self._ways
        how = {"optimizer": self.optimizer, "adapter": adapter}
        alone = adapter or OPTIMIZERS[self.optimizer].block
        stage = {"stage": "ddp"} if alone else {}
        return {"recipe": recipes, **how, **stage}

    @property
    def _ways(self) -> tuple[list[str], Adapter | None]:
        """The recipes that may be, and the adapter."""
        if self.trained != ALL:
            return [UNDER], adapter_of(SHOWN[self.model], self.trained)
        return list(MIXES) if self.recipe == ANY else [self.recipe], None

    @property
    def locks(self) -> dict[str, Any]:
        """Those of the problem and of the reader's switches."""
        share = self.job.batch // self.ranks
        found = self.free
        if self.checkpointed != ANY:
            depth = self.job.network.depth
            found["checkpointed"] = {"none": 0, "all": depth}[
                self.checkpointed
            ]
        if self.chunks != ANY:
            chunks = None if self.chunks == "none" else int(self.chunks)
            found["loss_chunks"] = chunks
        if self.micro:
            found["micro_batch"] = min(self.micro, share)
        if "stage" not in found and self.ranks > 1 and self.stage != ANY:
            found["stage"] = self.stage
        return found

    @property
    def answer(self) -> Answer:
        """What the widget shows.

        Raises:
            ValueError: a budget below the model's states.
        """
        return self._search(self.free)

    @property
    def yours(self) -> Choice:
        """The plan of the reader's switches: the fastest that fits, or the
        smallest; its slowdown is against what the switches allow.

        Raises:
            ValueError: as ``answer``.
        """
        found = self._search(self.locks)
        return found.within(self.bytes) or found.smallest

    def _search(self, locks: dict[str, Any]) -> Answer:
        machine = Machine.of_card(self.card)
        how = {"ranks": self.ranks, "locks": locks}
        return search(self.job, self.bytes, machine, **how)

    def sentence(self) -> str:
        """What the model's states need, and what the card has."""
        recipes, adapter = self._ways
        how = {"optimizer": self.optimizer, "ranks": self.ranks}
        states = min(
            static(self.job, Plan(1, recipe=one, adapter=adapter, **how)).total
            for one in recipes
        )
        return (
            f"{self.model}, {self.job.batch} × {self.tokens} tokens: its "
            f"states alone need {format_bytes(states)}, and the budget is "
            f"{format_bytes(self.bytes)} of one {self.card}. The planner "
            "finds the fastest way to train it."
        )

    def __repr__(self) -> str:
        return (
            f"Planning({self.model!r}, card={self.card!r}, "
            f"ranks={self.ranks}, batch={self.batch}, "
            f"recipe={self.recipe!r}, trained={self.trained!r})"
        )


def _tables() -> dict[str, Any]:
    """What the page has to know."""
    models = {}
    shown = {name: SHOWN[name] for name in known()}
    for name, network in shown.items():
        made = f"PRESETS[{name!r}]" if name in PRESETS else repr(network)
        models[name] = known()[name] | {
            "family": network.family,
            "made": made.replace("'", '"'),
        }
    packed = ", four_bits=True"
    adapters = {name: adapter_of(network, name) for name in ADAPTERS}
    return {
        "models": models,
        "adapters": {
            name: {
                "told": adapter.told,
                "recipe": UNDER,
                "parameters": RECIPES[UNDER].parameters,
                "gradients": adapter.itemsize,
                "given": f"{adapter.rank}" + packed * adapter.four_bits,
            }
            for name, adapter in adapters.items()
        },
        "recipes": {
            name: {
                "text": f"{name}: {RECIPES[name].text}",
                "parameters": RECIPES[name].parameters,
                "gradients": RECIPES[name].gradients,
                "like": "bf16" if name == "master" else name,
                "sharded": "fp32" if name == "autocast" else name,
            }
            for name in MIXES
        },
        "optimizers": {name: OPTIMIZERS[name].text for name in PLANNED},
        "cards": {
            name: {
                "usable": card.usable,
                "flops": {
                    recipe: Machine.of_card(name).rate(recipe)
                    for recipe in MIXES
                },
                "bandwidth": card.bandwidth,
                "link": card.link,
            }
            for name, card in CARDS.items()
        },
        "ranks": list(RANKS),
        "most": LARGEST,
        "efficiency": EFFICIENCY,
        "operator": LAUNCH,
    }
