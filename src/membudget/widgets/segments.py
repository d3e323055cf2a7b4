"""The segment-count widget: what checkpointing a chain in k segments costs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import traitlets

from membudget.checkpointing import (
    Run,
    Stage,
    equal_segments,
    no_segments,
    pytorch_segments,
    simulate,
)
from membudget.checks import instance, listed, number, shown, whole
from membudget.widgets.base import (
    Checked,
    Whole,
    Widget,
    checked,
    format_bytes,
    format_number,
)

SPLITS = {"balanced": equal_segments, "pytorch": pytorch_segments}
"""How the layers are shared out, by the names of the trait ``split``."""

ROW = (
    *("output", "inner", "holds_input", "holds_output"),
    *("forward_workspace", "record_workspace", "recompute_workspace"),
    *("backward_workspace", "again_workspace", "gradients", "gradient"),
)
"""What ``simulate`` of ``tape.mjs`` reads of a stage."""

UNIT = 100
"""A layer's tape inside the widget: sizes stay whole numbers."""

MOST_LAYERS = 100
MOST_STAGES = 200
"""Of a chain; the curve simulates every number of segments."""


def _share(value: Any, name: str) -> float:
    twentieths = 20 * number(value, name, above=0, most=1)
    if abs(twentieths - round(twentieths)) > 1e-9:
        raise ValueError(f"{name} is {value}: use a multiple of 0.05")
    return round(twentieths) / 20


def _chain(value: Any, name: str) -> tuple[Stage, ...] | None:
    if value is None:
        return None
    use = "stages, as membudget.checkpointing.profile gives; or None"
    stages = listed(value, name, use)
    whole(len(stages), f"the length of {name}", 1, MOST_STAGES)
    return tuple(instance(s, Stage, f"one of {name}", use) for s in stages)


def _chain_json(chain: tuple[Stage, ...] | None, widget: Widget) -> Any:
    """Rows of numbers."""
    return chain and [[int(getattr(s, n)) for n in ROW] for s in chain]


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
        cuts: the layers, counted from 0, before which checkpoints are kept,
            ascending from 1 to ``layers`` − 1; then ``segments`` follows
            from it. Empty: as many segments as ``segments`` says.
        checkpoint: a multiple of 0.05, above 0 and up to 1.
        split: one of :data:`SPLITS`: balanced with the longer ones first, or
            as ``torch.utils.checkpoint.checkpoint_sequential`` does it.
        measured: peaks that were measured, by the number of segments; bytes
            with a chain, else units. They belong to one chain and one split:
            when those change it becomes empty, unless it is set with them.
        label: what the chain is, in a few words; shown as text.

    Example:
        >>> widget = Segments(layers=16, segments=4)
        >>> widget.run().peak / UNIT, widget.run(0).peak / UNIT
        (8.0, 17.0)
    """

    name = "segments"

    chain = Checked(_chain).tag(sync=True, to_json=_chain_json)
    layers = Whole().tag(sync=True)
    segments = traitlets.Any().tag(sync=True)
    cuts = traitlets.List().tag(sync=True)
    checkpoint = Checked(_share, 1.0).tag(sync=True)
    split = traitlets.Enum(list(SPLITS), "balanced").tag(sync=True)
    measured = traitlets.Dict().tag(sync=True, to_json=_measured_json)
    label = traitlets.Unicode().tag(sync=True)

    _before: tuple | None = None  # the setting and what was measured in it

    def __init__(
        self, chain: Sequence[Stage] | None = None, **traits: Any
    ) -> None:
        super().__init__(chain=chain, **traits)

    @traitlets.default("layers")
    def _some_layers(self) -> int:
        return 16 if self.chain is None else len(self.chain)

    @traitlets.default("segments")
    def _some_segments(self) -> int:
        return min(4, self.layers)

    @traitlets.validate("layers")
    def _check_layers(self, proposal: Any) -> int:
        layers = proposal["value"]
        if self.chain is None:
            return checked(whole, layers, "layers", 1, MOST_LAYERS)
        if layers != len(self.chain):
            raise traitlets.TraitError(
                f"layers is {layers}: it follows from the chain, which has "
                f"{len(self.chain)} stages; set chain instead"
            )
        return layers

    @traitlets.validate("segments")
    def _check_segments(self, proposal: Any) -> int:
        return checked(whole, proposal["value"], "segments", 0, self.layers)

    @traitlets.validate("cuts")
    def _check_cuts(self, proposal: Any) -> list[int]:
        given, most = proposal["value"], self.layers - 1
        cuts = [checked(whole, cut, "one of cuts", 1, most) for cut in given]
        if cuts != sorted(set(cuts)):
            raise traitlets.TraitError(
                f"cuts is {shown(given)}: use ascending whole numbers, the "
                "layers before which checkpoints are kept"
            )
        return cuts

    @traitlets.validate("measured")
    def _check_measured(self, proposal: Any) -> dict[int, float]:
        measured, most = proposal["value"], self.layers
        for count, peak in measured.items():
            checked(whole, count, "a key of measured", 0, most)
            checked(number, peak, f"measured[{count}]", 0)
        return {int(k): number(peak, "peak") for k, peak in measured.items()}

    @traitlets.observe(
        *("chain", "layers", "segments", "cuts"),
        *("checkpoint", "split", "measured"),
    )
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
        if self.cuts:
            count = len(self.cuts) + 1
            moved = change["name"] == "segments" and self.segments != count
            if moved or self.cuts[-1] >= self.layers:
                self.cuts = []
            else:
                self.segments = count
        self.segments = min(self.segments, self.layers)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The chain; sizes in bytes, or in hundredths of a layer's tape."""
        if self.chain is not None:
            return self.chain
        size = round(UNIT * self.checkpoint)
        stage = Stage(output=size, inner=UNIT - size, backward_workspace=size)
        return (stage,) * self.layers

    def run(self, segments: int | None = None) -> Run:
        """What the tape machine makes of the step.

        Args:
            segments: in how many it is split, from 0 to ``layers``; by
                default as the widget says.
        """
        length = self.layers
        if segments is None and self.cuts:
            ends = [0, *self.cuts, length]
            return simulate(self.stages, [range(*of) for of in pairwise(ends)])
        count = self.segments
        if segments is not None:
            count = whole(segments, "segments", 0, length)
        split = SPLITS[self.split](length, count) if count else []
        return simulate(self.stages, split or no_segments(length))

    def sentence(self) -> str:
        """The peak, and that of the step without checkpointing."""
        plain, ours = (
            self._size(run.peak) for run in (self.run(0), self.run())
        )
        thing = "layer" if self.chain is None else "stage"
        text = _plural(self.layers, thing)
        if not self.segments:
            return f"{text} without checkpointing: the peak is {plain}."
        segments = _plural(self.segments, "checkpointed segment")
        return (
            f"{text} in {segments}: the peak is {ours}; without "
            f"checkpointing {plain}."
        )

    def _size(self, value: int) -> str:
        if self.chain is not None:
            return format_bytes(value)
        return _plural(format_number(value / UNIT), "unit")

    def __repr__(self) -> str:
        start = f"Segments(layers={self.layers}, segments={self.segments}, "
        if self.chain is None:
            start += f"checkpoint={format_number(self.checkpoint)}, "
        return f"{start}split={self.split!r})"


def _plural(count: int | str, thing: str) -> str:
    return f"{count} {thing}{'' if str(count) == '1' else 's'}"
