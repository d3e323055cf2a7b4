"""The timeline widget's traits, and what it sends."""

from collections import Counter

import pytest
import timeline_cases as cases
import torch

from membudget.measuring import CATEGORIES
from membudget.plotting import palette
from membudget.widgets import Timeline
from membudget.widgets.timeline import SHOWN, STEPS, Step, example_steps

WEIGHTS = 64 * 256 + 256 + 6 * (256 * 256 + 256) + 256 * 10 + 10
UNIT = 1024 * 256 * 4  # batch × width × bytes of a number
# What it shows -------------------------------------------------------------


def test_defaults():
    widget = Timeline()
    assert widget.steps == example_steps()
    assert widget.step == "plain"
    assert widget.moment == -1
    assert widget.label == "an MLP on handwritten digits, with Adam"
    assert tuple(widget.steps) == STEPS


def test_the_example_is_one_batch_three_times():
    plain, accumulated, checkpointed = example_steps().values()
    for tracker in (plain, accumulated, checkpointed):
        start = tracker.split(-1)
        assert start["parameters"] == 4 * WEIGHTS
        assert start["optimizer"] == 8 * WEIGHTS + 16 * 4  # and step counts
        assert start["inputs"] == 1024 * (64 * 4 + 8)
        assert tracker.split(len(tracker.timeline) - 1)["activations"] == 0
    assert accumulated.peak < checkpointed.peak < plain.peak
    passes = Counter(label for _, label in accumulated.marks)
    assert passes == {"forward": 4, "backward": 4, "step": 1}


def test_the_example_is_made_once_and_leaves_the_random_numbers():
    assert example_steps() is example_steps()
    before = torch.random.get_rng_state()
    state = Timeline().state()
    example_steps.cache_clear()
    assert Timeline().state() == state  # and is the same every time
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", STEPS)
def test_what_is_held_is_what_the_tracker_says(name):
    tracker = example_steps()[name]
    step = Step(tracker)
    for moment in range(-1, len(tracker.operators), 7):
        held = cases.held(step, moment)
        live = tracker.timeline[moment] if moment >= 0 else tracker.start
        assert held.pop("total") == live
        held["activations"] += held.pop("recomputation")
        assert held == tracker.split(moment)


def test_recomputed_activations_stand_for_themselves():
    """What the four segments had thrown away: the ReLUs' outputs."""
    for name, count in {
        "plain": 0,
        "accumulated": 0,
        "checkpointed": 7,
    }.items():
        step = Step(example_steps()[name])
        again = [
            (a.bytes, a.operator.name)
            for a in step.allocations
            if step.category(a) == "recomputation"
        ]
        assert again == [(UNIT, "aten.relu")] * count


# Traits --------------------------------------------------------------------


@pytest.mark.parametrize("order", [("step", "moment"), ("moment", "step")])
def test_step_and_moment_in_one_go(order):
    widget = Timeline(step="accumulated", moment=650)
    change = {"step": "plain", "moment": 7}
    with widget.hold_trait_notifications():
        for name in order:
            setattr(widget, name, change[name])
    assert (widget.step, widget.moment) == ("plain", 7)
    widget.set_state({"step": "accumulated", "moment": 500})
    assert (widget.step, widget.moment) == ("accumulated", 500)
    widget.set_state({"step": "plain"})
    assert widget.moment == 274  # its last


def test_an_observer_sees_a_moment_of_the_step():
    widget, seen = Timeline(), []

    def see(_):
        tracker = widget.steps[widget.step]
        seen.append(-1 <= widget.moment < len(tracker.operators))

    widget.observe(see, ["step", "moment"])
    widget.step = "accumulated"
    widget.moment = 677
    widget.step = "plain"
    assert len(seen) == 4 and all(seen)


def test_repr():
    assert repr(Timeline()) == "Timeline(step='plain', moment=-1)"


def test_every_category_is_shown():
    assert set(SHOWN) - {"recomputation"} == set(CATEGORIES)
    assert set(SHOWN) <= set(palette())
