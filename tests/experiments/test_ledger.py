"""The experiment on the ledger, small, on a CPU; and with a GPU's part played
by stand-ins."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from experiments_helpers import good

from membudget import experiments
from membudget.experiments import ledger as subject
from membudget.experiments.ledger import (
    METHODS,
    Case,
    Recomputed,
    step_peaks,
    summary,
    train,
)
from membudget.ledger import Chain, Transformer, predict
from membudget.measuring import PeakTracker, trace_step

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
META = torch.device("meta")
NETWORKS = {
    "mlp": {
        "model": "mlp",
        "inputs": 12,
        "width": 24,
        "depth": 5,
        "outputs": 10,
    },
    "convnet": {"model": "convnet", "channels": [4, 6], "side": 8},
    "gpt": {
        "model": "gpt",
        "vocabulary": 40,
        "width": 16,
        "depth": 2,
        "heads": 4,
        "context": 12,
        "tied": True,
        "tokens": 8,
    },
    "gpt-unfused": {
        "model": "gpt",
        "vocabulary": 40,
        "width": 16,
        "depth": 1,
        "heads": 4,
        "context": 8,
        "fused": False,
        "dropout": True,
        "tokens": 8,
    },
    "llama": {
        "model": "llama",
        "vocabulary": 40,
        "width": 16,
        "depth": 2,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 40,
        "tokens": 8,
    },
}
EVERY = pytest.mark.parametrize("name", NETWORKS)
GIVEN = {
    "networks": NETWORKS,
    "half": "bfloat16",
    "warm_up": 1,
    "repeats": 1,
}


def case(name, method="plain", batch=8):
    return Case(name, NETWORKS[name], method, batch, "bfloat16")


def step(work):
    """A tracked step of a new network."""
    network = work.build(CPU)
    optimizer = torch.optim.Adam(network.parameters(), foreach=True)
    batch = work.data(CPU)
    train(work, network, optimizer, *batch)
    with PeakTracker(network, optimizer, *batch) as run:
        train(work, network, optimizer, *batch)
    return run


# On a CPU ------------------------------------------------------------------


@EVERY
def test_the_ledger_is_right_to_the_byte(name, monkeypatch):
    monkeypatch.setattr(
        subject, "dry_run", lambda *a, **o: SimpleNamespace(peak=3)
    )
    batch = 400 if name == "mlp" else 8
    runs = [[name, method, batch] for method in METHODS]
    prediction, *samples = step_peaks(CPU, runs=runs, **GIVEN)
    rows = prediction["peak"]
    for found in (rows, samples):
        keys = ("network", "method", "batch")
        assert [[row[key] for key in keys] for row in found] == runs
    for row, sample in zip(rows, samples, strict=True):
        assert sample.keys() == step_peaks.units.keys()
        assert row["ledger"] == sample["requested"]
        assert row["dry_run"] == 3
        assert sample["allocated"] is sample["live_before"] is None
    assert len({row["ledger"] for row in rows}) == len(METHODS)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("mlp", "16-bit"),
        ("convnet", "accumulated"),
        ("convnet", "autocast"),
        ("convnet", "combined"),
        ("gpt", "combined"),
        ("gpt-unfused", "plain"),
        ("llama", "autocast"),
    ],
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


@EVERY
@pytest.mark.parametrize("method", METHODS)
def test_the_step_is_that_of_trace_step(name, method):
    work = case(name, method)
    network = work.build(CPU)
    run = trace_step(
        network,
        work.loss,
        *work.data(CPU),
        optimizer=torch.optim.Adam(network.parameters(), foreach=True),
        micro_batch=work.micro_batch,
    )
    own = step(work)
    assert (own.peak, own.start) == (run.peak, run.start)
    assert own.timeline == run.timeline


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


@EVERY
@pytest.mark.parametrize("method", METHODS)
def test_a_network_is_the_ledgers(name, method):
    work = case(name, method)
    network, paper = work.build(CPU), work.paper
    if isinstance(paper, Transformer):
        numbers = paper.parameters
        segments = paper.depth
    else:
        assert isinstance(paper, Chain)
        numbers = sum(p.numel() for p in paper.model.parameters())
        segments = len(paper.segments)
    assert sum(p.numel() for p in network.parameters()) == numbers
    wrapped = [m for m in network.modules() if isinstance(m, Recomputed)]
    assert len(wrapped) == segments * work.checkpointed
    dtype = torch.bfloat16 if method == "16-bit" else torch.float32
    assert {p.dtype for p in network.parameters()} == {dtype}
    x, y = work.data(CPU)
    assert x.dtype == (torch.int64 if "tokens" in work.shape else dtype)
    assert (x.shape, len(y)) == ((8, *work.sample), 8)
    assert y.dtype == torch.int64


def test_the_names_of_the_methods_say_what_they_do():
    given = {
        method: (
            (work := case("mlp", method)).micro_batch,
            work.checkpointed,
            work.recipe,
        )
        for method in METHODS
    }
    assert given == {
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
    for method in ("plain", "autocast", "combined"):
        work = replace(case("mlp", method), half=half)
        network = work.build(CPU)
        network.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
        assert work.loss(network, *work.data(CPU)).dtype == torch.float32
    dtype = getattr(torch, half)
    assert seen == [torch.float32, dtype, dtype]
    assert replace(case("mlp", "16-bit"), half=half).dtype == dtype


@pytest.mark.parametrize("name", ["mlp", "gpt", "llama"])
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


# Too little memory ---------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] can't allocate memory: 8 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_run_without_memory_is_none_and_the_others_go_on(monkeypatch, error):
    held = []
    real = trace_step

    def trace(network, *args, **options):
        if len(held) == 0:
            held.append(weakref.ref(network))
            raise error
        gc.collect()
        assert held[0]() is None
        return real(network, *args, **options)

    monkeypatch.setattr(subject, "trace_step", trace)
    runs = [["mlp", "plain", 8], ["mlp", "plain", 16]]
    _, first, second = step_peaks(CPU, runs=runs, **GIVEN)
    assert first == {
        "network": "mlp",
        "method": "plain",
        "batch": 8,
        "requested": None,
        "allocated": None,
        "live_before": None,
    }
    assert second["requested"] > 0


def test_other_errors_are_passed_on(monkeypatch):
    def trace(*args, **options):
        raise RuntimeError("shapes")

    monkeypatch.setattr(subject, "trace_step", trace)
    steps = step_peaks(CPU, runs=[["mlp", "plain", 8]], **GIVEN)
    next(steps)
    with pytest.raises(RuntimeError, match="shapes"):
        next(steps)


# On a GPU ------------------------------------------------------------------

WORKSPACE, ROUNDING = 1000, 7


@pytest.fixture
def gpu(monkeypatch):
    """A GPU played by the CPU; what was done, in order.

    Its libraries take a workspace in the first step. Its counters tell what
    the tracker counts, and that workspace.
    """
    done, alive = [], []

    def held():
        return sum(r() is not None for r in alive)

    def workspace():
        return WORKSPACE if ("train",) in done else 0

    def note(name):
        return lambda *args: done.append((name, *args))

    def read(device):
        assert device == CUDA
        done.append(("read", held()))
        used = workspace()
        return SimpleNamespace(requested=used, allocated=2 * used)

    def build(self, device):
        assert device in (CUDA, META)
        network = plain(self, CPU if device == CUDA else device)
        if device == CUDA:
            alive.append(weakref.ref(network))
            done.append(("build",))
        return network

    def step(work, network, *args):
        done.append(("train",))
        real(work, network, *args)

    def peak(call, device):
        assert device == CUDA
        with PeakTracker() as run:
            call()
        done.append(("peak",))
        bytes_ = workspace() + run.peak
        return {
            "requested": bytes_,
            "allocated": workspace() + bytes_ + ROUNDING,
            "reserved": 1 << 30,
        }

    def dry(*args, **options):
        asked.append(options)
        return SimpleNamespace(peak=5)

    plain, data, real, asked = Case.build, Case.data, train, []
    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", note("wait"))
    monkeypatch.setattr(subject, "read_memory", read)
    monkeypatch.setattr(subject, "peak_bytes", peak)
    monkeypatch.setattr(subject, "train", step)
    monkeypatch.setattr(subject, "dry_run", dry)
    monkeypatch.setattr(Case, "build", build)
    monkeypatch.setattr(
        Case, "data", lambda self, d: data(self, CPU if d == CUDA else d)
    )
    return SimpleNamespace(done=done, asked=asked)


def names(done):
    return [name for name, *_ in done]


def test_a_gpu_is_asked_for_its_own_operators(gpu):
    runs = [["gpt", "accumulated", 8]]
    (row,) = next(step_peaks(CUDA, runs=runs, **GIVEN))["peak"]
    (asked,) = gpu.asked
    assert row["dry_run"] == 5
    assert asked["on"] == asked["device"] == CUDA
    assert asked["micro_batch"] == 2
    (group,) = asked["optimizer"].param_groups
    assert group["foreach"] is True
    # the ledger's rules are the same on every device
    work = case("gpt", "accumulated")
    assert (
        row["ledger"]
        == predict(work.paper, 8, 8, micro_batch=2, foreach=True).peak
    )
    assert gpu.done == []  # nothing is built there before it is on disk


@pytest.mark.parametrize("warm_up", [1, 2])
def test_what_was_there_before_is_not_the_models(gpu, warm_up):
    runs = [["gpt", "plain", 8], ["mlp", "combined", 8]]
    given = {**GIVEN, "warm_up": warm_up}
    _, *samples = step_peaks(CUDA, runs=runs, **given)
    done = gpu.done[:]
    for sample, (name, method, _) in zip(samples, runs, strict=True):
        fresh = fresh_bytes(case(name, method))
        assert sample["live_before"] == WORKSPACE
        assert sample["requested"] == fresh
        assert sample["allocated"] == fresh + ROUNDING
    one = ["wait", "empty", "read", "build", "train", "train", "peak"]
    assert names(done) == one * (warm_up + 1) * len(runs)
    # every model is gone before the next reading
    assert {entry[1] for entry in done if entry[0] == "read"} == {0}
    assert {entry[1:] for entry in done if entry[0] == "wait"} == {(CUDA,)}


def fresh_bytes(work):
    """The peak of what a step makes on top of what is there."""
    network = work.build(CUDA)
    optimizer = torch.optim.Adam(network.parameters(), foreach=True)
    batch = work.data(CUDA)
    train(work, network, optimizer, *batch)
    with PeakTracker() as run:
        train(work, network, optimizer, *batch)
    return run.peak


def test_a_gpu_without_memory_goes_on(gpu, monkeypatch):
    stand_in = subject.train

    def step(work, *args):
        if work.batch == 16:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        stand_in(work, *args)

    monkeypatch.setattr(subject, "train", step)
    runs = [["gpt", "plain", 8], ["gpt", "plain", 16], ["gpt", "plain", 4]]
    _, *samples = step_peaks(CUDA, runs=runs, **GIVEN)
    assert [s["batch"] for s in samples] == [8, 16, 4]
    assert [s["requested"] is None for s in samples] == [False, True, False]
    assert samples[1]["allocated"] is samples[1]["live_before"] is None
    assert {entry[1] for entry in gpu.done if entry[0] == "read"} == {0}


# The sizes -----------------------------------------------------------------

ROOM = {
    "tiny": (50 << 10, 16 << 20),
    "t4": (100 << 20, 4 << 30),
    "large": (2 << 30, 40 << 30),
}


@pytest.mark.parametrize("size", ROOM)
def test_the_runs_of_a_size(size):
    given = step_peaks.sizes[size]
    runs = [tuple(run) for run in given["runs"]]
    assert len(runs) == len(set(runs)) >= 40
    models = {given["networks"][name]["model"] for name, *_ in runs}
    assert models == {"mlp", "convnet", "gpt", "llama"}
    for name in given["networks"]:
        assert {run[1] for run in runs if run[0] == name} == set(METHODS)
    least, most = ROOM[size]
    for name, *rest in runs:
        work = Case(name, given["networks"][name], *rest, given["half"])
        parts = METHODS[work.method].get("parts", 1)
        assert work.batch % parts == 0
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


def test_a_t4_has_no_bfloat16():
    assert step_peaks.sizes["t4"]["half"] == "float16"


def test_the_committed_cpu_records_bear_the_ledger_out():
    for record in experiments.load("step_peaks", "tiny", "cpu"):
        for by in ("ledger", "dry_run"):
            found = summary(record, by)
            assert len(found.rows) >= 40
            assert found.unmeasured == 0
            assert abs(found.worst.error) <= 0.1


# Reading the record --------------------------------------------------------


def record(*rows, experiment="step_peaks"):
    """From network, batch, ledger, dry run, requested, allocated."""
    samples, peaks = [], []
    for network, batch, ledger, dry, requested, allocated in rows:
        names = {"network": network, "method": "plain", "batch": batch}
        peaks.append({**names, "ledger": ledger, "dry_run": dry})
        samples.append(
            {**names, "requested": requested, "allocated": allocated}
        )
    values = {"utc": "2026-03-01T10:00:00Z", "values": {"peak": peaks}}
    return good(experiment=experiment, prediction=values, samples=samples)


ROWS = (
    ("mlp", 1, 101, 100, 100, 125),
    ("mlp", 2, 190, 200, 200, 200),
    ("gpt", 1, 400, 400, None, None),
    ("gpt", 2, 408, 400, 400, 500),
)


def test_a_summary_has_signed_errors():
    found = summary(record(*ROWS))
    assert [tuple(row) for row in found.rows] == [
        ("mlp", "plain", 1, 101, 100, pytest.approx(1)),
        ("mlp", "plain", 2, 190, 200, pytest.approx(-5)),
        ("gpt", "plain", 2, 408, 400, pytest.approx(2)),
    ]
    assert found.worst is found.rows[1]
    assert found.median == pytest.approx(2)
    assert found.unmeasured == 1


def test_a_summary_of_the_other_prediction_and_measurement():
    found = summary(record(*ROWS), "dry_run")
    assert [row.error for row in found.rows] == [0, 0, 0]
    found = summary(record(*ROWS), "dry_run", "allocated")
    assert [row.error for row in found.rows] == [-20, 0, -20]
    assert (found.worst.measured, found.median) == (125, 20)


def test_predictions_are_found_by_their_names():
    shuffled = record(*ROWS)
    shuffled["samples"].reverse()
    found = summary(shuffled)
    assert [row.predicted for row in found.rows] == [408, 190, 101]


def test_a_summary_of_what_ended_early():
    cut = record(*ROWS)
    del cut["samples"][1:]
    assert len(summary(cut).rows) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"by": "guess"}, "'guess': use one of ledger, dry_run"),
        ({"of": "reserved"}, "'reserved': use one of requested, allocated"),
    ],
)
def test_a_summary_of_what_is_not_there(given, words):
    with pytest.raises(ValueError, match=words):
        summary(record(*ROWS), **given)


def test_a_summary_of_another_experiment():
    with pytest.raises(ValueError, match="is of allocator: use one of step"):
        summary(record(*ROWS, experiment="allocator"))


def test_a_summary_of_nothing():
    nothing = [(*row[:5], None) for row in ROWS]
    with pytest.raises(ValueError, match="no run has allocated bytes"):
        summary(record(*nothing), of="allocated")
