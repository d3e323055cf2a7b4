"""The experiment on schedules, small, on a CPU; and its sizes for a GPU."""

import pytest
import torch
from experiments_helpers import WITHIN_OPERATORS, ran

from membudget.checkpointing import no_segments, simulate
from membudget.schedules import least_budget
from membudget_experiments.checkpointing import segments_gpt
from membudget_experiments.schedules import (
    profiled,
    schedules_gpt,
    segments_for,
)
from membudget_experiments.workload import META, Workload
from tests.soak import SOAK

CPU = torch.device("cpu")
GPT = dict(vocabulary=32, context=32, width=16, depth=3, heads=2)
BATCH = 32
AROUND = 8 * BATCH * 32 + 8 * 32 + 4 * BATCH * 32 * 16 + 8
"""Bytes around the chain at its peak: the tokens, their places, the input of
the first block, the loss and its gradient."""


def test_the_frontier_is_predicted_and_measured():
    stages = profiled(Workload("gpt", GPT, META, BATCH))
    plain = simulate(stages, no_segments(4))
    percent = 1 + 100 * least_budget(stages) // plain.peak
    runs = [["first", 0], ["equal", 2], ["first", 3], ["optimal", percent]]
    given = dict(shape=GPT, batch=BATCH, runs=runs, warm_up=0, repeats=2)
    rows, samples = ran(schedules_gpt, CPU, **given)
    assert rows[2]["segments"] == [[0], [1], [2]]
    peaks = [row["bytes"] for row in rows]
    assert peaks == sorted(set(peaks), reverse=True)
    for row, sample in zip(rows, samples, strict=True):
        run = simulate(stages, [*row["segments"], 3])
        assert row["bytes"] == row["alive"] + AROUND + run.peak
        assert row["time"] == pytest.approx(run.time / plain.time, abs=1e-6)
        assert row["flops"] == run.time
        assert 0 <= sample["requested"] - row["bytes"] <= WITHIN_OPERATORS
        assert len(sample["seconds"]) == 2
        assert sample["workspace"] is None
    assert run.peak <= percent * plain.peak // 100


@pytest.mark.parametrize("size", ["t4", "large"] if SOAK else ["t4"])
def test_a_gpu_runs_every_schedule(size):
    """Its budgets can be kept, and bring more than each block a segment."""
    given = schedules_gpt.experiment.sizes[size]
    shape, batch = given["shape"], given["batch"]
    assert segments_gpt.experiment.sizes[size]["shape"] == shape
    assert [batch, 0] in segments_gpt.experiment.sizes[size][
        "runs"
    ]  # there is room
    stages = profiled(Workload("gpt", shape, META, batch))
    peaks = [
        simulate(stages, [*segments_for(stages, *run), 12]).peak
        for run in given["runs"]
    ]
    assert max(peaks) == peaks[0]
    nested = [run[0] for run in given["runs"]].count("optimal")
    assert sorted(peaks)[:nested] == peaks[: -nested - 1 : -1]
