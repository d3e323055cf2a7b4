"""The sharding widget: model states and communication of each rank."""

from collections.abc import Iterator
from functools import lru_cache
from html import escape
from numbers import Integral
from types import ModuleType
from typing import Any

import traitlets

from membudget.ledger import GPT2, PRESETS, RECIPES, bytes_per_parameter
from membudget.plotting import palette
from membudget.widgets.base import Widget, format_bytes, format_number

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

CARDS = {
    "none": (0, "none"),
    "16 GB": (16 * 10**9, "16 GB (T4)"),
    "24 GB": (24 * 10**9, "24 GB (L4, RTX 4090)"),
    "40 GB": (40 * 10**9, "40 GB (A100)"),
    "80 GB": (80 * 10**9, "80 GB (A100, H100)"),
    "141 GB": (141 * 10**9, "141 GB (H200)"),
}
"""Bytes of a card, in the decimal GB of its name; 0 for no card."""

PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "waiting": "waiting gradients",
    "optimizer": "optimizer states",
}
"""The parts of a bar, from the left to the right."""

MOST_PARAMETERS = 2**40
"""Bytes stay below 2^53, where a browser's numbers are no longer whole."""

MOST_RANKS = 1024

MOST_STEPS = 16


def _room() -> ModuleType:
    """Imported when it is used: PyTorch's FSDP takes most of a second, which
    every notebook with a widget would wait for.
    """
    from membudget import sharding

    return sharding


class _Model(traitlets.TraitType):
    """A trait for the name of a model, or how many parameters it has."""

    def validate(self, obj: Any, value: Any) -> str | int:
        if isinstance(value, str) and value in MODELS:
            return value
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or not 1 <= value <= MOST_PARAMETERS:
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use one of {', '.join(MODELS)}, "
                "or a whole number of parameters, from 1 to "
                f"{MOST_PARAMETERS}"
            )
        return int(value)


class _Power(traitlets.Int):
    """A trait for a power of two."""

    def __init__(self, default: int, most: int) -> None:
        self.most = most
        super().__init__(default)

    def validate(self, obj: Any, value: Any) -> int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or not 1 <= value <= self.most or value & (value - 1):
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a power of two, from 1 to "
                f"{self.most}"
            )
        return int(value)


class Sharding(Widget):
    """What each rank holds and sends, with DDP and the stages of ZeRO.

    Two pictures with a bar for each stage: the bytes of the model states on
    each rank (:func:`membudget.sharding.zero_states`, with Adam), and the
    bytes that each rank sends in an optimizer step
    (:func:`membudget.sharding.zero_traffic`).

    Args:
        model: one of :data:`MODELS`, or a number of parameters, at most
            2**40.
        ranks: a power of two, from 1 to 1024.
        stage: one of :data:`membudget.sharding.STAGES`; of the sentence, and
            framed in the pictures.
        recipe: one of :data:`membudget.ledger.RECIPES`.
        accumulation_steps: micro-batches in a step: 1, 2, 4, 8 or 16.
        synchronise_last: whether gradients are reduced with the last
            micro-batch only. With one micro-batch it changes nothing.
        card: one of :data:`CARDS`, whose bytes are drawn as a limit.

    Raises:
        traitlets.TraitError: one of them is not as said above (the widget
            stays as it was).

    Example:
        >>> widget = Sharding("7.5 B", ranks=64, card="24 GB")
        >>> widget.numbers()["stages"]["zero-3"]["bytes"]
        1875000000
    """

    name = "sharding"

    model = _Model("7.5 B").tag(sync=True)
    ranks = _Power(64, MOST_RANKS).tag(sync=True)
    stage = traitlets.Enum(list(STAGE_NAMES), "zero-3").tag(sync=True)
    recipe = traitlets.Enum(list(RECIPES), "master").tag(sync=True)
    accumulation_steps = _Power(1, MOST_STEPS).tag(sync=True)
    synchronise_last = traitlets.Bool(False).tag(sync=True)
    card = traitlets.Enum(list(CARDS), "none").tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(
        self,
        model: str | int = "7.5 B",
        ranks: int = 64,
        stage: str = "zero-3",
        recipe: str = "master",
        accumulation_steps: int = 1,
        *,
        synchronise_last: bool = False,
        card: str = "none",
    ) -> None:
        self.set_trait("tables", _tables())
        super().__init__(
            model=model,
            ranks=ranks,
            stage=stage,
            recipe=recipe,
            accumulation_steps=accumulation_steps,
            synchronise_last=synchronise_last,
            card=card,
        )

    @property
    def parameters(self) -> int:
        """Ψ, how many the model has."""
        return MODELS.get(self.model, self.model)

    @property
    def waiting(self) -> bool:
        """Whether micro-batches wait for the last to reduce gradients."""
        return self.synchronise_last and self.accumulation_steps > 1

    def numbers(self) -> dict[str, Any]:
        """What the widget shows; ``describe`` of the module gives the same.

        ``parameters`` is Ψ. ``stages``: for each stage the bytes of the
        model states on a rank, together and as parts (``split``; ``waiting``
        are the gradients that a rank holds besides its shard, until the last
        micro-batch); the bytes that a rank ``sent`` in a step; how often Ψ
        numbers are ``gathered`` (parameters) and ``reduced`` (gradients) for
        that, each time (N − 1)/N; whether the states fit the card (None
        without one); and the ``fewest`` ranks, a power of two, with which
        they would (None without a card, or where no number is enough).
        """
        return {
            "parameters": self.parameters,
            "stages": {stage: self._stage(stage) for stage in STAGE_NAMES},
        }

    def _stage(self, stage: str) -> dict[str, Any]:
        room = _room()
        of = self.parameters, self.ranks, stage, self.recipe
        shard = room.zero_states(*of)
        held = room.zero_states(*of, waiting=self.waiting)
        when = {
            "accumulation_steps": self.accumulation_steps,
            "synchronise_last": self.synchronise_last,
        }
        sent = room.zero_traffic(
            self.parameters, stage, self.recipe, ranks=self.ranks, **when
        )
        # Two recipes whose gradients differ by two bytes tell both apart.
        short = room.zero_traffic(1, stage, "master", **when)
        long = room.zero_traffic(1, stage, "master-fp32-gradients", **when)
        reduced = (long - short) // 2
        card = CARDS[self.card][0]
        fewest = None
        if card:
            fewest = _fewest(
                self.parameters, stage, self.recipe, self.waiting, card
            )
        return {
            "split": {
                "parameters": held.parameters,
                "gradients": shard.gradients,
                "waiting": held.gradients - shard.gradients,
                "optimizer": held.optimizer,
            },
            "bytes": held.total,
            "sent": sent,
            "gathered": short // 2 - reduced,
            "reduced": reduced,
            "fits": held.total <= card if card else None,
            "fewest": fewest,
        }

    def sentence(self) -> str:
        """The key numbers of the chosen stage, as the module says them."""
        stages = self.numbers()["stages"]
        ddp, n = stages["ddp"], stages[self.stage]
        ranks = _plural(self.ranks, "rank")
        text = f"{STAGE_NAMES[self.stage]} on {ranks}: "
        text += f"{format_bytes(n['bytes'])} of model states per rank"
        if n["split"]["waiting"]:
            text += f" ({format_bytes(n['split']['waiting'])} of them wait "
            text += "to be reduced)"
        if self.stage != "ddp":
            text += f", {_times(ddp['bytes'] / n['bytes'], 'less than')}"
        if self.ranks == 1:
            text += "; nothing is sent."
        else:
            text += f"; each rank sends {format_bytes(n['sent'])} per step"
            if self.stage != "ddp":
                more = self._size(n) / self._size(ddp)
                text += f", {_times(more, 'as much as')}{self._unequal()}"
            text += "."
        if n["fits"] is not None:
            text += f" {self._fits(n)}"
        text += " Activations"
        text += ", gathered parameters" if self.stage == "zero-3" else ""
        return f"{text} and buffers come on top."

    def _size(self, n: dict[str, Any]) -> int:
        """Bytes that are sent for each parameter, without (N − 1)/N."""
        each = bytes_per_parameter(self.recipe)
        return n["gathered"] * each.parameters + n["reduced"] * each.gradients

    def _unequal(self) -> str:
        """Why the same Ψ are other bytes than DDP's."""
        each = bytes_per_parameter(self.recipe)
        if each.parameters == each.gradients:
            return ""
        text = f" (a parameter has {each.parameters} bytes, a gradient "
        return f"{text}{each.gradients})"

    def _fits(self, n: dict[str, Any]) -> str:
        """Whether the states fit the card, and with how many ranks."""
        fewest = n["fewest"]
        text = "The states " + ("fit" if n["fits"] else "do not fit")
        text += f" a card of {self.card}"
        if fewest == self.ranks:
            return f"{text}."
        if fewest:
            of = "of the powers of two, " if fewest > 2 else ""
            return f"{text}; {of}{_plural(fewest, 'rank')} would be enough."
        little = "nothing" if self.stage == "ddp" else "too little"
        return f"{text}; no number of ranks helps, as {little} is split."

    def titles(self) -> tuple[str, str]:
        """Of both pictures."""
        what = self.model
        if not isinstance(what, str):
            what = f"{what:,}".replace(",", "\u202f")
        if not isinstance(self.model, str) or what.endswith(" B"):
            what += f" parameter{'' if self.model == 1 else 's'}"
        one = f"Model states per rank: {what}, {self.recipe}, "
        one += _plural(self.ranks, "rank")
        steps = self.accumulation_steps
        two = "Sent by each rank per optimizer step: "
        two += "one micro-batch" if steps == 1 else f"{steps} micro-batches"
        if self.waiting:
            two += ", reduced once"
        return one, two

    def picture(self) -> str:
        """The states and, below, what is sent."""
        n = self.numbers()["stages"]
        one, two = (title.split(": ") for title in self.titles())
        body = "\n".join(
            [
                _text(2, 13, one[0]),
                _text(2, 30, one[1]),
                *self._states(n),
                _text(2, 275, two[0]),
                _text(2, 292, two[1]),
                *self._traffic(n),
            ]
        )
        return (
            '<svg viewBox="0 0 400 440" width="400" role="img" '
            f'aria-label="{escape(self.sentence())}" font-size="12" '
            'font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">\n'
            f"{body}\n</svg>"
        )

    def _states(self, n: dict[str, Any]) -> Iterator[str]:
        card = CARDS[self.card][0]
        top = _top([of["bytes"] for of in n.values()], card)
        limit = 2 + 396 * card / top if 0 < card <= top else None
        for index, (stage, of) in enumerate(n.items()):
            y = 56 + 38 * index
            words = f"{STAGE_NAMES[stage]}: {format_bytes(of['bytes'])}"
            if of["split"]["waiting"]:
                words += f", {format_bytes(of['split']['waiting'])} waiting"
            yield _text(2, y - 6, words, bold=stage == self.stage)
            parts = list(of["split"].items())
            yield from _bar(y, 16, parts, top, stage == self.stage, limit)
        if limit:  # beside the bars, not through their words
            lines = (f"M{limit:.1f} {56 + 38 * i}v16" for i in range(4))
            yield (
                f'<path d="{"".join(lines)}" stroke="currentColor" '
                'stroke-width="1.5" stroke-dasharray="6 4"/>'
            )
        if card:
            label = f"{self.card} = {format_bytes(card)}"
            label = f"card {label} →" if card > top else f"dashed: {label}"
            yield _text(398, 206, label, "end")
        legend = [part for part in PARTS if part != "waiting"]
        if any(of["split"]["waiting"] for of in n.values()):
            legend.append("waiting")
        for index, part in enumerate(legend):
            x, y = 2 + 198 * (index % 2), 228 + 20 * (index // 2)
            yield from _box(x, y - 11, 12, 12, part)
            yield _text(x + 17, y, PARTS[part])

    def _traffic(self, n: dict[str, Any]) -> Iterator[str]:
        each = bytes_per_parameter(self.recipe)
        top = _top([of["sent"] for of in n.values()], 0) or 1
        for index, (stage, of) in enumerate(n.items()):
            y = 318 + 34 * index
            times = of["gathered"] + of["reduced"]
            words = f"{STAGE_NAMES[stage]}: {format_bytes(of['sent'])}"
            words += f", {times} Ψ" if of["sent"] else ""
            yield _text(2, y - 4, words, bold=stage == self.stage)
            gathered = of["gathered"] * each.parameters / self._size(of)
            parts = [
                ("parameters", of["sent"] * gathered),
                ("gradients", of["sent"] * (1 - gathered)),
            ]
            yield from _bar(y, 12, parts, top, stage == self.stage)

    def __repr__(self) -> str:
        return (
            f"Sharding({self.model!r}, ranks={self.ranks}, "
            f"stage={self.stage!r}, recipe={self.recipe!r}, "
            f"accumulation_steps={self.accumulation_steps})"
        )


# What the module computes with


def _tables() -> dict[str, Any]:
    """The names, and the coefficients of the formulas, in their order."""
    each = {recipe: bytes_per_parameter(recipe) for recipe in RECIPES}
    return {
        "models": [[name, count] for name, count in MODELS.items()],
        "stages": [
            [
                stage,
                STAGE_NAMES[stage],
                of.text,
                [of.parameters, of.gradients, of.optimizer],
                of.gathers,
            ]
            for stage, of in _room().STAGES.items()
        ],
        "recipes": [
            [name, of.text, [e.parameters, e.gradients, e.optimizer]]
            for (name, of), e in zip(
                RECIPES.items(), each.values(), strict=True
            )
        ],
        "cards": [[name, size, text] for name, (size, text) in CARDS.items()],
    }


@lru_cache(maxsize=1024)
def _fewest(
    parameters: int, stage: str, recipe: str, waiting: bool, card: int
) -> int | None:
    """The fewest ranks, a power of two, whose states fit; None if none do."""

    def fits(ranks: int) -> bool:
        of = parameters, ranks, stage, recipe
        return _room().zero_states(*of, waiting=waiting).total <= card

    if not fits(2**50):  # of what is split, one byte is left
        return None
    ranks = 1
    while not fits(ranks):
        ranks *= 2
    return ranks


# Words and shapes


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _times(ratio: float, than: str) -> str:
    """``1.5 times as much as DDP``"""
    text = format_number(ratio)
    return "as much as DDP" if text == "1" else f"{text} times {than} DDP"


def _top(sizes: list[int], card: int) -> float:
    """The end of the axis: a card far beyond the bars is not on it."""
    most = max(sizes)
    return 1.04 * (card if most < card <= 2.5 * most else most)


def _bar(
    y: float,
    height: float,
    parts: list[tuple[str, float]],
    top: float,
    chosen: bool,
    limit: float | None = None,
) -> Iterator[str]:
    """Parts from the left to the right, with a frame if it is chosen.

    A line will be drawn at `limit`.
    """
    before = 0.0
    for part, size in parts:
        x, before = 2 + 396 * before / top, before + size
        wide = 2 + 396 * before / top - x
        if size:
            yield from _box(x, y, wide, height, part, limit)
    if chosen:
        yield (
            f'<rect x="2" y="{y}" width="{396 * before / top:.1f}" '
            f'height="{height}" fill="none" stroke="currentColor" '
            'stroke-width="2"/>'
        )


def _box(
    x: float,
    y: float,
    wide: float,
    height: float,
    part: str,
    limit: float | None = None,
) -> Iterator[str]:
    """In the part's colour, with its initial where there is room.

    In the middle, or beside a line at `limit`.
    """
    look = 'stroke="#fff" stroke-width="0.4"'
    colour = palette()["gradients" if part == "waiting" else part]
    if part == "waiting":
        look = f'fill-opacity="0.3" stroke="{colour}" stroke-dasharray="2 2"'
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}" '
        f'fill="{colour}" {look}/>'
    )
    middle = x + wide / 2
    if limit is not None and abs(middle - limit) < 9:
        middle = limit + (9 if middle >= limit else -9)
    if min(middle - x, x + wide - middle) >= 6:
        ink = "currentColor" if part == "waiting" else "#000"
        yield (
            f'<text x="{middle:.1f}" y="{y + height / 2 + 4}" '
            f'text-anchor="middle" font-size="11" fill="{ink}">'
            f"{part[0].upper()}</text>"
        )


def _text(
    x: float, y: float, content: str, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>'
        f"{escape(content)}</text>"
    )
