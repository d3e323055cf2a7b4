"""The timeline widget's traits, numbers and static picture."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest
import timeline_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from traitlets import TraitError

from membudget import models
from membudget.measuring import (
    CATEGORIES,
    Allocation,
    Operator,
    PeakTracker,
    trace_step,
)
from membudget.plotting import palette
from membudget.widgets import Timeline, format_bytes
from membudget.widgets.timeline import SHOWN, Step, example_steps

WEIGHTS = 64 * 256 + 256 + 6 * (256 * 256 + 256) + 256 * 10 + 10
UNIT = 1024 * 256 * 4  # batch × width × bytes of a number
EVERY = [
    pytest.param(tracker, id=name)
    for timeline in cases.timelines()
    for name, tracker in timeline.items()
]


def moments(tracker):
    return range(-1, len(tracker.operators))


def mark(tracker, label, number=0):
    """The first operator of the pass with this label."""
    return [at for at, mark in tracker.marks if mark == label][number]


def tiny(name="a", loss=lambda model, x: model(x).sum()):
    """A timeline of one step of two layers."""
    return {name: trace_step(models.mlp(5, 6, 2, 3), loss, torch.rand(4, 5))}


# What it shows -------------------------------------------------------------


def test_defaults():
    widget = Timeline()
    assert widget.steps == example_steps()
    assert widget.step == "plain"
    assert widget.moment == example_steps()["plain"].peak_moment
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


def test_what_is_alive_at_the_peak_and_why():
    """The page's question, for the plain step."""
    n = Timeline().numbers()
    assert (n["operator"], n["module"]) == ("aten.threshold_backward", "13")
    kept = {
        "category": "activations",
        "operator": "aten.relu",
        "phase": "forward",
        "modules": ["1", "3", "5", "7", "9", "11", "13"],
        "count": 7,
        "size": UNIT,
        "bytes": 7 * UNIT,
    }
    assert n["largest"][0] == kept
    on_the_way_back = [
        (row["operator"], row["modules"], row["bytes"])
        for row in n["largest"]
        if row["category"] == "temporaries"
    ]
    assert on_the_way_back == [
        ("aten.mm", ["14"], UNIT),
        ("aten.threshold_backward", ["13"], UNIT),
    ]
    last = 4 * (256 * 10 + 10)  # gradients of the last layer
    output = 1024 * 10 * 4
    gained = n["peak"]["total"] - n["forward_end"]["total"]
    assert gained == 2 * UNIT + last - 2 * output


@pytest.mark.parametrize("tracker", EVERY)
def test_numbers_are_the_trackers(tracker):
    widget = Timeline({"it": tracker})
    for moment in moments(tracker):
        widget.moment = moment
        n = widget.numbers()
        memory = dict(n["now"])
        live = tracker.timeline[moment] if moment >= 0 else tracker.start
        assert memory.pop("total") == sum(memory.values()) == live
        memory["activations"] += memory.pop("recomputation")
        assert memory == tracker.split(moment)
        assert sum(row["bytes"] for row in n["largest"]) == live
        if moment >= 0:
            operator = tracker.operators[moment]
            assert (n["operator"], n["module"]) == operator[:2]
    assert n["peak"]["total"] == n["peaks"]["it"] == tracker.peak
    assert n["peak_moment"] == tracker.peak_moment
    assert n["operators"] == len(tracker.operators)


@pytest.mark.parametrize("tracker", EVERY)
def test_groups_hold_what_is_alive(tracker):
    step = Step(tracker)
    for moment in list(moments(tracker))[::7]:
        rows = step.largest(moment)
        alive = [a for a in tracker.at(moment) if a.bytes]
        assert sum(row["count"] for row in rows) == len(alive)
        sizes = [row["bytes"] for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        for row in rows:
            mine = [
                a.bytes
                for a in alive
                if step.category(a) == row["category"]
                and a.operator.name == row["operator"]
                and a.operator.module in row["modules"]
                and step.operator(a.birth).phase == row["phase"]
            ]
            assert (len(mine), sum(mine)) == (row["count"], row["bytes"])
            same = {row["size"]} if row["size"] else set()
            assert set(mine) == same or (len(set(mine)) > 1 and not same)
            assert len(set(row["modules"])) == len(row["modules"])
            assert len({re.sub(r"\d+", "", m) for m in row["modules"]}) == 1


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    depth=st.integers(2, 5),
    width=st.integers(1, 9),
    batch=st.integers(1, 7),
    micro_batch=st.none() | st.integers(1, 4),
    optimizer=st.sampled_from(
        [None, torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad]
    ),
)
def test_any_step(depth, width, batch, micro_batch, optimizer):
    model = models.mlp(3, width, depth, 2)
    tracker = trace_step(
        model,
        lambda model, x: model(x).square().mean(),
        torch.rand(batch, 3),
        optimizer=optimizer and optimizer(model.parameters()),
        micro_batch=micro_batch,
    )
    step = Step(tracker)
    assert mark(tracker, "backward") - 1 <= step.forward_end
    assert step.forward_end + 1 in [
        at for at, label in tracker.marks if label == "backward"
    ]
    assert step.at(tracker.peak_moment)["total"] == tracker.peak
    phases = [o.phase for o in step.operators]
    assert ("optimizer" in phases) == (optimizer is not None)
    assert phases == sorted(phases, key=phases.index) or micro_batch
    Timeline({"it": tracker}).picture()


# Phases --------------------------------------------------------------------


def test_end_of_forward():
    plain, accumulated, checkpointed = (
        (tracker, Step(tracker).forward_end)
        for tracker in example_steps().values()
    )
    for tracker, end in (plain, checkpointed):
        assert end == mark(tracker, "backward") - 1
    tracker, end = accumulated  # the micro-batch of the peak, the second
    assert end == mark(tracker, "backward", 1) - 1
    assert end < tracker.peak_moment < mark(tracker, "forward", 2)


def test_end_of_forward_of_odd_steps():
    ends = {
        name: Step(tracker).forward_end
        for name, tracker in cases.odd_steps().items()
    }
    odd = cases.odd_steps()
    assert ends["forward <only> & no grad"] == 7
    assert ends["nothing runs"] == -1
    two = odd["two steps"]  # without a mark the loss's gradient is forward
    first = [o.phase for o in two.operators].index("backward")
    assert ends["two steps"] == first - 1
    assert two.operators[first - 1].name == "aten.ones_like"


def test_a_peak_in_the_forward_pass_is_compared_with_its_end():
    def wasteful(model, x):
        torch.empty(10_000).fill_(0)
        return model(x).sum()

    (tracker,) = tiny(loss=wasteful).values()
    step = Step(tracker)
    assert tracker.peak_moment < step.forward_end
    assert step.forward_end == mark(tracker, "backward") - 1


@pytest.mark.parametrize("tracker", EVERY)
def test_phases_are_corrected_and_no_more(tracker):
    """The tracker's phases, but for operators at a border."""
    step = Step(tracker)
    births = {a.birth for a in tracker.allocations if a.bytes}
    for i, (ours, its) in enumerate(
        zip(step.operators, tracker.operators, strict=True)
    ):
        assert ours[:2] == its[:2]
        if ours.phase == its.phase:
            continue
        if ours.phase == "recomputation":
            assert its.phase == "backward" and i not in births
        elif ours.phase == "backward":
            # The loss's weight and gradient, before autograd takes over.
            assert its.name in ("aten.mul", "aten.ones_like")
        else:
            assert its.name.startswith("profiler.")
            assert ours.phase == "optimizer"


def test_phases_come_in_runs():
    """No operator that only looks on interrupts a phase."""
    runs = {}
    for name, tracker in example_steps().items():
        phases = [o.phase for o in Step(tracker).operators]
        runs[name] = [
            phase
            for i, phase in enumerate(phases)
            if i == 0 or phases[i - 1] != phase
        ]
    both = ["forward", "backward"]
    assert runs["plain"] == [*both, "optimizer"]
    assert runs["accumulated"] == [*both * 4, "optimizer"]
    again = ["recomputation", "backward"]
    assert runs["checkpointed"] == [*both, *again * 4, "optimizer"]


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
    plain, accumulated, checkpointed = example_steps().values()
    for tracker in (plain, accumulated):
        step = Step(tracker)
        assert not any(
            step.at(m)["recomputation"] for m in moments(tracker)[::5]
        )
    step = Step(checkpointed)
    recomputed = [
        a
        for a in checkpointed.allocations
        if step.category(a) == "recomputation"
    ]
    # What the four segments had thrown away: the seven ReLUs' outputs.
    assert [a.bytes for a in recomputed] == [UNIT] * 7
    assert {a.operator.name for a in recomputed} == {"aten.relu"}
    assert all(a.operator.phase == "recomputation" for a in recomputed)
    backward = mark(checkpointed, "backward")
    assert all(a.birth > backward for a in recomputed)
    most = max(step.at(m)["recomputation"] for m in moments(checkpointed))
    assert most == 2 * UNIT


# Traits --------------------------------------------------------------------


def test_another_step_begins_at_its_peak():
    widget = Timeline()
    widget.moment = 3
    widget.step = "accumulated"
    assert widget.moment == example_steps()["accumulated"].peak_moment
    widget.moment = 600
    widget.step = "plain"  # which has fewer operators
    assert widget.moment == example_steps()["plain"].peak_moment


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
    widget.set_state({"step": "checkpointed"})
    assert widget.moment == example_steps()["checkpointed"].peak_moment


def test_an_observer_sees_a_moment_of_the_step():
    widget, seen = Timeline(), []

    def see(_):
        tracker = widget.steps[widget.step]
        seen.append(-1 <= widget.moment < len(tracker.operators))

    widget.observe(see, ["step", "moment"])
    widget.step = "accumulated"
    widget.moment = 677
    widget.step = "plain"
    assert len(seen) == 5 and all(seen)


def test_new_steps_replace_the_old():
    widget = Timeline(step="checkpointed", moment=250)
    new = tiny("mine")
    widget.steps = new
    assert widget.step == "mine"
    assert widget.moment == new["mine"].peak_moment
    widget.moment = 0
    widget.steps = {"other": new["mine"], **tiny("mine")}
    assert widget.step == "mine"
    assert widget.moment == widget.steps["mine"].peak_moment


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["plain", "accumulated", "checkpointed", None]),
        st.integers(-2, 700) | st.none(),
    ),
    max_size=8,
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(CHANGES)
def test_consistent_after_every_change(changes):
    widget = Timeline()
    for step, moment in changes:
        before = (widget.step, widget.moment)
        state = {"step": step, "moment": moment}
        state = {k: v for k, v in state.items() if v is not None}
        step, moment = (
            step or before[0],
            before[1] if moment is None else moment,
        )
        last = len(widget.steps[step].operators) - 1
        if step != before[0] and moment == before[1]:
            moment = widget.steps[step].peak_moment
        if -1 <= moment <= last:
            widget.set_state(state)
            assert (widget.step, widget.moment) == (step, moment)
        else:
            with pytest.raises(TraitError, match="moment is"):
                widget.set_state(state)
            assert (widget.step, widget.moment) == before
    widget.close()


def test_storages_without_bytes_are_left_out():
    def loss(model, x):
        nothing = torch.zeros(0)
        return model(x).sum() + nothing.sum()

    steps = tiny(loss=loss)
    assert any(a.bytes == 0 for a in steps["a"].allocations)
    widget = Timeline(steps)
    assert 0 not in widget.state()["steps"]["sizes"]
    assert all(row["bytes"] for row in widget.numbers()["largest"])


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
    end = len(tracker.operators) - 1
    widget.moment = end
    assert widget.numbers()["now"]["total"] == tracker.timeline[end]
    assert len(widget.state()["steps"]["steps"][0]["operators"]) == end + 1
    widget.picture()


def test_a_tracker_may_go_on():
    (tracker,) = tiny().values()
    widget = Timeline({"it": tracker})
    before = widget.numbers()["operators"]
    with tracker:
        kept = torch.ones(1000)
    widget.moment = before
    assert widget.numbers()["now"]["total"] >= kept.nbytes
    assert widget.numbers()["operators"] == before + 1


# Words ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, moment, parts",
    [
        (
            "plain",
            48,
            [
                "Step plain, operator 49 of 275: threshold_backward of "
                "module 13, in the backward pass. 14.0 MiB are alive, the "
                "peak. That is 1.93 MiB more than at the end of the forward "
                "pass: temporaries +1.96 MiB, activations −40.0 KiB, "
                "gradients +10.0 KiB.",
            ],
        ),
        (
            "plain",
            32,
            [
                "nll_loss_forward outside of the model, in the forward pass",
                "1.93 MiB below the peak of 14.0 MiB",
                "This is the end of the forward pass.",
            ],
        ),
        ("plain", -1, ["Step plain, before the first operator. 5.00 MiB are"]),
        ("plain", 31, ["less than at the end of the forward pass: "]),
        ("plain", 150, ["operator 151 of 275: mul_ of the optimizer step. "]),
        ("checkpointed", 75, ["relu of module 11, in the recomputation."]),
        ("checkpointed", 75, ["recomputed activations +2.00 MiB"]),
    ],
)
def test_sentence(step, moment, parts):
    sentence = Timeline(step=step, moment=moment).sentence()
    for part in parts:
        assert part in sentence


def test_sentence_where_nothing_differs():
    def loss(model, x):
        value = model(x).sum()
        value.view(1)
        value.view(1)
        return value

    widget = Timeline(tiny(loss=loss))
    widget.moment = widget.numbers()["forward_end_moment"] - 1
    assert widget.sentence().endswith(
        " As much as at the end of the forward pass."
    )


def test_modules_by_path():
    widget = Timeline(cases.odd_steps())
    names = {o.name for o in Step(widget.steps[widget.step]).operators}
    assert "aten.gelu" in names
    tracker = widget.steps["a GPT with SGD"]
    widget.moment = [o.module for o in tracker.operators].index("blocks.1.up")
    assert " of blocks.1.up, in the forward pass." in widget.sentence()


def test_repr():
    assert repr(Timeline()) == "Timeline(step='plain', moment=48)"


# The static picture --------------------------------------------------------


def corners(path):
    """The corners of a path of M, H, V and Z."""
    x = y = 0.0
    for command, first, second in re.findall(
        r"([MHV])([\d.]+)(?: ([\d.]+))?", path
    ):
        if command == "M":
            x, y = float(first), float(second)
        elif command == "H":
            x = float(first)
        else:
            y = float(first)
        yield x, y


@pytest.mark.parametrize("step", list(example_steps()))
def test_picture_is_drawn_to_scale(step):
    widget = Timeline(step=step)
    svg = ElementTree.fromstring(widget.picture())
    colours = {colour: name for name, colour in palette().items()}
    tracker = widget.steps[step]
    shown = Step(tracker)
    memory = shown.memory
    scale = 150 / example_steps()["plain"].peak
    paths = {
        colours[path.get("fill")]: list(corners(path.get("d")))
        for path in svg.iter("path")
        if path.get("fill")
    }
    drawn = [c for c in SHOWN if any(held[c] for held in memory)]
    assert list(paths) == drawn[::-1]  # the lowest is drawn last
    for i, category in enumerate(drawn):
        heights = [sum(held[c] for c in drawn[: i + 1]) for held in memory]
        top = 180 - max(heights) * scale
        ys = [y for _, y in paths[category]]
        assert min(ys) == pytest.approx(top, abs=0.06)
        assert ys[0] == ys[-1] == 180
        xs = [x for x, _ in paths[category]]
        assert xs == sorted(xs) and (xs[0], xs[-1]) == (2, 398)
    texts = [text.text for text in svg.iter("text")]
    assert f"peak {format_bytes(tracker.peak)}" in texts
    assert {SHOWN[category] for category in drawn} <= set(texts)
    # Every colour has its letter as well, in the legend and where it fits.
    letters = Counter(t for t in texts if len(t) == 1 and t not in "FBRS")
    initials = {category[0].upper() for category in drawn}
    assert initials - {"R"} == set(letters)
    assert letters["A"] == letters["O"] == 2
    assert len(widget.picture()) < 8_000


def test_names_are_escaped():
    widget = Timeline(tiny("</svg><b>&"), label="a <b>")
    svg = ElementTree.fromstring(widget.picture())
    assert svg.get("aria-label").startswith("Step </svg><b>&, operator")


def test_every_category_is_shown():
    assert set(SHOWN) - {"recomputation"} == set(CATEGORIES)
    assert set(SHOWN) <= set(palette())
