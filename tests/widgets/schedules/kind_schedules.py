"""What the tests have to know of the game of schedules."""

import json
from functools import cache

from kind import Kind

from membudget.checkpointing import equal_segments, no_segments, simulate
from membudget.checkpointing.schedule import flatten
from membudget.schedules import optimal_segments
from membudget.widgets import Schedules
from membudget.widgets.schedules import BOSS, level_of


@cache
def platinum(level):
    """Segments that win everything that a level has."""
    found = level_of(level)
    return optimal_segments(found.stages, found.medals[-1].peak)


def spans(segments):
    """The segments by their first and last stage, an outer one first."""
    found = []
    for item in segments:
        if isinstance(item, list):
            stages = list(flatten(item))
            found += [(stages[0], stages[-1]), *spans(item)]
    return found


def nested(length, spans):
    """The segments of these spans."""
    found = list(range(length))
    for first, last in sorted(spans, key=lambda s: s[1] - s[0]):
        starts = [next(flatten([item])) for item in found]
        place = starts.index(first)
        stop = sum(start <= last for start in starts)
        found[place:stop] = [found[place:stop]]
    return found


def written(segments):
    """As the page writes them: "0-5.0-2"."""
    return ".".join(f"{first}-{last}" for first, last in spans(segments))


def controls(widget):
    return {
        "level": str(widget.level),
        "segments": written(widget.segments),
        "moment": widget.run().peak_moment + 1,
    }


def printed(widget):
    run = widget.run()
    plain = simulate(level_of(widget.level).stages, no_segments(widget.length))
    return {
        "peak": run.peak,
        "plain_peak": plain.peak,
        "extra_runs": run.extra_runs,
        "extra_time": run.extra_time,
        "most_extra": max(run.runs) - 1,
        "won": json.dumps(widget.medals(), separators=(",", ":")),
    }


def said(widget):
    run = widget.run()
    units = f"The peak is {run.peak} units"
    extra = f"{run.extra_runs} extra run"
    if widget.level == BOSS:
        forward = sum(stage.time for stage in level_of(BOSS).stages)
        extra = f"{round(run.extra_time / forward, 3):g} extra passes"
    return [units, extra, *widget.medals()[-1:]]


NESTED = [[[0, 1, 2], 3, 4], [5, 6], 7, 8]

KIND = Kind(
    "schedules",
    Schedules,
    "Place your own checkpoints",
    controls,
    printed,
    said,
    states=[
        {"level": 9, "segments": NESTED},
        {"level": 9, "segments": equal_segments(9, 3)},
        {"level": 9, "segments": [0, 1, [2], 3, [4, [5, [6, [7, 8]]]]]},
        *({"level": n, "segments": platinum(n)} for n in (12, 36, BOSS)),
    ],
    given=[
        {"level": 12, "segments": platinum(12), "label": "mine <&>"},
        {"level": BOSS, "segments": equal_segments(24, 12)},
        {"segments": [[[0, 1]], 2, *range(3, 9)]},
    ],
    tabs=("level", "next", "play"),
    rest=None,
    spoken={"moment": "stage 8 goes backward"},
    columns=("units at the peak", "yours", "no segments"),
    parts=6,
    moves=[({"level": 36}, [{"segments": platinum(36)}])],
)
