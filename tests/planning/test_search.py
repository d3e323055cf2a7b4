"""The search: against every plan, one by one."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from membudget.cards import GIB
from membudget.ledger import GPT2, Adapter, Transformer, predict
from membudget.measuring import format_bytes
from membudget.planning import (
    CAUSES,
    Job,
    Machine,
    Plan,
    memory,
    search,
    seconds,
    static,
    work,
)
from tests.soak import part_of

MACHINE = Machine(1e12, 1e11, 1e-5, inf, "a made-up machine")
CLUSTER = Machine(1e12, 1e11, 1e-6, 1e10, "made-up machines")


CHUNKS = (None, 4)


def every_plan(job, machine, ranks, optimizers):
    """Seconds, peak and plan of all of them."""
    share, depth = job.batch // ranks, job.network.depth
    stages = ("ddp", "zero-2", "zero-3") if ranks > 1 else ("ddp",)
    found = []
    for size, blocks, chunks, optimizer, stage in product(
        range(1, share + 1), range(depth + 1), CHUNKS, optimizers, stages
    ):
        plan = Plan(size, blocks, chunks, "fp32", optimizer, stage, ranks)
        took = seconds(work(job, plan), machine)
        found.append((took, memory(job, plan), plan))
    return sorted(found, key=lambda entry: entry[:2])


def shape(depth=2):
    """The work of all depths is counted once, for all of these tests."""
    return Transformer(300, 16, depth, 4, context=16)


@pytest.mark.parametrize(("machine", "ranks"), [(MACHINE, 1), (CLUSTER, 2)])
def test_the_search_is_exact(machine, ranks):
    job, optimizers = Job(shape(), 16, 6), ("adam", "sgd")
    locks = {"optimizer": optimizers, "loss_chunks": CHUNKS}
    plans = every_plan(job, machine, ranks, optimizers)
    peaks = sorted(peak for _, peak, _ in plans)
    for budget in (peaks[0], peaks[len(peaks) // 8], peaks[-1]):
        answer = search(job, budget, machine, ranks=ranks, locks=locks)
        fit = [entry for entry in plans if entry[1] <= budget]
        best = answer.best[0]
        assert best.seconds == pytest.approx(fit[0][0])
        assert best.peak <= budget
        assert best.slowdown == pytest.approx(fit[0][0] / plans[0][0])
    # the frontier: each plan is at a peak at which nothing is faster
    assert answer.smallest.peak == peaks[0]
    for choice in answer.frontier:
        took = min(t for t, peak, _ in plans if peak <= choice.peak)
        assert choice.seconds == pytest.approx(took)
        assert memory(job, choice.plan) == choice.peak
    for peak in peaks:
        took = min(t for t, size, _ in plans if size <= peak)
        assert answer.within(peak).seconds == pytest.approx(took)


@pytest.fixture(scope="module")
def answer():
    job = Job(shape(8), 16, 32)
    free = {"optimizer": ["adam", "sgd"], "loss_chunks": [None, 8]}
    least = search(job, GIB, MACHINE, locks=free).smallest.peak
    return search(job, 2 * least, MACHINE, locks=free)


def test_the_best_save_in_different_ways(answer):
    first, second, third = answer.best
    assert first.seconds <= second.seconds <= third.seconds
    plans = [choice.plan for choice in answer.best]
    ways = {
        (p.micro_batch < 32, p.checkpointed > 0, p.loss_chunks, p.optimizer)
        for p in plans
    }
    assert len(ways) == 3
    assert all(choice.peak <= answer.budget for choice in answer.best)


def test_a_slowdown_is_the_sum_of_its_causes(answer):
    for choice in [*answer.best, *answer.frontier]:
        assert tuple(choice.causes) == CAUSES
        total = sum(choice.causes.values())
        assert total == pytest.approx(choice.slowdown - 1, abs=1e-9)
    slowest = answer.smallest.causes
    assert slowest["recomputation"] > 0 < slowest["small micro-batches"]
    assert slowest["traffic"] == 0


def test_the_causes_of_a_plan_are_told_below_it(answer):
    shares = {"recomputation": 0.25, "traffic": -0.005, "update": 0.0049}
    plans = [
        replace(answer.best[0], causes=shares),
        replace(answer.best[0], causes={"traffic": 0.0}),
    ]
    _, first, causes, second, *_ = str(replace(answer, best=plans)).split("\n")
    assert causes == "   recomputation +0.25, traffic -0.01"
    assert first.startswith("1. ") and second.startswith("2. ")


def test_traffic_is_a_cause():
    job = Job(shape(), 16, 8)
    found = search(job, GIB, CLUSTER, ranks=4, locks={"stage": "zero-3"})
    assert found.best[0].causes["traffic"] == 0  # the fastest has it, too
    found = search(job, GIB, CLUSTER, ranks=4)
    sharded = [c for c in found.frontier if c.plan.stage == "zero-3"]
    assert sharded
    assert all(choice.causes["traffic"] > 0 for choice in sharded)


def test_the_next_gib(answer):
    assert answer.next_gib.slowdown == 1
    assert answer.next_gib == answer.frontier[-1]
    text = str(answer)
    assert "The next GiB buys × 1.00." in text
    assert all(line in text for line in answer.assumes)
    enough = search(answer.job, GIB, MACHINE)
    assert "The next GiB buys nothing." in str(enough)


def test_nothing_fits():
    job = Job(shape(), 16, 32)
    states = static(job, Plan(1)).total
    few = search(job, states, MACHINE, locks={"checkpointed": 0})
    assert few.best == [] and few.smallest.peak > states
    assert few.within(states) is None
    assert "nothing fits. The smallest plan needs" in str(few)
    with pytest.raises(
        ValueError, match=f"states alone are {format_bytes(states)}"
    ):
        search(job, states - 1, MACHINE)


def test_locks_hold():
    wanted = {
        "micro_batch": 3,
        "checkpointed": (1, 2),
        "loss_chunks": 5,
        "recipe": "fp32",
        "optimizer": "adam-8bit",
    }
    job = Job(shape(), 16, 8)
    for choice in search(job, GIB, MACHINE, locks=wanted).frontier:
        plan = choice.plan
        assert plan.checkpointed in (1, 2)
        assert (plan.micro_batch, plan.loss_chunks) == (3, 5)
        assert (plan.recipe, plan.optimizer) == ("fp32", "adam-8bit")


def test_an_adapter_is_an_axis():
    """To train all weights takes longer, and more memory."""
    job = Job(shape(), 16, 2)
    thin = Adapter(("qkv",), rank=2)
    locks = {"adapter": [None, thin, replace(thin, four_bits=True)]}
    locks["loss_chunks"] = None
    answer = search(job, GIB, MACHINE, locks=locks)
    least = answer.frontier[0]
    assert least.plan.adapter.four_bits
    assert least.peak == memory(job, least.plan)
    adapters = {choice.plan.adapter for choice in answer.frontier}
    assert adapters == {thin, replace(thin, four_bits=True)}  # both faster
    assert "LoRA of rank 2 in qkv over 4 bits" in least.plan.text(job)


@pytest.mark.parametrize("axis", [7, "LoRA"])
def test_an_adapter_is_one_of_the_ledgers(axis):
    with pytest.raises(TypeError, match="the adapter is"):
        search(Job(GPT2, 64, 8), GIB, MACHINE, locks={"adapter": axis})


@pytest.mark.parametrize(
    ("locks", "says"),
    [
        ({"depth": 3}, "there is no axis 'depth'"),
        ({"recipe": "fp8"}, "no recipe 'fp8'"),
        ({"recipe": []}, "recipe is empty"),
        ({"micro_batch": 5}, "micro_batch is 5"),
        ({"checkpointed": 13}, "checkpointed is 13"),
        ({"loss_chunks": 0}, "loss_chunks is 0"),
        (
            {"adapter": Adapter(("query",))},
            "a block has no linear layer 'query': use qkv, out, up, down",
        ),
        (
            {"stage": "zero-3", "adapter": Adapter(("qkv",))},
            "no plan goes with these locks",
        ),
        (
            {"stage": "zero-3", "optimizer": "adam-8bit"},
            "no plan goes with these locks",
        ),
    ],
)
def test_what_no_search_takes(locks, says):
    with pytest.raises(ValueError, match=says):
        search(Job(GPT2, 64, 8), GIB, MACHINE, ranks=2, locks=locks)


def test_one_rank_has_no_stage():
    with pytest.raises(ValueError, match="no stage 'zero-3'"):
        search(Job(GPT2, 64, 8), GIB, MACHINE, locks={"stage": "zero-3"})


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_nth_block_is_never_less_than_the_first_ones(family):
    """As many are recomputed, so the axis is left out."""
    grid = product([True, False], [8, 200], ["fp32", "autocast"], [None, 1])
    for fused, vocabulary, recipe, micro_batch in part_of(grid, Random(0), 8):
        network = Transformer(
            vocabulary, 16, 6, 4, context=32, family=family, fused=fused
        )
        how = {"recipe": recipe, "micro_batch": micro_batch}
        for every in (2, 3):
            blocks = range(0, 6, every)
            spread, first = (
                predict(network, 3, 32, checkpointed=chosen, **how).peak
                for chosen in (blocks, len(blocks))
            )
            assert spread >= first


def test_kept_attention_wins_where_sequences_are_long():
    job = Job(Transformer(256, 64, 4, 4, context=4096), 4096, 2)
    budget = memory(job, Plan(1, 4, kept_attention=True))
    whole = {"loss_chunks": None}
    either = whole | {"kept_attention": [False, True]}
    without = search(job, budget, MACHINE, locks=whole).best[0]
    best = search(job, budget, MACHINE, locks=either).best[0]
    assert best.plan.kept_attention and not without.plan.kept_attention
    assert best.seconds < without.seconds
    unfused = Job(Transformer(fused=False), 8, 2)
    with pytest.raises(ValueError, match="use fused=True, or free the lock"):
        search(unfused, 10**9, MACHINE, locks={"kept_attention": True})
    with pytest.raises(ValueError, match="or kept_attention=False"):
        memory(unfused, Plan(1, kept_attention=True))
