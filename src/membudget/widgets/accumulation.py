"""The accumulation widget: a batch in micro-batches, and what that costs."""

from dataclasses import asdict
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import traitlets

from membudget import models, records
from membudget.accumulation import (
    NORMALISATIONS,
    Footprint,
    PeakLine,
    Plan,
    footprint,
)
from membudget.widgets.base import Whole, Widget, format_bytes, later

WORDS = later("window"), later("mean of means"), later("no division")
"""The normalisations, as the widget shows them."""


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


@cache
def digits_record() -> dict[str, Any] | None:
    """The record of the digits MLP's time, if there is one."""
    found = records.load("micro_batch", "tiny", "cpu")
    return found[-1] if found else None


def _footprint_json(value: Footprint, widget: Widget) -> dict[str, Any]:
    """Of each peak line: bytes of a sample, gradients and temporaries.

    Of the constant above parameters and optimizer states, gradients are the
    first part, up to one whole gradient; more than that is temporary.
    """

    def row(line: PeakLine) -> list[int]:
        rest = line.constant - value.parameters - value.optimizer
        gradients = min(value.gradients, rest)
        return [line.slope, gradients, rest - gradients]

    return {
        **asdict(value),
        "alone": [row(line) for line in value.alone],
        "later": [row(line) for line in value.later],
    }


def _record_json(record: dict | None, widget: Widget) -> dict | None:
    """The time of a sample at each micro-batch size: the repeats' median."""
    if record is None:
        return None
    per = 1e6 / record["parameters"]["window"]
    return {
        "times": [
            [row["micro_batch"], round(per * median(row["seconds"]), 3)]
            for row in record["samples"]
        ],
        "unit": "µs",
        "gpu": record["device"]["kind"] != "cpu",
        "provenance": records.provenance(record).replace("\n", ", "),
    }


class Accumulation(Widget):
    """The memory, the sample weights and the cost of accumulation steps.

    Steps and micro-batch follow from each other and the global batch; the
    last micro-batch takes the remainder. The traits agree with each other
    after every change, from Python or from the browser.

    Args:
        footprint: the model's bytes; by default :func:`digits_footprint`,
            whose time was measured, too (:func:`digits_record`).
        global_batch: samples for one optimizer step; by default
            ``steps * micro_batch``.
        micro_batch: samples in a full micro-batch.
        steps: accumulation steps; not used where ``global_batch`` is given.
            To set them chooses the smallest micro-batch that needs no more.
        normalisation: one of :data:`membudget.accumulation.NORMALISATIONS`.
        samples: samples in an epoch.
        budget: the memory limit, in bytes.
        label: what the footprint is of, in a few words; shown as text.

    Example:
        >>> widget = Accumulation(micro_batch=96, global_batch=512)
        >>> widget.steps, widget.plan.sizes[-1]
        (6, 32)
    """

    name = "accumulation"
    named = ("micro_batch", "steps", "global_batch", "normalisation")

    footprint = traitlets.Instance(Footprint).tag(
        sync=True, to_json=_footprint_json
    )
    micro_batch = Whole(128).tag(sync=True)
    steps = Whole(4).tag(sync=True)
    global_batch = Whole().tag(sync=True)
    normalisation = traitlets.Enum(NORMALISATIONS, "window").tag(sync=True)
    samples = Whole(1797).tag(sync=True)
    budget = Whole(4 * 2**20).tag(sync=True)
    record = traitlets.Any(read_only=True).tag(sync=True, to_json=_record_json)
    label = traitlets.Unicode().tag(sync=True)

    def __init__(
        self, footprint: Footprint | None = None, **settings: Any
    ) -> None:
        if "global_batch" in settings:
            settings.pop("steps", None)  # they follow
        if footprint is None:
            footprint = digits_footprint()
            self.set_trait("record", digits_record())
            settings.setdefault(
                "label", later("an MLP on handwritten digits, with Adam")
            )
        super().__init__(footprint=footprint, **settings)

    @traitlets.default("global_batch")
    def _whole(self) -> int:
        return self.steps * self.micro_batch

    @traitlets.observe("micro_batch", "steps", "global_batch")
    def _follow(self, change: Any) -> None:
        """Set the trait that follows from the other two."""
        if self.steps == -(-self.global_batch // self.micro_batch):
            return
        if change["name"] == "steps":
            self.micro_batch = -(-self.global_batch // self.steps)
        self.steps = -(-self.global_batch // self.micro_batch)

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

    def sentence(self) -> str:
        """The peak against the budget."""
        plan = self.plan
        over = plan.peak - self.budget
        return (
            f"A batch of {plan.global_batch} in {plan.steps} micro-batch"
            f"{'' if plan.steps == 1 else 'es'} of {plan.largest} samples "
            f"at most: the peak is {format_bytes(plan.peak)}, "
            f"{format_bytes(abs(over))} {'above' if over > 0 else 'below'} "
            f"the budget of {format_bytes(self.budget)}."
        )
