"""What the tests have to know of the timeline widget."""

import timeline_cases
from kind import Kind

from membudget import widgets
from membudget.widgets.timeline import SHOWN, Step, example_steps


def timeline_printed(widget):
    n = widget.numbers()
    memory = Step(widget.steps[widget.step]).memory
    drawn = [c for c in SHOWN if any(held[c] for held in memory)]
    return {
        f"{moment}.{category}": n[moment][category]
        for moment in ("now", "forward_end", "peak")
        for category in ("total", *drawn)
    }


def timeline_states():
    for step, tracker in example_steps().items():
        last = len(tracker.operators)
        for slot in sorted({0, 1, last, *range(5, last, 67)}):
            yield {"step": step, "moment": slot - 1}


KIND = Kind(
    "timeline",
    widgets.Timeline,
    "Memory during one training step: an MLP on handwritten digits",
    lambda widget: {"step": widget.step, "moment": widget.moment + 1},
    timeline_printed,
    lambda widget: [],
    states=list(timeline_states()),
    given=[
        {"step": "accumulated", "moment": 500, "label": "mine <&>"},
        {"step": "checkpointed"},
        {"steps": timeline_cases.odd_steps(), "step": "two steps"},
    ],
    tabs=("step", "forward_end", "peak", "moment"),
    rest=("moment", {"moment": 53}),
    spoken={
        "moment": "operator 49 of 275: threshold_backward of module 13, in "
        "the backward pass: 14.0 MiB"
    },
    columns=("bytes alive", "now", "end of forward", "peak"),
    parts=6,
    moves=[
        (
            {"step": step},
            [
                {"moment": slot - 1}
                for slot in (0, last // 9, last // 3, last - 1)
            ],
        )
        for step, tracker in example_steps().items()
        for last in [len(tracker.operators)]
    ],
)
