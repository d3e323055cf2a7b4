"""Readings of a device: the CPU's for real, CUDA's from its statistics."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from membudget.measuring.device import (
    MemoryReading,
    read_memory,
    reset_peak,
    resolve_device,
)

GIB = 2**30


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


# Which device ------------------------------------------------------------


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_without_cuda_it_is_the_cpu(no_cuda, device):
    assert resolve_device(device) == torch.device("cpu")
    assert resolve_device() == torch.ones(1).device


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (None, "cuda:1"),
        ("cuda", "cuda:1"),
        ("cuda:0", "cuda:0"),
        (torch.device("cuda", 1), "cuda:1"),
        ("cpu", "cpu"),
    ],
)
def test_with_cuda_it_has_an_index(cuda, device, found):
    resolved = resolve_device(device)
    assert isinstance(resolved, torch.device)
    assert str(resolved) == found


@pytest.mark.parametrize(
    "bad", ["cuda:2", "cuda:-1", "mps", "gpu", "", "cpu:1"]
)
def test_a_device_that_is_not_there(cuda, bad):
    message = (
        f"device {str(bad)!r} is not here: use one of 'cpu', 'cuda:0', "
        "'cuda:1', or None for the best of them"
    )
    for function in (resolve_device, read_memory, reset_peak):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            function(bad)
    assert cuda.calls == []


def test_without_cuda_there_is_only_the_cpu(no_cuda):
    message = (
        "device 'cuda' is not here: use one of 'cpu', or None for the best "
        "of them"
    )
    for device in ("cuda", torch.device("cuda")):
        with pytest.raises(ValueError, match=f"^{message}$"):
            resolve_device(device)


# CUDA --------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_a_reading_of_cuda(cuda, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)  # it needs none
    reading = read_memory(device)
    name = device or "cuda:1"
    assert reading == MemoryReading(
        device=name,
        requested=11 * GIB,
        allocated=12 * GIB,
        reserved=13 * GIB,
        peak_requested=21 * GIB,
        peak_allocated=22 * GIB,
        peak_reserved=23 * GIB,
        free=7 * GIB,
        total=80 * GIB,
        process=None,
    )
    assert str(reading) == (
        f"memory of {name}\n"
        "requested  11.0 GiB, peak 21.0 GiB\n"
        "allocated  12.0 GiB, peak 22.0 GiB\n"
        "reserved   13.0 GiB, peak 23.0 GiB\n"
        "free       7.00 GiB of 80.0 GiB"
    )
    first, *rest = cuda.calls
    assert first == "init"  # before it, there are no statistics
    where = torch.device(name)
    assert set(rest) == {("memory_stats", where), ("mem_get_info", where)}


def test_what_the_allocator_does_not_tell_is_none(cuda):
    cuda.stats = {
        key: value
        for key, value in cuda.stats.items()
        if not key.startswith("requested")
    }
    cuda.stats["allocated_bytes.all.current"] = 0
    reading = read_memory("cuda")
    assert reading.requested is reading.peak_requested is None
    assert "requested" not in str(reading)
    assert "allocated  0 B, peak 22.0 GiB\n" in str(reading)


def test_the_peaks_of_one_device_are_reset(cuda):
    assert reset_peak("cuda:0") is True
    assert cuda.calls == ["init", ("reset", torch.device("cuda:0"))]
    reset_peak()
    assert cuda.calls[-1] == ("reset", torch.device("cuda:1"))


def test_the_names_of_the_statistics_are_pytorchs():
    """They are documented, so that a renaming does not read as None."""
    documented = torch.cuda.memory_stats.__doc__
    for kind in ("requested", "allocated", "reserved"):
        assert (
            f'"{kind}_bytes.{{all,large_pool,small_pool}}.'
            '{current,peak,allocated,freed}"'
        ) in documented


# The CPU -----------------------------------------------------------------


def test_a_reading_of_the_cpu():
    psutil = pytest.importorskip("psutil")
    reading = read_memory("cpu")
    assert reading.device == "cpu"
    assert reading.total == psutil.virtual_memory().total
    assert 0 < reading.free < reading.total
    assert 10 * 2**20 < reading.process < reading.total
    for name in ("requested", "allocated", "reserved"):
        assert getattr(reading, name) is None
        assert getattr(reading, f"peak_{name}") is None


def test_the_cpus_process_and_free_bytes(monkeypatch):
    def process(pid=None):
        assert pid in (None, os.getpid())
        memory = SimpleNamespace(rss=3 * GIB, vms=9 * GIB)
        return SimpleNamespace(memory_info=lambda: memory)

    fake = SimpleNamespace(
        Process=process,
        virtual_memory=lambda: SimpleNamespace(
            total=16 * GIB, available=5 * GIB, free=1 * GIB, used=10 * GIB
        ),
    )
    monkeypatch.setitem(sys.modules, "psutil", fake)
    reading = read_memory("cpu")
    assert reading == MemoryReading(
        "cpu", process=3 * GIB, free=5 * GIB, total=16 * GIB
    )
    assert str(reading) == (
        "memory of cpu\nprocess    3.00 GiB\nfree       5.00 GiB of 16.0 GiB"
    )


def test_without_psutil_the_cpu_cannot_be_read(no_cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    message = "^reading the CPU's memory needs psutil: pip install "
    with pytest.raises(ModuleNotFoundError, match=message) as caught:
        read_memory()
    assert caught.value.name == "psutil"
    assert resolve_device() == torch.device("cpu")  # these do not need it
    assert reset_peak() is False


# A real GPU --------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_real_gpu():
    device = resolve_device("cuda")
    assert reset_peak(device) is True
    before = read_memory(device)
    held = torch.empty(3 * 2**20 + 1, dtype=torch.uint8, device=device)
    after = read_memory(device)
    assert after.requested - before.requested == held.nbytes
    assert after.allocated - before.allocated >= held.nbytes
    assert after.reserved >= after.allocated >= after.requested
    assert after.peak_requested == after.requested
    size = held.nbytes
    del held
    assert read_memory(device).requested == after.requested - size
    assert read_memory(device).peak_requested == after.peak_requested
    reset_peak(device)
    assert read_memory(device).peak_requested == before.requested
