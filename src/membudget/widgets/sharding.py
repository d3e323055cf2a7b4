"""The sharding widget: model states and communication of each rank."""

from functools import partial
from types import ModuleType
from typing import Any

import traitlets

from membudget import cards
from membudget.checks import one_of, whole
from membudget.ledger import (
    GPT2,
    PRESETS,
    States,
    bytes_per_parameter,
)
from membudget.widgets.base import TEXTS, Checked, Widget, format_bytes, later

MODELS = {
    "GPT-2 124M": GPT2.parameters,
    "1.3 B": 1_300_000_000,
    "7.5 B": 7_500_000_000,  # the example of the ZeRO paper
    "Llama 3 8B": PRESETS["Llama 3 8B"].parameters,
    "Llama 3 70B": PRESETS["Llama 3 70B"].parameters,
}
"""Models by name, and how many parameters they have."""

STAGE_NAMES = {
    "ddp": "DDP",
    "zero-1": "ZeRO-1",
    "zero-2": "ZeRO-2",
    "zero-3": "ZeRO-3",
}
"""The stages of :data:`membudget.sharding.STAGES`, as they are written."""

POLICY = later("mixed-precision policy")

HOW = {name: (name, None, text) for name, text in TEXTS.items()} | {
    POLICY: (
        *("autocast", 2),
        later("fp32 shards, which ZeRO-3 gathers in bf16"),
    )
}
"""The widget's recipes: what is kept, by its name in
:data:`membudget.ledger.RECIPES`; bytes of a parameter that is gathered to
compute with, where they are others; and in words. The last is FSDP2's
``MixedPrecisionPolicy(param_dtype=torch.bfloat16,
reduce_dtype=torch.float32)``."""

CARDS = {"none": 0} | {name: c.usable for name, c in cards.CARDS.items()}
"""Bytes that a step can have on each card; 0 for no card."""

MOST_PARAMETERS = 2**40
"""Bytes stay below 2^53, where a browser's numbers are no longer whole."""


def _room() -> ModuleType:
    """Imported late: PyTorch's FSDP takes most of a second."""
    from membudget import sharding

    return sharding


def _model(value: Any, name: str) -> str | int:
    """The name of a model, or how many parameters it has."""
    if isinstance(value, str):
        return one_of(value, MODELS, name)
    return whole(value, name, 1, MOST_PARAMETERS)


def _power(value: Any, name: str, most: int = 1024) -> int:
    """A power of two."""
    value = whole(value, name, 1, most)
    if value & (value - 1):
        raise ValueError(f"{name} is {value}: use a power of two")
    return value


class Sharding(Widget):
    """What each rank holds, borrows and sends, with DDP and ZeRO's stages.

    Ranks as cards in a ring, with the shards that they send each other,
    moment by moment of a step. Below it the bytes of the model states that
    each keeps (:func:`membudget.sharding.zero_states`, with Adam), and of the
    block that it borrows; in words what it sends in an optimizer step
    (:func:`membudget.sharding.zero_traffic`).

    Args:
        model: one of :data:`MODELS`, or a number of parameters, at most
            2**40.
        ranks: a power of two, from 1 to 1024.
        stage: one of :data:`membudget.sharding.STAGES`.
        recipe: one of :data:`HOW`.
        blocks: equal parts of the model that are gathered and reduced one
            after the other: a power of two, from 1 to 128.
        accumulation_steps: micro-batches in a step: 1, 2, 4, 8 or 16.
        synchronise_last: whether gradients are reduced with the last
            micro-batch only. With one micro-batch it changes nothing.
        card: one of :data:`CARDS`, whose bytes are the budget of a rank.

    Example:
        >>> widget = Sharding("7.5 B", ranks=64, card="RTX 4090")
        >>> widget.states().total
        1875000000
    """

    name = "sharding"
    positional = ("model",)
    named = ("ranks", "stage", "recipe", "accumulation_steps")

    model = Checked(_model, "7.5 B").tag(sync=True)
    ranks = Checked(_power, 64).tag(sync=True)
    stage = traitlets.Enum(list(STAGE_NAMES), "zero-3").tag(sync=True)
    recipe = traitlets.Enum(list(HOW), "master").tag(sync=True)
    blocks = Checked(partial(_power, most=128), 32).tag(sync=True)
    accumulation_steps = Checked(partial(_power, most=16), 1).tag(sync=True)
    synchronise_last = traitlets.Bool(False).tag(sync=True)
    card = traitlets.Enum(list(CARDS), "none").tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, model: str | int = "7.5 B", **traits: Any) -> None:
        super().__init__(model=model, **traits)

    @traitlets.default("tables")
    def _tables(self) -> dict[str, Any]:
        """The names, and the coefficients of the formulas, in their order."""
        return {
            "models": [[name, count] for name, count in MODELS.items()],
            "stages": [
                [
                    name,
                    STAGE_NAMES[name],
                    [s.parameters, s.gradients, s.optimizer],
                ]
                for name, s in _room().STAGES.items()
            ],
            "recipes": [_recipe(name) for name in HOW],
            "cards": [[name, size] for name, size in CARDS.items()],
        }

    @property
    def parameters(self) -> int:
        """Ψ, how many the model has."""
        return MODELS.get(self.model, self.model)

    @property
    def waiting(self) -> bool:
        """Whether micro-batches wait for the last to reduce gradients."""
        return self.synchronise_last and self.accumulation_steps > 1

    def states(self) -> States:
        """Bytes of the model states on each rank, in the chosen stage."""
        return _room().zero_states(
            self.parameters,
            self.ranks,
            self.stage,
            HOW[self.recipe][0],
            waiting=self.waiting,
        )

    def borrowed(self) -> int:
        """Bytes that a rank has on top of them while a block is at work.

        They are the block's whole parameters, where a rank keeps a shard of
        them, and its whole gradients, where they do not wait.
        """
        if self.ranks == 1:
            return 0
        kept, gathered, _ = HOW[self.recipe]
        split = _room().STAGES[self.stage]
        count = -(-self.parameters // self.blocks)
        block = _room().zero_states(count, 1, self.stage, kept)
        parameters = gathered * count if gathered else block.parameters
        reduced = split.gradients and not self.waiting
        return parameters * split.parameters + block.gradients * reduced

    def sent(self) -> int:
        """Bytes that each rank sends in a step, in the chosen stage."""
        kept, gathered, _ = HOW[self.recipe]
        return _room().zero_traffic(
            self.parameters,
            self.stage,
            kept,
            ranks=self.ranks,
            gathered=gathered,
            accumulation_steps=self.accumulation_steps,
            synchronise_last=self.synchronise_last,
        )

    def sentence(self) -> str:
        """What a rank holds and sends in the chosen stage."""
        name, total = STAGE_NAMES[self.stage], self.states().total
        if self.ranks == 1:
            return f"{name} on 1 rank: it holds all {format_bytes(total)}."
        lent = self.borrowed()
        borrows = f", borrows up to {format_bytes(lent)} for a block,"
        return (
            f"{name} on {self.ranks} ranks: each holds "
            f"{format_bytes(total)} of model states"
            f"{borrows if lent else ''} and sends "
            f"{format_bytes(self.sent())} per step."
        )


def _recipe(name: str) -> list[Any]:
    """A recipe's name, its words, and bytes of each parameter: of what is
    kept, by stage :func:`_sent`, and of a parameter that is gathered.
    """
    kept, gathered, text = HOW[name]
    each = bytes_per_parameter(kept)
    sizes = [each.parameters, each.gradients, each.optimizer]
    sent = [_sent(stage, name) for stage in STAGE_NAMES]
    return [name, text, sizes, sent, gathered or each.parameters]


def _sent(stage: str, recipe: str) -> list[int]:
    """Bytes that are sent for each parameter, without (N − 1)/N: once in a
    step, to gather for each micro-batch, and for each reduction.
    """
    kept, gathered, _ = HOW[recipe]
    sent = partial(_room().zero_traffic, 1, stage, kept, gathered=gathered)
    one = sent()
    last = sent(accumulation_steps=2, synchronise_last=True)
    reduction = sent(accumulation_steps=2) - last
    return [2 * one - last - reduction, last - one, reduction]
