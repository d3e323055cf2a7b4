"""The ledger widget: where the bytes of a transformer's step go."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from html import escape
from typing import Any

import traitlets

from membudget.ledger import (
    FAMILIES,
    OPTIMIZERS,
    PRESETS,
    RECIPES,
    PaperMoment,
    Prediction,
    Transformer,
    predict,
)
from membudget.plotting import palette
from membudget.widgets.base import (
    Whole,
    Widget,
    format_bytes,
)

SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "inputs": "inputs",
    "temporaries": "temporaries",
}
"""The categories of what is alive, from the left of a bar to its right."""

BARS = {
    "forward": ("forward",),
    "backward": ("backward", "recomputation"),
    "update": ("optimizer",),
}
"""The bars, and the phases of a step that each of them is the worst of."""

PHASE_WORDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "recomputation": "recomputation",
    "optimizer": "optimizer’s step",
}

SHAPE = (
    "family",
    "vocabulary",
    "width",
    "depth",
    "heads",
    "kv_heads",
    "hidden",
    "tied",
    "context",
)
"""The traits that a preset sets."""

MOST = {
    "vocabulary": 2**20,
    "width": 2**16,
    "depth": 256,
    "heads": 1024,
    "kv_heads": 1024,
    "hidden": 2**18,
    "context": 2**20,
    "batch": 2**16,
    "tokens": 2**20,
    "steps": 2**16,
}
"""The largest sizes."""

MOST_NUMBERS = 2**48
"""Of the activations, about: bytes stay below 2^53, where a browser's
numbers are no longer whole."""

MOST_BUDGET = 2**50

DEFAULT = "GPT-2 124M"


class _Size(Whole):
    """A trait for a size."""

    def validate(self, obj: Any, value: Any) -> int:
        value = super().validate(obj, value)
        most = MOST[self.name]
        if value > most:
            raise traitlets.TraitError(
                f"{self.name} is {value}: use at most {most}"
            )
        return value


class _Budget(Whole):
    """A trait for bytes, or 0."""

    def validate(self, obj: Any, value: Any) -> int:
        if value == 0 and value is not False:
            return 0
        try:
            value = super().validate(obj, value)
        except traitlets.TraitError:
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a whole number of bytes; 0 "
                "is no budget"
            ) from None
        if value > MOST_BUDGET:
            raise traitlets.TraitError(
                f"{self.name} is {value}: use at most {MOST_BUDGET} bytes"
            )
        return value


class Ledger(Widget):
    """What a training step of a transformer needs, and when it needs most.

    The step is that of :func:`membudget.ledger.predict`, with the batch
    split into micro-batches. Shapes without dropout.

    Args:
        preset: one of :data:`membudget.ledger.PRESETS`, which sets the shape:
            ``family``, ``vocabulary``, ``width``, ``depth``, ``heads``,
            ``kv_heads``, ``hidden``, ``tied`` and ``context``, as
            :class:`membudget.ledger.Transformer` has them. To change one of
            these leaves the preset: then it is ``""``.
        fused: whether attention is one operator.
        batch: sequences.
        tokens: of each; with the family gpt at most ``context``.
        steps: accumulation steps: the micro-batch is ``batch / steps``,
            rounded up.
        checkpointed: whether each block is checkpointed.
        recipe: one of :data:`membudget.ledger.RECIPES`.
        optimizer: one of :data:`membudget.ledger.OPTIMIZERS`.
        foreach: whether Adam works on all parameters at once, which is
            PyTorch's way on a GPU.
        budget: bytes that there are; 0 for no budget.

    The family gpt has as many heads of keys as of queries, and an MLP of
    4 × width: ``kv_heads`` and ``hidden`` are not used; ``context`` is not by
    the family llama. Sizes are at most those of :data:`MOST`.

    Raises:
        traitlets.TraitError: one of them is not as said above (the widget
            stays as it was).
        TypeError: an argument that is none of these.

    Example:
        >>> widget = Ledger("Llama 3 8B", batch=1, tokens=2048, recipe="bf16")
        >>> widget.numbers()["parameters"]
        8030261248
    """

    name = "ledger"

    preset = traitlets.Enum(["", *PRESETS], "").tag(sync=True)
    family = traitlets.Enum(list(FAMILIES), "gpt").tag(sync=True)
    vocabulary = _Size(256).tag(sync=True)
    width = _Size(64).tag(sync=True)
    depth = _Size(2).tag(sync=True)
    heads = _Size(4).tag(sync=True)
    kv_heads = _Size(4).tag(sync=True)
    hidden = _Size(256).tag(sync=True)
    tied = traitlets.Bool(False).tag(sync=True)
    context = _Size(1024).tag(sync=True)
    fused = traitlets.Bool(True).tag(sync=True)
    batch = _Size(8).tag(sync=True)
    tokens = _Size(1024).tag(sync=True)
    steps = _Size(1).tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    recipe = traitlets.Enum(list(RECIPES), "fp32").tag(sync=True)
    optimizer = traitlets.Enum(list(OPTIMIZERS), "adam").tag(sync=True)
    foreach = traitlets.Bool(False).tag(sync=True)
    budget = _Budget(0).tag(sync=True)

    _followed = ""  # the preset whose shape the traits have

    def __init__(self, preset: str = DEFAULT, **settings: Any) -> None:
        known = set(self.class_own_traits(sync=True))
        unknown = sorted(set(settings) - known)
        if unknown:
            raise TypeError(
                f"Ledger has no argument {unknown[0]!r}: use one of "
                f"{', '.join(sorted(known))}"
            )
        if isinstance(preset, str) and preset in PRESETS:
            given = _traits(PRESETS[preset])
            if any(settings.get(k, v) != v for k, v in given.items()):
                preset = ""
            settings = given | settings
        super().__init__(preset=preset, **settings)

    @traitlets.validate("preset", "fused", "batch", "tokens", *SHAPE)
    def _check(self, proposal: Any) -> Any:
        """What no single trait can tell."""
        new = {name: getattr(self, name) for name in (*SHAPE, *MOST)}
        new |= {"preset": self.preset, "fused": self.fused}
        new[proposal["trait"].name] = proposal["value"]
        if new["preset"] not in ("", self._followed):
            new |= _traits(PRESETS[new["preset"]])
        try:
            shape = _shape(new)
        except ValueError as error:
            raise traitlets.TraitError(str(error)) from None
        tokens, context = new["tokens"], new["context"]
        if shape.family == "gpt" and tokens > context:
            raise traitlets.TraitError(
                f"{tokens} tokens are more than the {context} learned "
                "positions: use fewer tokens or a larger context"
            )
        scores = 0 if shape.fused else shape.heads * tokens
        numbers = shape.depth * (16 * shape.width + 4 * shape.hidden + scores)
        numbers += shape.vocabulary
        if new["batch"] * tokens * numbers > MOST_NUMBERS:
            raise traitlets.TraitError(
                "a step of these sizes holds more than 2**48 numbers: use "
                "smaller ones"
            )
        return proposal["value"]

    @traitlets.observe("preset", *SHAPE)
    def _follow(self, change: Any) -> None:
        """A preset sets the shape; another shape leaves the preset."""
        if self.preset not in ("", self._followed):
            self._followed = self.preset
            with self.hold_trait_notifications():
                for name, value in _traits(PRESETS[self.preset]).items():
                    setattr(self, name, value)
        elif self.preset and (
            replace(self.shape, fused=True) != PRESETS[self.preset]
        ):
            self.preset = ""
        self._followed = self.preset

    @property
    def shape(self) -> Transformer:
        """The network."""
        names = (*SHAPE, "fused")
        return _shape({name: getattr(self, name) for name in names})

    @property
    def prediction(self) -> Prediction:
        """The step, row by row."""
        return _predict(*self._setting())

    def _setting(self) -> tuple:
        """The arguments of :func:`_predict`."""
        return (
            self.shape,
            self.batch,
            self.tokens,
            self.steps,
            self.recipe,
            self.optimizer,
            self.checkpointed,
            self.foreach,
        )

    def numbers(self) -> dict[str, Any]:
        """What the widget shows; ``describe`` of the module gives the same.

        ``parameters`` is a number, ``states`` the bytes of parameters,
        gradients and optimizer states. ``forward``, ``backward`` (with
        recomputation) and ``update`` are the worst moments of these phases,
        ``peak`` that of the step: its row, its phase, its bytes, and these by
        category (``split``). ``fits`` says whether the peak is within the
        budget, and ``largest`` how many sequences would be; both are None
        without a budget.
        """
        setting = self._setting()
        run = self.prediction
        count, kept = self.shape.parameters, run.at_peak.split
        gradients = RECIPES[self.recipe].gradients * count
        bars = {
            bar: _moment(
                max(
                    (m for m in run.moments if m.phase in phases),
                    key=lambda moment: moment.live,
                )
            )
            for bar, phases in BARS.items()
        }
        return {
            "parameters": count,
            "states": kept["parameters"] + gradients + kept["optimizer"],
            **bars,
            "peak": _moment(run.at_peak),
            "fits": run.peak <= self.budget if self.budget else None,
            "largest": _largest(setting, self.budget) if self.budget else None,
        }

    def sentence(self) -> str:
        """The key numbers in words, as the module says them."""
        n = self.numbers()
        peak = n["peak"]
        what = self.preset or (
            f"{_plural(self.depth, 'block')} of "
            f"{'GPT-2' if self.family == 'gpt' else 'Llama'}’s kind, "
            f"{self.width} wide"
        )
        text = f"{what}, {_plural(self.batch, 'sequence')} of "
        text += _plural(self.tokens, "token")
        parts = -(-self.batch // -(-self.batch // self.steps))
        if parts > 1:
            text += f" in {parts} micro-batches"
        if self.checkpointed:
            text += ", every block checkpointed"
        text += f": the peak, {format_bytes(peak['bytes'])}, comes in the "
        text += PHASE_WORDS[peak["phase"]]
        if peak["phase"] != "optimizer":
            text += f", at {peak['row']}"
        split = peak["split"]
        one, two = sorted(SHOWN, key=lambda c: -split[c])[:2]
        text += (
            f", and is {_percent(split[one], peak['bytes'])} {SHOWN[one]} and "
            f"{_percent(split[two], peak['bytes'])} {SHOWN[two]}."
        )
        if self.budget:
            text += f" It {'fits' if n['fits'] else 'does not fit'} the "
            text += f"budget of {format_bytes(self.budget)}; "
            if n["largest"]:
                text += f"the largest batch that does is {n['largest']}."
            else:
                text += "not even one sequence does."
        return text

    def picture(self) -> str:
        """A bar for each phase, drawn to one scale."""
        n = self.numbers()
        top = _top(n, self.budget)
        body = []
        for index, bar in enumerate(BARS):
            body += _bar(n, bar, 20 + 48 * index, top)
        if self.budget and self.budget <= top:
            x = _x(self.budget, top)
            line = "".join(f"M{x:.1f} {y}v36" for y in (14, 62, 110))
            body.append(
                f'<path d="{line}" stroke="currentColor" '
                'stroke-width="1.5" stroke-dasharray="6 4"/>'
            )
        if self.budget:
            label = f"dashed: the budget, {format_bytes(self.budget)}"
            if self.budget > top:
                label = f"budget: {format_bytes(self.budget)} →"
            body.append(_text(398, 178, label, "end"))
        for index, category in enumerate(SHOWN):
            x, y = 2 + 132 * (index % 3), 202 + 20 * (index // 3)
            body.append(
                f'<rect x="{x}" y="{y - 11}" width="12" height="12" '
                f'fill="{palette()[category]}"/>'
                + _initial(x + 6, y - 1, category)
                + _text(x + 17, y, SHOWN[category])
            )
        lines = "\n".join(body)
        return (
            '<svg viewBox="0 0 400 230" width="400" role="img" '
            f'aria-label="{escape(self.sentence())}" font-size="12" '
            'font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">\n'
            f"{lines}\n</svg>"
        )

    def __repr__(self) -> str:
        what = self.preset or self.family
        return (
            f"Ledger({what!r}, batch={self.batch}, tokens={self.tokens}, "
            f"recipe={self.recipe!r}, optimizer={self.optimizer!r})"
        )


# What the ledger says


def _traits(shape: Transformer) -> dict[str, Any]:
    """The traits that make this shape."""
    given = {name: getattr(shape, name) for name in SHAPE}
    if shape.family == "llama":
        del given["context"]
    return given


def _shape(values: dict[str, Any]) -> Transformer:
    """The shape that the traits make.

    Raises:
        ValueError: sizes that do not go together.
    """
    given = {name: values[name] for name in (*SHAPE, "fused")}
    unused = ["context"]
    if values["family"] == "gpt":
        unused = ["kv_heads", "hidden"]
    for name in unused:
        del given[name]
    return Transformer(**given)


@lru_cache(maxsize=32)
def _predict(
    shape: Transformer,
    batch: int,
    tokens: int,
    steps: int,
    recipe: str,
    optimizer: str,
    checkpointed: bool,
    foreach: bool,
) -> Prediction:
    return predict(
        shape,
        batch,
        tokens,
        recipe=recipe,
        optimizer=optimizer,
        micro_batch=-(-batch // steps),
        checkpointed=checkpointed,
        foreach=foreach,
    )


@lru_cache(maxsize=8)
def _largest(setting: tuple, budget: int) -> int:
    """The most sequences whose step stays within the budget; 0 for none.

    Every moment's bytes are a straight line in the micro-batch (one of 1
    needs no more than that), so two steps say how many full micro-batches
    fit; then one by one.
    """
    shape, _, tokens, steps, *rest = setting

    def run(batch: int) -> Prediction:
        return _predict(shape, batch, tokens, steps, *rest)

    def fits(batch: int) -> bool:
        return run(batch).peak <= budget

    two, three = ([m.live for m in run(k * steps).moments] for k in (2, 3))
    size = 2 + min(
        (budget - a) // (b - a) for a, b in zip(two, three, strict=True)
    )
    low, by = steps * max(0, size), 1
    high = low + 1
    while fits(high):
        low, by = high, 2 * by
        high += by
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _moment(moment: PaperMoment) -> dict[str, Any]:
    return {
        "row": moment.row,
        "phase": moment.phase,
        "split": moment.split,
        "bytes": moment.live,
    }


# Words and shapes


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _percent(part: int, whole: int) -> str:
    """A half goes up."""
    return f"{int(part / whole * 100 + 0.5)} %"


def _top(n: dict[str, Any], budget: int) -> float:
    """The end of the axis: a budget far beyond the peak is not on it."""
    peak = n["peak"]["bytes"]
    return 1.04 * (budget if peak < budget <= 2.5 * peak else peak)


def _x(size: float, top: float) -> float:
    return 2 + 396 * size / top


def _bar(n: dict[str, Any], bar: str, y: float, top: float) -> Iterator[str]:
    """A phase's worst moment: what is alive, by category."""
    moment, colours = n[bar], palette()
    words = f"{bar}: {'peak ' if moment == n['peak'] else ''}"
    words += format_bytes(moment["bytes"])
    if bar != "update":
        words += f", at {moment['row'].replace('sum of gradients', 'sum')}"
    yield _text(2, y - 5, words)
    alive = 0
    for category, size in moment["split"].items():
        left, alive = _x(alive, top), alive + size
        wide = _x(alive, top) - left
        if not size:
            continue
        yield (
            f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="24" '
            f'fill="{colours[category]}" stroke="#fff" stroke-width="0.4"/>'
        )
        if wide >= 12:
            yield _initial(left + wide / 2, y + 16, category)
    if moment == n["peak"]:
        yield (
            f'<rect x="2" y="{y}" width="{_x(alive, top) - 2:.1f}" '
            'height="24" fill="none" stroke="currentColor" '
            'stroke-width="2"/>'
        )


def _initial(x: float, y: float, category: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="11" '
        f'fill="#000">{category[0].upper()}</text>'
    )


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )
