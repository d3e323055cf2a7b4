"""Settings of these tests, and experiments planted in place of the real."""

import importlib.util
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from membudget.measuring import PeakTracker
from membudget.records import record as records
from membudget_experiments import definition

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

# The helpers of this folder; other processes import them, too.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "records"))

torch.set_num_threads(1)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Plant experiments; gives a function from bodies to their module.

    The commands then know these experiments alone.
    """
    from experiments_helpers import plant

    def make(**bodies):
        path = plant(tmp_path / "planted", **bodies)
        spec = importlib.util.spec_from_file_location("planted", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = {name: getattr(module, name) for name in sorted(bodies)}
        monkeypatch.setattr(definition, "definitions", lambda: found)
        monkeypatch.setattr(definition, "of", lambda known: found[known.name])
        monkeypatch.setattr(
            records,
            "catalogue",
            lambda: {name: f.experiment for name, f in found.items()},
        )
        return module

    return make


WORKSPACE, ROUNDING = 1000, 7


@pytest.fixture
def play_gpu(monkeypatch):
    """Let the CPU play a GPU for a module of experiments, ledger or precision.

    Its libraries take ``WORKSPACE`` bytes in the first step. Its counters
    tell what the tracker counts, and those; the allocator rounds up by
    ``ROUNDING``. Gives a function from the module to what was ``done`` there,
    in order, and what dry runs were ``asked``.
    """

    def play(subject):
        done, asked, alive, case = [], [], [], subject.Case
        plain, data, train = case.build, case.data, subject.train

        def workspace():
            return WORKSPACE if "train" in done else 0

        def note(name):
            return lambda *args: done.append(name)

        def here(device):
            assert device in (CUDA, torch.device("meta"))
            return CPU if device == CUDA else device

        def build(self, device):
            network = plain(self, here(device))
            if device == CUDA:
                alive.append(weakref.ref(network))
                done.append("build")
            return network

        def read_memory(device):
            assert device == CUDA
            assert not any(network() is not None for network in alive)
            done.append("read")
            used = workspace()
            return SimpleNamespace(requested=used, allocated=2 * used)

        def step(*args):
            done.append("train")
            train(*args)

        def peak_bytes(call, device):
            assert device == CUDA
            with PeakTracker() as run:
                call()
            done.append("peak")
            requested = workspace() + run.peak
            allocated = workspace() + requested + ROUNDING
            return {"requested": requested, "allocated": allocated}

        def dry_run(network, loss, *batch, **options):
            batch = [torch.zeros_like(t, device=CPU) for t in batch]
            loss(network.to_empty(device=CPU), *batch)
            asked.append(options)
            return SimpleNamespace(peak=5)

        monkeypatch.setattr(torch.cuda, "empty_cache", note("empty"))
        monkeypatch.setattr(torch.cuda, "synchronize", note("wait"))
        monkeypatch.setattr(case, "build", build)
        monkeypatch.setattr(case, "data", lambda s, d: data(s, here(d)))
        monkeypatch.setattr(subject, "train", step)
        for stand_in in (read_memory, peak_bytes, dry_run):
            monkeypatch.setattr(subject, stand_in.__name__, stand_in)
        return SimpleNamespace(
            done=done, asked=asked, workspace=WORKSPACE, rounding=ROUNDING
        )

    return play
