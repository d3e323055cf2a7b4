"""The accumulation widget's traits and numbers."""

from math import ceil
from xml.etree import ElementTree

import pytest
from traitlets import TraitError

from membudget.accumulation import (
    Footprint,
    PeakLine,
    Plan,
)
from membudget.widgets import Accumulation
from membudget.widgets.accumulation import CONSUMERS, digits_footprint

SMALL = Footprint(
    parameters=1000,
    gradients=1000,
    optimizer=2000,
    alone=[PeakLine(4500, 0), PeakLine(3600, 20), PeakLine(3100, 50)],
    later=[PeakLine(4500, 0), PeakLine(4300, 30), PeakLine(4000, 50)],
)


def consistent(widget):
    if widget.locked:
        follows = ceil(widget.global_batch / widget.micro_batch)
        return widget.steps == follows
    return widget.global_batch == widget.steps * widget.micro_batch


def test_defaults():
    widget = Accumulation()
    assert widget.footprint is digits_footprint()
    assert (widget.micro_batch, widget.steps) == (128, 4)
    assert (widget.global_batch, widget.locked) == (512, False)
    assert (widget.normalisation, widget.samples) == ("window", 1797)
    assert widget.numbers()["fits"]
    assert not widget.numbers()["whole_fits"]


def test_global_batch_follows():
    widget = Accumulation(SMALL, micro_batch=16, steps=4)
    widget.steps = 5
    assert widget.global_batch == 80
    widget.micro_batch = 10
    assert widget.global_batch == 50
    assert widget.plan == Plan(50, 10, 1797, SMALL, "window")


def test_steps_follow_a_locked_global_batch():
    widget = Accumulation(SMALL, micro_batch=96, global_batch=512)
    assert widget.locked
    assert widget.steps == 6
    assert widget.plan.sizes == [96] * 5 + [32]
    widget.micro_batch = 512
    assert widget.steps == 1
    widget.micro_batch = 1000
    assert widget.plan.sizes == [512]
    widget.global_batch = 1001
    assert widget.plan.sizes == [1000, 1]
    widget.locked = False
    assert widget.global_batch == 2000


def test_the_browser_may_send_any_subset():
    widget = Accumulation(SMALL, micro_batch=8, steps=4)
    widget.set_state({"micro_batch": 16})
    assert widget.global_batch == 64
    widget.set_state({"locked": True, "steps": 4, "global_batch": 64})
    widget.set_state({"micro_batch": 30, "steps": 3, "global_batch": 64})
    assert (widget.steps, widget.plan.sizes) == (3, [30, 30, 4])
    widget.set_state({"locked": False, "steps": 3, "global_batch": 90})
    assert widget.global_batch == 90


def test_an_observer_sees_a_consistent_plan():
    widget = Accumulation(SMALL, micro_batch=8, steps=4)
    seen = []
    for name in ("micro_batch", "steps", "global_batch"):
        widget.observe(lambda _: seen.append(consistent(widget)), name)
    widget.micro_batch = 9
    widget.steps = 7
    widget.locked = True
    widget.micro_batch = 20
    assert len(seen) == 6
    assert all(seen)


def test_what_follows_cannot_be_set():
    widget = Accumulation(SMALL, micro_batch=16, steps=4)
    with pytest.raises(TraitError, match="it follows steps × micro_batch"):
        widget.global_batch = 100
    assert widget.global_batch == 64
    widget.locked = True
    with pytest.raises(TraitError, match="set micro_batch instead"):
        widget.steps = 9
    assert widget.steps == 4


@pytest.mark.parametrize("sizes", [(8, 8), (24, 100), (64, 65)])
def test_numbers_are_the_plans(sizes):
    micro_batch, global_batch = sizes
    widget = Accumulation(micro_batch=micro_batch, global_batch=global_batch)
    plan, n = widget.plan, widget.numbers()
    assert n["peak"] == plan.peak == sum(n["memory"].values())
    assert n["whole_peak"] == plan.whole_peak
    assert n["whole_peak"] == sum(n["whole_memory"].values())
    assert set(n["memory"]) == set(CONSUMERS)
    assert all(bytes_ >= 0 for bytes_ in n["memory"].values())
    assert n["steps_per_epoch"] == plan.steps_per_epoch
    full, rest = divmod(1797, global_batch)
    assert n["last_window"] == (rest or global_batch)
    assert n["steps_per_epoch"] == full + bool(rest)


def test_a_long_window(monkeypatch):
    """Its micro-batches are not written down one by one."""
    monkeypatch.delattr("membudget.accumulation.plan.partition")
    widget = Accumulation(SMALL, micro_batch=3, global_batch=10**30)
    assert widget.steps == 333333333333333333333333333334
    assert widget.numbers()["weight_sum"] == pytest.approx(1)


def test_picture_is_drawn_to_scale():
    widget = Accumulation()
    svg = ElementTree.fromstring(widget.picture())
    bars = [r for r in svg.iter("rect") if r.get("height") == "26"]
    n = widget.numbers()
    rows = (n["memory"], n["whole_memory"])
    expected = [row[consumer] for row in rows for consumer in CONSUMERS]
    scale = 396 / n["whole_peak"]
    for bar, held in zip(bars, expected, strict=True):
        assert float(bar.get("width")) == pytest.approx(held * scale, abs=0.1)
        assert float(bar.get("x")) + float(bar.get("width")) <= 398.2


def test_repr():
    assert repr(Accumulation(micro_batch=8, steps=2)) == (
        "Accumulation(micro_batch=8, steps=2, global_batch=16, "
        "normalisation='window')"
    )


def test_the_label_says_what_the_footprint_is_of():
    assert Accumulation().label == "an MLP on handwritten digits, with Adam"
    assert Accumulation(SMALL).label == ""
    assert Accumulation(SMALL, label="a toy").state()["label"] == "a toy"
