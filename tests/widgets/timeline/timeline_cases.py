"""Tracked steps for the timeline's tests: the example's, and odd ones."""

from functools import cache

import torch
import torch.nn.functional as F

from membudget import models
from membudget.measuring import PeakTracker, trace_step
from membudget.widgets import Timeline, format_bytes
from membudget.widgets.timeline import SHOWN, Step, example_steps
from tests.soak import SOAK


def next_byte(model, tokens):
    """Loss of a language model that predicts the last token."""
    return F.cross_entropy(model(tokens)[:, -1], tokens[:, 0])


def ends_in_views(model, x):
    """Loss whose last operators allocate nothing."""
    return model(x).square().sum().view(1).view(())


@cache
def odd_steps() -> dict[str, PeakTracker]:
    """Steps that lack something, in one timeline."""
    torch.manual_seed(0)
    x, y = torch.rand(8, 5), torch.randint(3, (8,))
    model = models.mlp(5, 6, 3, 3)
    gpt = models.GPT(32, 8, 16, 2, 2)
    tokens = torch.randint(32, (4, 8))

    with PeakTracker(model, x, y) as unmarked:  # two steps, no marks
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()
    with PeakTracker(model) as forward, torch.no_grad():
        model(x)
    with PeakTracker(model) as backward:
        loss = model(x).sum()
    with PeakTracker(model) as backward:
        loss.backward()
    model.zero_grad()
    with PeakTracker(model) as nothing:
        pass
    return {
        "a GPT with SGD": trace_step(
            gpt,
            next_byte,
            tokens,
            optimizer=torch.optim.SGD(gpt.parameters(), 0.1),
        ),
        "two steps": unmarked,
        "forward <only> & no grad": forward,
        "backward only": backward,
        "nothing runs": nothing,
    }


@cache
def timelines() -> list[dict[str, PeakTracker]]:
    """Whole timelines: several steps, or one."""
    x = torch.rand(4, 5)
    model = models.mlp(5, 6, 2, 3)
    alone = trace_step(model, ends_in_views, x)
    with PeakTracker() as empty:
        pass
    plain = {"plain": example_steps()["plain"]}
    return [
        example_steps(),
        odd_steps(),
        plain,
        {"alone": alone},
        {"0": empty},
    ]


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
    if tracker.peak_moment > Step(tracker).forward_end:
        more = format_bytes(n["peak"] - n["forward_end"])
        end = format_bytes(n["forward_end"])
        found += [f"before the peak ends with {end},", f"{more} more"]
    return found


def cases():
    """Timelines, each with what is alive at moments of every step.

    Every eleventh, the end of the forward pass, and the peak; in a soak all.
    """
    for steps in timelines():
        group = {"state": Timeline(steps).state(), "moments": []}
        for name, tracker in steps.items():
            end, peak = Step(tracker).forward_end, tracker.peak_moment
            every = range(-1, len(tracker.operators), 1 if SOAK else 11)
            for moment in sorted({*every, end, peak}):
                widget = Timeline(steps, step=name, moment=moment)
                numbers = {
                    **three(widget),
                    "operators": len(tracker.operators),
                    "forward_end_moment": end,
                    "peak_moment": peak,
                }
                where = {"step": name, "moment": moment}
                group["moments"].append([where, numbers, said(widget)])
        yield group
