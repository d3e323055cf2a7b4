"""What is alive in the timeline's steps, for its tests."""

from membudget.widgets import Timeline, format_bytes
from membudget.widgets.timeline import SHOWN, Step, example_steps
from tests.soak import SOAK


def held(step, moment):
    """Bytes of each category that are alive, and their total."""
    found = dict.fromkeys(SHOWN, 0)
    for a in step.allocations:
        if a.alive(moment):
            found[step.category(a)] += a.bytes
    return found | {"total": sum(found.values())}


def three(widget):
    """What is held now, at the end of the forward pass and at the peak."""
    step = Step(widget.steps[widget.step])
    moments = {
        "now": widget.moment,
        "forward_end": step.forward_end,
        "peak": step.tracker.peak_moment,
    }
    return {name: held(step, moment) for name, moment in moments.items()}


def said(widget):
    tracker = widget.steps[widget.step]
    n = {name: bytes_["total"] for name, bytes_ in three(widget).items()}
    found = [f"{format_bytes(n['now'])} alive"]
    if widget.moment < tracker.peak_moment:
        return found
    found.append(format_bytes(n["peak"]))
    more = format_bytes(n["peak"] - n["forward_end"])
    end = format_bytes(n["forward_end"])
    return [*found, f"before the peak ends with {end},", f"{more} more"]


def cases():
    """What is alive at moments of every step.

    Every eleventh, the end of the forward pass, and the peak; in a soak all.
    """
    found = []
    for name, tracker in example_steps().items():
        end, peak = Step(tracker).forward_end, tracker.peak_moment
        every = range(-1, len(tracker.operators), 1 if SOAK else 11)
        for moment in sorted({*every, end, peak}):
            widget = Timeline(step=name, moment=moment)
            numbers = {
                **three(widget),
                "operators": len(tracker.operators),
                "forward_end_moment": end,
                "peak_moment": peak,
            }
            where = {"step": name, "moment": moment}
            found.append([where, numbers, said(widget)])
    return {"state": Timeline().state(), "moments": found}
