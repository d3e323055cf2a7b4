"""What chapter 11 says to try first, by the planner's own answers."""

from dataclasses import replace

import pytest

from membudget.cards import CARDS
from membudget.ledger import PRESETS
from membudget.planning import (
    Job,
    Machine,
    Plan,
    memory,
    search,
    seconds,
    static,
    work,
)
from membudget.planning.search import CHUNKS

EIGHT = PRESETS["Llama 3 8B"]
H100, FAST = CARDS["H100 80 GB"].usable, Machine.of_card("H100 80 GB")


def time(job, plan):
    return seconds(work(job, plan), FAST, plan.recipe)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    "better", [{"recipe": "autocast"}, {"fused": True}], ids=str
)
def test_some_savings_save_time_as_well(better, size):
    job = Job(EIGHT, 4096, 8)
    plain = Plan(size, recipe="fp32", fused=False)
    assert time(job, replace(plain, **better)) < time(job, plain)


def test_nothing_fits_where_the_states_do_not():
    job = Job(EIGHT, 4096, 8)
    for recipe in ("autocast", "master"):
        plan = Plan(1, 32, 16, recipe)
        assert static(job, plan).total > H100


def test_micro_batches_come_before_checkpoints():
    job, t4 = Job(PRESETS["GPT-2 124M"], 1024, 32), CARDS["T4"]
    locks = {"recipe": "autocast", "loss_chunks": None}
    best, *_ = search(job, t4.usable, Machine.of_card("T4"), locks=locks).best
    assert best.plan.micro_batch < 32 and not best.plan.checkpointed


def test_long_sequences_need_checkpoints():
    job = Job(PRESETS["Llama 3.2 1B"], 8192, 8)
    budget = CARDS["RTX 5090"].usable * 9 // 10
    for chunks in CHUNKS:
        assert memory(job, Plan(1, 0, chunks, "autocast")) > budget
    assert memory(job, Plan(1, 16, 16, "autocast")) <= budget


def test_a_slow_link_turns_the_order_round():
    """Between fast cards small micro-batches are cheaper than checkpoints."""
    job = Job(EIGHT, 4096, 64)
    locks = {"recipe": "master", "loss_chunks": None}
    slow = Machine.of_card("H100 80 GB", link=25e9)
    by_link = [
        search(job, H100, machine, ranks=8, locks=locks).best[0].plan
        for machine in (FAST, slow)
    ]
    near, far = by_link
    assert near.checkpointed == 0 and far.checkpointed > 0
    assert near.micro_batch < far.micro_batch
