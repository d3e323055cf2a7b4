"""What the tests of the experiments share: a record, planted experiments."""

import json
from copy import deepcopy

from membudget.experiments import record as records

NAME = "synchronisation"

GOOD = records.new(
    experiment=NAME,
    size="tiny",
    parameters={"sides": [64, 128], "warm_up": 1, "repeats": 2},
    prediction={
        "utc": "2026-03-01T10:00:00Z",
        "values": {"growth_per_doubling": {"synchronised": 8}},
    },
    outcome="measured",
    samples=[
        {"side": 64, "synchronised": [0.25, 0.5], "unsynchronised": [1, 2]},
        {"side": 128, "synchronised": [2.0, 4e-05], "unsynchronised": None},
    ],
    units={"side": "rows", "synchronised": "s", "unsynchronised": "s"},
    device={
        "kind": "cpu",
        "name": "A CPU (8 cores) @ 3.0",
        "memory": 8 << 30,
        "capability": "AVX2",
        "driver": None,
        "cuda": None,
        "threads": 1,
    },
    software={
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "system": "Linux x86_64",
        "matmul_precision": "highest",
        "allocator_settings": None,
    },
    utc="2026-03-01T10:00:05Z",
    commit="0123456789abcdef0123456789abcdef01234567",
    clean=True,
    source="ab" * 32,
)
FILE = f"{NAME}.tiny.a-cpu-8-cores-3-0.json"

WITHIN_OPERATORS = 64
"""Adam's step asks for a few scalars and frees them within an operator, where
only the profiler sees them."""


def good(**changes):
    """A fresh copy of a record without fault, with fields replaced."""
    return {**deepcopy(GOOD), **deepcopy(changes)}


def on_gpu(size, name="NVIDIA H200", **changes):
    """The same from a GPU."""
    device = {
        "kind": "cuda",
        "name": name,
        "memory": 140 << 30,
        "capability": "9.0",
        "driver": "580.1",
        "cuda": "13.0",
        "threads": None,
    }
    return good(size=size, device=device, **changes)


def place(folder, record, name=FILE):
    """Write whatever it is as a record, with the digest it should have."""
    if isinstance(record, dict):
        record["digest"] = records.digest(record)
    path = folder / name
    path.write_text(records._text_of(record), encoding="utf-8")
    return path


def current(name=NAME, size="tiny"):
    """The fields that make a record one of today's version."""
    experiment = records.catalogue()[name]
    return {
        "parameters": experiment.sizes[size],
        "source": experiment.source,
        "units": experiment.units,
    }


def read(path):
    """A record as it is on disk."""
    return json.loads(path.read_text("utf-8"))


PLANTED = '''
import gc
import time
import weakref
from pathlib import Path

import torch

from membudget.experiments.definition import experiment

SEEN = {}


@experiment(
    sizes={
        "tiny": {"values": [1, 2, 3], "warm_up": 0, "repeats": 1},
        "t4": {"values": [1], "warm_up": 0, "repeats": 1},
        "large": {"values": [1], "warm_up": 0, "repeats": 1},
    },
    units={"value": "things"},
    over="values",
)
def NAME(device, *, values, warm_up, repeats):
    """SUMMARY"""
'''


def plant(folder, **bodies):
    """A package folder with one experiment for each body, in one module."""
    head, decorated = PLANTED.split("\n\n\n@")
    text = head
    for name, body in bodies.items():
        function = decorated.replace("NAME", name)
        function = function.replace("SUMMARY", f"Planted: {name}.")
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        text += f"\n\n\n@{function}{lines}"
    folder.mkdir(exist_ok=True)
    path = folder / "planted.py"
    path.write_text(text, encoding="utf-8")
    return path


SIMPLE = """\
yield {"total": sum(values)}
for value in values:
    yield {"value": value}
"""


def ran(experiment, device, **given):
    """Run an experiment: the rows of its prediction, and its samples.

    Of both there is one for each run; first it says which one it is. A
    sample has the keys of the units.
    """
    prediction, *samples = experiment(device, **given)
    (rows,) = (value for value in prediction.values() if type(value) is list)
    runs = [
        run if isinstance(run, list) else [run]
        for run in given[experiment.over]
    ]
    for found in (rows, samples):
        firsts = [list(each.values()) for each in found]
        pairs = zip(firsts, runs, strict=True)
        assert [first[: len(run)] for first, run in pairs] == runs
    for sample in samples:
        assert sample.keys() == experiment.units.keys()
    return rows, samples
