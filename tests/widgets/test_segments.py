"""The segment-count widget's traits and numbers."""

from math import sqrt
from xml.etree import ElementTree

import pytest
import torch
from traitlets import TraitError

from membudget.checkpointing import (
    Stage,
    equal_segments,
    least_peak,
    no_segments,
    peak_of_segments,
    profile,
    pytorch_segments,
    simulate,
)
from membudget.widgets import Segments
from membudget.widgets.segments import SHOWN

CHAIN = [
    Stage(output=400, inner=100),
    Stage(output=0, inner=8, backward_workspace=200),
    Stage(output=1200, gradient=600, holds_output=False, gradients=40),
]


def mlp_chain(depth=6):
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        for _ in range(depth)
    ]
    return profile(*layers, x=torch.rand(32, 8))


# Traits --------------------------------------------------------------------


def test_defaults():
    widget = Segments()
    assert (widget.layers, widget.segments, widget.checkpoint) == (16, 4, 1)
    assert (widget.split, widget.chain, widget.measured) == (
        "balanced",
        None,
        {},
    )
    n = widget.numbers()
    assert (n["peak"], n["plain_peak"], n["extra_runs"]) == (8, 17, 16)
    assert (n["best"], n["root"]) == ([3, 4, 5, 6], 4)


def test_fewer_layers_take_the_segments_along():
    widget = Segments(layers=16, segments=9)
    widget.layers = 12
    assert widget.segments == 9
    widget.layers = 5
    assert widget.segments == 5
    widget.layers = 16
    assert widget.segments == 5
    widget.segments = 0
    widget.layers = 1
    assert widget.segments == 0


def test_both_in_one_go():
    """As the browser sends them."""
    widget = Segments(layers=4, segments=4)
    widget.set_state({"layers": 8, "segments": 8})
    assert (widget.layers, widget.segments) == (8, 8)
    widget.set_state({"segments": 2, "layers": 3})
    assert (widget.layers, widget.segments) == (3, 2)
    with pytest.raises(TraitError, match="segments is 7: with 5 layers"):
        widget.set_state({"layers": 5, "segments": 7})
    assert (widget.layers, widget.segments) == (3, 2)


def test_a_share_is_the_same_however_it_was_computed():
    assert Segments(checkpoint=3 * 0.1).checkpoint == 0.3
    assert Segments(checkpoint=1).checkpoint == 1.0
    for n in range(1, 21):
        widget = Segments(checkpoint=0.05 * n)
        assert widget.stages[0].output == 5 * n
        assert widget.stages[0].inner == 100 - 5 * n


# A chain -------------------------------------------------------------------


def test_a_chain_says_how_many_layers():
    widget = Segments(CHAIN)
    assert widget.layers == 3
    with pytest.raises(TraitError, match="it follows from the chain"):
        widget.layers = 4
    with pytest.raises(TraitError, match="which has 3 stages"):
        Segments(CHAIN, layers=16)
    widget.chain = CHAIN * 3
    assert (widget.layers, widget.segments) == (9, 3)
    widget.segments = 9
    widget.chain = CHAIN
    assert (widget.layers, widget.segments) == (3, 3)
    widget.chain = None
    widget.layers = 12
    assert widget.numbers()["plain_peak"] == 13


def test_a_long_chain_leaves_as_many_layers_as_there_may_be():
    widget = Segments(CHAIN * 40, segments=120)
    assert widget.layers == 120
    widget.chain = None
    assert (widget.layers, widget.segments) == (100, 100)


def test_a_chain_is_kept_as_it_was():
    given = list(CHAIN)
    widget = Segments(given)
    given.pop()
    assert len(widget.chain) == widget.layers == 3


def test_a_profiled_chain():
    chain = mlp_chain()
    widget = Segments(chain, segments=2, label="an MLP")
    n = widget.numbers()
    assert n["peak"] == simulate(chain, equal_segments(6, 2)).peak
    assert n["plain_peak"] == simulate(chain, no_segments(6)).peak
    assert isinstance(n["peak"], int)
    assert n["root"] == pytest.approx(sqrt(6))
    assert "6 stages in 2 segments (2 × 3): the peak is 5.28 KiB" in (
        widget.sentence()
    )


def test_checkpoints_that_cost_nothing_have_no_mark():
    chain = [Stage(output=0, inner=8, gradient=4)] * 4
    widget = Segments(chain)
    assert widget.numbers()["root"] is None
    nothing = [Stage(output=0, backward_workspace=0, gradient=0)] * 2
    widget.chain = nothing
    assert widget.numbers()["peak"] == 0
    assert "100 % of the 0 B" in widget.sentence()
    ElementTree.fromstring(widget.picture())


# What was measured ---------------------------------------------------------


def test_measured_belongs_to_one_setting():
    changes = [
        ("layers", 12),
        ("checkpoint", 0.5),
        ("split", "pytorch"),
        ("chain", CHAIN),
    ]
    for name, value in changes:
        widget = Segments(measured={4: 8.1, 0: 17})
        widget.segments = 3
        widget.label = "other"
        assert widget.measured == {4: 8.1, 0: 17}
        setattr(widget, name, value)
        assert widget.measured == {}, name


def test_measured_stays_where_it_is_set_in_one_go():
    widget = Segments(measured={4: 8.1})
    with widget.hold_trait_notifications():
        widget.split = "pytorch"
        widget.measured = {4: 9}
    assert widget.measured == {4: 9}
    assert Segments(split="pytorch", measured={4: 9}).measured == {4: 9}


def test_an_observer_measures():
    """As the lab does: the peak of a real step at each number chosen."""
    chain = mlp_chain()
    widget = Segments(chain, segments=0)

    def measure(change):
        peak = 1000 + change["new"]
        widget.measured = {**widget.measured, change["new"]: peak}

    widget.observe(measure, "segments")
    widget.segments = 2
    widget.set_state({"segments": 6})
    assert widget.measured == {2: 1002, 6: 1006}
    assert widget.numbers()["measured"] == 1006
    assert widget.sentence().endswith("Measured here: 1006 B.")
    widget.chain = chain[:4]  # takes the segments along, and they are measured
    assert widget.measured == {4: 1004}


# Numbers -------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 9, 20, 36])
def test_curve_is_the_theorys(layers):
    n = Segments(layers=layers, segments=1).numbers()
    assert n["curve"] == [
        peak_of_segments(layers, count) for count in range(layers + 1)
    ]
    assert n["best_peak"] == least_peak(layers)
    assert n["best"] == [
        k for k, peak in enumerate(n["curve"]) if peak == n["best_peak"]
    ]
    assert n["root"] == pytest.approx(sqrt(layers))


@pytest.mark.parametrize("split", ["balanced", "pytorch"])
@pytest.mark.parametrize("checkpoint", [0.05, 0.35, 1])
def test_numbers_are_the_tape_machines(split, checkpoint):
    make = {"balanced": equal_segments, "pytorch": pytorch_segments}[split]
    stage = Stage(
        output=round(20 * checkpoint),
        inner=20 - round(20 * checkpoint),
        backward_workspace=round(20 * checkpoint),
    )
    widget = Segments(layers=11, checkpoint=checkpoint, split=split)
    for widget.segments in range(12):
        n = widget.numbers()
        count = widget.segments
        segments = make(11, count) if count else no_segments(11)
        run = simulate([stage] * 11, segments)
        assert n["peak"] == run.peak / 20 == n["curve"][count]
        assert n["extra_runs"] == run.extra_runs
        assert sum(n["parts"].values()) == pytest.approx(n["peak"])
        assert set(n["parts"]) == set(SHOWN)
        assert sum(n["sizes"]) + n["rest"] == 11
        assert len(n["sizes"]) == (
            count if split == "balanced" else max(count - 1, 0)
        )
    assert n["root"] == pytest.approx(sqrt(11 / checkpoint))


def test_repr():
    assert repr(Segments(segments=2)) == (
        "Segments(layers=16, segments=2, checkpoint=1, split='balanced')"
    )
    assert repr(Segments(CHAIN, split="pytorch")) == (
        "Segments(layers=3, segments=3, split='pytorch')"
    )


# The static picture --------------------------------------------------------


def paths(svg):
    return [p for p in svg.iter("path") if p.get("stroke-width") == "0.4"]


@pytest.mark.parametrize("segments", [0, 4])
def test_picture_is_drawn_to_scale(segments):
    widget = Segments(segments=segments)
    svg = ElementTree.fromstring(widget.picture())
    n = widget.numbers()
    scale = 130 / 17
    top = min(
        float(step.split("H")[0])
        for path in paths(svg)
        for step in path.get("d").split("V")[1:-1]
    )
    assert 150 - top == pytest.approx(n["peak"] * scale, abs=0.06)
    line = next(svg.iter("polyline")).get("points").split()
    heights = [300 - float(point.split(",")[1]) for point in line]
    drawn = [peak * 100 / 17 for peak in n["curve"]]
    assert heights == pytest.approx(drawn, abs=0.06)
    ring = [c for c in svg.iter("circle") if c.get("r") == "5"]
    assert f"{ring[0].get('cx')},{ring[0].get('cy')}" == line[segments]


def test_picture_shows_what_was_measured():
    widget = Segments(measured={2: 10, 4: 30})
    svg = ElementTree.fromstring(widget.picture())
    points = [c for c in svg.iter("circle") if c.get("r") == "2.5"]
    heights = [300 - float(point.get("cy")) for point in points]
    assert heights == pytest.approx([100 / 3, 100], abs=0.06)


def test_picture_says_what_is_where():
    svg = ElementTree.fromstring(Segments().picture())
    texts = [text.text for text in svg.iter("text")]
    assert {"forward pass", "R", "B", "peak 8 units"} <= set(texts)
    assert {"checkpoints", "recomputed tapes", "workspace"} <= set(texts)
    assert "tapes" not in texts  # all of them are recomputed
    plain = ElementTree.fromstring(Segments(segments=0).picture())
    texts = [text.text for text in plain.iter("text")]
    assert {"tapes", "backward pass"} <= set(texts)
    assert "recomputed tapes" not in texts
