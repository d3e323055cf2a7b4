"""The experiments on checkpointing, small, on a CPU; and with a GPU's part
played by stand-ins."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from experiments_helpers import WITHIN_OPERATORS, ran

from membudget import models
from membudget.checkpointing import (
    equal_segments,
    no_segments,
    profile,
    simulate,
)
from membudget.measuring import (
    FlopCounter,
    PeakTracker,
    replay,
)
from membudget_experiments import checkpointing as subject
from membudget_experiments.checkpointing import (
    Segmented,
    attention_of,
    capped,
    largest_batch,
    segments_gpt,
    segments_mlp,
    traced,
)
from membudget_experiments.workload import META

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHAIN = dict(width=16, depth=6)
GPT = dict(vocabulary=32, context=16, width=32, depth=3, heads=2)
ONCE = dict(warm_up=0, repeats=1)
SHAPES = pytest.mark.parametrize(
    ("model", "shape"), [("chain", CHAIN), ("gpt", GPT)], ids=["chain", "gpt"]
)


@pytest.fixture(autouse=True)
def what_is_there_is_not_searched_for_garbage():
    """The experiments collect garbage often, and tests hold a lot."""
    gc.freeze()
    yield
    gc.unfreeze()


# The sweep over segments ---------------------------------------------------


def sweep(*runs, device=CPU, experiment=segments_mlp, shape=CHAIN):
    """The predictions of a sweep."""
    model = "chain" if experiment is segments_mlp else "gpt"
    steps = experiment(device, model=model, shape=shape, runs=runs, **ONCE)
    return next(steps)["peak"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("experiment", "model", "shape"),
    [(segments_mlp, "chain", CHAIN), (segments_gpt, "gpt", GPT)],
)
def test_a_sweep_predicts_its_peaks(experiment, model, shape):
    runs = [[2, 0], [64, 0], [64, 1], [64, 2]]
    given = dict(model=model, shape=shape, runs=runs, warm_up=0, repeats=2)
    rows, samples = ran(experiment, CPU, **given)
    for row, sample in zip(rows, samples, strict=True):
        more = sample["requested"] - row["bytes"]
        assert 0 <= more <= WITHIN_OPERATORS
        assert more == 0 or row["phase"] == "optimizer"
        assert len(sample["seconds"]) == 2
        assert min(sample["seconds"]) > 0
        assert sample["allocated"] is sample["reserved"] is None
        assert sample["workspace"] is None
    # Adam's step is the peak of a small batch; segments of a large one help.
    assert rows[0]["phase"] == "optimizer"
    assert rows[1]["phase"] == "backward"
    assert rows[3]["bytes"] < rows[2]["bytes"] <= rows[1]["bytes"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_peak_of_the_chain_is_the_tape_machines(count):
    batch, depth = 256, CHAIN["depth"]
    (row,) = sweep([batch, count])
    stages = profile(
        models.chain(**CHAIN),
        x=torch.rand(batch, CHAIN["width"]),
        gradients=False,
    )
    segments = equal_segments(depth, count) if count else no_segments(depth)
    run = simulate(stages, segments)
    loss_and_gradient = 8
    assert row["boundary"] == stages[0].output
    assert row["bytes"] == (
        row["alive"] + row["boundary"] + run.peak + loss_and_gradient
    )
    assert row["flops"] == run.time


def test_what_is_alive_before_a_step_of_the_chain():
    parameters, counts = 6 * (16 * 16 + 16), 12
    (row,) = sweep([4, 2])
    assert row["alive"] == 4 * (3 * parameters + counts)
    (row,) = sweep([4, 2], device=CUDA)
    assert row["alive"] == 4 * 3 * parameters  # the counts are on the CPU


def test_the_chains_time_is_that_of_its_layer_runs():
    depth = 5
    rows = sweep(
        *([8, count] for count in (0, 1, 2, depth)),
        shape={"width": 16, "depth": depth},
    )
    more = (4 * depth - 1) / (3 * depth - 1)
    assert rows[0]["time"] == 1
    assert rows[0]["flops"] == 2 * 8 * 16 * 16 * (3 * depth - 1)
    for row in rows[1:]:
        assert row["time"] == pytest.approx(more, abs=1e-6)


# The largest batch ---------------------------------------------------------


def test_largest_batch_predicts_what_fits():
    variants, budget = ["none", "root", "each"], 200_000
    given = dict(model="chain", shape=CHAIN, variants=variants, budget=budget)
    rows, samples = ran(largest_batch, CPU, **given, warm_up=1, repeats=2)
    assert [row["count"] for row in rows] == [0, 3, 6]
    assert [row["reserved_batch"] for row in rows] == [None] * 3
    assert 1 < rows[0]["batch"] == rows[2]["batch"] < rows[1]["batch"]
    for row, sample in zip(rows, samples, strict=True):
        for key in ("count", "batch"):
            assert sample[key] == row[key]
        assert sample["tried"] == [row["batch"], row["batch"] + 1]
        assert len(sample["seconds"]) == 2
        assert 0.8 * budget < sample["requested"] <= budget


def test_the_measurement_does_not_take_over_the_prediction(monkeypatch):
    given = dict(model="chain", shape=CHAIN, variants=["none"], **ONCE)
    _, right = largest_batch(CPU, budget=200_000, **given)
    wrong = {"batch": 3, "reserved_batch": 100}
    monkeypatch.setattr(subject, "_predict_largest", lambda *a: wrong)
    prediction, sample = largest_batch(CPU, budget=200_000, **given)
    assert prediction["largest"][0]["batch"] == 3
    assert sample["batch"] == right["batch"]
    assert sample["tried"][0] == 100
    # not even one sample
    _, sample = largest_batch(CPU, budget=10_000, **given)
    assert (sample["batch"], sample["tried"][-1]) == (0, 1)
    assert sample["seconds"] is sample["requested"] is None


def test_a_later_step_that_does_not_fit_leaves_no_time(monkeypatch):
    def step(*args):
        raise torch.OutOfMemoryError("fragments")

    monkeypatch.setattr(subject, "_step", step)
    given = dict(model="chain", shape=CHAIN, variants=["each"], **ONCE)
    _, sample = largest_batch(CPU, budget=200_000, **given)
    assert sample["batch"] > 1
    assert sample["seconds"] is sample["requested"] is None


def test_the_prediction_for_a_gpu_knows_the_allocator():
    budget, shape = 16 << 20, dict(width=64, depth=4)
    given = dict(model="chain", shape=shape, variants=["root"], budget=budget)
    (row,) = next(largest_batch(CUDA, **given, **ONCE))["largest"]
    assert 1 < row["reserved_batch"] <= row["batch"]

    def events(size):
        meta = Segmented("chain", shape, META, size, row["count"])
        with attention_of("cuda"), PeakTracker(device="meta") as run:
            subject._train(meta)
        return run

    assert events(row["batch"]).peak <= budget
    assert events(row["batch"] + 1).peak > budget
    replay(events(row["reserved_batch"]).events, capacity=budget)
    with pytest.raises(torch.OutOfMemoryError):
        replay(events(row["reserved_batch"] + 1).events, capacity=budget)


def test_how_many_segments_a_root_is():
    counts = [subject._count_of("root", depth) for depth in (1, 4, 5, 12)]
    assert counts == [1, 2, 3, 4]


# What is trained -----------------------------------------------------------


@SHAPES
def test_segments_change_no_gradient(model, shape):
    def gradients(count):
        torch.manual_seed(0)
        work = Segmented(model, shape, CPU, 4, count)
        network, _ = work.build()
        work.loss(network, 4).backward()
        return [p.grad for p in network.parameters()]

    for one, other in zip(gradients(0), gradients(2), strict=True):
        assert torch.equal(one, other)
        assert one.abs().max() > 0


def test_the_chain_stays_alive_however_often_it_is_trained():
    torch.manual_seed(0)
    work = Segmented("chain", CHAIN, CPU, 32, 2)
    network, optimizer = work.build()
    first = work.loss(network, 32)
    for _ in range(50):
        work.train(network, optimizer, 32)
    assert work.loss(network, 32) > 0.9 * first > 0


@SHAPES
def test_a_boundary_is_the_input_of_a_stage(model, shape):
    work = Segmented(model, shape, CPU, 5, 2)
    network, _ = work.build()
    chain = network if model == "chain" else network.blocks
    seen = []
    chain.get_submodule("1").register_forward_pre_hook(
        lambda module, args: seen.append(args[0].nbytes)
    )
    work.loss(network, 5)
    assert seen == [work.boundary()]


def test_attention_is_fused_in_recomputations_as_well():
    shape = {**GPT, "context": 256}
    plain = F.scaled_dot_product_attention
    run, flops = traced(Segmented("gpt", shape, META, 1, 1), "cuda")
    assert F.scaled_dot_product_attention is plain
    scores = 4 * shape["heads"] * 256 * 256
    assert max(a.bytes for a in run.allocations) < scores
    assert flops > traced(Segmented("gpt", shape, META, 1), "cuda")[1]


def test_attention_is_put_back_after_an_error():
    plain = F.scaled_dot_product_attention
    q = torch.empty(1, 2, 8, 4, device="meta")
    with pytest.raises(NotImplementedError, match="attention with"):  # noqa: SIM117
        with attention_of("cpu"):
            F.scaled_dot_product_attention(q, q, q)
    assert F.scaled_dot_product_attention is plain


def test_flops_on_meta_are_those_that_run():
    work = Segmented("gpt", GPT, CPU, 3, 2)
    network, optimizer = work.build()
    with FlopCounter() as flops:
        work.train(network, optimizer, 3)
    assert traced(replace(work, device=META), "cpu")[1] == flops.total


# The sizes -----------------------------------------------------------------


@pytest.mark.parametrize("size", ["t4", "large"])
@pytest.mark.parametrize("experiment", [segments_mlp, segments_gpt])
def test_a_gpu_has_room_for_the_sweeps(experiment, size):
    """For the largest batch without segments, from two of the stages."""
    runs = experiment.experiment.sizes[size]["runs"]
    most = [max(batch for batch, _ in runs), 0]
    shape = {**experiment.experiment.sizes[size]["shape"]}
    deep, shape["depth"] = shape["depth"], 2
    rows = sweep(most, device=CUDA, experiment=experiment, shape=shape)
    room = {"t4": 14 << 30, "large": 130 << 30}[size]
    assert rows[0]["bytes"] * deep / 2 < room
    for batch, count in runs:
        assert batch >= 1
        assert 0 <= count <= deep
        assert [batch, 0] in runs  # to compare with


# On a GPU ------------------------------------------------------------------

TOTAL = 16 << 30


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for a GPU's controls; what was done, in order."""
    done = []

    def note(place, attribute, name, result=None):
        stand_in = lambda *args: (done.append((name, *args)), result)[1]  # noqa: E731
        monkeypatch.setattr(place, attribute, stand_in)

    total = SimpleNamespace(total_memory=TOTAL)
    peaks = dict(peak_requested=3, peak_allocated=5, peak_reserved=7)
    reading = SimpleNamespace(allocated=5, reserved=7, **peaks)
    note(torch.cuda, "empty_cache", "empty")
    note(torch.cuda, "synchronize", "wait")
    note(torch.cuda, "set_per_process_memory_fraction", "cap")
    note(torch.cuda, "get_per_process_memory_fraction", "ask", 0.75)
    note(torch.cuda, "get_device_properties", "total", total)
    note(subject, "read_memory", "read", reading)
    note(subject, "reset_peak", "reset")
    note(subject, "wait_for_autograd", "autograd")
    return done


def test_a_cap_is_set_on_an_empty_cache_and_taken_back(gpu):
    with pytest.raises(torch.OutOfMemoryError):  # noqa: SIM117
        with capped(CUDA, 4 << 30):
            gpu.append(("inside",))
            raise torch.OutOfMemoryError("full")
    assert gpu[-6:] == [
        ("autograd", CUDA),
        ("wait", CUDA),
        ("empty",),
        ("cap", 0.25, CUDA),
        ("inside",),
        ("cap", 0.75, CUDA),
    ]


@pytest.fixture
def step_on_gpu(gpu, monkeypatch):
    """Steps of a GPU's model, done on a CPU; one with 1024 samples fails."""
    train = Segmented.train

    def on_cpu(self, *args):
        if self.device == CUDA and self.window >= 1024:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        gpu.append(("train", self.window))
        device = CPU if self.device == CUDA else self.device
        train(replace(self, device=device), *args)

    build = Segmented.build
    monkeypatch.setattr(Segmented, "train", on_cpu)
    monkeypatch.setattr(
        Segmented,
        "build",
        lambda self: build(
            replace(self, device=CPU) if self.device == CUDA else self
        ),
    )
    return gpu


def test_a_gpu_searches_from_the_allocators_prediction(
    step_on_gpu, monkeypatch
):
    """Under the cap alone: its two steps have to survive."""
    row = {"batch": 1040, "reserved_batch": 1021}

    def seconds(step, *args):
        step()
        return [0.5]

    monkeypatch.setattr(subject, "_predict_largest", lambda *a: row)
    monkeypatch.setattr(subject, "workspace", lambda work: 11)
    monkeypatch.setattr(subject, "seconds", seconds)
    given = dict(model="chain", shape=CHAIN, variants=["root"], **ONCE)
    _, sample = largest_batch(CUDA, budget=1, **given)
    assert (sample["batch"], sample["workspace"]) == (1023, 11)
    assert sample["tried"] == [1021, 1022, 1023, 1025, 1024]
    assert (sample["seconds"], sample["requested"]) == ([0.5], 3)
    cleared = [("autograd", CUDA), ("wait", CUDA), ("empty",)]
    assert step_on_gpu == [
        *[("ask", CUDA), ("total", CUDA), *cleared, ("cap", 1 / TOTAL, CUDA)],
        *[*[("train", 1021)] * 2, *cleared, *[("train", 1022)] * 2, *cleared],
        *[*[("train", 1023)] * 2, *cleared, *cleared, *cleared],
        # No cache is emptied before the step that is measured.
        *[("reset", CUDA), ("train", 1023)] * 2,
        *[("wait", CUDA), ("read", CUDA), ("train", 1023)],
        *[*cleared, ("cap", 0.75, CUDA)],
    ]
