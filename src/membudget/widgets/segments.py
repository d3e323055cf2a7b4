"""The segment-count widget: what checkpointing a chain in k segments costs."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape
from itertools import groupby
from math import isfinite, sqrt
from numbers import Integral, Real
from typing import Any

import traitlets

from membudget.checkpointing import (
    Moment,
    Run,
    Stage,
    equal_segments,
    no_segments,
    pytorch_segments,
    simulate,
)
from membudget.plotting import palette
from membudget.widgets.base import (
    Whole,
    Widget,
    format_bytes,
    format_number,
)

SHOWN = {
    "kept": "checkpoints",
    "tapes": "tapes",
    "recomputed": "recomputed tapes",
    "value": "value at work",
    "gradients": "gradients",
    "workspace": "workspace",
}
"""What is alive, from the bottom of the picture to its top."""

COLOURS = {
    "kept": "activations",
    "tapes": "activations",
    "recomputed": "recomputation",
    "value": "inputs",
    "gradients": "gradients",
    "workspace": "temporaries",
}
"""Where each of them finds its colour in the palette."""

SPLITS = {"balanced": equal_segments, "pytorch": pytorch_segments}
"""How the layers are shared out, by the names of the trait ``split``."""

PHASE_WORDS = {
    "forward": ("forward pass", "forward", "F"),
    "recomputation": ("recomputation", "R"),
    "backward": ("backward pass", "backward", "B"),
}
"""Words for a phase, the longest first."""

UNIT = 100
"""A layer's tape inside the widget: sizes stay whole numbers."""

MOST_LAYERS = 100
MOST_STAGES = 200
"""Of a chain; the curve simulates every number of segments."""


class _Count(traitlets.Int):
    """A trait for a number of segments."""

    def validate(self, obj: Any, value: Any) -> int:
        if not _whole(value) or value < 0:
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a whole number; 0 is no "
                "checkpointing"
            )
        return int(value)


class _Share(traitlets.Float):
    """A trait for a multiple of 0.05, above 0 and up to 1."""

    def validate(self, obj: Any, value: Any) -> float:
        number = isinstance(value, Real) and value is not True
        number = number and isfinite(value)
        twentieths = round(20 * value) if number else 0
        if not 1 <= twentieths <= 20 or abs(20 * value - twentieths) > 1e-9:
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use a multiple of 0.05, above 0 "
                "and up to 1"
            )
        return twentieths / 20


class _Chain(traitlets.TraitType):
    """A trait for the stages of a chain, or None."""

    default_value = None

    def validate(self, obj: Any, value: Any) -> tuple[Stage, ...] | None:
        if value is None:
            return None
        if (
            not isinstance(value, Sequence)
            or not 1 <= len(value) <= MOST_STAGES
            or not all(isinstance(stage, Stage) for stage in value)
        ):
            raise traitlets.TraitError(
                f"{self.name} is {_short(value)}: use a list of 1 to "
                f"{MOST_STAGES} stages, as membudget.checkpointing.profile "
                "gives, or None and layers"
            )
        return tuple(value)


def _chain_json(
    chain: tuple[Stage, ...] | None, widget: Widget
) -> list[list[int]] | None:
    """Rows of numbers; ``simulate`` of the module reads them."""
    return None if chain is None else [_row(stage) for stage in chain]


def _row(stage: Stage) -> list[int]:
    return [
        stage.output,
        stage.inner,
        int(stage.holds_input),
        int(stage.holds_output),
        stage.forward_workspace,
        stage.record_workspace,
        stage.recompute_workspace,
        stage.backward_workspace,
        stage.again_workspace,
        stage.gradients,
        stage.gradient,
    ]


def _measured_json(measured: dict[int, float], widget: Widget) -> dict:
    return {str(count): measured[count] for count in sorted(measured)}


class Segments(Widget):
    """The peak and the extra layer runs of k checkpointed segments.

    A chain of equal layers, in units: a layer's tape is 1, of which its
    output, and so a checkpoint, is the share ``checkpoint``; as large are
    the gradient on its way back and the one that the layer at work makes.
    Or a chain of stages that were measured, in bytes.

    Args:
        chain: stages from :func:`membudget.checkpointing.profile`; then
            ``layers`` follows from it and ``checkpoint`` is not used.
        layers: from 1 to 100.
        segments: from 0, no checkpointing, to ``layers``. Fewer layers take
            it along.
        checkpoint: a multiple of 0.05, above 0 and up to 1.
        split: one of :data:`SPLITS`: balanced with the longer ones first, or
            as ``torch.utils.checkpoint.checkpoint_sequential`` does it.
        measured: peaks that were measured, by the number of segments; bytes
            with a chain, else units. They belong to one chain and one split:
            when those change it becomes empty, unless it is set with them.
        label: what the chain is, in a few words; shown as text.

    Raises:
        traitlets.TraitError: one of them is not as said above (the widget
            stays as it was).

    Example:
        >>> widget = Segments(layers=16, segments=4)
        >>> widget.numbers()["peak"], widget.numbers()["plain_peak"]
        (8.0, 17.0)
    """

    name = "segments"

    chain = _Chain().tag(sync=True, to_json=_chain_json)
    layers = Whole().tag(sync=True)
    segments = _Count().tag(sync=True)
    checkpoint = _Share(1.0).tag(sync=True)
    split = traitlets.Enum(list(SPLITS), "balanced").tag(sync=True)
    measured = traitlets.Dict().tag(sync=True, to_json=_measured_json)
    label = traitlets.Unicode().tag(sync=True)

    _before: tuple | None = None  # the setting and what was measured in it

    def __init__(
        self,
        chain: Sequence[Stage] | None = None,
        *,
        layers: int | None = None,
        segments: int | None = None,
        checkpoint: float = 1.0,
        split: str = "balanced",
        measured: dict[int, float] | None = None,
        label: str = "",
        **kwargs: Any,
    ) -> None:
        given = {"layers": layers, "segments": segments, "measured": measured}
        kwargs.update((k, v) for k, v in given.items() if v is not None)
        super().__init__(
            chain=chain,
            checkpoint=checkpoint,
            split=split,
            label=label,
            **kwargs,
        )

    @traitlets.default("layers")
    def _some_layers(self) -> int:
        return 16 if self.chain is None else len(self.chain)

    @traitlets.default("segments")
    def _some_segments(self) -> int:
        return min(4, self.layers)

    @traitlets.validate("layers")
    def _check_layers(self, proposal: Any) -> int:
        layers = proposal["value"]
        if self.chain is not None and layers != len(self.chain):
            raise traitlets.TraitError(
                f"layers is {layers}: it follows from the chain, which has "
                f"{len(self.chain)} stages; set chain instead"
            )
        if self.chain is None and layers > MOST_LAYERS:
            raise traitlets.TraitError(
                f"layers is {layers}: use 1 to {MOST_LAYERS}"
            )
        return layers

    @traitlets.validate("segments")
    def _check_segments(self, proposal: Any) -> int:
        count = proposal["value"]
        if count > self.layers:
            raise traitlets.TraitError(
                f"segments is {count}: with {self.layers} layers use 0 to "
                f"{self.layers}"
            )
        return count

    @traitlets.validate("measured")
    def _check_measured(self, proposal: Any) -> dict[int, float]:
        measured = proposal["value"]
        for count, value in measured.items():
            if not _whole(count) or not 0 <= count <= self.layers:
                raise traitlets.TraitError(
                    f"measured holds {count!r}: use numbers of segments, "
                    f"from 0 to {self.layers}"
                )
            if not isinstance(value, Real) or not 0 <= value < float("inf"):
                raise traitlets.TraitError(
                    f"measured[{count}] is {value!r}: use a peak, in bytes "
                    "for a chain and in units without one"
                )
        return {
            int(count): int(value) if _whole(value) else float(value)
            for count, value in measured.items()
        }

    @traitlets.observe("chain", "layers", "checkpoint", "split", "measured")
    def _follow(self, change: Any) -> None:
        """Set what follows from what has changed."""
        if self.chain is not None:
            self.layers = len(self.chain)
        elif self.layers > MOST_LAYERS:  # there was a longer chain
            self.layers = MOST_LAYERS
        setting = self.chain, self.layers, self.checkpoint, self.split
        if self._before is not None:
            before, measured = self._before
            if before != setting and measured is self.measured:
                self.measured = {}
        self._before = setting, self.measured
        self.segments = min(self.segments, self.layers)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The chain; sizes in bytes, or in hundredths of a layer's tape."""
        if self.chain is not None:
            return self.chain
        size = round(UNIT * self.checkpoint)
        stage = Stage(output=size, inner=UNIT - size, backward_workspace=size)
        return (stage,) * self.layers

    def numbers(self) -> dict[str, Any]:
        """What the widget shows; ``describe`` of the module gives the same.

        Sizes are bytes with a chain, else units. ``sizes`` are those of the
        checkpointed segments, ``rest`` the layers that keep their tapes.
        ``parts`` and ``plain_parts`` say what is alive at the peak, and at
        the peak without checkpointing. ``curve`` holds the peak of every
        number of segments, from 0, and ``best`` the numbers with the least;
        ``root`` is √(L·a/c), with a the mean tape and c the mean checkpoint,
        None where checkpoints cost nothing. ``measured`` is None where
        nothing is measured.
        """
        stages, count = self.stages, self.segments
        plain, run = (_run(stages, k, self.split) for k in (0, count))
        curve = _curve(stages, self.split)
        best = [k for k, peak in enumerate(curve) if peak == min(curve)]
        segments = SPLITS[self.split](len(stages), count) if count else []
        sizes = [len(s) for s in segments if not isinstance(s, int)]

        def shown(size: int) -> float:
            return size if self.chain is not None else size / UNIT

        def parts(run: Run) -> dict[str, float]:
            here = _shown(run)[run.peak_moment]
            return {part: shown(size) for part, size in here.items()}

        return {
            "layers": len(stages),
            "segments": count,
            "sizes": sizes,
            "rest": len(stages) - sum(sizes),
            "peak": shown(run.peak),
            "phase": _phase(run.moments[run.peak_moment]),
            "parts": parts(run),
            "plain_peak": shown(plain.peak),
            "plain_parts": parts(plain),
            "extra_runs": run.extra_runs,
            "curve": [shown(peak) for peak in curve],
            "best": best,
            "best_peak": shown(min(curve)),
            "root": _root(stages, plain),
            "measured": self.measured.get(count),
        }

    def sentence(self) -> str:
        """The key numbers in words, as the module says them."""
        n = self.numbers()
        thing = "layer" if self.chain is None else "stage"
        count, extra, layers = n["segments"], n["extra_runs"], n["layers"]
        peak = f"the peak is {self._size(n['peak'])}, in the "
        peak += PHASE_WORDS[n["phase"]][0]
        if count:
            place = f"in {_plural(count, 'segment')} ({_sizes_text(n)})"
            share = _percent(n["peak"], n["plain_peak"])
            whole = self._size(n["plain_peak"])
            peak += f": {share} of the {whole} without checkpointing"
        else:
            place = "without checkpointing"
        again = f"No {thing} runs again"
        if extra:
            runs = "s run" if extra > 1 else " runs"
            again = f"{extra} {thing}{runs} again"
            again += f", {_percent(extra, layers)} of a forward pass"
        if count in n["best"]:
            best = "No number of segments has a lower peak"
        else:
            best = f"The least peak is {self._size(n['best_peak'])}, with "
            best += f"k = {_ranges(n['best'])}"
        text = f"{_plural(layers, thing)} {place}: {peak}. {again}. {best}."
        if n["measured"] is not None:
            text += f" Measured here: {self._size(n['measured'])}."
        return text

    def _size(self, value: float) -> str:
        if self.chain is not None:
            return format_bytes(value)
        number = format_number(value)
        return f"{number} unit{'' if number == '1' else 's'}"

    def picture(self) -> str:
        """The passes in steps, and under them the curve over k."""
        n, colours = self.numbers(), palette()
        run = _run(self.stages, self.segments, self.split)
        unit = 1 if self.chain is not None else UNIT
        scale = 130 / (max(n["curve"]) or 1)
        alive = _shown(run)
        edges = [2 + 396 * i / len(alive) for i in range(len(alive) + 1)]
        drawn = [p for p in SHOWN if any(now[p] for now in alive)]
        bands, letters, marks, legend = [], [], [], []
        floor = [150.0] * len(alive)
        for part in drawn:
            ys = [
                y - now[part] / unit * scale
                for y, now in zip(floor, alive, strict=True)
            ]
            bands.append(
                f'<path fill="{colours[COLOURS[part]]}" stroke="#fff" '
                f'stroke-width="0.4" d="{_stairs(edges, ys)}"/>'
            )
            letters += _letter(part, edges, floor, ys)
            floor = ys
        for phase, begin, end in _phases(run):
            left, right = edges[begin], edges[end]
            words = [
                w for w in PHASE_WORDS[phase] if 7 * len(w) < right - left
            ]
            if words:
                marks.append(
                    _text((left + right) / 2, 165, words[0], "middle")
                )
        x = (edges[run.peak_moment] + edges[run.peak_moment + 1]) / 2
        y = 150 - n["peak"] * scale
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        side = "start" if x < 200 else "end"
        size = self._size(n["peak"])
        marks.append(_text(x, y - 7, f"peak {size}", side))
        marks += self._curve_marks(n)
        for index, part in enumerate(reversed(drawn)):
            x, y = 2 + 132 * (index % 3), 342 + 20 * (index // 3)
            legend.append(
                f'<rect x="{x}" y="{y - 11}" width="12" height="12" '
                f'fill="{colours[COLOURS[part]]}"/>'
                + _initial(x + 6, y - 1, part)
                + _text(x + 17, y, SHOWN[part])
            )
        height = 330 + 20 * ((len(drawn) + 2) // 3)
        # Each band begins at the axis, so the lowest has to be the last.
        body = "\n".join([*reversed(bands), *letters, *marks, *legend])
        return (
            f'<svg viewBox="0 0 400 {height}" width="400" role="img" '
            f'aria-label="{escape(self.sentence())}" font-size="12" '
            'font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">\n'
            f"{body}\n</svg>"
        )

    def _curve_marks(self, n: dict[str, Any]) -> Iterator[str]:
        """The peak over the number of segments."""
        layers, count = n["layers"], n["segments"]
        top = max(*n["curve"], *self.measured.values()) or 1

        def at(k: float, peak: float) -> tuple[float, float]:
            return 10 + 380 * k / layers, 300 - 100 * peak / top

        points = [at(k, peak) for k, peak in enumerate(n["curve"])]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield '<path d="M2 150H398M2 300H398" stroke="currentColor"/>'
        yield _text(2, 188, "peak for each number of segments k")
        yield (
            f'<polyline points="{line}" fill="none" stroke="currentColor" '
            'stroke-width="1.5"/>'
        )
        for k, peak in sorted(self.measured.items()):
            x, y = at(k, peak)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
        x, y = points[count]
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" '
            'stroke="currentColor" stroke-width="2"/>'
        )
        places = [at(0, 0)[0], at(layers, 0)[0]]
        yield _text(places[0], 315, "0", "middle")
        yield _text(places[1], 315, str(layers), "end")
        if min(abs(x - place) for place in places) > 24:
            yield _text(x, 315, str(count), "middle")

    def __repr__(self) -> str:
        start = f"Segments(layers={self.layers}, segments={self.segments}, "
        if self.chain is None:
            start += f"checkpoint={format_number(self.checkpoint)}, "
        return f"{start}split={self.split!r})"


# What the tape machine counts


@lru_cache(maxsize=8)
def _run(chain: tuple[Stage, ...], count: int, split: str) -> Run:
    length = len(chain)
    segments = SPLITS[split](length, count) if count else no_segments(length)
    return simulate(chain, segments)


@lru_cache(maxsize=64)
def _curve(chain: tuple[Stage, ...], split: str) -> tuple[int, ...]:
    """The peak of every number of segments, from 0."""
    counts = range(len(chain) + 1)
    return tuple(_run.__wrapped__(chain, k, split).peak for k in counts)


def _root(chain: tuple[Stage, ...], plain: Run) -> float | None:
    """√(L·a/c): the tapes of all layers against the mean checkpoint."""
    tapes = plain.moments[len(chain) - 1].part("tapes")
    outputs = [stage.output for stage in chain[:-1] or chain]
    if not sum(outputs):
        return None
    return sqrt(tapes * len(outputs) / sum(outputs))


def _phase(moment: Moment) -> str:
    if moment.extra:
        return "recomputation"
    after = moment.action.kind in ("backward", "drop")
    return "backward" if after else "forward"


def _shown(run: Run) -> list[dict[str, int]]:
    """Sizes of :data:`SHOWN` at each moment."""
    again, result = False, []
    for moment in run.moments:
        again = again or moment.extra
        sizes = {part: 0 for part in SHOWN}
        for part in ("kept", "value", "gradients", "workspace"):
            sizes[part] = moment.part(part)
        tapes = "recomputed" if again else "tapes"
        sizes[tapes] = moment.part("tapes")
        # A recomputation that ends early does not make all of it.
        for part in ("value", tapes):
            missing = min(sizes[part], max(0, -sizes["workspace"]))
            sizes[part] -= missing
            sizes["workspace"] += missing
        result.append(sizes)
    return result


def _phases(run: Run) -> Iterator[tuple[str, int, int]]:
    """(phase, first moment, one after the last), in order."""
    begin = 0
    for phase, group in groupby(map(_phase, run.moments)):
        end = begin + len(list(group))
        yield phase, begin, end
        begin = end


# Words and shapes


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} …"


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _percent(part: float, whole: float) -> str:
    """A half goes up."""
    return f"{int(100 * part / whole + 0.5) if whole else 100} %"


def _sizes_text(n: dict[str, Any]) -> str:
    """``3 × 6 + 1 × 5``"""
    groups = ((len(list(group)), size) for size, group in groupby(n["sizes"]))
    parts = [f"{many} × {size}" for many, size in groups]
    if n["rest"]:
        parts.append(f"{n['rest']} not checkpointed")
    return " + ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """``3 to 5, 7, 8``"""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(
        f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r))
        for r in ranges
    )


def _stairs(edges: list[float], ys: list[float]) -> str:
    """A path from the axis up, along the heights, and down to the axis."""
    path, before = f"M{edges[0]:.0f} 150", 150.0
    for x, y in zip(edges, ys, strict=False):
        if f"{y:.1f}" != f"{before:.1f}":
            path += f"H{x:.1f}V{y:.1f}"
            before = y
    return path + f"H{edges[-1]:.1f}V150Z"


def _letter(
    part: str, edges: list[float], floor: list[float], ys: list[float]
) -> list[str]:
    """The initial where its band is thick, not to tell it by colour alone."""
    width, begin, end, place = 0.0, 0, 0, 0
    thick = (low - y >= 12 for low, y in zip(floor, ys, strict=True))
    for here, group in groupby(thick):
        first, place = place, place + len(list(group))
        if here and edges[place] - edges[first] > width:
            width, begin, end = edges[place] - edges[first], first, place
    if width < 12:
        return []
    middle = (begin + end - 1) // 2
    y = (floor[middle] + ys[middle]) / 2 + 4
    x = (edges[begin] + edges[end]) / 2
    return [_initial(x, y, part)]


def _initial(x: float, y: float, part: str) -> str:
    letter = {"kept": "C"}.get(part, part[0].upper())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="11" '
        f'fill="#000">{letter}</text>'
    )


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )
