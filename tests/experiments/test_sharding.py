"""The experiments on sharding, small, on a CPU; and with a GPU's part played
by stand-ins."""

import json
import multiprocessing
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from experiments_helpers import good, ran
from torch.distributed.fsdp import CPUOffloadPolicy

from membudget.experiments import sharding as subject
from membudget.experiments.sharding import (
    CALLS,
    PARTS,
    Task,
    fsdp_one_gpu,
    fsdp_ranks,
    residuals,
    sharded_ranks,
)
from membudget.models import GPT, Llama
from membudget.sharding import RankError
from tests.versions import here

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
META = torch.device("meta")
SIZES = ("tiny", "t4", "large")


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not dist.is_initialized()
    assert multiprocessing.active_children() == []


# Simulated ranks -----------------------------------------------------------

LLAMA = dict(vocabulary=66, width=32, depth=2, heads=4, kv_heads=2, hidden=44)
TOKENS = 20
RANKS = (2, 70)
GIVEN = dict(models={"a": LLAMA}, batch=[1, TOKENS], warm_up=0, repeats=1)


def simulated(*ranks, device=CPU, **changes):
    """The prediction's rows and the samples, in pairs."""
    given = {**GIVEN, "runs": [["a", n] for n in ranks], **changes}
    return list(zip(*ran(sharded_ranks, device, **given), strict=True))


@pytest.fixture(scope="module")
def pairs():
    return simulated(*RANKS)


def test_a_simulated_rank_is_that_of_the_formulas(pairs):
    numbers = sum(p.numel() for p in Llama(**LLAMA).parameters())
    units = LLAMA["depth"] + 1
    for (row, sample), ranks in zip(pairs, RANKS, strict=True):
        same = ("states", "parameters", "optimizer", *CALLS)
        assert {key: sample[key] for key in same} == {
            key: row[key] for key in same
        }
        assert row["states"] == sum(row[kind] for kind in KINDS)
        assert row["formula"] <= row["states"]
        assert row["numbers"] == numbers
        assert 0 <= row["formula"] - 16 * numbers / ranks < 3
        assert row["gathers"] == 2 * units
        assert row["reductions"] == units
        # two gathers in bf16, one reduction in fp32
        assert row["all_gather"] == row["reduce_scatter"] >= 4 * numbers


def test_the_parts_add_up_to_the_peak(pairs):
    for _, sample in pairs:
        assert sum(sample[part] for part in PARTS) == sample["peak"]
        assert sample["phase"] == "backward"


def test_the_parts_are_what_they_are_called(pairs):
    """By hand: the peak is in the backward pass of the first block, when its
    MLP and second norm are done."""
    width, hidden = LLAMA["width"], LLAMA["hidden"]
    head = LLAMA["vocabulary"] * width
    whole = 2 * (head + 3 * hidden * width)
    if not here("gradients of norms stay in fp32"):
        whole += 2 * (width + width)
    block = 3 * width * width + 3 * hidden * width + 2 * width
    for row, sample in pairs[:1]:  # on 2 ranks nothing is padded
        assert sample["whole_gradients"] == whole
        assert sample["gathered"] == 2 * (2 * head + width + block)
        assert sample["gathered"] == row["held"]["gathered"]
        # the last block's gradients on their way; nothing to gather ahead
        assert sample["buffers"] == 4 * block
        assert sample["gradients"] == 4 * block // 2
        assert sample["inputs"] == 8 * TOKENS


def test_sharding_does_not_shrink_the_activations(pairs):
    kinds = ("activations", "recomputed", "inputs", "temporaries")
    found = {tuple(sample[kind] for kind in kinds) for _, sample in pairs}
    assert len(found) == 1
    assert min(*found) > 0
    rest = {
        sample["after_forward"] - row["held_after_forward"]
        for row, sample in pairs
    }
    assert len(rest) == 1


def test_what_fsdp_holds_is_bounded_by_the_prediction(pairs):
    held = PARTS[: PARTS.index("buffers") + 1]
    for row, sample in pairs:
        assert row["held_peak"] == sum(row["held"].values())
        assert sum(sample[part] for part in held) <= row["held_peak"]
        assert sample["peak"] > row["held_peak"]


def test_a_simulation_is_the_same_each_time_and_on_each_device(pairs):
    row, sample = pairs[0]
    ((same, again),) = simulated(2, device=CUDA, repeats=2)
    assert same == row
    assert len(again["seconds"]) == 2
    assert len(sample["seconds"]) == 1
    assert min(again["seconds"]) > 0
    assert {**again, "seconds": None} == {**sample, "seconds": None}


@pytest.mark.parametrize("size", SIZES)
def test_the_models_of_a_size(size):
    given = sharded_ranks.sizes[size]
    published = {"7B": 6_738_415_616, "70B": 68_976_648_192}
    _, tokens = given["batch"]
    for name, shape in given["models"].items():
        with META:
            network = Llama(**shape)
        shapes = {tuple(p.shape) for p in network.parameters()}
        # so a whole gradient is told by its size
        assert all(tokens not in dimensions for dimensions in shapes)
        if size != "tiny":
            numbers = sum(p.numel() for p in network.parameters())
            assert numbers == published[name]
    assert {name for name, _ in given["runs"]} == given["models"].keys()


# One device ----------------------------------------------------------------

SMALL = dict(vocabulary=20, context=4, width=16, depth=3, heads=2)
ONE = dict(shape=SMALL, batch=2, steps=3, warm_up=0, repeats=2)
RUNS = ["plain", "sharded", "offloaded"]
KINDS = ("parameters", "gradients", "optimizer")
NUMBERS = sum(p.numel() for p in GPT(**SMALL).parameters())
TENSORS = len(list(GPT(**SMALL).parameters()))


@pytest.fixture(scope="module")
def one():
    return ran(fsdp_one_gpu, CPU, runs=RUNS, **ONE)


def test_one_rank_has_the_predicted_states_and_peak(one):
    rows, samples = one
    for row, sample in zip(rows[:2], samples[:2], strict=True):
        assert sample["outcome"] == "measured"
        assert {kind: sample[kind] for kind in KINDS} == {
            "parameters": 4 * NUMBERS,
            "gradients": 4 * NUMBERS,
            "optimizer": 8 * NUMBERS + 4 * TENSORS,
        }
        assert {key: sample[key] for key in (*KINDS, "on_device")} == {
            key: row[key] for key in (*KINDS, "on_device")
        }
        assert sample["on_device"] == 16 * NUMBERS + 4 * TENSORS
        assert sample["requested"] == row["peak"]
        assert sample["allocated"] is sample["live_before"] is None
        assert len(sample["seconds"]) == 2
    plain, sharded = rows[:2]
    assert sharded["peak"] > plain["peak"]  # copies of units at work


def test_one_rank_trains_the_same_model(one):
    plain, sharded, _ = one[1]
    assert sharded["losses"] == plain["losses"]
    assert len(plain["losses"]) == ONE["steps"]
    assert plain["losses"][-1] < plain["losses"][0]


def test_a_cpu_has_nothing_to_offload_from(one):
    sample = one[1][2]
    assert sample["outcome"] == "needs a GPU to offload from"
    assert {sample[k] for k in sample.keys() - {"run", "outcome"}} == {None}
    assert one[0][2]["on_device"] == 0
    assert one[0][2]["peak"] is None


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for a GPU; what was done, in order.

    The models are on the CPU, whose tensors are those off the GPU.
    """
    done, options = [], []
    begin, group = subject.start, subject.alone

    def note(name, result=None):
        return lambda *args: (done.append(name), result)[1]

    def start(task, device, mesh=None, stage="zero-3", **given):
        assert device is CUDA
        done.append("build")
        options.append((mesh is not None, given))
        return begin(task, CPU, mesh, stage)

    @contextmanager
    def alone(device):
        assert device is CUDA
        with group(CPU) as mesh:
            yield mesh

    def peak_bytes(call, device):
        call()
        done.append("peak")
        return {"requested": 107, "allocated": 209}

    for stand_in in (start, alone, peak_bytes):
        monkeypatch.setattr(subject, stand_in.__name__, stand_in)
    reading = SimpleNamespace(requested=7, allocated=9)
    monkeypatch.setattr(subject, "read_memory", note("read", reading))
    monkeypatch.setattr(subject, "_clear", note("clear"))
    monkeypatch.setattr(subject, "seconds", note("time", [2.0, 2.0]))
    return SimpleNamespace(done=done, options=options)


def test_a_gpus_peak_is_less_what_was_there(gpu):
    steps = fsdp_one_gpu(CUDA, runs=RUNS, **ONE)
    found = [row["on_device"] for row in next(steps)["runs"]]
    assert found == [16 * NUMBERS, 16 * NUMBERS, 0]  # without Adam's counts
    assert gpu.done == []  # nothing is built there before it is on disk
    for sample in steps:
        assert sample["outcome"] == "measured"
        assert sample["requested"] == 100
        assert sample["allocated"] == 200
        assert sample["live_before"] == 7
        assert sample["seconds"] == [2.0, 2.0]
        assert sample["on_device"] == 0  # the stand-in's model is not there
    run = ["clear", "build", "clear", "read", "build", "peak", "time"]
    assert gpu.done == 3 * run
    assert [there for there, _ in gpu.options[::2]] == [False, True, True]
    plain, sharded, (_, offloaded) = gpu.options[1::2]
    assert plain[1] == sharded[1] == {}
    assert isinstance(offloaded["offload_policy"], CPUOffloadPolicy)


# Several ranks -------------------------------------------------------------

SEVERAL = dict(shape=SMALL, batch=6, steps=2, warm_up=1, repeats=2)
GROUPS = [[1, "zero-3"], [3, "zero-2"], [3, "zero-3"]]


@pytest.fixture(scope="module")
def several():
    return ran(fsdp_ranks, CPU, runs=GROUPS, **SEVERAL)


def test_ranks_hold_what_is_predicted(several):
    rows, samples = several
    for row, sample, (ranks, _) in zip(*several, GROUPS, strict=True):
        assert row == {key: sample[key] for key in row}
        assert sample["outcome"] == "measured"
        assert sample["backend"] == "gloo"
        assert sample["requested"] is None
        assert all(len(sample[kind]) == ranks for kind in KINDS)
        assert len(sample["seconds"]) == 2
        assert min(sample["seconds"]) > 0
    assert len(set(samples[1]["optimizer"])) > 1  # 20 rows on 3 ranks
    whole = [rows[0][kind][0] for kind in KINDS]
    assert whole == [4 * NUMBERS, 4 * NUMBERS, 8 * NUMBERS + 4 * TENSORS]


def test_ranks_gather_again_under_zero_3(several):
    _, (alone, two, three) = several
    assert all(alone[key] == 0 for key in CALLS)
    assert three["gathers"] == 2 * two["gathers"] == 2 * (SMALL["depth"] + 1)
    assert three["all_gather"] == 2 * two["all_gather"]
    assert three["reduce_scatter"] == two["reduce_scatter"] > 4 * NUMBERS


def test_ranks_learn_what_one_learns(several):
    _, (alone, two, three) = several
    assert two["losses"] == three["losses"]
    assert two["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert two["losses"][1] < two["losses"][0]


@pytest.fixture
def pool(monkeypatch):
    """Two GPUs, and ranks that answer without processes."""
    asked, answers = [], []

    class Ranks:
        def __init__(self, ranks, *, backend, deadline, show):
            assert show is None
            self.ranks = ranks
            asked.append((ranks, backend, deadline))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            asked.append("end")

        def run(self, worker, *given):
            assert worker is subject.one_rank
            asked.append(given)
            if answers and answers[0] is not None:
                raise answers.pop(0)
            return [answer(rank) for rank in range(self.ranks)]

    monkeypatch.setattr(subject, "Ranks", Ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return SimpleNamespace(asked=asked, answers=answers)


def answer(rank):
    """What a rank with a GPU measures."""
    return {
        "parameters": 10 + rank,
        "gradients": 20 + rank,
        "optimizer": 30 + rank,
        **dict.fromkeys(CALLS, 5),
        "requested": 1000 + rank,
        "losses": [1.0 + rank, 0.5],
        "seconds": [0.1 + rank, 0.2 - rank / 10],
    }


def test_ranks_without_a_gpu_or_without_memory(pool):
    runs = [[2, "zero-2"], [2, "zero-3"], [4, "zero-2"], [4, "zero-3"]]
    text = "rank 1: OutOfMemoryError: CUDA out of memory."
    pool.answers[:] = [RankError(1, text, "…"), None]
    _, samples = ran(fsdp_ranks, CUDA, runs=runs, **SEVERAL)
    task = Task(SMALL, 6)
    assert pool.asked == [
        (2, "cpu:gloo,cuda:nccl", subject.DEADLINE),
        ("cuda", task, "zero-2", 2, 1, 2),
        ("cuda", task, "zero-3", 2, 1, 2),
        "end",
    ]
    why = "skipped: 4 ranks need 4 GPUs, here are 2"
    for sample, outcome in (
        (samples[0], "out of memory"),
        (samples[2], why),
        (samples[3], why),
    ):
        assert sample["outcome"] == outcome
        rest = sample.keys() - {"ranks", "stage", "outcome"}
        assert {sample[key] for key in rest} == {None}
    assert samples[1] == {
        "ranks": 2,
        "stage": "zero-3",
        "outcome": "measured",
        "backend": "nccl",
        "parameters": [10, 11],
        "gradients": [20, 21],
        "optimizer": [30, 31],
        **dict.fromkeys(CALLS, 5),
        "requested": [1000, 1001],
        "losses": [1.5, 0.5],
        "seconds": [1.1, 0.2],
    }


def test_a_rank_that_fails_is_an_error(pool):
    pool.answers[:] = [RankError(1, "rank 1: ValueError: boom", "…")]
    with pytest.raises(RankError, match="boom"):
        list(fsdp_ranks(CUDA, runs=[[2, "zero-2"]], **SEVERAL))
    assert pool.asked[-1] == "end"


# The sizes -----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_runs_of_a_size(size):
    given = fsdp_ranks.sizes[size]
    most = max(ranks for ranks, _ in given["runs"])
    assert most == (4 if size == "tiny" else 8)
    assert given["batch"] % most == 0
    assert fsdp_one_gpu.sizes[size]["shape"] == given["shape"]
    with META:
        network = GPT(**given["shape"])
    numbers = sum(p.numel() for p in network.parameters())
    wanted = {"tiny": 0.24e6, "t4": 124e6, "large": 1.3e9}
    assert numbers == pytest.approx(wanted[size], rel=0.02)


# Reading the records -------------------------------------------------------


def as_record(rows, samples, experiment="sharded_ranks"):
    stored = {"utc": "2026-03-01T10:00:00Z", "values": {"runs": rows}}
    found = good(experiment=experiment, prediction=stored, samples=samples)
    return json.loads(json.dumps(found))


def test_residuals_have_named_parts(pairs):
    rows, samples = (list(side) for side in zip(*pairs, strict=True))
    found = residuals(as_record(rows[::-1], samples))
    assert [row.ranks for row in found] == list(RANKS)
    for row, (predicted, sample) in zip(found, pairs, strict=True):
        assert row.model == "a"
        assert row.formula == predicted["formula"]
        assert row.numbers == predicted["numbers"]
        assert row.held == predicted["held_peak"]
        assert (row.states, row.peak) == (sample["states"], sample["peak"])
        assert row.residual == row.peak - row.formula
        assert sum(row.parts.values()) == row.residual
        assert list(row.parts) == ["shards", *PARTS[3:]]
        missing = predicted["gradients"] - sample["gradients"]
        assert row.parts["shards"] == row.states - row.formula - missing
        assert row.seconds == sample["seconds"][0]


def test_residuals_of_another_experiment():
    with pytest.raises(ValueError, match="fsdp_ranks: use one of sharded_r"):
        residuals(as_record([], [], "fsdp_ranks"))
