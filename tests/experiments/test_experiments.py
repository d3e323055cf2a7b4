"""The experiments themselves, small, on a CPU; and what they do on CUDA."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from experiments_helpers import WITHIN_OPERATORS, ran

from membudget.measuring import PeakTracker
from membudget_experiments import workload
from membudget_experiments.accumulation import micro_batch
from membudget_experiments.workload import META, FusedAttention, Workload

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


def test_predictions_for_a_gpu_need_none():
    given = micro_batch.experiment.sizes["large"]
    shape = {**given["shape"], "depth": 1}
    given = {**given, "shape": shape, "micro_batches": [1, 64]}
    first, last = next(micro_batch(CUDA, **given))["peak"]
    assert 10**8 < first["bytes"] < last["bytes"]


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
