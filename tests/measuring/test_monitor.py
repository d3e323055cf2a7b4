"""The memory monitor, on invented readings, on the CPU and on a CUDA stub."""

import mmap
import re
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget.measuring import (
    MemoryMonitor,
    Reading,
    Status,
    monitor,
    process_limit,
)
from membudget.measuring.device import MemoryReading
from tests.soak import examples

MIB, GIB = 2**20, 2**30


def reading(values, **options):
    values = iter(values)
    return MemoryMonitor(read=lambda: next(values), **options)


# The status --------------------------------------------------------------


def statuses(m, count):
    """The first letters of the statuses of the next readings."""
    return "".join(m().name[0] for _ in range(count))


def test_the_thresholds_belong_to_the_fuller_status():
    m = reading([0, 79, 80, 89, 90, 100, 130], budget=100, window=1)
    assert statuses(m, 7) == "NNWWCCC"
    m = reading([99, 100], budget=100, warning=0.99, critical=1, window=1)
    assert statuses(m, 2) == "WC"
    assert list(Status) == sorted(Status)


def test_a_dip_does_not_hide_a_peak():
    m = reading([95, 10, 10, 10, 85, 10, 10, 10], budget=100, window=3)
    assert statuses(m, 8) == "CCCNWWWN"


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(0, 1200), min_size=1, max_size=30),
    st.integers(1, 1000),
    st.integers(1, 8),
    st.lists(st.integers(1, 100), min_size=2, max_size=2, unique=True),
)
@example([29, 57, 58], 100, 1, [29, 57])  # 0.29 * 100 < 29 in floats
@example([55], 100, 1, [55, 56])  # 0.55 * 100 > 55
def test_status_and_peaks_against_exact_arithmetic(
    values, budget, window, percents
):
    low, high = sorted(percents)
    m = reading(
        values,
        budget=budget,
        window=window,
        warning=low / 100,
        critical=high / 100,
    )
    for n in range(1, len(values) + 1):
        status = m()
        most = max(values[max(0, n - window) : n])
        share = 100 * Fraction(most, budget)
        assert status == m.status == (share >= low) + (share >= high)
        assert m.window_peak == most
        assert m.peak == max(values[:n])
    assert m.readings == list(enumerate(values))


def test_before_the_first_reading():
    m = reading([1], budget=10)
    assert (m.status, m.peak, m.window_peak) == (Status.NORMAL, 0, 0)
    assert m.readings == []
    with pytest.raises(RuntimeError, match=r"call the monitor, then line\(\)"):
        m.line()


def test_steps_are_counted_on_and_the_line_shows_the_last_values():
    m = reading([1] * 5, budget=10)
    m(loss=1.0)
    m(rate=0.1, loss=2.0)
    assert m.line().endswith("NORMAL | rate 0.1 | loss 2")
    m(10)
    assert m.line().endswith("NORMAL")
    m()
    m(step=0)
    assert [r.step for r in m.readings] == [0, 1, 10, 11, 0]


# Steps, values and the line ----------------------------------------------


def test_the_line_of_a_log():
    m = reading(
        [int(3.61 * MIB), int(3.2 * MIB) + 1, int(3.5999 * MIB)],
        budget=4 * MIB,
        window=2,
    )
    m(11)
    m(12, loss=2.3012)
    assert m.line() == (
        "step 12 | 3.20 MiB of 4.00 MiB (80.0 %) | peak of the last 2: "
        "3.61 MiB | CRITICAL | loss 2.301"
    )
    m(13)  # its share is not rounded up to the threshold
    assert "(89.9 %)" in m.line() and "WARNING" in m.line()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456789, "1.235"),
        (0.000123456, "0.0001235"),
        (float("nan"), "nan"),
        ("cosine", "cosine"),
        (torch.tensor(1.23456789), "1.235"),
        (torch.tensor([[7]]), "7"),
        (np.float32(1.23456789), "1.235"),
        (np.int64(12), "12"),
    ],
)
def test_values_are_rounded(value, text):
    m = reading([1], budget=10)
    m(value=value)
    assert m.line().endswith(f"NORMAL | value {text}")


def test_a_loss_does_not_keep_its_graph():
    m = reading([1], budget=10)
    x = torch.ones(3, requires_grad=True)
    hidden = x.exp()
    graph = weakref.ref(hidden.untyped_storage())
    m(loss=hidden.sum())
    del hidden
    assert graph() is None
    assert m.line().endswith("loss 8.155")


def test_several_values_in_one_are_refused_before_a_reading_is_taken():
    m = reading([1], budget=10)
    message = "loss is a tensor of shape (2,): hand over one number"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        m(loss=torch.zeros(2))
    assert m.readings == []
    m()
    assert m.readings == [Reading(0, 1)]


# Bad input ---------------------------------------------------------------


def test_thresholds_in_the_wrong_order():
    message = (
        "warning is 0.8 and critical 0.8: use shares of the budget with "
        "0 < warning < critical <= 1"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        reading([], budget=10, warning=0.8, critical=0.8)


def test_a_reading_needs_to_know_of_how_much_it_is_a_part():
    with pytest.raises(ValueError, match=r"^read= needs budget=: say of how"):
        reading([])


@pytest.mark.parametrize("value", [1.0, True])
def test_a_reading_that_is_no_whole_number(value):
    message = (
        f"a reading of memory is {value!r}: use a whole number of at least 0"
    )
    m = reading([value], budget=10)
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        m()
    assert m.readings == []


# The CPU -----------------------------------------------------------------


def test_the_cpu_is_read_when_the_monitor_is_called():
    m = MemoryMonitor("cpu")
    m()
    pages = mmap.mmap(-1, 64 * MIB)  # new ones, not what was freed before
    kept = torch.frombuffer(pages, dtype=torch.float32).fill_(1)
    m()
    before, after = (r.bytes for r in m.readings)
    assert 0 <= after - before - kept.nbytes < 8 * MIB
    assert m.budget > after


def test_on_the_cpu_the_limit_is_what_it_has_and_what_is_available(
    monkeypatch,
):
    now = MemoryReading("cpu", process=30, free=50, total=100)
    monkeypatch.setattr(monitor, "read_memory", lambda device: now)
    assert process_limit("cpu") == 80
    m = MemoryMonitor("cpu")
    assert m.budget == 80
    m()
    assert m.readings == [Reading(0, 30)]
    assert MemoryMonitor("cpu", budget=70).budget == 70


# CUDA, as far as it goes without ------------------------------------------


def test_on_cuda_a_reading_is_the_peak_since_the_last(cuda):
    m = MemoryMonitor(budget=100)
    for peak in (85, 20):
        cuda.stats["allocated_bytes.all.peak"] = peak
        m()
    assert [r.bytes for r in m.readings] == [85, 20]
    assert m.status is Status.WARNING
    calls = [call for call in cuda.calls if call != "init"]
    read = ["memory_stats", "mem_get_info", "reset"]
    assert [name for name, _ in calls] == ["reset", *read, *read]
    assert {device for _, device in calls} == {torch.device("cuda:1")}


@pytest.mark.parametrize(
    ("fraction", "limit"), [(1.0, 20), (0.125, 10), (0.2503, 20)]
)
def test_on_cuda_the_limit_is_reserved_and_free_or_the_fraction(
    cuda, fraction, limit
):
    cuda.fraction = fraction
    assert process_limit() == MemoryMonitor().budget == limit * GIB


def test_with_a_function_of_its_own_the_device_is_left_alone(cuda):
    reading([5], budget=10)()
    assert cuda.calls == []
