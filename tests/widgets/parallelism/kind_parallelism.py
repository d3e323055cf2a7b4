"""What the tests have to know of the widget of pipelines."""

import json
import random
from itertools import product
from math import floor

from kind import Kind

from membudget.parallelism import SCHEDULES, replay
from membudget.widgets import Parallelism, format_bytes
from membudget.widgets.parallelism import LEVELS, SHOWN, board, written
from tests.soak import SOAK

BEST = {
    "level 1": "F0F1B0F2B1F3B2B3.F0B0F1B1F2B2F3B3",
    "level 3": "F0F1I0W0F2I1W1F3I2W2I3W3.F0I0F1I1W0F2I2W1F3I3W2W3",
    "level 4": (
        "F0F1F2F3I0W0F4I1W1F5I2I3W2F6W3F7I4I5W4W5I6W6I7W7."
        "F0F1F2F3I0W0I1W1I2F4I3F5W2W3I4F6I5F7W4W5I6W6I7W7."
        "F0F1F2I0F3I1W0I2W1I3F4W2F5I4W3I5F6W4F7I6W5I7W6W7."
        "F0I0F1I1F2I2F3I3W0W1F4I4F5I5W2W3F6I6F7I7W4W5W6W7"
    ),
    "level 5": (
        "F0F1f0i0w0F2I0W0f1i1w1F3I1W1f2i2w2I2W2f3i3w3I3W3."
        "F0f0F1i0I0W0f1w0F2i1I1W1f2w1F3i2I2W2f3w2i3I3W3w3"
    ),
}
"""Orders that win gold."""
BEST["level 2"] = written(board("1F1B", 4, 5))


def controls(widget):
    run, loads = widget.run(), widget.loads()
    most = max(widget.peaks())
    moment = min(
        start
        for row, starts in zip(loads, run.starts, strict=True)
        for load, start in zip(row, starts, strict=True)
        if load == most
    )
    ranks, _ = widget.shape
    return {
        "schedule": widget.schedule,
        "ranks": ranks,
        "rounds": widget.rounds,
        "checkpointed": widget.checkpointed,
        "moment": int(2 * moment),
        "order": widget.order,
    }


def printed(widget):
    run, peaks = widget.run(), widget.peaks()
    found = {
        "time": run.time,
        "bubble": run.bubble,
        "won": json.dumps(widget.medals(), separators=(",", ":")),
    }
    for rank, peak in enumerate(peaks):
        found |= {f"peak.{rank}": peak, f"tapes.{rank}": run.peaks[rank]}
    size = "{} {}".format(*widget.shape)
    for name in SCHEDULES:
        if size not in widget.tables["orders"][name]:
            continue
        other = replay(board(name, *widget.shape))
        found[f"bubble.{name}"] = other.bubble
        found[f"worst.{name}"] = max(other.peaks)
    return found


def said(widget):
    run = widget.run()
    bubble = f"a bubble of {floor(100 * run.bubble + 0.5)} %"
    if widget.schedule in LEVELS:
        return [bubble, f"ends at {run.time:g}", *widget.medals()[-1:]]
    return [bubble, format_bytes(max(widget.peaks()))]


def cases():
    """First states, the best of each level, and orders of chance, of which
    some cannot run."""
    rng = random.Random(0)
    sizes = ((2, 4, 8), (2, 3, 4)) if SOAK else ((2, 4), (2, 3))
    for shown, ranks, rounds, checkpointed in product(
        SHOWN, *sizes, (False, True)
    ):
        if shown in LEVELS and (ranks, rounds) != (2, 2):
            continue
        widget = Parallelism(
            shown, ranks=ranks, rounds=rounds, checkpointed=checkpointed
        )
        yield _case(widget, rng)
    for shown, order in BEST.items():
        yield _case(Parallelism(shown, order=order), rng)


def _case(widget, rng):
    """One operation is moved by chance: what Python says of that."""
    state = {k: v for k, v in widget.state().items() if k != "tables"}
    rows = [list(row) for row in widget.board]
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
    try:
        run, waits = replay(rows), ""
        moved = {"starts": run.starts, "held": run.held, "time": run.time}
    except ValueError as error:
        moved, waits = None, str(error)
    return {
        "state": state,
        "numbers": printed(widget),
        "said": said(widget),
        "starts": widget.run().starts,
        "loads": widget.loads(),
        "order": written(rows),
        "moved": moved,
        "waits": waits,
    }


KIND = Kind(
    "parallelism",
    Parallelism,
    "A pipeline",
    controls,
    printed,
    said,
    states=[
        {"schedule": name, "ranks": ranks, "rounds": rounds}
        for name, ranks, rounds in product(SCHEDULES, (2, 4, 8), (2, 4))
    ]
    + [
        {"schedule": "1F1B", "ranks": 4, "rounds": 2, "checkpointed": True},
        *({"schedule": name} for name in LEVELS),
    ],
    given=[
        {"schedule": "ZBVZeroBubble", "ranks": 8, "rounds": 3},
        {"schedule": "level 1", "order": BEST["level 1"]},
        {"schedule": "GPipe", "ranks": 2, "checkpointed": True},
    ],
    tabs=("schedule", "ranks", "rounds"),
    rest=("rounds", {"rounds": 4}),
    spoken={"rounds": "8, 2 for each rank"},
    columns=("rank", "tapes at most", "bytes at most"),
    parts=7,
    moves=[({}, [{"rounds": 2}, {"rounds": 3}, {"rounds": 4}])],
)
