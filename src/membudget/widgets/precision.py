"""The precision widget: bits of a number, the loss scale, the recipes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from html import escape
from math import log2
from numbers import Integral, Real
from typing import Any

import torch
import traitlets

from membudget.checks import iterable, listed
from membudget.ledger import (
    GPT2,
    PRESETS,
    RECIPES,
    Chain,
    PaperMoment,
    Transformer,
    bytes_per_parameter,
    predict,
)
from membudget.plotting import palette
from membudget.precision import (
    FORMATS,
    best_scale,
    binades,
    format_of,
)
from membudget.widgets.base import (
    Widget,
    format_bytes,
    format_number,
)

SCALED = ("fp16", "bf16", "fp8-e5m2", "fp8-e4m3")
"""The formats of the histogram."""

MOST_SCALE = 24
"""The loss scale is at most 2 to the power of this."""

MOST_BINADES = 56
"""Of the histogram; the first holds what is smaller, too."""

MOST_BATCHES = 12

MOST_BUDGET = 2**50

SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "inputs": "inputs",
    "temporaries": "temporaries",
}
"""The categories of what is alive, from the left of a bar to its right."""

MOMENTS = {
    "forward": "forward",
    "backward": "backward",
    "recomputation": "recomputation",
    "optimizer": "optimizer step",
}
"""The phases in which a peak can be, in words."""


class _Number(traitlets.Float):
    """A trait for any number but NaN."""

    def validate(self, obj: Any, value: Any) -> float:
        try:
            number = float(value) if _real(value) else math.nan
        except OverflowError:
            raise traitlets.TraitError(
                f"{self.name} is beyond the largest number, 1.8e308: use a "
                "smaller one, or inf"
            ) from None
        if math.isnan(number):
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a number such as 0.1, 3e-5 "
                "or inf"
            )
        return number


class _Scale(traitlets.Int):
    """A trait for a power of two."""

    def validate(self, obj: Any, value: Any) -> int:
        whole = _real(value) and 1 <= value <= 2**MOST_SCALE
        if not whole or 2 ** round(log2(value)) != value:
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a power of two, from 1 to "
                f"2**{MOST_SCALE}"
            )
        return int(value)


class _Budget(traitlets.Int):
    """A trait for bytes, or None."""

    def validate(self, obj: Any, value: Any) -> int | None:
        if value is None:
            return None
        if not _whole(value) or not 1 <= value <= MOST_BUDGET:
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a whole number of bytes, "
                f"from 1 to {MOST_BUDGET}, or None for no budget"
            )
        return int(value)


class Precision(Widget):
    """What a format keeps of a number, of gradients, and of a step's bytes.

    Three pictures: the bits of one number in each of
    :data:`membudget.precision.FORMATS`; gradients by binade, and what one of
    :data:`SCALED` loses of them at a loss scale
    (:func:`membudget.precision.lost`); the peak of a training step by recipe
    (:func:`membudget.ledger.predict`, with Adam).

    Args:
        gradients: finite fp32 tensors, not all zero.
        network: of the third picture.
        tokens: of a sequence; not used for a ``Chain``.
        batches: ascending batches among which one can choose, at most
            :data:`MOST_BATCHES`.
        number: whose bits are shown; any but NaN.
        format: one of :data:`SCALED`.
        scale: the loss scale, a power of two from 1 to 2**24.
        batch: one of ``batches``; by default 8, or else the first.
        checkpointed: whether each block (or segment of a ``Chain``) is.
        budget: bytes that there are; None for no budget.
        lists: whose operator lists autocast follows, ``"cpu"`` or ``"cuda"``.
        label: what the gradients are of, in a few words; shown as text.

    Attributes:
        histogram: what the second picture shows, for every format and scale.
        account: what the third shows, for every batch.

    Raises:
        traitlets.TraitError: number, format, scale, batch or budget is not
            as said above (the widget stays as it was).
        ValueError: gradients that are all zero, infinite or NaN; sizes for
            which there is no step.
        TypeError: gradients that are no fp32 tensors, or another network.

    Example:
        >>> widget = Precision([p.grad for p in model.parameters()])
        >>> widget.scale = 2**16
        >>> widget.numbers()["below"]
    """

    name = "precision"

    number = _Number(0.1).tag(
        sync=True,
        to_json=lambda value, widget: repr(value).replace("inf", "Infinity"),
        from_json=lambda text, widget: float(text),
    )
    format = traitlets.Enum(SCALED, "fp16").tag(sync=True)
    scale = _Scale(1).tag(sync=True)
    batch = traitlets.Int(8).tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    budget = _Budget(None, allow_none=True).tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    histogram = traitlets.Dict(read_only=True).tag(sync=True)
    account = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(
        self,
        gradients: Iterable[torch.Tensor],
        network: Transformer | Chain = GPT2,
        tokens: int = 1024,
        batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
        *,
        number: float = 0.1,
        format: str = "fp16",
        scale: int = 1,
        batch: int | None = None,
        checkpointed: bool = False,
        budget: int | None = None,
        lists: str = "cpu",
        label: str = "",
    ) -> None:
        account = _account(network, tokens, batches, lists)
        self.set_trait("histogram", _histogram(gradients))
        self.set_trait("account", account)
        if batch is None:
            batch = 8 if 8 in account["batches"] else account["batches"][0]
        super().__init__(
            number=number,
            format=format,
            scale=scale,
            batch=batch,
            checkpointed=checkpointed,
            budget=budget,
            label=label,
        )

    @traitlets.validate("batch")
    def _check_batch(self, proposal: Any) -> int:
        batch, batches = proposal["value"], self.account["batches"]
        if isinstance(batch, bool) or batch not in batches:
            raise traitlets.TraitError(
                f"batch is {batch!r}: use one of {_and(batches)}, or hand "
                "over other batches"
            )
        return batch

    def show(self, gradients: Iterable[torch.Tensor]) -> None:
        """Other gradients in the histogram.

        Raises:
            ValueError, TypeError: as the class.
        """
        self.set_trait("histogram", _histogram(gradients))

    def numbers(self) -> dict[str, Any]:
        """What the widget shows; ``describe`` of the module gives the same.

        ``formats``: of the number, its bits, the value that is stored, its
        relative error (None where a number is infinite) and its kind:
        ``normal`` (zero and infinity, too), ``subnormal``, ``underflow`` or
        ``overflow``. ``below``, ``subnormal`` and ``above`` are shares of
        the ``gradients`` that are not zero; ``best`` is log2 of the largest
        scale without overflow. ``recipes``: the bytes at the peak, together
        and by category, the phase of that moment, the bytes per parameter of
        parameters, gradients and optimizer states, and whether the peak is
        within the budget (None without one).
        """
        histogram, account = self.histogram, self.account
        shares = histogram["lost"][self.format][round(log2(self.scale))]
        count = histogram["gradients"]
        below, subnormal, above = (lost / count for lost in shares)
        index = account["batches"].index(self.batch)
        recipes = account["peaks"][int(self.checkpointed)][index]
        phases = account["phases"][int(self.checkpointed)][index]
        return {
            "formats": {f: _stored(self.number, f) for f in FORMATS},
            "gradients": count,
            "below": below,
            "subnormal": subnormal,
            "above": above,
            "best": histogram["best"][self.format],
            "recipes": {
                recipe: {
                    "split": dict(zip(SHOWN, split, strict=True)),
                    "bytes": sum(split),
                    "phase": phase,
                    "states": states,
                    "fits": (
                        None
                        if self.budget is None
                        else sum(split) <= self.budget
                    ),
                }
                for recipe, split, phase, states in zip(
                    RECIPES, recipes, phases, account["states"], strict=True
                )
            },
        }

    def sentences(self) -> tuple[str, str, str]:
        """One for each picture, as the module says them."""
        n = self.numbers()
        return self._bits(n), self._scaled(n), self._recipes(n)

    def sentence(self) -> str:
        """The key numbers in words."""
        return " ".join(self.sentences())

    def _bits(self, n: dict[str, Any]) -> str:
        kinds: dict[str, list[str]] = {}
        errors = {}
        for name, stored in n["formats"].items():
            kind, error = stored["kind"], stored["error"]
            if kind == "normal" and stored["value"] == self.number:
                kind = "exact"
            kinds.setdefault(kind, []).append(name)
            if kind == "normal":
                errors[name] = error
        exact = _and(kinds.get("exact", []))
        if len(kinds.get("exact", [])) == len(FORMATS):
            exact = "every format"
        text = f"{_number(self.number)} is exact in {exact or 'no format'}"
        for kind, words in (
            ("subnormal", "subnormal"),
            ("underflow", "underflow to 0"),
            ("overflow", "overflow"),
        ):
            if kind in kinds:
                text += f"; {words} in {_and(kinds[kind])}"
        if errors:
            worst = max(errors, key=errors.__getitem__)
            named = set(kinds) - {"normal"}
            text += f"; {'elsewhere ' if named else ''}the relative error is "
            text += f"at most {_number(errors[worst], 2)}, in {worst}"
        return text + "."

    def _scaled(self, n: dict[str, Any]) -> str:
        text = f"With a loss scale of {_power(round(log2(self.scale)))}, "
        text += f"{self.format} loses {_percent(n['below'])} of the "
        text += f"{_grouped(n['gradients'])} gradients to underflow; "
        text += f"{_percent(n['subnormal'])} are subnormal, and "
        text += f"{_percent(n['above'])} overflow"
        if n["above"] and FORMATS[self.format].infinite:
            text += ", so a scaler would skip the step"
        best = f"2{_superscript(n['best'])}"
        text += f". The largest scale without overflow is {best}"
        end = min(max(n["best"], 0), MOST_SCALE)
        if n["best"] != end:
            text += ", which is beyond the slider"
            if self.scale == 2**end:
                text += ": this is its end"
        return text + "."

    def _recipes(self, n: dict[str, Any]) -> str:
        recipes = n["recipes"]
        whole = recipes["fp32"]["bytes"]
        least = min(recipes, key=lambda recipe: recipes[recipe]["bytes"])

        def share(recipe: str) -> str:
            size = recipes[recipe]["bytes"]
            percent = int(size / whole * 100 + 0.5)
            return f"{format_bytes(size)} ({percent} % of fp32’s)"

        text = f"{self.account['name']}, batch {self.batch}, "
        text += "" if self.checkpointed else "not "
        text += f"checkpointed: the peak is {format_bytes(whole)} in fp32 and "
        text += f"{share('autocast')} under autocast"
        if least not in ("fp32", "autocast"):
            text += f"; the least is {least}’s, {share(least)}"
        text += "."
        if self.budget is not None:
            fit = [r for r, of in recipes.items() if of["fits"]]
            text += f" Within the budget of {format_bytes(self.budget)}: "
            text += f"{_and(fit) or 'none'}."
        return text

    def picture(self) -> str:
        """The bits, the histogram and the bars, one under the other."""
        n = self.numbers()
        body = "\n".join([*_rows(n), *self._bars(n), *self._peaks(n)])
        return (
            '<svg viewBox="0 0 400 590" width="400" role="img" '
            f'aria-label="{escape(self.sentence())}" font-size="12" '
            'font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">\n'
            f"{body}\n</svg>"
        )

    def _bars(self, n: dict[str, Any]) -> Iterator[str]:
        """The histogram: bars move with the scale, the lines stay."""
        start, counts = self.histogram["start"], self.histogram["counts"]
        shift = round(log2(self.scale))
        low, high = _axis(start, len(counts))
        wide, most = 396 / (high - low), max(counts)
        kind = format_of(self.format)

        def place(value: float) -> float:
            return 2 + (min(max(log2(value), low), high) - low) * wide

        edges = left, middle, right = (
            place(kind.underflow),
            place(kind.smallest_normal),
            place(kind.overflow),
        )
        for x, end, shade in (
            (2.0, left, 0.3),
            (left, middle, 0.12),
            (right, 398.0, 0.3),
        ):
            if end - x > 0.05:
                yield (
                    f'<rect x="{x:.1f}" y="200" width="{end - x:.1f}" '
                    f'height="110" fill-opacity="{shade}"/>'
                )
        colour, path = palette()["gradients"], ""
        for index, count in enumerate(counts):
            x = 2 + (start + index + shift - low) * wide
            height = 104 * count / most
            if count:
                path += f"M{x:.1f} 310v-{height:.1f}h{wide:.1f}v{height:.1f}z"
        yield f'<path fill="{colour}" stroke="#fff" d="{path}"/>'
        yield '<path d="M2 310H398" stroke="currentColor"/>'
        words = f"gradients × {_grouped(self.scale)} in {self.format}"
        yield _text(2, 168, words)
        for row, x in enumerate(edges):
            if 2.05 < x < 397.95:
                yield (
                    f'<path d="M{x:.1f} 200V310" stroke="currentColor" '
                    'stroke-dasharray="2 3"/>'
                )
            anchor = ("start", "middle", "end")[row]
            share = n[("below", "subnormal", "above")[row]]
            words = ("underflow", "subnormal", "overflow")[row]
            words += f": {_percent(share)}"
            yield _text((2, 200, 398)[row], 190, words, anchor)
        yield _text(2, 325, f"2{_superscript(low)}")
        yield _text(398, 325, f"2{_superscript(high)}", "end")

    def _peaks(self, n: dict[str, Any]) -> Iterator[str]:
        """A bar for each recipe, drawn to one scale."""
        recipes = n["recipes"]
        top = _top([r["bytes"] for r in recipes.values()], self.budget)
        for index, (recipe, of) in enumerate(recipes.items()):
            y = 364 + 36 * index
            words = f"{recipe}: {format_bytes(of['bytes'])}"
            yield _text(2, y - 4, f"{words}, {MOMENTS[of['phase']]}")
            alive = 0
            for category, size in of["split"].items():
                x, alive = 2 + 396 * alive / top, alive + size
                wide = 2 + 396 * alive / top - x
                if not size:
                    continue
                yield (
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" '
                    f'height="14" fill="{palette()[category]}" '
                    'stroke="#fff" stroke-width="0.4"/>'
                )
                if wide >= 12:
                    yield _initial(x + wide / 2, y + 11, category)
        if self.budget and self.budget <= top:
            x = 2 + 396 * self.budget / top
            lines = "".join(f"M{x:.1f} {362 + 36 * i}v18" for i in range(5))
            yield (
                f'<path d="{lines}" stroke="currentColor" '
                'stroke-width="1.5" stroke-dasharray="6 4"/>'
            )
        if self.budget:
            label = f"dashed: the budget, {format_bytes(self.budget)}"
            if self.budget > top:
                label = f"budget: {format_bytes(self.budget)} →"
            yield _text(398, 540, label, "end")
        for index, category in enumerate(SHOWN):
            x, y = 2 + 132 * (index % 3), 562 + 20 * (index // 3)
            yield (
                f'<rect x="{x}" y="{y - 11}" width="12" height="12" '
                f'fill="{palette()[category]}"/>'
                + _initial(x + 6, y - 1, category)
                + _text(x + 17, y, SHOWN[category])
            )

    def __repr__(self) -> str:
        return (
            f"Precision(number={self.number!r}, format={self.format!r}, "
            f"scale={self.scale}, batch={self.batch}, "
            f"checkpointed={self.checkpointed})"
        )


# What the pictures show


def _stored(x: float, name: str) -> dict[str, Any]:
    """What a format keeps of a number."""
    kind = FORMATS[name]
    value = kind.round(x)
    what = "normal"
    if x and not value:
        what = "underflow"
    elif value != x and abs(x) >= kind.overflow:
        what = "overflow"
    elif 0 < abs(value) < kind.smallest_normal:
        what = "subnormal"
    error = None
    if math.isfinite(x) and math.isfinite(value):
        error = abs(value - x) / abs(x) if x else 0.0
    bits = kind.text(x)
    return {"bits": bits, "value": value, "error": error, "kind": what}


def _histogram(gradients: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Gradients by binade, and what is lost of them at every scale.

    What is lost is counted in the sorted sizes, as
    :func:`membudget.precision.lost` counts it.
    """
    if isinstance(gradients, torch.Tensor):
        gradients = [gradients]
    gradients = list(iterable(gradients, "gradients", "tensors"))
    for tensor in gradients:
        dtype = getattr(tensor, "dtype", type(tensor).__name__)
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"gradients hold {dtype}: use tensors in fp32; 16 bits have "
                "lost what is to be shown"
            )
    best = {f: round(log2(best_scale(gradients, f))) for f in SCALED}
    counts = binades(gradients)
    first, last = min(counts), max(counts)
    start = max(first, last - MOST_BINADES + 1)
    below = sum(n for e, n in counts.items() if e < start)
    bars = [counts.get(e, 0) for e in range(start, last + 1)]
    parts = [g.detach().flatten().cpu().double().abs() for g in gradients]
    sizes = torch.cat(parts).sort().values
    zeros = int((sizes == 0).sum())
    sizes = sizes[zeros:]
    return {
        "gradients": len(sizes),
        "zeros": zeros,
        "start": start,
        "counts": [bars[0] + below, *bars[1:]],
        "merged": first < start,
        "lost": {f: list(_lost(sizes, f)) for f in SCALED},
        "best": best,
    }


def _lost(sizes: torch.Tensor, name: str) -> Iterator[list[int]]:
    """How many are below, subnormal and above, at every scale."""
    kind = format_of(name)
    normal = kind.smallest_normal - kind.smallest / 2
    for exponent in range(MOST_SCALE + 1):
        scale = 2.0**exponent
        below = int(
            torch.searchsorted(sizes, kind.underflow / scale, right=True)
        )
        small = int(torch.searchsorted(sizes, normal / scale))
        large = int(torch.searchsorted(sizes, kind.overflow / scale))
        yield [below, small - below, len(sizes) - large]


def _account(
    network: Transformer | Chain,
    tokens: int,
    batches: Sequence[int],
    lists: str,
) -> dict[str, Any]:
    """The peak of every batch and recipe, plain and checkpointed."""
    batches = listed(batches, "batches", "numbers", 0)
    if not (
        1 <= len(batches) <= MOST_BATCHES
        and all(_whole(batch) and batch >= 1 for batch in batches)
        and batches == sorted(set(batches))
    ):
        raise ValueError(
            f"batches is {batches}: use 1 to {MOST_BATCHES} ascending whole "
            "numbers, such as (1, 2, 4)"
        )
    if isinstance(network, Transformer):
        sizes = (tokens,)
        known = [name for name, of in PRESETS.items() if of == network]
        name = f"A transformer of {_grouped(network.parameters)} parameters"
        name = f"{known[0] if known else name}, {tokens} tokens"
    elif isinstance(network, Chain):
        sizes = ()
        count = sum(p.numel() for p in network.model.parameters())
        name = f"A chain of {_grouped(count)} parameters"
    else:
        raise TypeError(
            f"network is a {type(network).__name__}: use a Transformer or a "
            "Chain of membudget.ledger"
        )

    def at_peak(recipe: str, batch: int, checkpointed: bool) -> PaperMoment:
        step = predict(
            network,
            batch,
            *sizes,
            recipe=recipe,
            lists=lists,
            checkpointed=checkpointed,
        )
        return step.at_peak

    peaks = [
        [[at_peak(r, b, checkpointed) for r in RECIPES] for b in batches]
        for checkpointed in (False, True)
    ]
    rules = [bytes_per_parameter(recipe) for recipe in RECIPES]
    return {
        "name": name,
        "batches": [int(batch) for batch in batches],
        "states": [[r.parameters, r.gradients, r.optimizer] for r in rules],
        "peaks": [
            [[[m.split[c] for c in SHOWN] for m in row] for row in rows]
            for rows in peaks
        ],
        "phases": [[[m.phase for m in row] for row in rows] for rows in peaks],
    }


def _axis(start: int, count: int) -> tuple[int, int]:
    """The binades of the histogram: at all scales, and all of fp16's."""
    return min(start, -27), max(start + count + MOST_SCALE, 18)


def _top(peaks: Iterable[int], budget: int | None) -> float:
    """The end of the axis: a budget far beyond the peaks is not on it."""
    most = max(peaks)
    near = budget is not None and most < budget <= 2.5 * most
    return 1.04 * (budget if near else most)


# Words and shapes


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _and(things: Iterable[Any]) -> str:
    """``a, b and c``"""
    *most, last = map(str, things) if things else [""]
    return f"{', '.join(most)} and {last}" if most else last


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _power(exponent: int) -> str:
    """``2¹⁶ = 65 536``"""
    whole = _grouped(2**exponent)
    return f"2{_superscript(exponent)} = {whole}" if exponent else whole


def _grouped(count: int) -> str:
    """``851 496``, with a narrow no-break space."""
    return f"{count:,}".replace(",", "\u202f")


def _number(value: float, digits: int | None = None) -> str:
    """``0.0999755859``, ``5.96·10⁻⁸``, ``∞``; all digits without a number.

    A half goes up.
    """
    sign = "−" if math.copysign(1, value) < 0 else ""
    if not value or math.isinf(value):
        return sign + ("∞" if value else "0")
    exact = Decimal(abs(value)) if digits else Decimal(repr(abs(value)))
    if digits:
        exact = Context(digits, ROUND_HALF_UP).plus(exact)
    exponent = exact.adjusted()
    if -5 < exponent < 9:
        text = f"{exact:f}"
        return sign + (text.rstrip("0").rstrip(".") if "." in text else text)
    mantissa = f"{exact.scaleb(-exponent):f}"
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{sign}{mantissa}·10{_superscript(exponent)}"


def _percent(share: float) -> str:
    """Nothing and everything are said only where they are meant."""
    if 0 < share < 0.0001:
        return "< 0.01 %"
    if 0.9999 < share < 1:
        return "> 99.99 %"
    return f"{format_number(share * 100)} %"


def _rows(n: dict[str, Any]) -> Iterator[str]:
    """The bits of each format, and what they are worth."""
    for index, (name, stored) in enumerate(n["formats"].items()):
        y = 14 + 23 * index
        words = _number(stored["value"], 9)
        yield _text(2, y, name)
        yield (
            f'<text x="64" y="{y}" font-family="monospace" font-size="9">'
            f"{stored['bits']}</text>"
        )
        yield _text(398, y, words, "end")


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
