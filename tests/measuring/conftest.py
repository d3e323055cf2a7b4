"""Settings of this room's tests, and the way to their helpers."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("measuring_helpers")

GIB = 2**30

torch.set_num_threads(1)
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, print_blob=False
)
settings.load_profile("fixed")


class Cuda:
    """Stands in for the functions of ``torch.cuda``; two devices.

    The statistics have the names of PyTorch's allocator: see
    ``torch.cuda.memory_stats``.
    """

    def __init__(self):
        self.calls = []
        self.current = 1
        self.stats = {}
        for n, kind in enumerate(("requested", "allocated", "reserved"), 1):
            for pool, share in (("all", 1), ("small_pool", 2)):
                for m, what in enumerate(("current", "peak"), 1):
                    key = f"{kind}_bytes.{pool}.{what}"
                    self.stats[key] = (10 * m + n) * GIB // share
                self.stats[f"{kind}_bytes.{pool}.allocated"] = 99 * GIB
        self.free, self.total, self.fraction = 7 * GIB, 80 * GIB, 1.0

    def init(self):
        self.calls.append("init")

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def current_device(self):
        return self.current

    def memory_stats(self, device=None):
        self.calls.append(("memory_stats", device))
        return dict(self.stats)

    def mem_get_info(self, device=None):
        self.calls.append(("mem_get_info", device))
        return self.free, self.total

    def get_per_process_memory_fraction(self, device=None):
        return self.fraction

    def reset_peak_memory_stats(self, device=None):
        self.calls.append(("reset", device))


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    for name in dir(Cuda):
        if not name.startswith("_"):
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake
