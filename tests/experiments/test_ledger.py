"""The experiment on the ledger, small, on a CPU; and with a GPU's part played
by stand-ins."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from experiments_helpers import ran

from membudget.ledger import predict
from membudget.measuring import PeakTracker
from membudget_experiments import ledger as subject
from membudget_experiments.ledger import (
    METHODS,
    Case,
    step_peaks,
    train,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BLOCKS = dict(vocabulary=40, width=16, depth=2, heads=4, tokens=8)
NETWORKS = {
    "mlp": dict(model="mlp", inputs=12, width=24, depth=5, outputs=10),
    "convnet": dict(model="convnet", channels=[4, 6], side=8),
    "gpt": dict(model="gpt", **BLOCKS, context=12, tied=True),
    "gpt-unfused": dict(
        model="gpt", **BLOCKS, context=8, fused=False, dropout=True
    ),
    "llama": dict(model="llama", **BLOCKS, kv_heads=2, hidden=40),
}
EVERY = pytest.mark.parametrize("name", NETWORKS)
GIVEN = dict(networks=NETWORKS, half="bfloat16", warm_up=1, repeats=1)


def case(name, method="plain", batch=8):
    return Case(name, NETWORKS[name], method, batch, "bfloat16")


def adam(network):
    return torch.optim.Adam(network.parameters(), foreach=True)


# On a CPU ------------------------------------------------------------------


@EVERY
def test_the_ledger_is_right_to_the_byte(name, monkeypatch):
    monkeypatch.setattr(
        subject, "dry_run", lambda *a, **o: SimpleNamespace(peak=3)
    )
    batch = 400 if name == "mlp" else 8
    runs = [[name, method, batch] for method in METHODS]
    rows, samples = ran(step_peaks, CPU, runs=runs, **GIVEN)
    for row, sample in zip(rows, samples, strict=True):
        assert row["ledger"] == sample["requested"]
        assert row["dry_run"] == 3
        assert sample["allocated"] is sample["live_before"] is None
    assert len({row["ledger"] for row in rows}) == len(METHODS)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "method"),
    [("mlp", "16-bit"), ("convnet", "combined"), ("llama", "autocast")],
)
def test_a_dry_run_on_a_cpu_says_the_same(name, method):
    predicted = subject._predict(case(name, method), CPU)
    assert predicted["dry_run"] == predicted["ledger"]


def test_the_phase_is_that_of_the_peak():
    small, large = (
        subject._predict(case("mlp", batch=batch), CPU)["phase"]
        for batch in (4, 400)
    )
    assert (small, large) == ("optimizer", "backward")


def test_a_step_trains_with_the_mean_of_all_samples():
    grads = []
    for method in ("plain", "accumulated"):
        work = case("mlp", method)
        torch.manual_seed(0)
        network, batch = work.build(CPU), work.data(CPU)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        before = network[0].weight.detach().clone()
        train(work, network, optimizer, *batch)
        grads.append(before - network[0].weight.detach())
        assert all(p.grad is None for p in network.parameters())
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads)


# What is trained -----------------------------------------------------------


def test_the_names_of_the_methods_say_what_they_do():
    works = {method: case("mlp", method) for method in METHODS}
    assert {
        method: (work.micro_batch, work.checkpointed, work.recipe)
        for method, work in works.items()
    } == {
        "plain": (8, False, "fp32"),
        "accumulated": (2, False, "fp32"),
        "checkpointed": (8, True, "fp32"),
        "autocast": (8, False, "autocast"),
        "16-bit": (8, False, "bf16"),
        "combined": (4, True, "autocast"),
    }


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_autocast_takes_the_dtype_that_is_given(half):
    seen = []
    for method in ("plain", "autocast"):
        work = replace(case("mlp", method), half=half)
        network = work.build(CPU)
        network.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
        assert work.loss(network, *work.data(CPU)).dtype == torch.float32
    dtype = getattr(torch, half)
    assert seen == [torch.float32, dtype]
    assert replace(case("mlp", "16-bit"), half=half).dtype == dtype


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_checkpoints_change_no_gradient(name):
    grads = []
    for method in ("plain", "checkpointed"):
        torch.manual_seed(0)
        work = case(name, method)
        network = work.build(CPU)
        work.loss(network, *work.data(CPU)).backward()
        grads.append([p.grad for p in network.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


# On a GPU ------------------------------------------------------------------


def test_a_gpu_is_asked_for_its_own_operators(play_gpu):
    gpu = play_gpu(subject)
    runs = [["gpt", "accumulated", 8]]
    (row,) = next(step_peaks(CUDA, runs=runs, **GIVEN))["peak"]
    (asked,) = gpu.asked
    assert row["dry_run"] == 5
    assert asked["on"] == asked["device"] == CUDA
    assert asked["micro_batch"] == 2
    (group,) = asked["optimizer"].param_groups
    assert group["foreach"] is True
    # the ledger's rules are the same on every device
    paper = case("gpt", "accumulated").paper
    own = predict(paper, 8, 8, micro_batch=2, foreach=True)
    assert row["ledger"] == own.peak
    assert gpu.done == []  # nothing is built there before it is on disk


def test_what_was_there_before_is_not_the_models(play_gpu):
    gpu = play_gpu(subject)
    runs = [["gpt", "plain", 8], ["mlp", "combined", 8]]
    _, *samples = step_peaks(CUDA, runs=runs, **{**GIVEN, "warm_up": 2})
    one = ["wait", "empty", "read", "build", "train", "train", "peak"]
    assert gpu.done == one * 3 * len(runs)
    for sample, run in zip(samples, runs, strict=True):
        work = case(*run)
        network = work.build(CUDA)
        given = (network, adam(network), *work.data(CUDA))
        train(work, *given)
        with PeakTracker() as fresh:
            train(work, *given)
        assert sample["live_before"] == gpu.workspace
        assert sample["requested"] == fresh.peak
        assert sample["allocated"] == fresh.peak + gpu.rounding


# The sizes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "half", "least", "most"),
    [
        ("tiny", "bfloat16", 50 << 10, 16 << 20),
        ("t4", "float16", 100 << 20, 4 << 30),  # it has no bfloat16
        ("large", "bfloat16", 2 << 30, 40 << 30),
    ],
)
def test_the_runs_of_a_size(size, half, least, most):
    given = step_peaks.experiment.sizes[size]
    assert given["half"] == half
    for name in given["networks"]:
        assert {run[1] for run in given["runs"] if run[0] == name} == set(
            METHODS
        )
    for name, *rest in given["runs"]:
        work = Case(name, given["networks"][name], *rest, half)
        assert work.batch % work.micro_batch == 0
        if work.method not in ("plain", "combined"):
            continue  # theirs are between
        peak = predict(
            work.paper,
            work.batch,
            *(work.sample if "tokens" in work.shape else ()),
            recipe=work.recipe,
            micro_batch=work.micro_batch,
            checkpointed=work.checkpointed,
            foreach=True,
        ).peak
        assert least <= peak <= most
