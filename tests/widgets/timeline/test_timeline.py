"""The timeline widget's traits, and what it sends."""

from collections import Counter

import pytest
import timeline_cases as cases
import torch

from membudget import models
from membudget.measuring import (
    CATEGORIES,
    Allocation,
    Operator,
    PeakTracker,
    trace_step,
)
from membudget.plotting import palette
from membudget.widgets import Timeline
from membudget.widgets.timeline import SHOWN, Step, example_steps

WEIGHTS = 64 * 256 + 256 + 6 * (256 * 256 + 256) + 256 * 10 + 10
UNIT = 1024 * 256 * 4  # batch × width × bytes of a number
EVERY = [
    pytest.param(tracker, id=name)
    for timeline in cases.timelines()
    for name, tracker in timeline.items()
]


def tiny(name="a", loss=lambda model, x: model(x).sum()):
    """A timeline of one step of two layers."""
    return {name: trace_step(models.mlp(5, 6, 2, 3), loss, torch.rand(4, 5))}


# What it shows -------------------------------------------------------------


def test_defaults():
    widget = Timeline()
    assert widget.steps == example_steps()
    assert widget.step == "plain"
    assert widget.moment == -1
    assert widget.label == "an MLP on handwritten digits, with Adam"
    assert list(widget.steps) == ["plain", "accumulated", "checkpointed"]


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


@pytest.mark.parametrize("tracker", EVERY)
def test_what_is_held_is_what_the_tracker_says(tracker):
    step = Step(tracker)
    for moment in range(-1, len(tracker.operators), 7):
        held = cases.held(step, moment)
        live = tracker.timeline[moment] if moment >= 0 else tracker.start
        assert held.pop("total") == live
        held["activations"] += held.pop("recomputation")
        assert held == tracker.split(moment)


# Phases --------------------------------------------------------------------


LETTERS = {
    "F": Operator("aten.relu", "1", "forward"),
    "L": Operator("aten.mean", "", "forward"),
    "B": Operator("aten.mm", "1", "backward"),
    "R": Operator("aten.relu", "1", "recomputation"),
    "S": Operator("aten.add_", "", "optimizer"),
    "<": Operator("profiler._record_function_enter_new", "", "forward"),
    ">": Operator("profiler._record_function_exit", "", "forward"),
}


def written(text, peak=0, mark=None, makes=()):
    """A tracker of these operators; ``makes`` says which allocate."""
    tracker = PeakTracker()
    tracker.operators = [LETTERS[letter] for letter in text]
    tracker.marks = [] if mark is None else [(mark, "backward")]
    tracker.timeline = [int(i == peak) for i in range(len(text))]
    tracker.peak = max(tracker.timeline, default=0)
    tracker.allocations = [
        Allocation(1, i, "temporaries", tracker.operators[i]) for i in makes
    ]
    return tracker


@pytest.mark.parametrize(
    "text, options, phases",
    [
        ("FLLB", {}, "FFFB"),
        ("FLLB", {"mark": 2}, "FFBB"),
        ("FLFLB", {"mark": 1}, "FBFFB"),  # until a module runs
        ("FBLL", {"mark": 1}, "FBFF"),  # or autograd has begun
        ("FB<SS>", {}, "FBSSSS"),
        ("F>F<", {}, "FFFF"),
        ("FRBBRB", {}, "FRRRRB"),
        ("FRBBRB", {"makes": [2]}, "FRBBRB"),
        ("FRBBRB", {"makes": [1, 4]}, "FRRRRB"),
        ("FBRBBRBR", {"makes": [4]}, "FBRBBRRR"),
        ("FRBSBR", {}, "FRBSBR"),  # not the same recomputation
        ("", {"mark": 0}, ""),
        ("F", {"mark": 1}, "F"),
    ],
)
def test_phases_of_written_steps(text, options, phases):
    names = {"F": "forward", "B": "backward", "R": "recomputation"}
    step = Step(written(text, **options))
    expected = [names.get(letter, "optimizer") for letter in phases]
    assert [o.phase for o in step.operators] == expected


@pytest.mark.parametrize(
    "text, peak, end",
    [
        ("FFBB", 2, 1),
        ("FFBBFFB", 6, 5),
        ("FFBBFFB", 5, 5),  # the end of a forward pass is the peak
        ("FFBBFFB", 4, 1),
        ("FFBBFFB", 0, 1),
        ("FFRBS", 4, 1),
        ("FFSFF", 2, 1),
        ("BB", 1, -1),
        ("FF", 1, 1),
    ],
)
def test_end_of_forward_of_written_steps(text, peak, end):
    assert Step(written(text, peak)).forward_end == end


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


def test_new_steps_replace_the_old():
    widget = Timeline(step="checkpointed", moment=250)
    widget.steps = tiny("mine")
    last = len(widget.steps["mine"].operators) - 1
    assert (widget.step, widget.moment) == ("mine", last)


def test_storages_without_bytes_are_left_out():
    def loss(model, x):
        nothing = torch.zeros(0)
        return model(x).sum() + nothing.sum()

    steps = tiny(loss=loss)
    assert any(a.bytes == 0 for a in steps["a"].allocations)
    widget = Timeline(steps)
    assert 0 not in widget.state()["steps"]["sizes"]


def test_a_step_that_was_refused_ends_before_it():
    """The operator that did not fit has made an allocation and did not end."""
    model = models.mlp(5, 60, 2, 3)
    x = torch.rand(40, 5)
    size = sum(p.nbytes for p in [*model.parameters(), x])
    with (
        pytest.raises(torch.OutOfMemoryError),
        PeakTracker(model, x, budget=size + 12_000) as tracker,
    ):
        model(x).sum().backward()
    assert tracker.allocations[-1].birth == len(tracker.operators)
    widget = Timeline({"refused": tracker})
    (step,) = widget.state()["steps"]["steps"]
    assert len(step["operators"]) == len(tracker.operators)
    births = step["allocations"][::4]
    assert max(births) < len(tracker.operators)


def test_repr():
    assert repr(Timeline()) == "Timeline(step='plain', moment=-1)"


def test_every_category_is_shown():
    assert set(SHOWN) - {"recomputation"} == set(CATEGORIES)
    assert set(SHOWN) <= set(palette())
