"""What the tests have to know of the timeline widget."""

from kind import Kind
from timeline_cases import said, three

from membudget import widgets
from membudget.widgets.timeline import Step, example_steps


def printed(widget):
    step = Step(widget.steps[widget.step])
    drawn = sorted({step.category(a) for a in step.allocations})
    return {
        f"{moment}.{category}": bytes_[category]
        for moment, bytes_ in three(widget).items()
        for category in ("total", *drawn)
    }


def states():
    for step, tracker in example_steps().items():
        last = len(tracker.operators)
        for slot in sorted({0, 1, last, *range(5, last, 67)}):
            yield {"step": step, "moment": slot - 1}


KIND = Kind(
    "timeline",
    widgets.Timeline,
    "Memory during one training step: an MLP on handwritten digits",
    lambda widget: {"step": widget.step, "moment": widget.moment + 1},
    printed,
    said,
    states=list(states()),
    given=[
        {"step": "accumulated", "moment": 500},
        {"step": "checkpointed"},
    ],
    tabs=("step", "play", "forward_end", "peak", "moment"),
    rest=("moment", {"moment": 4}),
    spoken={
        "moment": "Before the first operator: 5.00 MiB",
    },
    columns=("bytes alive", "now", "end of forward", "peak"),
    parts=7,
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
