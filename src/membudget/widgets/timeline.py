"""The memory timeline: one training step, operator by operator."""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import traitlets
from torch.utils.checkpoint import checkpoint

from membudget import data, models
from membudget.checks import whole
from membudget.measuring import (
    OUTSIDE,
    PHASES,
    Allocation,
    PeakTracker,
    trace_step,
)
from membudget.measuring.modules import block_of
from membudget.widgets.base import Widget, checked, format_bytes, later

SHOWN = (
    "optimizer",
    "parameters",
    "inputs",
    "gradients",
    "activations",
    "recomputation",
    "temporaries",
)
"""Who holds the bytes, from the bottom of the picture to its top."""

BOXES = 40
"""Modules that have room beside each other, one box each."""

STEPS = later("plain"), later("accumulated"), later("checkpointed")
"""The names of :func:`example_steps`."""


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
        allocations: the tracker's, without those that have no bytes.
        operators: the tracker's; where these have more than :data:`BOXES`
            modules, with the blocks that these are in. The phase has two
            corrections. What
            runs after the mark ``"backward"`` before autograd takes over
            (the gradient of the loss, 1) belongs to the backward pass;
            operators that only look on (the profiler's, or a recomputed
            tensor's ``detach``) belong to what runs around them.
        forward_end: the last moment of the forward pass before the peak;
            the peak, if it is in the forward pass.
    """

    def __init__(self, tracker: PeakTracker) -> None:
        self.tracker = tracker
        self.operators = [
            operator._replace(phase=phase)
            for operator, phase in zip(
                tracker.operators, _phases(tracker), strict=True
            )
        ]
        if len({o.module for o in self.operators}) > BOXES:
            self.operators = [
                o._replace(module=block_of(o.module)) for o in self.operators
            ]
        self.allocations = [a for a in tracker.allocations if a.bytes]
        ends = (
            moment
            for moment, (one, then) in enumerate(pairwise(self.operators))
            if one.phase == "forward" != then.phase
            and moment < tracker.peak_moment
        )
        self.forward_end = max(ends, default=tracker.peak_moment)

    def category(self, allocation: Allocation) -> str:
        """One of :data:`SHOWN`."""
        kind, birth = allocation.category, allocation.birth
        if kind != "activations" or birth < 0:
            return kind
        again = self.operators[birth].phase == "recomputation"
        return "recomputation" if again else kind


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
    shown = []
    for label, tracker in steps.items():
        step = Step(tracker)
        operators = [kinds[operator] for operator in step.operators]
        allocations = []
        for a in step.allocations:
            death = len(operators) if a.death is None else a.death
            category = SHOWN.index(step.category(a))
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
        "phases": list(PHASES),
        "kinds": numbers,
        "sizes": list(sizes),
        "steps": shown,
    }


class Timeline(Widget):
    """What is alive in a training step, after each of its operators.

    Args:
        step: one of :func:`example_steps`.
        moment: index of the operator to begin with; by default -1, before
            the first.

    Another step that has no such ``moment`` is shown at its last.

    Example:
        >>> Timeline(step="checkpointed", moment=25)
        Timeline(step='checkpointed', moment=25)
    """

    name = "timeline"
    named = ("step", "moment")

    steps = traitlets.Dict(read_only=True).tag(sync=True, to_json=_steps_json)
    step = traitlets.Enum(STEPS, STEPS[0]).tag(sync=True)
    moment = traitlets.Any(-1).tag(sync=True)
    label = traitlets.Unicode(
        later("an MLP on handwritten digits, with Adam"), read_only=True
    ).tag(sync=True)

    @traitlets.default("steps")
    def _examples(self) -> dict[str, PeakTracker]:
        return example_steps()

    @traitlets.validate("moment")
    def _check_moment(self, proposal: Any) -> int:
        return checked(whole, proposal["value"], "moment", -1, self._last())

    @traitlets.observe("step")
    def _follow(self, change: Any) -> None:
        """Keep to a moment of the step."""
        self.moment = min(self.moment, self._last())

    def _last(self) -> int:
        return len(self.steps[self.step].operators) - 1

    def sentence(self) -> str:
        """The end of the forward pass, and the peak."""
        tracker = self.steps[self.step]
        alive = tracker.timeline[Step(tracker).forward_end]
        return (
            f"Step {self.step}: {format_bytes(alive)} are alive at the end "
            f"of the forward pass, {format_bytes(tracker.peak)} at the peak."
        )
