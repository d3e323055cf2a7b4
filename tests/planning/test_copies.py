"""What goes to the host and back: its bytes, and its seconds."""

from dataclasses import replace
from math import inf
from operator import mul
from random import Random

import pytest
from planning_helpers import any_plan
from test_hub import SHAPES
from test_memory import check_against_the_ledger

from membudget.cards import CARDS
from membudget.ledger import Transformer, host_step, predict
from membudget.offloading import FULL, TAPE, least_width, sustained
from membudget.planning import (
    Job,
    Machine,
    Plan,
    Work,
    memory,
    search,
    seconds,
    work,
)
from membudget.planning.copies import Copy, left_of
from membudget.planning.machine import HOST
from membudget.planning.plan import HOST as HOST_AXES
from tests.soak import examples

MACHINE = Machine(2e9, 3e9, 4e-6, inf, "made up", 1e8, 1e9)
JOB = Job(Transformer(40, 16, 3, 4, context=16), 16, 8)


def moved(job, plan):
    """Bytes that leave with saved tensors, by the ledger."""
    names = "recipe", "micro_batch", "checkpointed", "loss_chunks"
    names += "kept_attention", "adapter", "offloaded"
    how = {name: getattr(plan, name) for name in names}
    how |= {"kernels": job.device, "lists": job.device, "optimizer": None}
    return predict(job.network, job.batch, job.tokens, **how).moved


def test_all_that_leaves_is_copied_out_and_back():
    """To the byte, at any depth."""
    rng = Random(0)
    for _ in range(examples(24)):
        job, plan = any_plan(rng, "one rank")
        deep = rng.choice([1, 2, 3, 6, 9])
        job = replace(job, network=replace(job.network, depth=deep))
        again = rng.randint(0, deep)
        plan = replace(plan, checkpointed=again, offloaded=True)
        full, rest = divmod(job.batch, plan.micro_batch)
        found = 0
        for times, size in ((full, plan.micro_batch), (1, rest)):
            left = left_of(job, plan, size) if size else (0, 0, 0)
            blocks = 1, deep - again, again
            found += times * sum(map(mul, blocks, left))
        assert found == moved(job, plan), (job, plan)


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("again", [0, 2, 4])
def test_of_models_of_transformers(shape, again):
    job = Job(replace(shape, depth=4), 12, 3)
    plan = Plan(2, again, recipe="bf16", offloaded=True)
    found = sum(times * size for times, size, _ in work(job, plan).copies)
    assert found == 2 * moved(job, plan)
    check_against_the_ledger(job, plan)


def test_a_copy_is_hidden_as_far_as_the_work_beside_it_takes():
    """One sticks out by 0.6 s twice, another does not, and nothing runs
    beside the third."""
    copies = (
        Copy(2, 10**8, (8 * 10**8, 0, 0)),
        Copy(3, 10**7, (8 * 10**8, 0, 0)),
        Copy(1, 10**8),
    )
    one = Work(10**9, 0, 0, 0, copies, 5 * 10**8)
    assert seconds(one, MACHINE) == pytest.approx(0.5 + 2 * 0.6 + 1 + 0.5)


def test_an_optimizer_on_the_host():
    """Its gradients and weights cross the link once a step, and its own
    bytes are those of the host's memory; no kernel steps on the device."""
    for size in (8, 1):
        here = work(JOB, Plan(size, recipe="master"))
        there = work(JOB, Plan(size, recipe="master", optimizer_on_host=True))
        step = host_step([JOB.network.parameters], "master")
        assert there.copies == (Copy(1, step.out), Copy(1, step.back))
        assert there.host == step.touched == 28 * JOB.network.parameters
        assert there.flops == here.flops and there.bytes < here.bytes
    taken = seconds(there, MACHINE)
    without = seconds(there._replace(copies=(), host=0), MACHINE)
    link, own = (step.out + step.back) / 1e8, step.touched / 1e9
    assert taken == pytest.approx(without + link + own)


def test_the_law_of_least_width_is_that_of_the_plan():
    """Where the law says that a tape hides, twice as wide blocks' does, of
    blocks half as wide it does not: operators take time beside FLOPs."""
    flops, link = sustained("A100 80 GB", 0.4)
    width = least_width(TAPE, flops, link, 1024)
    machine = Machine(flops, inf, 0, inf, "FLOPs alone", link, HOST)
    sticks = []
    for factor in (0.5, 2):
        wide = 64 * round(factor * width / 64)
        shape = Transformer(256, wide, 2, 8, context=1024)
        done = work(
            Job(shape, 1024, 1), Plan(1, recipe="bf16", offloaded=True)
        )
        blocks = done.copies[:2]  # out, and back
        alone = done._replace(copies=())
        sticks.append(
            [
                seconds(done._replace(copies=(copy,)), machine)
                - seconds(alone, machine)
                for copy in blocks
            ]
        )
    assert sticks[0][0] > sticks[0][1]  # a backward pass takes longer
    assert sticks[0][0] > 0
    assert sticks[1] == pytest.approx([0, 0], abs=1e-9)


def test_a_machine_that_knows_no_host():
    blind = replace(MACHINE, host_link=None, host_bandwidth=None)
    for plan in (Plan(1, offloaded=True), Plan(1, optimizer_on_host=True)):
        with pytest.raises(ValueError, match="no host_link: give it one"):
            seconds(work(JOB, plan), blind)
    half = replace(MACHINE, host_bandwidth=None)
    with pytest.raises(ValueError, match="no host_bandwidth: give it one"):
        seconds(work(JOB, Plan(1, optimizer_on_host=True)), half)
    with pytest.raises(ValueError, match="host_link is 0: use a finite"):
        replace(MACHINE, host_link=0)
    card = Machine.of_card("T4")
    assert card.host_link == FULL * CARDS["T4"].host_link
    assert card.host_bandwidth == HOST


# The search --------------------------------------------------------------


def test_the_search_looks_at_the_host_if_it_is_asked():
    job, machine = replace(JOB, batch=3), Machine.of_card("T4")
    budget, locks = 2**30, {"loss_chunks": None}
    plain = search(job, budget, machine, locks=locks)
    assert not any(c.plan.offloaded for c in plain.frontier)
    locks |= {axis: [False, True] for axis in HOST_AXES}
    asked = search(job, budget, machine, locks=locks)
    assert asked.smallest.peak < plain.smallest.peak
    assert asked.smallest.plan.offloaded
    assert asked.smallest.plan.optimizer_on_host
    for choice in asked.frontier:
        assert choice.peak == memory(job, choice.plan)
        found = seconds(work(job, choice.plan), machine)
        assert choice.seconds == pytest.approx(found)
        total = sum(choice.causes.values())
        assert total == pytest.approx(choice.slowdown - 1, abs=1e-9)
    assert "hide behind a block's work" in str(asked)
    assert "hide behind a block's work" not in str(plain)


def test_no_plan_of_several_ranks_is_on_the_host():
    job, machine = replace(JOB, batch=2), Machine.of_card("T4")
    locks = {"offloaded": [False, True]}
    found = search(job, 2**30, machine, ranks=2, locks=locks)
    assert not any(choice.plan.offloaded for choice in found.frontier)
    with pytest.raises(ValueError, match="no plan goes with these locks"):
        search(job, 2**30, machine, ranks=2, locks={"offloaded": True})
