"""A record without fault, and changes of it."""

import json
from copy import deepcopy

from membudget.records import record as records

NAME = "plan_times"

GOOD = {
    "schema": 1,
    "experiment": NAME,
    "size": "tiny",
    "parameters": {"sides": [64, 128], "warm_up": 1, "repeats": 2},
    "prediction": {
        "utc": "2026-03-01T10:00:00Z",
        "values": {"growth_per_doubling": {"synchronised": 8}},
    },
    "outcome": "measured",
    "error": None,
    "samples": [
        {"side": 64, "synchronised": [0.25, 0.5], "unsynchronised": [1, 2]},
        {"side": 128, "synchronised": [2.0, 4e-05], "unsynchronised": None},
    ],
    "units": {"side": "rows", "synchronised": "s", "unsynchronised": "s"},
    "device": {
        "kind": "cpu",
        "name": "A CPU (8 cores) @ 3.0",
        "memory": 8 << 30,
        "capability": "AVX2",
        "driver": None,
        "cuda": None,
        "threads": 1,
    },
    "software": {
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "system": "Linux x86_64",
        "matmul_precision": "highest",
        "allocator_settings": None,
    },
    "utc": "2026-03-01T10:00:05Z",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "clean": True,
    "source": "ab" * 32,
}
FILE = f"{NAME}.tiny.a-cpu-8-cores-3-0.json"


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


def place(folder, record, name=None):
    """Write whatever it is as a record, with the digest it should have."""
    if isinstance(record, dict):
        record["digest"] = records.digest(record)
        name = name or records.file_name(record)
    path = folder / (name or FILE)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return path


def current(name=NAME, size="tiny"):
    """The fields that make a record one of today's version."""
    experiment = records.catalogue()[name]
    return {
        "parameters": experiment.sizes[size],
        "source": experiment.source,
        "units": experiment.units,
    }
