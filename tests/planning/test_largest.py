"""The largest micro-batch, against every one of them."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.ledger import Transformer
from membudget.measuring import trace_step
from membudget.planning import Job, Plan, largest_micro_batch, memory
from tests.soak import examples

GPT = Transformer(40, 16, 3, 4, context=16, tied=True)
LLAMA = Transformer(40, 16, 3, 4, kv_heads=2, family="llama", fused=False)
PLANS = [
    Plan(1),
    Plan(1, 2, 4, "master-fp32-gradients"),
    Plan(1, 3, None, "autocast", "sgd"),
    Plan(1, 1, None, "bf16", "adam", "zero-3", 2),
    Plan(1, 0, 2, ranks=2),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_of_a_job_no_larger_one_fits(shape, plan):
    job = Job(shape, 12, 26)
    share = job.batch // plan.ranks
    peaks = [
        memory(job, Plan(n, *list(vars(plan).values())[1:]))
        for n in range(1, share + 1)
    ]
    for budget in {peak + spare for peak in peaks for spare in (0, -1)}:
        fitting = [n for n, peak in enumerate(peaks, 1) if peak <= budget]
        if peaks[0] <= budget:
            found = largest_micro_batch(job, plan, budget=budget)
            assert found == max(fitting)
    with pytest.raises(ValueError, match=r"one sequence needs .* saves more"):
        largest_micro_batch(job, plan, budget=peaks[0] - 1)


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("seed", range(examples(3)))
def test_of_a_model_no_larger_one_runs(seed):
    rng = random.Random(seed)
    width, samples = rng.choice([4, 200]), rng.randint(1, 12)
    norm = rng.choice([nn.Identity, nn.LayerNorm])
    layers = [nn.Linear(8, width), norm(width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.rand(samples, 8), torch.zeros(samples, dtype=torch.long)
    peaks = [
        trace_step(
            model, classify, *batch, optimizer=optimizer, micro_batch=n
        ).peak
        for n in range(1, samples + 1)
    ]
    for budget in peaks:
        found = largest_micro_batch(
            model, classify, *batch, budget=budget, optimizer=optimizer
        )
        best = max(n for n, peak in enumerate(peaks, 1) if peak <= budget)
        assert found == best


def test_of_a_model_that_takes_only_few_samples():
    """No prime of them tells what grows."""

    def few(model, x, y):
        if len(x) > 6:
            raise ValueError("at most 6 samples")
        return classify(model, x, y)

    model = nn.Sequential(nn.Linear(8, 50), nn.Linear(50, 10))
    batch = torch.rand(6, 8), torch.zeros(6, dtype=torch.long)
    for size in range(1, 7):
        peak = trace_step(model, few, *batch, micro_batch=size).peak
        found = largest_micro_batch(model, few, *batch, budget=peak)
        assert found >= size
        assert trace_step(model, few, *batch, micro_batch=found).peak <= peak


def test_a_job_says_all():
    job = Job(GPT, 12, 4)
    with pytest.raises(TypeError, match="leave out the batch and the optim"):
        largest_micro_batch(job, Plan(1), torch.ones(1), budget=10**9)
