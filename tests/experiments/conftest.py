"""Settings of these tests, and experiments planted in place of the real."""

import sys
from pathlib import Path

import pytest
import torch

import membudget.experiments
from membudget.experiments import record as records

# The helpers of this folder; other processes import them, too.
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Plant experiments; gives a function from bodies to their module.

    The package then has these experiments alone.
    """
    from experiments_helpers import plant

    folder = tmp_path / "experiments"
    monkeypatch.setattr(records, "HERE", folder)
    monkeypatch.setattr(
        membudget.experiments,
        "__path__",
        [*membudget.experiments.__path__, str(folder)],
    )
    name = "membudget.experiments.planted"
    monkeypatch.setitem(sys.modules, name, None)

    def make(**bodies):
        del sys.modules[name]
        records.catalogue.cache_clear()
        plant(folder, **bodies)
        return __import__(name, fromlist=["planted"])

    yield make
    records.catalogue.cache_clear()
