"""Random games, for the tests of the game of schedules."""

import random
from functools import cache

import kind_schedules
from segments_cases import random_stage

from membudget.checkpointing import simulate
from membudget.widgets import Schedules
from membudget.widgets.schedules import LEVELS, TIMES, level_of
from membudget.widgets.segments import ROW
from tests.soak import SOAK


def random_segments(rng, first, last, nest=0.7):
    """Stages and segments from the first stage to before the last."""
    found, at = [], first
    while at < last:
        if rng.random() > nest:
            found.append(at)
            at += 1
            continue
        stop = rng.randint(at + 1, last)
        found.append(random_segments(rng, at, stop, 0.6 * nest))
        at = stop
    return found


def moments(run):
    """In the module's form."""
    return [
        [m.action.kind, m.action.stage, list(m.parts), m.extra, m.recomputed]
        for m in run.moments
    ]


@cache
def machine(count=5000 if SOAK else 500):
    """Chains with nested segments, and what Python's machine says."""
    rng, found = random.Random(2), []
    for _ in range(count):
        stages = [random_stage(rng) for _ in range(rng.randint(1, 9))]
        segments = random_segments(rng, 0, len(stages))
        run = simulate(stages, segments)
        columns = (*ROW, *TIMES)
        chain = [[int(getattr(s, name)) for name in columns] for s in stages]
        found.append(
            {
                "chain": chain,
                "segments": segments,
                "moments": moments(run),
                "extra_time": run.extra_time,
            }
        )
    return found


def games():
    """States of the widget, with the numbers and the words of Python."""
    rng = random.Random(3)
    widget = Schedules()
    for level in LEVELS:
        widget.level = level
        count = 9 if SOAK else 4
        some = [random_segments(rng, 0, widget.length) for _ in range(count)]
        for segments in [kind_schedules.platinum(level), *some]:
            widget.segments = segments
            yield {
                "state": {
                    k: v for k, v in widget.state().items() if k != "tables"
                },
                "written": kind_schedules.written(segments),
                "numbers": kind_schedules.printed(widget),
                "said": kind_schedules.said(widget),
            }


def cases():
    """All that ``tests/js/schedules.test.mjs`` reads."""
    tables = Schedules().state()["tables"]
    names = {str(name): len(level_of(name).stages) for name in LEVELS}
    return {
        **{"machine": machine(), "games": list(games())},
        **{"tables": tables, "lengths": names},
    }
