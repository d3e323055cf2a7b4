"""What the tests of the experiments share: planted ones, and runs."""

import json

WITHIN_OPERATORS = 64
"""Adam's step asks for a few scalars and frees them within an operator, where
only the profiler sees them."""


def read(path):
    """A record as it is on disk."""
    return json.loads(path.read_text("utf-8"))


PLANTED = '''
import gc
import time
import weakref
from pathlib import Path

import torch

from membudget_experiments.definition import experiment

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
        for run in given[experiment.experiment.over]
    ]
    for found in (rows, samples):
        firsts = [list(each.values()) for each in found]
        pairs = zip(firsts, runs, strict=True)
        assert [first[: len(run)] for first, run in pairs] == runs
    for sample in samples:
        assert sample.keys() == experiment.experiment.units.keys()
    return rows, samples
