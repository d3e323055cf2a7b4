"""The segment-count widget's traits and numbers."""

import pytest
import torch
from traitlets import TraitError

from membudget.checkpointing import (
    Stage,
    equal_segments,
    no_segments,
    profile,
    simulate,
)
from membudget.widgets import Segments
from membudget.widgets.segments import UNIT

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
    assert widget.sentence() == (
        "16 layers in 4 checkpointed segments: the peak is 8 units; without "
        "checkpointing 17 units."
    )


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
    with pytest.raises(TraitError, match="segments is 7: use a whole number"):
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
    assert widget.run(0).peak == 13 * UNIT


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
    assert widget.run().peak == simulate(chain, equal_segments(6, 2)).peak
    assert widget.run(0).peak == simulate(chain, no_segments(6)).peak
    assert widget.sentence().startswith(
        "6 stages in 2 checkpointed segments: the peak is 5.28 KiB;"
    )


# Cuts ----------------------------------------------------------------------


def test_cuts_say_how_many_segments():
    widget = Segments(layers=12, cuts=[5, 9, 11])
    assert widget.segments == 4
    own = [range(0, 5), range(5, 9), range(9, 11), range(11, 12)]
    assert widget.run().peak == simulate(widget.stages, own).peak
    widget.cuts = [6]
    assert widget.segments == 2
    widget.set_state({"cuts": [2, 4, 6], "segments": 4})
    assert (widget.cuts, widget.segments) == ([2, 4, 6], 4)


@pytest.mark.parametrize(
    "change", [{"segments": 3}, {"layers": 6}, {"segments": 0}]
)
def test_equal_segments_take_the_place_of_cuts(change):
    widget = Segments(layers=12, cuts=[5, 9, 11])
    for name, value in change.items():
        setattr(widget, name, value)
    assert widget.cuts == []


def test_shrinking_segments_beat_equal_ones():
    widget = Segments(layers=16, cuts=[5, 9, 12, 14])
    equal = min(widget.run(k).peak for k in range(17))
    assert (widget.run().peak, equal) == (7 * UNIT, 8 * UNIT)


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
    widget.chain = chain[:4]  # takes the segments along, and they are measured
    assert widget.measured == {4: 1004}


def test_repr():
    assert repr(Segments(segments=2)) == (
        "Segments(layers=16, segments=2, checkpoint=1, split='balanced')"
    )
    assert repr(Segments(CHAIN, split="pytorch")) == (
        "Segments(layers=3, segments=3, split='pytorch')"
    )
