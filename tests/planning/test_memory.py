"""The bytes of plans: against their programs, run and tracked."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from planning_helpers import any_host, any_plan, making, measured
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from membudget.ledger import (
    GPT2,
    PLANNED,
    PRESETS,
    RECIPES,
    TARGETS,
    Adapter,
    Transformer,
    predict,
    rules,
)
from membudget.ledger.paper import LISTS
from membudget.measuring import witness
from membudget.planning import Job, Plan, at_peak, memory, static
from membudget.planning.memory import (
    family_of,
    input_bytes,
    passes,
    sharded_of,
    workspace,
)
from membudget.planning.plan import HOST
from membudget.planning.rows import placed, upper
from membudget.sharding import shard, simulate_rank, zero_states
from tests.soak import examples


@pytest.mark.parametrize(
    ("kind", "count"), [("one rank", examples(10)), ("ddp", examples(4))]
)
def test_the_program_of_a_plan_peaks_where_the_plan_says(kind, count):
    rng = Random(0)
    for _ in range(count):
        job, plan = any_plan(rng, kind)
        if kind == "one rank":
            plan = any_host(rng, plan)
        assert measured(job, plan) == memory(job, plan), (job, plan)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_program_of_an_adapter_over_4_bits(family):
    """By the allocator: no mode sees what bitsandbytes allocates. What is
    left are the numbers that scale the branches."""
    pytest.importorskip("bitsandbytes")
    shape = Transformer(300, 64, 3, 4, context=16, family=family)
    adapter = Adapter(TARGETS[family], 3, 4, four_bits=True)
    job = Job(shape, 16, 6, "cpu")
    plan = Plan(2, 1, None, "bf16", fused=True, adapter=adapter)
    names = {}
    exec(plan.code(job), names)
    batch = names["tokens"], names["targets"]
    with torch.backends.mkldnn.flags(enabled=False):
        found = witness(lambda: names["step"](*batch))
    held = static(job, plan)
    states = held.parameters + held.optimizer + input_bytes(job, 6)
    kept = torch.get_rng_state().nbytes  # by the one checkpoint
    left = found - kept - (memory(job, plan) - states)
    assert 0 <= left <= 3 * len(adapter.targets) * 16, left


def test_an_adapter_needs_what_the_ledger_says():
    """At any depth, on a GPU, in parts or at once."""
    rng = Random(0)
    for _ in range(examples(20)):
        job, plan = any_plan(rng, "one rank")
        if plan.adapter is None:
            continue
        deep = rng.choice([3, 6, 9])
        job = replace(job, network=replace(job.network, depth=deep))
        job, fused = replace(job, device="cuda"), rng.random() < 0.5
        plan = replace(plan, fused=fused)
        names = "recipe", "optimizer", "micro_batch", "checkpointed"
        names += "loss_chunks", "kept_attention", "fused", "adapter"
        expected = predict(
            job.network,
            job.batch,
            job.tokens,
            **rules(job.network, "cuda") | {"foreach": not fused},
            **{name: getattr(plan, name) for name in names},
        )
        assert memory(job, plan) == expected.peak, (job, plan)


def test_what_is_on_the_host_at_any_depth():
    """Of saved tensors and of the optimizer, as the ledger says."""
    rng = Random(0)
    for _ in range(examples(24)):
        job, plan = any_plan(rng, "one rank")
        deep, plan = rng.choice([2, 3, 6, 9]), any_host(rng, plan)
        network = replace(job.network, depth=deep)
        job = replace(job, network=network, device=rng.choice(LISTS))
        plan = replace(plan, checkpointed=rng.randint(0, deep))
        check_against_the_ledger(job, plan)


def test_attention_that_stays_while_all_else_waits_on_the_host():
    """The worst block is the last that is checkpointed."""
    network = Transformer(40, 16, 6, 4, context=16)
    plan = Plan(1, 3, 4, "master-fp32-gradients", "sgd", kept_attention=True)
    job, plan = Job(network, 12, 1, "cpu"), replace(plan, offloaded=True)
    check_against_the_ledger(job, plan)
    assert at_peak(job, plan).row.startswith("blocks.2")


def check_against_the_ledger(job, plan):
    names = "recipe", "optimizer", "micro_batch", "checkpointed"
    names += "loss_chunks", "kept_attention", "fused", "adapter", *HOST
    how = {name: getattr(plan, name) for name in names}
    how |= rules(job.network, job.device)
    how["foreach"] = how["foreach"] and not plan.fused
    expected = predict(job.network, job.batch, job.tokens, **how)
    assert memory(job, plan) == expected.peak, (job, plan)


def test_real_ranks_hold_what_the_plan_says():
    """But for the loss times its share of the batch."""
    rng = Random(0)
    for _ in range(examples(6)):
        job, plan = any_plan(rng, "shards")
        held, planned = measured(job, plan), memory(job, plan)
        assert held <= planned <= held + 8, (job, plan)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "master"])
def test_a_shards_program_never_makes_the_whole_model(recipe):
    network = Transformer(40, 16, 2, 4, context=16)
    job = Job(network, 16, 4, "cpu")
    plan = Plan(1, 0, None, recipe, "sgd", "zero-3", 4)
    assert making(job, plan) == static(job, plan).parameters


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())


def simulated(job, plan):
    """The peak of a simulated rank."""
    share, recipe = plan.share(job), RECIPES[plan.recipe]
    policy = {}
    if recipe.master:
        reduced = torch.bfloat16 if recipe.gradients == 2 else torch.float32
        policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduced)

    def cut(model, mesh):
        blocks = model.model.blocks
        for block in blocks[: plan.checkpointed]:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False
            )
        shard(model, blocks, plan.stage, mesh=mesh, **policy)

    def loss(model, *batch):
        mixed = bool(recipe.autocast)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            value = model(*batch)
        return value * (plan.micro_batch / share) if waiting else value

    waiting = share - plan.micro_batch
    tokens = torch.empty(
        plan.micro_batch, job.tokens, dtype=torch.long, device="meta"
    )
    found = simulate_rank(
        lambda: WithLoss(job.network.build("cpu")),
        cut,
        loss,
        tokens,
        tokens,
        ranks=plan.ranks,
        micro_batches=share // plan.micro_batch,
        optimizer=partial(
            torch.optim.AdamW, foreach=False, fused=plan.fused or None
        ),
    )
    return found.peak + 2 * 8 * job.tokens * waiting


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(64))
def test_simulated_ranks_hold_what_the_plan_says(seed):
    """Within a thousandth, and never more."""
    rng = Random(seed)
    width, depth = rng.choice([256, 512]), rng.randint(2, 6)
    shape = rng.choice([8000, 32000]), width, depth, 8
    own = {"hidden": 1024, "kv_heads": 2, "family": "llama"}
    network = Transformer(
        *shape,
        context=1024,
        tied=rng.random() < 0.3,
        **rng.choice([own, {"family": "gpt"}]),
    )
    ranks, size = rng.choice([2, 4, 8, 64]), rng.choice([1, 2])
    batch = ranks * size * rng.choice([1, 2, 4, 8])
    job = Job(network, rng.choice([128, 512, 1024]), batch, "cpu")
    recipes = "fp32", "autocast", "master", "master-fp32-gradients"
    plan = Plan(
        size,
        rng.randint(0, depth),
        None,
        rng.choice(recipes),
        "adam",
        rng.choice(["zero-2", "zero-3"]),
        ranks,
        fused=rng.random() < 0.5,
    )
    held, planned = simulated(job, plan), memory(job, plan)
    assert held <= planned <= 1.001 * held, (job, plan)


@pytest.mark.parametrize("network", [GPT2, PRESETS["Llama 3.2 1B"]])
def test_a_gpus_rules_are_the_ledgers(network):
    plan = Plan(2, 3, 2, "autocast")
    options = {"checkpointed": 3, "loss_chunks": 2, "recipe": "autocast"}
    gpu = {"lists": "cuda", "kernels": "cuda"}
    for way, fused in {"foreach": False, "fused": True}.items():
        predicted = predict(
            network, 4, 64, micro_batch=2, **gpu, **{way: True}, **options
        )
        one = replace(plan, fused=fused)
        assert at_peak(Job(network, 64, 4), one) == predicted.at_peak


def any_shape(rng):
    """Any network, on any device, with any plan."""
    heads = rng.choice([1, 2, 4])
    family = rng.choice(["gpt", "llama"])
    own = {"dropout": rng.random() < 0.3}
    if family == "llama":
        shared = [h for h in (1, 2, 4) if heads % h == 0]
        own = {"kv_heads": rng.choice(shared), "hidden": rng.choice([7, 64])}
    network = Transformer(
        rng.choice([2, 13, 100, 1000]),
        heads * rng.choice([2, 4, 8]),
        rng.randint(1, 12),
        heads,
        context=64,
        family=family,
        fused=rng.random() < 0.6,
        tied=rng.random() < 0.5,
        **own,
    )
    ranks, share = rng.choice([1, 2, 4]), rng.randint(1, 9)
    device = rng.choice(["cpu", "cuda"])
    tokens = rng.choice([1, 2, 7, 12, 16, 64])
    job = Job(network, tokens, share * ranks, device)
    names = [
        rng.choice([*RECIPES]),
        rng.choice([*PLANNED]),
        rng.choice(["ddp", "zero-2", "zero-3"]) if ranks > 1 else "ddp",
    ]
    if "8bit" in names[1] and names[2] != "ddp":
        names[1] = "adam"
    if ranks > 1 and names[::2] == ["master-fp32-gradients", "ddp"]:
        names[0] = "master"
    return job, Plan(
        rng.randint(1, share),
        rng.randint(0, network.depth),
        rng.choice([None, None, 1, 2, 3, 4, 8]),
        *names,
        ranks,
        network.fused and rng.random() < 0.3,
    )


def predicted(job, plan, batch, **more):
    """The ledger's walk through the whole network."""
    names = "recipe", "micro_batch", "checkpointed", "loss_chunks"
    names += "kept_attention", "fused", "optimizer"
    how = rules(job.network, job.device)
    how["foreach"] &= not plan.fused
    how |= {name: getattr(plan, name) for name in names} | more
    return predict(job.network, batch, job.tokens, **how)


def sharded_peak(job, plan):
    """What FSDP2 holds at each place, and what a walk needs there."""
    network, family, share = job.network, family_of(plan), plan.share(job)
    recipe = plan.recipe.removesuffix("-fp32-gradients")
    found = [sum(sharded_of(network, family, False).step)]
    found[0] += workspace(network, family, job.device)
    for size, summed, scaled in passes(share, plan.micro_batch):
        held = sharded_of(network, family, summed).places
        more = {"micro_batch": size, "optimizer": None, "recipe": recipe}
        for row in placed(predicted(job, plan, size, **more)):
            needed, _ = row.line(0)
            found.append(sum(held[row.place][row.block]) + needed + scaled)
    return 16 * job.tokens * share + max(found)


def test_few_blocks_tell_what_all_of_them_need():
    rng = Random(0)
    for _ in range(examples(60)):
        job, plan = any_shape(rng)
        if plan.stage != "ddp":
            assert memory(job, plan) == sharded_peak(job, plan), (job, plan)
            continue
        kept = {"keep_gradients": plan.ranks > 1}
        whole = predicted(job, plan, plan.share(job), **kept)
        assert at_peak(job, plan) == whole.at_peak, (job, plan)


def test_blocks_that_are_checkpointed_save():
    """Each of them, also where shards are a bound."""
    job = Job(GPT2, 1024, 32)
    for further in ({}, {"stage": "zero-3", "ranks": 4}):
        peaks = [memory(job, Plan(4, j, 8, **further)) for j in range(13)]
        assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]


def test_two_unequal_micro_batches_need_less_than_two_equal_ones():
    """The second finds the gradients of the first beside it: the larger one
    goes first. So the peak does not always grow with the micro-batch."""
    network = Transformer(100, 64, 4, 4, context=16)
    job = Job(network, 16, 8, "cpu")
    equal, unequal = (memory(job, Plan(size)) for size in (4, 5))
    assert unequal < equal


def test_states():
    job = Job(GPT2, 64, 8)
    whole = static(job, Plan(1))
    assert whole.parameters == 4 * GPT2.parameters
    assert whole.total > 16 * GPT2.parameters
    split = static(job, Plan(1, stage="zero-3", ranks=8)).total
    paper = zero_states(GPT2.parameters, 8, recipe="fp32").total
    assert paper <= split < 1.01 * paper


def test_the_highest_lines():
    """Constant and slope; the second is never the highest alone."""
    lines = [(100, 0), (50, 10), (0, 20), (0, 20), (-900, 30)]
    assert upper(lines) == [0, 2, 4]
    assert upper(lines, most=80) == [0, 2]
    assert upper([(5, 1), (6, 0)]) == [0]
