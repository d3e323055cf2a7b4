"""Layouts: the bytes of a rank, their time, and which one fits."""

import random

import pytest
from layout_helpers import in_a_ring, sharded, simulated

from membudget.cards import CARDS
from membudget.ledger import PRESETS, RECIPES, CausalLM, Transformer
from membudget.planning import Job, Machine, Plan, memory
from membudget.planning.layout import Layout
from membudget.planning.layouts import layout_seconds, layouts, least
from membudget.planning.ranks import need, worst

RNG = random.Random(7)


def plan(tensor, pipeline, data=1):
    """A job, a layout and a stage, at random."""
    family = RNG.choice(("gpt", "llama"))
    batch, many = RNG.choice((1, 2)), RNG.choice((2, 3, 5))
    schedule = "GPipe" if pipeline == 64 else RNG.choice(("GPipe", "1F1B"))
    many += pipeline if schedule == "1F1B" else 0
    heads = 8 * max(1, tensor // 8)
    network = Transformer(
        64 if data > 1 else RNG.choice((40, 64, 300)),
        8 * heads,
        pipeline + RNG.choice((0, 1, 2)),
        heads,
        32,
        family=family,
        **{"hidden": 2 * 8 * heads} if family == "llama" else {},
    )
    tokens = RNG.choice((8, 16))
    # a stage of a Llama takes its turns from the tokens that it is given
    whole = family == "gpt" or pipeline == 1
    layout = Layout(
        tensor=tensor,
        sequence=whole and 1 < tensor <= tokens and RNG.random() < 0.5,
        pipeline=pipeline,
        data=data,
        schedule=schedule,
        micro_batch=batch,
        checkpointed=RNG.choice((False, True)),
        recipe=RNG.choice(("fp32", "bf16")),
    )
    job = Job(network, tokens, batch * many * data, "cpu")
    stages = sorted({0, min(1, pipeline - 1), pipeline - 1})
    return job, layout, RNG.choice(stages)


SPREAD = [(2, 1), (4, 1), (8, 1), (64, 1)] * 6
SPREAD += [(1, 2), (1, 4), (1, 8), (1, 64)] * 6
SPREAD += [(2, 2), (4, 2), (2, 4), (8, 8), (64, 2)] * 4
SPREAD += [(1, 2, 4), (1, 4, 8), (2, 4, 8), (8, 16, 8)] * 2
PLANS = [plan(*ranks) for ranks in SPREAD]


@pytest.mark.few(3)
@pytest.mark.parametrize("job, layout, stage", PLANS)
def test_a_rank_needs_what_a_simulated_one_has(job, layout, stage):
    assert need(job, layout, stage).bytes == simulated(job, layout, stage).peak


def rings():
    """A ring, at random."""
    heads, checkpointed = RNG.choice((4, 8)), RNG.random() < 0.5
    network = Transformer(
        RNG.choice((8, 40, 300)),
        64,
        RNG.choice((1, 2, 3)),
        heads,
        family="llama",
        hidden=RNG.choice((64, 128, 256)),
        kv_heads=heads // RNG.choice((1, 2)),
    )
    size = RNG.choice((1, 4, 8))
    layout = Layout(
        context=RNG.choice((2, 4, 16)),
        sharded=False,
        micro_batch=size,
        checkpointed=checkpointed,
        recipe=RNG.choice(("fp32", "bf16")),
    )
    return Job(network, RNG.choice((64, 128)), size, "cpu"), layout


@pytest.mark.few(1)
@pytest.mark.parametrize("job, layout", [rings() for _ in range(24)])
def test_a_rank_of_a_ring_needs_what_a_simulated_one_has(job, layout):
    """To 1 % where a checkpointed block's ring is the worst moment."""
    found, law = in_a_ring(job, layout), need(job, layout).bytes
    assert law == pytest.approx(found, rel=0.01 * layout.checkpointed)


def shares():
    """FSDP2 and tensor parallelism, at random."""
    tensor, data = RNG.choice((1, 2, 4, 8)), RNG.choice((2, 4, 8))
    family, size = RNG.choice(("gpt", "llama")), RNG.choice((1, 2))
    network = Transformer(
        RNG.choice((40, 64, 304)),
        64,
        RNG.choice((1, 2, 3, 5)),
        8,
        32,
        family=family,
        **{"hidden": 128} if family == "llama" else {},
    )
    layout = Layout(
        tensor=tensor,
        sequence=tensor > 1 and RNG.random() < 0.5,
        data=data,
        micro_batch=size,
        recipe=RNG.choice(("fp32", "bf16")),
    )
    return Job(network, RNG.choice((8, 16)), size * data, "cpu"), layout


@pytest.mark.few(2)
@pytest.mark.parametrize("job, layout", [shares() for _ in range(24)])
def test_fsdp_beside_tensor_parallelism_needs_at_most_this(job, layout):
    """Or the one number less by which the loss divides."""
    more = need(job, layout).bytes - sharded(job, layout)
    assert more in (0, RECIPES[layout.recipe].parameters)


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_one_card_needs_what_the_plan_of_one_does(checkpointed):
    job = Job(Transformer(depth=3), 32, 4, "cpu")
    layout = Layout(
        micro_batch=4, checkpointed=bool(checkpointed), recipe="fp32"
    )
    plan = Plan(4, checkpointed=checkpointed, fused=False)
    assert need(job, layout).bytes == memory(job, plan)


LLAMA = Transformer(128, 64, 8, 8, family="llama", kv_heads=4, hidden=128)
JOB = Job(LLAMA, 16, 16, "cpu")


def test_the_first_stage_holds_a_whole_network():
    """8 blocks on 4 stages: 4 micro-batches of 2 blocks each."""
    flying = Layout(pipeline=4)
    found = [need(JOB, flying, stage) for stage in range(4)]
    held = [one.others for one in found]
    assert held[1] == 2 * held[2] == pytest.approx(2 / 3 * held[0], rel=0.1)
    assert held[3] == 0


def test_a_stage_has_buffers_for_all_micro_batches():
    """16 of 16 tokens × 64 × 2 bytes, each way that a stage has."""
    each = 16 * 16 * 64 * 2
    found = [need(JOB, Layout(pipeline=4), r).boundaries for r in range(4)]
    assert found == [each, 2 * each, 2 * each, each]


BAD = {
    "3 tensor ranks do not divide the heads": Layout(tensor=3),
    "8 tensor ranks do not divide the heads of keys": Layout(tensor=8),
    "5 data ranks with micro-batches of 1": Layout(data=5),
    "16 stages are more than the 8 blocks": Layout(pipeline=16),
    "1F1B with 8 stages needs as many": Layout(pipeline=8, data=4),
    "32 ranks that share a sequence's tokens": Layout(context=32),
}


@pytest.mark.parametrize("message", BAD)
def test_a_layout_that_is_none_of_the_jobs_is_refused(message):
    with pytest.raises(ValueError, match=message):
        need(JOB, BAD[message])
    assert BAD[message].fault(JOB).startswith(message)


def test_what_has_no_rules_is_refused():
    with pytest.raises(ValueError, match="tensor is 1"):
        Layout(sequence=True)
    with pytest.raises(ValueError, match="no rules for autocast"):
        Layout(recipe="autocast")
    tied = Job(Transformer(tied=True), 32, 4)
    with pytest.raises(ValueError, match="is tied"):
        need(tied, Layout(pipeline=2))
    unfused = Job(Transformer(fused=False), 32, 4)
    with pytest.raises(ValueError, match="fused attention"):
        need(unfused, Layout())
    hub = Job(CausalLM(64, 32, 2, 4, 2, 8, 64), 8, 4)
    with pytest.raises(ValueError, match="GPT and Llama"):
        need(hub, Layout())
    with pytest.raises(ValueError, match="use 4 or 8"):
        layouts(JOB, "H100 80 GB", 6)


def test_a_bubble_is_what_the_others_wait_for():
    """(P - 1)/(M + P - 1) of the time: 3 of 19."""
    machine = Machine(1e12, 1e11, 1e-6, 1e10, "a test")
    time = layout_seconds(JOB, Layout(pipeline=4), machine)
    share = time.bubble / (time.total - time.data)
    assert share == pytest.approx(3 / 19)


def test_tensor_parallelism_is_slow_between_nodes():
    machine = Machine(1e12, 1e11, 1e-6, 450e9, "a test")
    within = layout_seconds(JOB, Layout(tensor=4), machine, node=4)
    across = layout_seconds(JOB, Layout(tensor=4), machine, node=2)
    assert across.tensor > within.tensor > 0


def test_all_that_is_found_fits_and_the_fastest_is_first():
    job = Job(PRESETS["Llama 3 8B"], 4096, 64)
    found = layouts(job, "H100 80 GB", 64)
    budget = CARDS["H100 80 GB"].usable
    for one in found:
        assert one.layout.cards == 64
        assert worst(job, one.layout).bytes <= budget
    times = [one.time.total for one in found]
    assert times == sorted(times)
    assert layouts(Job(PRESETS["Llama 3 70B"], 4096, 64), "T4", 8) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("job, layout, stage", PLANS)
def test_no_layout_is_left_out_that_would_fit(job, layout, stage):
    """What is weighed first is less than what the first stage needs."""
    assert least(job, layout) <= need(job, layout).bytes
