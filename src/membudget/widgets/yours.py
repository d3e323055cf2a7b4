"""Will my model fit? For a reader's own ``config.json``, in the browser."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import traitlets

from membudget.cards import CARDS, GIB
from membudget.checks import number, refused, shown, whole
from membudget.ledger import Adapter, CausalLM, from_config
from membudget.planning import Job, Plan, memory
from membudget.widgets.base import Checked, Widget, format_bytes, later
from membudget.widgets.yours_rows import (
    CHOICES,
    KINDS,
    LEAST,
    MOST,
    SIZES,
    SPANS,
    TRAIN,
    own_biases,
    page_tables,
)

OTHER = "another"
"""A card of which the reader says how many GiB a step can have."""

WAYS = {
    "whole": (later("all at once"), False, False),
    "split": (later("one at a time"), True, False),
    "checkpointed": (later("all at once, blocks checkpointed"), False, True),
    "both": (later("one at a time, blocks checkpointed"), True, True),
}
"""Ways to run a step, the cheaper first: words, whether sequences run one at a
time, and whether every block is checkpointed."""


def read_config(config: Mapping[str, Any] | str, name: str = "config") -> str:
    """A config with no more than what the widget needs, as JSON.

    Args:
        config: the content of a ``config.json``, as a dict or as text, or
            one of :data:`membudget.widgets.yours_rows.CHOICES`.
        name: what a refusal calls it.

    Raises:
        ValueError, TypeError: what :func:`membudget.ledger.from_config`
            refuses, or a model for which the page has no rows.
    """
    entries = CHOICES.get(config) if isinstance(config, str) else config
    if entries is None:
        entries = _parsed(str(config), name)
    if not isinstance(entries, Mapping):
        raise refused(name, entries, "the entries of a model's config.json")
    shape = from_config(entries)
    _check(str(entries["model_type"]), shape)
    return _text(str(entries["model_type"]), shape)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the {name} is no JSON ({error}): use a model's config.json, or "
            f"one of {', '.join(CHOICES)}"
        ) from None


def _check(kind: str, shape: CausalLM) -> None:
    """Refuse a model for which there are no rows."""
    use = "use the command membudget fits"
    if kind not in KINDS:
        raise ValueError(f"the page has no rows for a {kind}: {use}")
    if tuple(shape.biases) != own_biases(kind):
        raise ValueError(f"the page has no rows for other biases: {use}")
    if shape.turned != 1:
        raise ValueError(
            f"partial_rotary_factor is {shown(shape.turned)}: {use}"
        )
    if shape.depth < LEAST:
        raise ValueError(
            f"num_hidden_layers is {shape.depth}, and the page has rows from "
            f"{LEAST} on: {use}"
        )
    for entry, attribute in SIZES.items():
        whole(getattr(shape, attribute), entry, most=MOST)
    wide = {"queries": shape.heads * shape.head_size, "MLP": shape.hidden}
    for name, (low, high) in SPANS.items():
        if not low * shape.width <= wide[name] <= high * shape.width:
            raise ValueError(
                f"the width of the {name} is {wide[name]}, and the page has "
                f"rows from {low} to {high} times hidden_size: {use}"
            )


def _text(kind: str, shape: CausalLM) -> str:
    entries = {
        "model_type": kind,
        **{name: getattr(shape, key) for name, key in SIZES.items()},
        "tie_word_embeddings": shape.tied,
    }
    if shape.window is not None:
        if kind.startswith("qwen"):
            entries |= {"use_sliding_window": True, "max_window_layers": 1}
        entries["sliding_window"] = shape.window
    return json.dumps(entries, indent=1)


TEXTS = {name: read_config(name) for name in CHOICES}
"""The configs of the page's choices, as they are kept."""


class YourModel(Widget):
    """A model, a card, a step: does it fit, and which change makes it fit?

    The bytes are :func:`membudget.planning.memory`'s, by a GPU's kernels.

    Args:
        config: see :func:`read_config`, which says how it is kept.
        train: one of :data:`membudget.widgets.yours_rows.TRAIN`.
        card: one of :data:`membudget.cards.CARDS`, or :data:`OTHER`.
        gib: GiB that a step can have of another card, from 0.5 to 1 000.
        tokens: of a sequence, from 64 to 1 048 576.
        batch: sequences of a step, up to 1 024.
        rank: of LoRA in all linear layers, up to 1 024.

    Example:
        >>> YourModel("Qwen2.5 7B", tokens=1024, batch=4).peaks["both"]
        8282355512
    """

    name = "yours"
    named = ("train", "card", "gib", "tokens", "batch", "rank")

    config = Checked(read_config, TEXTS["Qwen2.5 7B"]).tag(sync=True)
    train = traitlets.Enum(list(TRAIN), "qlora").tag(sync=True)
    card = traitlets.Enum([*CARDS, OTHER], "RTX 3060").tag(sync=True)
    gib = Checked(partial(number, least=0.5, most=1000), 11.5).tag(sync=True)
    tokens = Checked(partial(whole, least=64, most=2**20), 2048).tag(sync=True)
    batch = Checked(partial(whole, most=1024), 8).tag(sync=True)
    rank = Checked(partial(whole, most=1024), 16).tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, config: object = "Qwen2.5 7B", **rest: object) -> None:
        self.set_trait("tables", page_tables(TEXTS, WAYS))
        super().__init__(config=config, **rest)

    @property
    def model(self) -> str:
        """Its name, or "your own"."""
        known = (name for name in TEXTS if TEXTS[name] == self.config)
        return next(known, "your own")

    @property
    def shape(self) -> CausalLM:
        """What the config says."""
        return from_config(json.loads(self.config))

    @property
    def budget(self) -> int:
        """Bytes that a step can have of the card."""
        if self.card == OTHER:
            return int(self.gib * GIB)
        return CARDS[self.card].usable

    @property
    def problem(self) -> str:
        """Why there are no rows for this step; "" where there are."""
        shape = self.shape
        narrow = min(map(min, shape.linears.values()))
        if shape.window is not None and self.tokens >= shape.window:
            return (
                f"attention is local beyond {shape.window - 1} tokens: use "
                "fewer tokens, or the command membudget fits"
            )
        if "lora" in self.train and self.rank > narrow:
            return f"a linear layer is {narrow} wide: use a rank up to that"
        return ""

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes at the peak of each of :data:`WAYS`; none where there is a
        :attr:`problem`."""
        job = Job(self.shape, self.tokens, self.batch)
        ways = () if self.problem else WAYS.items()
        return {
            way: memory(job, self._plan(*how))
            for way, (_, *how) in ways
            if self.batch > 1 or not how[0]
        }

    def _plan(self, split: bool, checkpointed: bool) -> Plan:
        shape, adapter = self.shape, None
        if "lora" in self.train:
            packed = self.train == "qlora"
            layers = list(shape.linears)
            adapter = Adapter(layers, self.rank, four_bits=packed)
        return Plan(
            1 if split else self.batch,
            shape.depth * checkpointed,
            recipe=TRAIN[self.train][1],
            adapter=adapter,
        )

    def sentence(self) -> str:
        """Whether it fits, and how."""
        named = self.model
        told = f"{named[0].upper()}{named[1:]}, {TRAIN[self.train][0]}"
        if "lora" in self.train:
            told += f" of rank {self.rank}"
        told += f", {self.batch} × {self.tokens} tokens: "
        if self.problem:
            return f"{told}{self.problem}."
        card, peaks = format_bytes(self.budget), self.peaks
        told += f"{format_bytes(peaks['whole'])} all at once. "
        for way, peak in peaks.items():
            if peak <= self.budget:
                how = f"{WAYS[way][0]} it fits in {format_bytes(peak)}"
                return f"{told}Of a card's {card}, {how}."
        least = format_bytes(min(peaks.values()))
        return f"{told}The least is {least}, too much for a card's {card}."

    def __repr__(self) -> str:
        model = self.model if self.model in CHOICES else self.config
        rest = [f"{name}={getattr(self, name)!r}" for name in self.named]
        return f"YourModel({', '.join([repr(model), *rest])})"
