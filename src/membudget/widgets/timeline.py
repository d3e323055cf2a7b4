"""The memory timeline: one training step, operator by operator."""

import re
from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
import traitlets
from torch.utils.checkpoint import checkpoint

from membudget import data, models
from membudget.measuring import (
    OUTSIDE,
    PHASES,
    Allocation,
    Operator,
    PeakTracker,
    trace_step,
)
from membudget.plotting import palette
from membudget.widgets.base import Widget, format_bytes

SHOWN = {
    "optimizer": "optimizer states",
    "parameters": "parameters",
    "inputs": "inputs",
    "gradients": "gradients",
    "activations": "activations",
    "recomputation": "recomputed activations",
    "temporaries": "temporaries",
}
"""Who holds the bytes, from the bottom of the picture to its top."""

PHASE_WORDS = {
    "forward": ("forward pass", "forward", "F"),
    "backward": ("backward pass", "backward", "B"),
    "recomputation": ("recomputation", "R"),
    "optimizer": ("optimizer step", "step", "S"),
}
"""Words for a phase, the longest first."""

MOST_STEPS = 6
"""How many steps one timeline compares."""

LARGEST_STEP_SHARE = 0.22
"""Of the picture's width, for the optimizer step's many operators."""


@cache
def example_steps() -> dict[str, PeakTracker]:
    """One step of the digits MLP with Adam, taken in three ways.

    Eight linear layers of width 256, 1 024 digits, cross-entropy: all of the
    batch at once (``"plain"``), in 4 micro-batches of 256
    (``"accumulated"``), in 4 checkpointed segments of 4 modules
    (``"checkpointed"``).
    """
    batch = [tensor[:1024].clone() for tensor in data.digits()]

    def plain(model, x, y):
        return F.cross_entropy(model(x), y)

    def checkpointed(model, x, y):
        for start in range(0, len(model), 4):
            segment = model[start : start + 4]
            x = checkpoint(
                segment, x, use_reentrant=False, preserve_rng_state=False
            )
        return F.cross_entropy(x, y)

    def trace(loss, micro_batch=None):
        model = models.mlp(width=256, depth=8)
        optimizer = torch.optim.Adam(model.parameters())
        return trace_step(
            model, loss, *batch, optimizer=optimizer, micro_batch=micro_batch
        )

    with torch.random.fork_rng(devices=[]):
        return {
            "plain": trace(plain),
            "accumulated": trace(plain, micro_batch=256),
            "checkpointed": trace(checkpointed),
        }


class Step:
    """One tracked step, as the timeline shows it.

    The categories are the tracker's, but activations that were made in a
    recomputation stand for themselves.

    Args:
        tracker: has tracked the step.

    Attributes:
        allocations: the tracker's, without those that have no bytes, or
            whose operator did not end (it raised).
        operators: the tracker's, with two corrections of the phase. What
            runs after the mark ``"backward"`` before autograd takes over
            (the gradient of the loss, 1) belongs to the backward pass;
            operators that only look on (the profiler's, or a recomputed
            tensor's ``detach``) belong to what runs around them.
        forward_end: the last moment of the forward pass that comes before
            the peak; of the first, where the peak is no later.
        memory: bytes of each category, and their total, before the first
            operator and after each.
    """

    def __init__(self, tracker: PeakTracker) -> None:
        self.tracker = tracker
        self.operators = [
            operator._replace(phase=phase)
            for operator, phase in zip(
                tracker.operators, _phases(tracker), strict=True
            )
        ]
        self.allocations = [
            a
            for a in tracker.allocations
            if a.bytes and a.birth < len(self.operators)
        ]
        phases = ["forward", *(o.phase for o in self.operators)]
        ends = [
            moment
            for moment, (here, then) in enumerate(pairwise(phases), start=-1)
            if here == "forward" != then
        ] or [len(self.operators) - 1]
        before = [end for end in ends if end <= tracker.peak_moment]
        self.forward_end = before[-1] if before else ends[0]
        self.memory = self._memory()

    def operator(self, moment: int) -> Operator:
        """The operator of a moment; an empty one before the first."""
        if moment < 0:
            return Operator("", OUTSIDE, "")
        return self.operators[moment]

    def category(self, allocation: Allocation) -> str:
        """One of :data:`SHOWN`."""
        made = self.operator(allocation.birth).phase
        if allocation.category == "activations" and made == "recomputation":
            return "recomputation"
        return allocation.category

    def _memory(self) -> list[dict[str, int]]:
        count = len(self.operators) + 1
        changes = [dict.fromkeys([*SHOWN, "total"], 0) for _ in range(count)]
        for a in self.allocations:
            for name in (self.category(a), "total"):
                changes[a.birth + 1][name] += a.bytes
                if a.death is not None and a.death + 1 < count:
                    changes[a.death + 1][name] -= a.bytes
        for before, now in pairwise(changes):
            for name, amount in before.items():
                now[name] += amount
        return changes

    def at(self, moment: int) -> dict[str, int]:
        """Bytes of each category after an operator, and their total."""
        return dict(self.memory[moment + 1])

    def largest(self, moment: int) -> list[dict[str, Any]]:
        """What is alive, the most bytes first.

        Storages of one category stand together if the same operator made
        them in the same phase, in modules whose paths differ in numbers
        alone. ``size`` is what each of them has; None where they differ.
        """
        groups: dict[tuple, list[tuple[int, str]]] = {}
        for a in self.allocations:
            if a.alive(moment):
                name, module, phase = self.operator(a.birth)
                like = re.sub(r"[0-9]+", "#", module)
                key = self.category(a), name, phase, like
                groups.setdefault(key, []).append((a.bytes, module))
        rows = []
        for (category, name, phase, _), items in groups.items():
            sizes, modules = zip(*items, strict=True)
            rows.append(
                {
                    "category": category,
                    "operator": name,
                    "phase": phase,
                    "modules": list(dict.fromkeys(modules)),
                    "count": len(sizes),
                    "size": sizes[0] if len(set(sizes)) == 1 else None,
                    "bytes": sum(sizes),
                }
            )
        return sorted(rows, key=lambda row: -row["bytes"])


def _phases(tracker: PeakTracker) -> list[str]:
    """The operators' phases, corrected as :class:`Step` says."""
    operators = tracker.operators
    phases = [o.phase for o in operators]
    count = len(phases)
    for begin, label in tracker.marks:
        for i in range(begin, count if label == "backward" else begin):
            if operators[i].module != OUTSIDE or phases[i] != "forward":
                break
            phases[i] = "backward"
    for i, operator in enumerate(operators):
        if operator.name.startswith("profiler."):
            beside = i + 1 if operator.name.endswith("_enter_new") else i - 1
            phases[i] = phases[beside] if 0 <= beside < count else phases[i]
    births = {a.birth for a in tracker.allocations}
    last = None
    for i in range(count):
        if phases[i] == "recomputation":
            if last is not None and births.isdisjoint(range(last + 1, i)):
                phases[last:i] = ["recomputation"] * (i - last)
            last = i
        elif phases[i] != "backward":
            last = None
    return phases


class _Table(dict):
    """Numbers its keys in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _steps_json(
    steps: dict[str, PeakTracker], widget: Widget
) -> dict[str, Any]:
    """Integers and tables; ``unpack`` of the module reads them.

    ``kinds`` are (name, module, phase), three numbers each; a step's
    ``operators`` are numbers of kinds, its ``allocations`` are (birth, moments
    of life, number of the size, number of the category), four numbers each.
    """
    names, modules, kinds, sizes = _Table(), _Table(), _Table(), _Table()
    categories = list(SHOWN)
    shown = []
    for label, tracker in steps.items():
        step = Step(tracker)
        operators = [kinds[operator] for operator in step.operators]
        allocations = []
        for a in step.allocations:
            death = len(operators) if a.death is None else a.death
            category = categories.index(step.category(a))
            allocations += a.birth, death - a.birth, sizes[a.bytes], category
        shown.append(
            {
                "label": label,
                "operators": operators,
                "allocations": allocations,
                "forward_end": step.forward_end,
            }
        )
    numbers = [
        number
        for name, module, phase in kinds
        for number in (names[name], modules[module], PHASES.index(phase))
    ]
    return {
        "names": list(names),
        "modules": list(modules),
        "kinds": numbers,
        "sizes": list(sizes),
        "steps": shown,
    }


class _Moment(traitlets.Int):
    """A trait for the index of an operator."""

    def validate(self, obj: Any, value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise traitlets.TraitError(
                f"{self.name} is {value!r}: use the index of an operator, a "
                "whole number; -1 is before the first"
            )
        return int(value)


class Timeline(Widget):
    """What is alive in a training step, after each of its operators.

    Args:
        steps: what :func:`membudget.measuring.trace_step` gives, by the
            names to show, in this order; by default :func:`example_steps`.
        step: the name of the step to begin with; by default the first.
        moment: index of the operator to begin with; -1 is before the first;
            by default the step's peak.
        label: what the steps are of, in a few words; shown as text.

    Another ``step`` begins at its peak, unless ``moment`` is set with it.

    Raises:
        traitlets.TraitError: ``steps`` is not a dictionary of trackers by
            name, is empty, or has more than :data:`MOST_STEPS`; no step has
            this name; no operator has this index (the widget stays as it
            was).

    Example:
        >>> widget = Timeline(step="checkpointed")
        >>> widget.moment = widget.numbers()["forward_end_moment"]
        >>> widget.numbers()["now"]["activations"]
    """

    name = "timeline"

    steps = traitlets.Dict().tag(sync=True, to_json=_steps_json)
    step = traitlets.Unicode().tag(sync=True)
    moment = _Moment().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)

    _before: tuple | None = None  # steps, step and moment, until they change
    _view: Step | None = None  # of the step that was shown last

    def __init__(
        self,
        steps: dict[str, PeakTracker] | None = None,
        *,
        step: str | None = None,
        moment: int | None = None,
        label: str = "",
        **kwargs: Any,
    ) -> None:
        if steps is None:
            steps = example_steps()
            label = label or "an MLP on handwritten digits, with Adam"
        given = {"step": step, "moment": moment}
        kwargs.update((k, v) for k, v in given.items() if v is not None)
        super().__init__(steps=steps, label=label, **kwargs)

    @traitlets.default("step")
    def _first_step(self) -> str:
        return next(iter(self.steps), "")

    @traitlets.default("moment")
    def _peak_moment(self) -> int:
        return self.steps[self.step].peak_moment

    @traitlets.validate("steps")
    def _check_steps(self, proposal: Any) -> dict[str, PeakTracker]:
        steps = proposal["value"]
        if not steps:
            raise traitlets.TraitError(
                "steps is empty: hand over at least one step, as "
                '{"plain": trace_step(…)}'
            )
        if len(steps) > MOST_STEPS:
            raise traitlets.TraitError(
                f"steps has {len(steps)} steps: use at most {MOST_STEPS}, "
                "the picture has no room for more"
            )
        for name, tracker in steps.items():
            if not (
                isinstance(name, str)
                and name
                and isinstance(tracker, PeakTracker)
            ):
                raise traitlets.TraitError(
                    f"steps[{name!r}] is {type(tracker).__name__}: use a name "
                    "as key, and what trace_step returns, a PeakTracker"
                )
        return steps

    @traitlets.validate("step")
    def _check_step(self, proposal: Any) -> str:
        step = proposal["value"]
        if step not in self.steps:
            raise traitlets.TraitError(
                f"step is {step!r}: use one of {', '.join(self.steps)}"
            )
        return step

    @traitlets.validate("moment")
    def _check_moment(self, proposal: Any) -> int:
        moment = proposal["value"]
        self._check_steps({"value": self.steps})
        self._check_step({"value": self.step})
        last = len(self.steps[self.step].operators) - 1
        if not -1 <= moment <= last:
            raise traitlets.TraitError(
                f"moment is {moment}: the step {self.step!r} has the "
                f"operators 0 … {last}, and -1 is before them"
            )
        return moment

    @traitlets.observe("steps", "step", "moment")
    def _follow(self, change: Any) -> None:
        """Go to the peak of another step."""
        if self.step not in self.steps:
            self.step = self._first_step()
            return
        which = self.steps, self.step
        if self._before is not None:
            *before, moment = self._before
            if which != tuple(before) and self.moment == moment:
                self.moment = self._peak_moment()
        self._before = (*which, self.moment)

    def _shown(self) -> Step:
        tracker, view = self.steps[self.step], self._view
        if (
            view is None
            or view.tracker is not tracker
            or len(view.operators) != len(tracker.operators)
        ):
            self._view = Step(tracker)
        return self._view

    def numbers(self) -> dict[str, Any]:
        """What the widget shows; ``describe`` of the module gives the same.

        Bytes, counts and indices are integers. ``now``, ``forward_end`` and
        ``peak`` hold the bytes of each category and their ``total``;
        ``largest`` as :meth:`Step.largest`.
        """
        step = self._shown()
        operator, peak = step.operator(self.moment), step.tracker.peak_moment
        return {
            "step": self.step,
            "moment": self.moment,
            "operators": len(step.operators),
            "operator": operator.name,
            "module": operator.module,
            "phase": operator.phase,
            "forward_end_moment": step.forward_end,
            "peak_moment": peak,
            "now": step.at(self.moment),
            "forward_end": step.at(step.forward_end),
            "peak": step.at(peak),
            "peaks": {name: t.peak for name, t in self.steps.items()},
            "largest": step.largest(self.moment),
        }

    def sentence(self) -> str:
        """The moment in words, as the module says it."""
        n = self.numbers()
        now, end, peak = (
            n[moment]["total"] for moment in ("now", "forward_end", "peak")
        )
        if self.moment < 0:
            place = "before the first operator"
        else:
            operator = Operator(n["operator"], n["module"], n["phase"])
            place = (
                f"operator {self.moment + 1} of {n['operators']}: "
                f"{_operator_words(operator)}"
            )
        rank = (
            "the peak"
            if now == peak
            else f"{format_bytes(peak - now)} below the peak of "
            f"{format_bytes(peak)}"
        )
        if self.moment == n["forward_end_moment"]:
            against = "This is the end of the forward pass"
        else:
            much = "As much as"
            if now != end:
                more = "more" if now > end else "less"
                much = f"That is {format_bytes(abs(now - end))} {more} than"
            against = f"{much} at the end of the forward pass"
            changes = {c: n["now"][c] - n["forward_end"][c] for c in SHOWN}
            listed = ", ".join(
                f"{SHOWN[c]} {'+' if by > 0 else '−'}{format_bytes(abs(by))}"
                for c, by in sorted(
                    changes.items(), key=lambda item: -abs(item[1])
                )
                if by
            )
            against += f": {listed}" if listed else ""
        return (
            f"Step {self.step}, {place}. {format_bytes(now)} are alive, "
            f"{rank}. {against}."
        )

    def picture(self) -> str:
        """The step's bytes over its operators, by category."""
        step, colours = self._shown(), palette()
        scale = 150 / (max(t.peak for t in self.steps.values()) or 1)
        edges = [2 + 396 * x for x in _edges(step, _step_share(self.steps))]
        bands, letters, legend = [], [], []
        floor = [180.0] * len(step.memory)
        drawn = [c for c in SHOWN if any(held[c] for held in step.memory)]
        for category in drawn:
            ys = [
                y - held[category] * scale
                for y, held in zip(floor, step.memory, strict=True)
            ]
            bands.append(
                f'<path fill="{colours[category]}" d="{_stairs(edges, ys)}"/>'
            )
            letters += _letter(category, edges, floor, ys)
            floor = ys
        for index, category in enumerate(reversed(drawn)):
            x, y = 2 + 165 * (index % 2), 220 + 20 * (index // 2)
            legend.append(
                f'<rect x="{x}" y="{y - 11}" width="12" height="12" '
                f'fill="{colours[category]}"/>'
                + _initial(x + 6, y - 1, category)
                + f'<text x="{x + 17}" y="{y}" font-size="12">'
                f"{SHOWN[category]}</text>"
            )
        peak = step.tracker.peak_moment + 1
        x, y = (edges[peak] + edges[peak + 1]) / 2, floor[peak]
        marks = [
            '<path d="M2 180H398" stroke="currentColor"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>',
            f'<text x="{x:.1f}" y="{y - 8:.1f}" '
            f'text-anchor="{"start" if x < 200 else "end"}">'
            f"peak {format_bytes(step.tracker.peak)}</text>",
        ]
        for phase, begin, end in _runs(step):
            left, right = edges[begin + 1], edges[end + 1]
            words = [
                w for w in PHASE_WORDS[phase] if 7 * len(w) < right - left
            ]
            if words:
                marks.append(
                    f'<text x="{(left + right) / 2:.1f}" y="196" '
                    f'text-anchor="middle" font-size="12">{words[0]}</text>'
                )
        height = 212 + 20 * ((len(drawn) + 1) // 2)
        # Each band begins at the axis, so the lowest has to be the last.
        body = "\n".join([*reversed(bands), *letters, *marks, *legend])
        return (
            f'<svg viewBox="0 0 400 {height}" width="400" role="img" '
            f'aria-label="{escape(self.sentence())}" font-size="14" '
            'font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">\n'
            f"{body}\n</svg>"
        )

    def __repr__(self) -> str:
        return f"Timeline(step={self.step!r}, moment={self.moment})"


def _operator_words(operator: Operator) -> str:
    """An operator with its module and phase."""
    name, module = operator.name.removeprefix("aten."), operator.module
    phase = f"the {PHASE_WORDS[operator.phase][0]}"
    if module != OUTSIDE:
        kind = "module " if re.match("[0-9]", module) else ""
        return f"{name} of {kind}{module}, in {phase}"
    if operator.phase == "optimizer":
        return f"{name} of {phase}"
    return f"{name} outside of the model, in {phase}"


# Geometry of the static picture; the module's is the same.


def _step_share(steps: dict[str, PeakTracker]) -> float:
    """Of the width, for the operators of the optimizer; for every step."""
    shares = [LARGEST_STEP_SHARE]
    for tracker in steps.values():
        ours = _phases(tracker).count("optimizer")
        if ours:
            shares.append(ours / (len(tracker.operators) + 1))
    return min(shares)


def _edges(step: Step, share: float) -> list[float]:
    """Where each moment begins, and the last one ends, from 0 to 1."""
    phases = ["", *(o.phase for o in step.operators)]
    ours = phases.count("optimizer")
    narrow = share * (len(phases) - ours) / ((1 - share) * ours) if ours else 1
    widths = [narrow if p == "optimizer" else 1 for p in phases]
    places = list(accumulate(widths, initial=0))
    return [place / places[-1] for place in places]


def _stairs(edges: list[float], ys: list[float]) -> str:
    """A path from the axis up, along the heights, and down to the axis."""
    path, before = f"M{edges[0]:.0f} 180", 180.0
    for x, y in zip(edges, ys, strict=False):
        if f"{y:.1f}" != f"{before:.1f}":
            path += f"H{x:.1f}V{y:.1f}"
            before = y
    return path + f"H{edges[-1]:.1f}V180Z"


def _runs(step: Step) -> Iterator[tuple[str, int, int]]:
    """(phase, first operator, one after the last), in order."""
    begin, phases = 0, [o.phase for o in step.operators]
    for i, phase in enumerate(phases):
        if i + 1 == len(phases) or phases[i + 1] != phase:
            yield phase, begin, i + 1
            begin = i + 1


def _letter(
    category: str, edges: list[float], floor: list[float], ys: list[float]
) -> list[str]:
    """The initial where its band is thick, not to tell it by colour alone."""
    runs, begin = [(0.0, 0, 0)], 0
    for i, (low, y) in enumerate(zip(floor, ys, strict=True)):
        if low - y < 12:
            begin = i + 1
        else:
            runs.append((edges[i + 1] - edges[begin], begin, i))
    width, begin, last = max(runs)
    if width < 12:
        return []
    middle = (begin + last) // 2
    y = (floor[middle] + ys[middle]) / 2 + 4
    return [_initial((edges[begin] + edges[last + 1]) / 2, y, category)]


def _initial(x: float, y: float, category: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="11" '
        f'fill="#000">{category[0].upper()}</text>'
    )
