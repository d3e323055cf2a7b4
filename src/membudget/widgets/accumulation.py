"""The accumulation widget: one window, its memory and its weights."""

from collections.abc import Iterable
from functools import cache
from html import escape
from typing import Any

import torch
import torch.nn.functional as F
import traitlets

from membudget import models
from membudget.accumulation import (
    NORMALISATIONS,
    Footprint,
    PeakLine,
    Plan,
    footprint,
)
from membudget.plotting import palette
from membudget.widgets.base import (
    Whole,
    Widget,
    format_bytes,
    format_number,
)

CONSUMERS = {
    "optimizer": "optimizer states",
    "parameters": "parameters",
    "gradients": "gradients",
    "activations": "activations and inputs",
    "temporaries": "temporaries",
}
"""Who holds the bytes, from the bottom of the picture to its top."""


@cache
def digits_footprint() -> Footprint:
    """Footprint of the digits MLP with Adam and cross-entropy."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = models.mlp()
        return model, torch.optim.Adam(model.parameters())

    def loss(model: torch.nn.Module, size: int) -> torch.Tensor:
        labels = torch.randint(10, (size,))
        return F.cross_entropy(model(torch.rand(size, 64)), labels)

    return footprint(build, loss)


def _footprint_json(value: Footprint, widget: Widget) -> dict[str, Any]:
    return {
        "parameters": value.parameters,
        "gradients": value.gradients,
        "optimizer": value.optimizer,
        "alone": [list(line) for line in value.alone],
        "later": [list(line) for line in value.later],
    }


class Accumulation(Widget):
    """The memory and the sample weights of one accumulation window.

    The global batch is steps × micro-batch. Once it is locked, the steps
    follow from the micro-batch instead, and the last micro-batch takes the
    remainder. The traits agree with each other after every change, from
    Python or from the browser.

    Args:
        footprint: the model's bytes; by default those of
            :func:`digits_footprint`.
        micro_batch: samples in a full micro-batch.
        steps: accumulation steps; not used where ``global_batch`` is given.
        global_batch: samples for one optimizer step; locks it.
        normalisation: one of :data:`membudget.accumulation.NORMALISATIONS`.
        samples: samples in an epoch.
        budget: the memory limit, in bytes.
        label: what the footprint is of, in a few words; shown as text.

    Attributes:
        locked: whether the global batch stays while the micro-batch moves.

    Raises:
        traitlets.TraitError: a number that is not whole or below 1; an
            unknown normalisation; a footprint of another type; ``steps`` set
            while the global batch is locked, or ``global_batch`` while it is
            not (the widget stays as it was).

    Example:
        >>> widget = Accumulation(micro_batch=96, global_batch=512)
        >>> widget.steps, widget.plan.sizes[-1]
        (6, 32)
    """

    name = "accumulation"

    footprint = traitlets.Instance(Footprint).tag(
        sync=True, to_json=_footprint_json
    )
    micro_batch = Whole(128).tag(sync=True)
    steps = Whole(4).tag(sync=True)
    global_batch = Whole(512).tag(sync=True)
    locked = traitlets.Bool(False).tag(sync=True)
    normalisation = traitlets.Enum(NORMALISATIONS, "window").tag(sync=True)
    samples = Whole(1797).tag(sync=True)
    budget = Whole(4 * 2**20).tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        footprint: Footprint | None = None,
        *,
        micro_batch: int = 128,
        steps: int = 4,
        global_batch: int | None = None,
        normalisation: str = "window",
        samples: int = 1797,
        budget: int = 4 * 2**20,
        label: str = "",
        **kwargs: Any,
    ) -> None:
        steps = type(self).steps.validate(self, steps)
        if global_batch is None:
            kwargs["steps"] = steps
        else:
            kwargs.update(global_batch=global_batch, locked=True)
        if footprint is None:
            footprint = digits_footprint()
            label = label or "an MLP on handwritten digits, with Adam"
        super().__init__(
            footprint=footprint,
            label=label,
            micro_batch=micro_batch,
            normalisation=normalisation,
            samples=samples,
            budget=budget,
            **kwargs,
        )

    @traitlets.observe("micro_batch", "steps", "global_batch", "locked")
    def _follow(self, change: Any) -> None:
        """Set the trait that follows from the other two."""
        if self.locked:
            name, value = "steps", -(-self.global_batch // self.micro_batch)
            advice = "the global batch is locked: set micro_batch instead"
        else:
            name, value = "global_batch", self.steps * self.micro_batch
            advice = (
                "it follows steps × micro_batch: set those, or locked = True "
                "first"
            )
        given = getattr(self, name)
        if given != value:
            setattr(self, name, value)
            if change["name"] == name:
                raise traitlets.TraitError(
                    f"{name} cannot be set to {given}; {advice}"
                )

    @property
    def plan(self) -> Plan:
        """The plan that the widget shows now."""
        return Plan(
            self.global_batch,
            self.micro_batch,
            self.samples,
            self.footprint,
            self.normalisation,
        )

    def numbers(self) -> dict[str, Any]:
        """What the widget shows; ``describe`` of the module gives the same.

        Bytes, samples and counts are integers. ``memory`` and
        ``whole_memory`` say who holds the bytes at the peak of the window
        and of the whole batch.
        """
        plan, fp = self.plan, self.footprint
        size, last = plan.largest, plan.last
        weight, last_weight = map(plan.sample_weight, (size, last))
        epoch_steps = plan.steps_per_epoch
        return {
            "micro_batches": plan.steps,
            "micro_batch": size,
            "last_micro_batch": last,
            "global_batch": plan.global_batch,
            "weight": weight,
            "last_weight": last_weight,
            "weight_sum": (
                (plan.global_batch - last) * weight + last * last_weight
            ),
            "weight_ratio": (
                max(weight, last_weight) / min(weight, last_weight)
            ),
            "peak": plan.peak,
            "whole_peak": plan.whole_peak,
            "fits": plan.peak <= self.budget,
            "whole_fits": plan.whole_peak <= self.budget,
            "memory": _memory(
                fp, fp.alone if plan.steps == 1 else fp.later, size
            ),
            "whole_memory": _memory(fp, fp.alone, plan.global_batch),
            "steps_per_epoch": epoch_steps,
            "last_window": (
                self.samples - (epoch_steps - 1) * plan.global_batch
            ),
        }

    def sentence(self) -> str:
        """The key numbers in words, as the module says them."""
        n = self.numbers()
        count, whole = n["micro_batches"], n["global_batch"]
        size, last = n["micro_batch"], n["last_micro_batch"]
        budget = f"the budget of {format_bytes(self.budget)}"
        step = "" if n["memory"]["activations"] else " (in the optimizer step)"
        fits = "within" if n["fits"] else "above"
        peak = f"peak {format_bytes(n['peak'])}{step}, {fits} {budget}"
        if count == 1:
            memory = f"One micro-batch, the whole batch of {whole}: {peak}"
        else:
            sizes = f"micro-batches of {size}"
            if size != last:
                sizes = f"micro-batches, {size} each and the last {last}"
            fits = "fits" if n["whole_fits"] else "does not fit"
            memory = (
                f"{count} {sizes}: {peak}; the whole batch of {whole} needs "
                f"{format_bytes(n['whole_peak'])} and {fits}"
            )
        ratio = format_number(n["weight_ratio"])
        bias = (
            f"sample of the last micro-batch weighs {ratio} times as much "
            "as any other"
        )
        if abs(n["weight_sum"] - 1) > 1e-9:
            total = format_number(n["weight_sum"])
            weights = f"The weights sum to {total} instead of 1"
            if size != last:
                weights += f", and a {bias}"
        elif size != last and n["weight_ratio"] > 1 + 1e-9:
            weights = f"A {bias}"
        else:
            weights = f"Every sample weighs 1/{whole}, as in the whole batch"
        return f"{memory}. {weights}."

    def picture(self) -> str:
        """Two stacked bars: the window's peak and the whole batch's."""
        n, colours = self.numbers(), palette()
        scale = 396 / max(n["peak"], n["whole_peak"], self.budget)
        rows = [
            ("Window", n["peak"], n["memory"]),
            ("Whole batch", n["whole_peak"], n["whole_memory"]),
        ]
        shapes, y = [], 0
        for label, peak, memory in rows:
            shapes.append(
                f'<text x="2" y="{y + 16}">{label}: peak '
                f"{format_bytes(peak)}</text>"
            )
            x = 2.0
            for consumer in CONSUMERS:
                width = memory[consumer] * scale
                shapes.append(
                    f'<rect x="{x:.1f}" y="{y + 24}" width="{width:.1f}" '
                    f'height="26" fill="{colours[consumer]}" '
                    'stroke="#fff" stroke-width="0.5"/>'
                )
                if width >= 12:
                    shapes.append(_initial(x + width / 2, y + 42, consumer))
                x += width
            y += 60
        limit = 2 + self.budget * scale
        shapes.append(
            f'<path d="M{limit:.1f} 20V{y + 6}" stroke="currentColor" '
            'stroke-width="1.5" stroke-dasharray="5 4"/>'
            f'<text x="{min(limit, 398):.1f}" y="{y + 20}" '
            f'text-anchor="{"end" if limit > 200 else "start"}">'
            f"budget {format_bytes(self.budget)}</text>"
        )
        for index, (consumer, label) in enumerate(CONSUMERS.items()):
            x, row = 2 + 150 * (index % 3), y + 44 + 22 * (index // 3)
            shapes.append(
                f'<rect x="{x}" y="{row - 11}" width="12" height="12" '
                f'fill="{colours[consumer]}"/>'
                + _initial(x + 6, row - 1, consumer)
                + f'<text x="{x + 17}" y="{row}" font-size="12">{label}</text>'
            )
        body = "\n".join(shapes)
        return (
            '<svg viewBox="0 0 400 196" width="400" role="img" '
            f'aria-label="{escape(self.sentence())}" font-size="14" '
            'font-family="sans-serif" fill="currentColor" '
            'style="max-width: 100%; height: auto">\n'
            f"{body}\n</svg>"
        )

    def __repr__(self) -> str:
        return (
            f"Accumulation(micro_batch={self.micro_batch}, "
            f"steps={self.steps}, global_batch={self.global_batch}, "
            f"normalisation={self.normalisation!r})"
        )


def _memory(
    footprint: Footprint, lines: Iterable[PeakLine], size: int
) -> dict[str, int]:
    """Who holds the bytes at the peak of these lines.

    What grows with the size is activations and inputs. Of the constant above
    parameters and optimizer states, gradients are the first part, up to one
    whole gradient; more than that is temporary.
    """
    line = max(lines, key=lambda line: line.constant + line.slope * size)
    rest = line.constant - footprint.parameters - footprint.optimizer
    gradients = min(footprint.gradients, rest)
    return {
        "optimizer": footprint.optimizer,
        "parameters": footprint.parameters,
        "gradients": gradients,
        "activations": line.slope * size,
        "temporaries": rest - gradients,
    }


def _initial(x: float, y: float, consumer: str) -> str:
    """A consumer's first letter, so that it is not told by colour alone."""
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="middle" font-size="11" '
        f'fill="#000">{consumer[0].upper()}</text>'
    )
