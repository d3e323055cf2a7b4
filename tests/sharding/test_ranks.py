"""Real ranks against the formulas and the simulation, to the byte."""

from functools import cache

import fsdp_workers
import pytest
import torch
import torch.distributed as dist
from fsdp_workers import CASES, OPTIMIZERS, loss_of

from membudget.ledger import States
from membudget.sharding import (
    Ranks,
    Traffic,
    fsdp_traffic,
    rank_moments,
    rank_states,
    sent,
    simulate_rank,
    units_of,
    zero_states,
    zero_traffic,
)
from tests.soak import SOAK

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this PyTorch has no gloo",
)

SIZES = (1, 2, 3, 4) if SOAK else (4,)


@cache
def run(ranks):
    """For each rank what it found in each case; one start for each size."""
    with Ranks(ranks) as pool:
        return pool.run(fsdp_workers.all_steps, CASES)


@pytest.fixture(scope="module", params=SIZES)
def found(request):
    return run(request.param)


def units(name):
    model = CASES[name].build()
    return units_of(model, CASES[name].blocks(model))


@pytest.mark.parametrize("name", CASES)
def test_states_and_traffic_are_the_formulas(found, name):
    case, ranks = CASES[name], len(found)
    said = fsdp_traffic(
        units(name),
        ranks,
        case.stage,
        gathered=2 if case.bf16 else 4,
        accumulation_steps=case.steps,
        synchronise_last=case.last,
    )
    for rank, cases in enumerate(found):
        states = rank_states(units(name), ranks, rank, case.optimizer)
        assert States(*cases[name].states) == states, f"{rank} of {ranks}"
        assert cases[name].traffic == said
        assert cases[name].finite


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_have_the_model_together(found, name):
    """Padding aside; and each at least its padding more."""
    model, ranks = CASES[name].build(), len(found)
    whole = sum(p.numel() for p in model.parameters())
    kept = {"sgd": 0, "momentum": 1, "adam": 2}[CASES[name].optimizer]
    assert sum(c[name].numbers[0] for c in found) == whole
    assert sum(c[name].numbers[1] for c in found) == kept * whole
    stored = sum(c[name].states[0] for c in found)
    padding = sum(u.padded(ranks) * ranks - u.numbers for u in units(name))
    assert stored == 4 * (whole + padding)
    assert (padding == 0) == all(
        shape[0] % ranks == 0 for u in units(name) for shape in u.shapes
    )


SIMULATED = (
    "uneven, zero-2, bf16",
    "a bias of 2 and one of 1",
    "tied in a block",
    "GPT",
    "convnet with batch norm",
    "uneven, zero-3, 3 micro-batches, each reduced",
)


@pytest.mark.parametrize("ranks", SIZES if SOAK else [4])
@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulation_is_the_real_run(name, ranks):
    case, last = CASES[name], ranks - 1
    simulation = simulate_rank(
        case.build,
        case.shard,
        loss_of,
        case.x,
        ranks=ranks,
        rank=last,
        optimizer=OPTIMIZERS[case.optimizer],
        micro_batches=case.steps,
    )
    real = run(ranks)[last][name]
    assert simulation.states == States(*real.states)
    assert simulation.traffic == real.traffic


def test_how_much_memory_does_rank_3_need():
    """The formula and a real run above what the paper says: 16 Ψ / N."""
    ranks, rank = 4, 3
    formula = rank_states(units("GPT"), ranks, rank)
    real = run(ranks)[rank]["GPT"]
    assert formula == States(*real.states)
    # By the padding and the counts alone.
    numbers = sum(unit.numbers for unit in units("GPT"))
    padded = sum(unit.padded(ranks) for unit in units("GPT"))
    tensors = sum(len(unit.shapes) for unit in units("GPT"))
    own = real.numbers[0]
    paper = zero_states(numbers, ranks, recipe="fp32").total
    assert paper == 4 * numbers
    assert formula.total == 8 * padded + 8 * own + 4 * tensors
    assert formula.total == 18_452


@pytest.fixture(scope="module")
def two_ranks():
    with Ranks(2) as pool:
        yield pool


def test_the_moments_of_a_step(two_ranks):
    """And at times what one or two of gloo's threads hold still."""
    build, model = CASES["even"].build, CASES["even"].build()
    of_units = units_of(model, list(model))
    largest = max(4 * 2 * unit.padded(2) for unit in of_units)
    arguments = 8, build, list, torch.empty(0, 8)
    ranks = two_ranks.run(fsdp_workers.moments_again, *arguments)
    for rank, found in enumerate(ranks):
        said = rank_moments(of_units, 2, rank)
        for name in found[0]:
            sizes = [moments[name] for moments in found]
            least = getattr(said, name).total
            assert min(sizes) == least
            # Of a reduction both sides, of a gather one is in the other.
            assert max(sizes) <= least + 2 * (largest + largest // 2)


def test_ddp(two_ranks):
    """2 Ψ numbers of gradients, whole states, and nothing while it waits."""
    numbers = 2 * (256 * 256 + 256)
    for found in two_ranks.run(fsdp_workers.data_parallel):
        assert set(found["waiting"].values()) == {Traffic()}
        reduced = found["traffic"]["all-reduce"]
        assert reduced.bytes == found["gradients"] == 4 * numbers
        assert reduced.calls > 1  # buckets
        assert found["traffic"]["all-gather"] == Traffic()
        assert found["traffic"]["reduce-scatter"] == Traffic()
        assert found["sent"] == zero_traffic(numbers, "ddp", "fp32", ranks=2)
        assert found["sent"] == sent("all-reduce", 4 * numbers, 2)
        whole = zero_states(numbers, 2, "ddp", "fp32")
        counts = 4 * 4  # of Adam's steps, for four tensors
        assert found["held"] == (
            whole.parameters,
            whole.gradients,
            whole.optimizer + counts,
        )


def test_a_parameter_without_a_dimension(two_ranks):
    """What `units_of` refuses, PyTorch refuses, too."""
    for said in two_ranks.run(fsdp_workers.a_parameter_without_a_dimension):
        assert "scalar" in said
