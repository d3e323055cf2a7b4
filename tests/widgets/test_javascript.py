"""The JavaScript tests, and the numbers that they compare with Python's."""

import json
import os
import re
import subprocess
from itertools import product
from pathlib import Path

import kind_accumulation
import kind_adapters
import kind_fits
import kind_offloading
import kind_parallelism
import kind_yours
import ledger_cases
import node
import planning_cases
import precision_cases
import pytest
import schedules_cases
import segments_cases
import sharding_cases
import timeline_cases
from project import PATIENCE

from membudget.accumulation import NORMALISATIONS, Footprint, PeakLine
from membudget.widgets import Accumulation, Parallelism, bundle
from membudget.widgets.accumulation import digits_footprint

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted(ROOT.glob("tests/js/*.test.mjs"))

FOOTPRINTS = (
    digits_footprint(),
    Footprint(1000, 1000, 0, [PeakLine(2100, 7)], [PeakLine(3000, 7)]),
)
CUTS = tuple((n, n * k) for n in (1, 16, 128, 333) for k in (1, 2, 3, 8, 31))
CUTS += tuple(product((1, 7, 96, 128, 500), (1, 96, 100, 500, 1797)))


def cases():
    """A grid of states, each with the numbers that Python gives."""
    widget = Accumulation()
    for footprint, normalisation, samples in product(
        FOOTPRINTS, NORMALISATIONS, (1, 512, 1797)
    ):
        widget.footprint = footprint
        widget.normalisation = normalisation
        widget.samples = samples
        widget.budget = 3 * 2**20 if samples == 1797 else 3300
        for widget.micro_batch, widget.global_batch in CUTS:
            yield {
                "state": widget.state(),
                "numbers": kind_accumulation.printed(widget),
                "said": kind_accumulation.said(widget),
            }


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The folder with the grid and the composed modules."""
    folder = tmp_path_factory.mktemp("js")
    for name, answers in {
        "accumulation": list(cases()),
        "adapters": list(kind_adapters.cases()),
        "fits": list(kind_fits.cases()),
        "ledger": ledger_cases.cases(),
        "bits": precision_cases.bits(),
        "lossscale": list(precision_cases.loss_scales()),
        "recipes": list(precision_cases.accounts()),
        "offloading": list(kind_offloading.cases()),
        "parallelism": {
            "tables": Parallelism().state()["tables"],
            "cases": list(kind_parallelism.cases()),
        },
        "planning": list(planning_cases.cases()),
        "schedules": schedules_cases.cases(),
        "segments": list(segments_cases.cases()),
        "sharding": sharding_cases.answers(),
        "timeline": timeline_cases.cases(),
        "yours": list(kind_yours.cases()),
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(answers))
    for name in bundle.names():
        (folder / f"{name}.mjs").write_text(bundle.module_text(name))
    return folder


@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.stem)
def test_javascript(test, grid):
    done = subprocess.run(
        [node.find(), "--test", "--test-reporter=tap", str(test)],
        env={**os.environ, "MB_GRID": str(grid)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.M)
    skipped = re.search(r"^# skipped (\d+)$", done.stdout, re.M)
    assert int(passed[1]) >= 3
    assert int(skipped[1]) == 0


def test_there_are_javascript_tests():
    names = {"base", "bundle", *bundle.names()}
    assert {path.name for path in TESTS} >= {f"{n}.test.mjs" for n in names}
