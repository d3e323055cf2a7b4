"""The experiment on offloading, small, on a CPU."""

import pytest
import torch
from experiments_helpers import WITHIN_OPERATORS, ran

from membudget.models import GPT
from membudget_experiments import offloading as subject
from membudget_experiments.offloading import offload

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIVEN = dict(
    shape=dict(vocabulary=32, context=16, width=32, depth=3, heads=2),
    batch=16,
    variants=["plain", "offloaded", "checkpointed", "both"],
    warm_up=0,
)


def test_it_predicts_its_peaks_and_what_moves():
    rows, samples = ran(offload, CPU, **GIVEN, repeats=2)
    for row, sample in zip(rows, samples, strict=True):
        assert sample["variant"] == row["variant"]
        assert 0 <= sample["requested"] - row["bytes"] <= WITHIN_OPERATORS
        assert (sample["out"], sample["back"]) == (row["out"], row["back"])
        assert len(sample["seconds"]) == 2
        assert (sample["copying"] is None) == (row["out"] == 0)
        assert sample["workspace"] is sample["reserved"] is None
    plain, moved, checkpointed, both = rows
    assert plain["out"] == checkpointed["out"] == 0
    assert 5 * both["out"] < moved["out"]
    assert moved["bytes"] < plain["bytes"]
    assert both["bytes"] < checkpointed["bytes"] < plain["bytes"]
    assert plain["time"] == moved["time"] == 1 < both["time"]
    assert both["flops_a_byte"] > 5 * moved["flops_a_byte"]


def test_what_leaves_of_checkpointed_blocks_is_their_inputs():
    """And of the rest, the same at every depth."""
    out = [
        next(
            offload(
                CPU,
                shape={**GIVEN["shape"], "depth": depth},
                batch=4,
                variants=["both"],
                warm_up=0,
                repeats=1,
            )
        )["steps"][0]["out"]
        for depth in (2, 3, 5)
    ]
    block = 4 * 4 * 16 * 32  # fp32, samples, tokens, width
    assert [out[1] - out[0], out[2] - out[1]] == [block, 2 * block]


@pytest.mark.parametrize("size", [1000, 3000])
def test_copies_are_timed_in_parts(size, monkeypatch):
    monkeypatch.setattr(subject, "LARGEST", 1000)
    monkeypatch.setattr(subject, "seconds", lambda *_: [0.5, 0.25])
    times = subject._copying(size, CPU, 0, 2)
    assert times == [0.5 * size / 1000, 0.25 * size / 1000]
    assert subject._copying(0, CPU, 0, 2) is None


def test_a_card_has_adams_step_counts_elsewhere():
    (here,), (there,) = (
        next(offload(device, **{**GIVEN, "variants": ["plain"]}, repeats=1))[
            "steps"
        ]
        for device in (CPU, CUDA)
    )
    steps = len(list(GPT(**GIVEN["shape"]).parameters()))
    assert here["alive"] - there["alive"] == 4 * steps
