"""Timing calls, with a clock and a device that only pretend."""

import dataclasses
import statistics

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget import measuring
from membudget.measuring import timing
from membudget.measuring.timing import Timing, time_calls
from tests.soak import examples

QUEUE, RUN, WAIT = 1.0, 10.0, 0.25


class Machine:
    """A GPU that works behind the program, and the clock on the wall.

    A call takes QUEUE seconds to queue work that takes RUN; to wait for the
    device takes WAIT, and as long as the work does.
    """

    def __init__(self):
        self.now = 0.0
        self.done = 0.0  # when the device will have done its work
        self.events = []

    def clock(self):
        self.events.append("clock")
        return self.now

    def synchronise(self, device=None):
        self.events.append("wait")
        assert device == torch.device("cuda:0")
        self.now = max(self.now, self.done) + WAIT

    def call(self):
        self.events.append("call")
        self.now += QUEUE
        self.done = max(self.now, self.done) + RUN


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(timing, "perf_counter", machine.clock)
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronise)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return machine


@pytest.mark.parametrize("device", ["cuda", None])
@pytest.mark.parametrize("warm_up", [0, 2])
def test_the_device_is_waited_for_before_each_reading(
    machine, warm_up, device
):
    result = time_calls(machine.call, device, warm_up=warm_up, repeats=3)
    assert machine.events == (
        ["call"] * warm_up + ["wait", "clock", "call", "wait", "clock"] * 3
    )
    assert result.samples == (QUEUE + RUN + WAIT,) * 3


def test_the_cpu_is_not_waited_for(machine):
    """By default three calls warm up and ten are timed."""
    result = time_calls(machine.call)
    assert machine.events == ["call"] * 3 + ["clock", "call", "clock"] * 10
    assert len(result.samples) == 10


def test_the_samples_are_raw_and_in_order(machine):
    durations = iter([100.0, 3.0, 1.0, 2.0])

    def call():
        machine.now += next(durations)

    result = time_calls(call, warm_up=1, repeats=3)
    assert result.samples == (3.0, 1.0, 2.0)
    assert result.median == 2.0


def test_with_the_real_clock():
    result = time_calls(lambda: torch.ones(4).sum(), warm_up=1, repeats=5)
    assert len(result.samples) == 5
    assert all(isinstance(x, float) and x > 0 for x in result.samples)
    assert min(result.samples) <= result.median <= max(result.samples)


# Statistics --------------------------------------------------------------


@settings(max_examples=examples(30))
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
@example([5.0])
@example([1.0, 2.0, 9.0])
def test_the_statistics_are_numpys(samples):
    result = Timing(tuple(samples))
    first, third = np.percentile(samples, [25, 75])
    assert result.median == statistics.median(samples)
    assert result.spread == pytest.approx(third - first, rel=1e-9, abs=1e-9)


def test_results_cannot_be_changed():
    made = [k for k in vars(measuring).values() if isinstance(k, type)]
    made = [k for k in made if dataclasses.is_dataclass(k)]
    changing = [k for k in made if not k.__dataclass_params__.frozen]
    assert made and changing == [measuring.Allocation]
