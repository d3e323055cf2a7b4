"""The experiments themselves, small, on a CPU; and what they do on CUDA."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from experiments_helpers import WITHIN_OPERATORS, ran

from membudget.experiments import measuring, workload
from membudget.experiments.accumulation import micro_batch
from membudget.experiments.measuring import allocator, synchronisation
from membudget.experiments.workload import META, FusedAttention, Workload
from membudget.measuring import PeakTracker

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MLP = dict(inputs=16, width=32, depth=3, outputs=4)
GPT = dict(vocabulary=64, context=64, width=32, depth=1, heads=2)
SHAPES = pytest.mark.parametrize(
    ("model", "shape"), [("mlp", MLP), ("gpt", GPT)], ids=["mlp", "gpt"]
)


@SHAPES
def test_micro_batch_predicts_its_peak(model, shape):
    given = dict(model=model, shape=shape, window=8, micro_batches=[2, 8])
    found = ran(micro_batch, CPU, **given, warm_up=0, repeats=2)
    for row, sample in zip(*found, strict=True):
        more = sample["requested"] - row["bytes"]
        assert 0 <= more <= WITHIN_OPERATORS
        assert len(sample["seconds"]) == 2
        assert min(sample["seconds"]) > 0
        assert sample["allocated"] is sample["reserved"] is None
        assert sample["workspace"] is None


@SHAPES
def test_allocator_predicts_what_is_requested(model, shape):
    given = dict(model=model, shape=shape, batches=[1, 16], steps=2)
    found = ran(allocator, CPU, **given, warm_up=0, repeats=1)
    for row, sample in zip(*found, strict=True):
        more = sample["requested"] - row["requested"]
        assert 0 <= more <= WITHIN_OPERATORS
        assert row["requested"] < row["allocated"] < row["reserved"]
        assert row["allocated"] % 512 == row["reserved"] % (2 << 20) == 0


@pytest.mark.parametrize(("device", "queued"), [(CPU, 8), (CUDA, 1)])
def test_synchronisation_waits_in_one_of_the_two(monkeypatch, device, queued):
    def seconds(call, device, warm_up, repeats, synchronise):
        assert call().shape == (8, 8)
        return [float(synchronise), warm_up, repeats]

    monkeypatch.setattr(measuring, "seconds", seconds)
    steps = synchronisation(device, sides=[8], warm_up=3, repeats=5)
    assert next(steps) == {
        "growth_per_doubling": {"synchronised": 8, "unsynchronised": queued},
        "flops": [{"side": 8, "flops": 1024}],
    }
    if device == CPU:
        sample = next(steps)
        assert sample.keys() == synchronisation.units.keys()
        assert sample == {
            "side": 8,
            "synchronised": [1.0, 3, 5],
            "unsynchronised": [0.0, 3, 5],
        }


@pytest.mark.parametrize("experiment", [micro_batch, allocator])
def test_predictions_for_a_gpu_need_none(experiment):
    given = experiment.sizes["large"]
    values = given[experiment.over][:: len(given[experiment.over]) - 1]
    shape = {**given["shape"], "depth": 1}
    given = {**given, "shape": shape, experiment.over: values}
    rows = next(experiment(CUDA, **given))["peak"]
    first, last = (row.get("bytes", row.get("requested")) for row in rows)
    assert 10**8 < first < last


# The workload --------------------------------------------------------------


def test_flops_of_an_mlp():
    weights = 16 * 32 + 32 * 32 + 32 * 4
    first = 16 * 32  # whose input needs no gradient
    work = Workload("mlp", MLP, META, 1)
    assert work.flops() == 2 * (3 * weights - first)


def test_a_windows_gradient_is_that_of_its_mean_loss():
    torch.manual_seed(0)
    work = Workload("mlp", MLP, CPU, 8)
    network, _ = work.build()
    torch.manual_seed(1)
    whole = work.loss(network, 8)
    torch.manual_seed(1)
    x, y = torch.rand(8, 16), torch.randint(4, (8,))
    torch.testing.assert_close(whole, F.cross_entropy(network(x), y))
    half = Workload("mlp", MLP, CPU, 16)
    torch.manual_seed(1)
    torch.testing.assert_close(half.loss(network, 8), whole / 2)


def test_a_window_is_one_optimizer_step_with_all_its_samples():
    work = Workload("gpt", GPT, CPU, 6)
    network, optimizer = work.build()
    seen = []
    network.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    work.train(network, optimizer, 2)
    assert [tuple(x.shape) for x in seen] == [(2, 64)] * 3
    assert optimizer.defaults["foreach"] is True
    assert {s["step"].item() for s in optimizer.state.values()} == {1}
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fused_attention_stores_no_matrix_of_tokens_times_tokens(kind):
    tokens, heads = 256, 2
    shape = dict(size=(1, heads, tokens, 8), device="meta")
    q = [torch.empty(**shape, requires_grad=True) for _ in range(3)]
    for mode, stored in ((FusedAttention(kind), False), (nullcontext(), True)):
        with mode, PeakTracker() as tracker:
            F.scaled_dot_product_attention(*q, is_causal=True).sum().backward()
        for tensor in q:
            tensor.grad = None
        assert (tracker.peak > 4 * heads * tokens * tokens) == stored


def test_profiled_peak_counts_from_what_is_there():
    def call():
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        return torch.empty(100), b

    found = workload.peak_bytes(call, CPU, alive=7)
    assert found == {
        "requested": 6000 + 7,
        "allocated": None,
        "reserved": None,
    }
    assert workload.peak_bytes(lambda: None, CPU, 7)["requested"] == 7


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for a GPU's counters; what was done, in order."""
    done = []
    reading = SimpleNamespace(
        allocated=5, peak_requested=1, peak_allocated=2, peak_reserved=3
    )

    def note(name, result=None):
        return lambda *args: (done.append(name), result)[1]

    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", note("wait"))
    monkeypatch.setattr(workload, "reset_peak", note("reset"))
    monkeypatch.setattr(workload, "read_memory", note("read", reading))
    return done


def test_the_counters_of_a_gpu_are_reset_before_and_read_after(gpu):
    found = workload.peak_bytes(lambda: gpu.append("call"), CUDA, alive=9)
    assert found == {"requested": 1, "allocated": 2, "reserved": 3}
    assert gpu == ["empty", "reset", "call", "wait", "read"]


def test_the_workspace_is_what_a_small_window_leaves(gpu, monkeypatch):
    assert workload.workspace(Workload("mlp", MLP, CPU, 8)) is None
    assert gpu == []
    trained = []
    monkeypatch.setattr(Workload, "build", lambda self: (None, None))
    monkeypatch.setattr(
        Workload,
        "train",
        lambda self, n, o, size: trained.append((self.window, size)),
    )
    assert workload.workspace(Workload("mlp", MLP, CUDA, 8)) == 5
    assert trained == [(1, 1)]
    assert gpu == ["empty", "read"]


def test_seconds_are_the_raw_samples():
    calls = []
    found = workload.seconds(lambda: calls.append(1), CPU, 2, 5)
    assert len(calls) == 7
    assert len(found) == 5
    assert all(round(second, 9) == second for second in found)
