"""What the tests have to know of the segments widget."""

from functools import cache
from itertools import accumulate, pairwise, product

from kind import Kind

from membudget import widgets
from membudget.checkpointing import Stage
from membudget.widgets import format_bytes, format_number
from membudget.widgets import segments as module

CHAIN = [Stage(output=2**20, inner=3 * 2**20, backward_workspace=2**20)] * 12


def controls(widget):
    return {
        "layers": widget.layers,
        "checkpoint": round(20 * widget.checkpoint),
        "segments": widget.segments,
        "cuts": "-".join(map(str, cuts(widget))),
        "moment": widget.run().peak_moment + 1,
        "split": widget.split,
    }


def size(widget, run):
    return run.peak / (1 if widget.chain else module.UNIT)


@cache
def peaks_of(stages, split):
    """Of each number of segments, from 0."""
    widget = widgets.Segments(layers=len(stages), split=split)
    if stages != widget.stages:
        widget.chain = stages
    return [widget.run(k).peak for k in range(len(stages) + 1)]


def curve(widget):
    unit = 1 if widget.chain else module.UNIT
    return [peak / unit for peak in peaks_of(widget.stages, widget.split)]


def sizes(widget):
    """Of the checkpointed segments."""
    if widget.cuts:
        return [b - a for a, b in pairwise([0, *widget.cuts, widget.layers])]
    split = module.SPLITS[widget.split]
    found = split(widget.layers, widget.segments) if widget.segments else []
    return [len(segment) for segment in found if not isinstance(segment, int)]


def cuts(widget):
    """Where the checkpoints are."""
    return [cut for cut in accumulate(sizes(widget)) if cut < widget.layers]


def printed(widget):
    run, peaks = widget.run(), curve(widget)
    least = min(peaks)
    found = {
        "peak": size(widget, run),
        "plain_peak": peaks[0],
        "best_peak": least,
        "best": [k for k, peak in enumerate(peaks) if peak == least],
        "sizes": sizes(widget),
        "extra_runs": run.extra_runs,
    }
    if not widget.cuts and widget.segments in widget.measured:
        found["measured"] = widget.measured[widget.segments]
    return found


def said(widget):
    def words(value):
        if widget.chain:
            return format_bytes(value)
        number = format_number(value)
        return f"{number} unit{'' if number == '1' else 's'}"

    run, peaks = widget.run(), curve(widget)
    peak, least = size(widget, run), min(peaks)
    found = [
        f"the peak is {words(peak)}",
        f"{run.extra_runs or 'No'} {'stage' if widget.chain else 'layer'}",
        "has a lower peak" if peak == least else words(least),
    ]
    return found[:2] if widget.cuts else found


KIND = Kind(
    "segments",
    widgets.Segments,
    "Memory during one step",
    controls,
    printed,
    said,
    states=[
        {"layers": layers, "checkpoint": share / 20, "segments": k}
        for layers, share in product((1, 2, 9, 16, 47, 100), (1, 7, 20))
        for k in sorted({0, 1, layers // 9, layers // 2, layers})
    ]
    + [{"split": split, "segments": 7} for split in reversed(module.SPLITS)],
    given=[
        {
            **{"layers": 23, "segments": 5, "checkpoint": 0.25},
            **{"split": "pytorch", "measured": {5: 9.2, 23: 8}},
            "label": "mine <&>",
        },
        {"chain": CHAIN, "segments": 3, "measured": {3: 9 * 2**20}},
        {"segments": 0},
        {"layers": 12, "cuts": [5, 9, 11]},
    ],
    tabs=("layers", "segments", "play"),
    rest=("segments", {"segments": 9}),
    spoken={"segments": "4 segments: peak 8 units"},
    columns=("units at the peak", "k = 4", "k = 0"),
    parts=6,
    moves=[
        (
            {"layers": 97, "checkpoint": 0.35},
            [
                {"split": split, "segments": k}
                for split, k in product(module.SPLITS, (0, 1, 9, 45, 97))
            ],
        )
    ],
)
