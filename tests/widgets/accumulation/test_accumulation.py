"""The accumulation widget's traits."""

from math import ceil

from membudget.accumulation import Footprint, PeakLine, Plan
from membudget.widgets import Accumulation
from membudget.widgets.accumulation import digits_footprint, digits_record

SMALL = Footprint(
    parameters=1000,
    gradients=1000,
    optimizer=2000,
    alone=[PeakLine(4500, 0), PeakLine(3600, 20), PeakLine(3100, 50)],
    later=[PeakLine(4500, 0), PeakLine(4300, 30), PeakLine(4000, 50)],
)


def test_steps_and_micro_batch_follow_from_each_other():
    widget = Accumulation(SMALL, micro_batch=16, steps=4)
    assert widget.plan == Plan(64, 16, 1797, SMALL, "window")
    widget = Accumulation(SMALL, micro_batch=96, global_batch=512)
    assert widget.plan.sizes == [96] * 5 + [32]
    for asked in range(1, 23):  # 22² < 512: each can be reached
        widget.steps = asked
        assert widget.steps == asked
        assert widget.micro_batch == ceil(512 / asked)
    widget.global_batch = 10
    widget.steps = 6
    assert (widget.micro_batch, widget.steps) == (2, 5)
    widget.micro_batch = 1000
    assert widget.plan.sizes == [10]


def test_the_browser_may_send_any_subset():
    """And an observer sees a consistent plan, whatever comes."""
    widget = Accumulation(SMALL, micro_batch=8, steps=8)
    seen = []

    def look(_):
        whole, size = widget.global_batch, widget.micro_batch
        seen.append(widget.steps == ceil(whole / size))

    widget.observe(look, ["micro_batch", "steps", "global_batch"])
    for sent, wanted in [
        ({"micro_batch": 16}, (16, 4, 64)),
        ({"micro_batch": 30, "steps": 3, "global_batch": 64}, (30, 3, 64)),
        ({"steps": 7}, (10, 7, 64)),
        ({"steps": 3, "global_batch": 30}, (10, 3, 30)),
    ]:
        widget.set_state(sent)
        shown = widget.micro_batch, widget.steps, widget.global_batch
        assert shown == wanted
    assert len(seen) > 5 and all(seen)


def test_a_long_window(monkeypatch):
    """Its micro-batches are not written down one by one."""
    monkeypatch.delattr("membudget.accumulation.plan.partition")
    widget = Accumulation(SMALL, micro_batch=3, global_batch=10**30)
    assert widget.steps == 333333333333333333333333333334
    assert "333 micro-batch" not in widget.sentence()


def test_a_difference_that_rounding_hides_is_said():
    widget = Accumulation(micro_batch=332, global_batch=1024)
    assert "the peak is 4.00 MiB, 3.20 KiB above the budget of 4.00 MiB" in (
        widget.sentence()
    )


def test_what_goes_with_the_default_footprint():
    widget = Accumulation()
    assert widget.footprint is digits_footprint()
    assert widget.record == digits_record()
    assert widget.label == "an MLP on handwritten digits, with Adam"
    assert digits_record()["parameters"]["model"] == "mlp"
    sent = widget.state()["record"]
    assert (sent["unit"], sent["gpu"], len(sent["times"])) == ("µs", False, 7)
    own = Accumulation(SMALL, label="a toy")
    assert (own.record, own.label) == (None, "a toy")
