"""The segment-count widget: what checkpointing a chain in k segments costs."""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from numbers import Integral, Real
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
from membudget.checks import listed, whole
from membudget.widgets.base import (
    Whole,
    Widget,
    format_bytes,
    format_number,
)

SPLITS = {"balanced": equal_segments, "pytorch": pytorch_segments}
"""How the layers are shared out, by the names of the trait ``split``."""

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

    Raises:
        traitlets.TraitError: one of them is not as said above (the widget
            stays as it was).

    Example:
        >>> widget = Segments(layers=16, segments=4)
        >>> widget.run().peak / UNIT, widget.run(0).peak / UNIT
        (8.0, 17.0)
    """

    name = "segments"

    chain = _Chain().tag(sync=True, to_json=_chain_json)
    layers = Whole().tag(sync=True)
    segments = _Count().tag(sync=True)
    cuts = traitlets.List().tag(sync=True)
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
        cuts: Sequence[int] = (),
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
            cuts=listed(cuts, "cuts", "whole numbers", 0),
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

    @traitlets.validate("cuts")
    def _check_cuts(self, proposal: Any) -> list[int]:
        cuts, most = proposal["value"], self.layers - 1
        fit = all(_whole(cut) and 1 <= cut <= most for cut in cuts)
        if not fit or cuts != sorted(set(cuts)):
            raise traitlets.TraitError(
                f"cuts is {_short(cuts)}: use ascending whole numbers from 1 "
                f"to {most}, the layers before which checkpoints are kept"
            )
        return [int(cut) for cut in cuts]

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

    @traitlets.observe(
        "chain",
        "layers",
        "segments",
        "cuts",
        "checkpoint",
        "split",
        "measured",
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
            segments: in how many it is split; by default as the widget says.

        Raises:
            TypeError: a number that is not whole.
            ValueError: more segments than layers, or fewer than none.
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
        text = f"{self.layers} {thing}{'' if self.layers == 1 else 's'} "
        if not self.segments:
            return f"{text}without checkpointing: the peak is {plain}."
        return (
            f"{text}in {self.segments} checkpointed "
            f"segment{'' if self.segments == 1 else 's'}: the peak is {ours}; "
            f"without checkpointing {plain}."
        )

    def _size(self, value: int) -> str:
        if self.chain is not None:
            return format_bytes(value)
        number = format_number(value / UNIT)
        return f"{number} unit{'' if number == '1' else 's'}"

    def __repr__(self) -> str:
        start = f"Segments(layers={self.layers}, segments={self.segments}, "
        if self.chain is None:
            start += f"checkpoint={format_number(self.checkpoint)}, "
        return f"{start}split={self.split!r})"


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} …"
