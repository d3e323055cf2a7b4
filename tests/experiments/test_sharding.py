"""The experiments on sharding, small, on a CPU; and with a GPU's part played
by stand-ins."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from experiments_helpers import ran

from membudget.models import Llama
from membudget_experiments.sharding import (
    CALLS,
    PARTS,
    sharded_ranks,
)
from tests.versions import here

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
META = torch.device("meta")
SIZES = ("tiny", "t4", "large")
KINDS = ("parameters", "gradients", "optimizer")


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
    given = sharded_ranks.experiment.sizes[size]
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
