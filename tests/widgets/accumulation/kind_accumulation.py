"""What the tests have to know of the accumulation widget."""

from itertools import product

from kind import Kind

from membudget import widgets
from membudget.accumulation import NORMALISATIONS
from membudget.widgets import format_bytes


def controls(widget):
    keys = ("global_batch", "micro_batch", "steps", "normalisation")
    held = {key: getattr(widget, key) for key in keys}
    return {**held, "steps": min(widget.steps, 32)}  # the slider ends there


def printed(widget):
    plan = widget.plan
    weights = [plan.sample_weight(n) for n in (plan.largest, plan.last)]
    before = plan.global_batch - plan.last
    *_, window = range(0, widget.samples, plan.global_batch)
    return {
        "micro_batches": plan.steps,
        "global_batch": plan.global_batch,
        "passes": 2 * plan.steps,
        "weight_sum": before * weights[0] + plan.last * weights[1],
        "weight_ratio": max(weights) / min(weights),
        "peak": plan.peak,
        "whole_peak": plan.whole_peak,
        "memory.optimizer": plan.footprint.optimizer,
        "memory.parameters": plan.footprint.parameters,
        "steps_per_epoch": plan.steps_per_epoch,
        "last_window": widget.samples - window,
    }


def said(widget):
    numbers = printed(widget)
    over = numbers["peak"] - widget.budget
    than = "above" if over > 0 else "below"
    weights = ": not the gradient of the batch."
    if max(abs(numbers[f"weight_{w}"] - 1) for w in ("sum", "ratio")) < 1e-9:
        weights = "Every sample counts 1/N, as in the whole batch."
    return [
        f"the peak is {format_bytes(numbers['peak'])}, ",
        f" {format_bytes(abs(over))} {than} the budget",
        weights,
    ]


KIND = Kind(
    "accumulation",
    widgets.Accumulation,
    "Memory of one optimizer step: an MLP on handwritten digits, with Adam",
    controls,
    printed,
    said,
    states=[
        {"global_batch": size * steps, "micro_batch": size}
        for size, steps in product((1, 16, 512), (1, 3, 32))
    ]
    + [
        {"normalisation": n, "global_batch": whole} | {"micro_batch": size}
        for n, whole in ((NORMALISATIONS[1], 512), (NORMALISATIONS[2], 65536))
        for size in (1, 3, 40, 100, 130, 255, 256, 400, 511, 512)
    ]
    + [{"normalisation": NORMALISATIONS[0]}],
    given=[
        {
            **{"micro_batch": 700, "steps": 40, "samples": 5, "budget": 10},
            "normalisation": "no division",
        },
        {
            **{"micro_batch": 450, "global_batch": 1024},
            "normalisation": "mean of means",
        },
    ],
    tabs=("steps", "normalisation"),
    rest=("steps", {"steps": 9}),
    spoken={"micro_batch": "128 samples", "steps": "4 steps: peak 3.08 MiB"},
    columns=("bytes at the peak", "micro-batches", "whole batch"),
    parts=5,
    moves=[
        (
            {"global_batch": 1024, "normalisation": "mean of means"},
            [{"micro_batch": size} for size in (1, 15, 300, 342, 500, 1024)],
        )
    ],
)
