"""The work of a plan: the same as an operator by operator count of a step."""

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from membudget.adapters import adapt
from membudget.checkpointing import ATTENTION
from membudget.ledger import (
    PLANNED,
    RECIPES,
    TARGETS,
    Adapter,
    Transformer,
)
from membudget.models import chunked_loss
from membudget.planning import Job, Plan, WorkCounter, work
from membudget.planning.counter import less
from membudget.planning.plan import STAGES as PLAN_STAGES
from membudget.planning.work import MAKE, update
from membudget.sharding import STAGES, fsdp_traffic, units_of
from tests.soak import part_of

RNG = random.Random(0)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
SHAPES = {
    "gpt": Transformer(40, 16, 1, 4, context=16),
    "gpt, dropout": Transformer(
        13, 8, 1, 2, context=16, fused=False, dropout=True, tied=True
    ),
    "llama": Transformer(40, 16, 1, 4, hidden=24, family="llama"),
    "llama, grouped": Transformer(
        13, 16, 1, 4, hidden=7, kv_heads=2, family="llama", tied=True
    ),
    "llama, not fused": Transformer(
        13, 16, 1, 2, kv_heads=1, family="llama", fused=False
    ),
}


def counted(job, plan):
    """FLOPs, bytes and operators of a real step on a CPU."""
    kind, samples = RECIPES[plan.recipe], job.batch
    model = job.network.build("cpu")
    if kind.parameters == 2:
        model = model.bfloat16()
    if plan.adapter:
        adapt(
            model,
            plan.adapter.targets,
            plan.adapter.rank,
            dropout=0.1 * plan.adapter.dropout,
            dtype=DTYPES[plan.adapter.itemsize],
        )
    how = {"use_reentrant": False}
    if plan.kept_attention:
        make = create_selective_checkpoint_contexts
        how["context_fn"] = partial(make, list(ATTENTION))
    for block in model.blocks[: plan.checkpointed]:
        block.forward = partial(checkpoint, block.forward, **how)
    weights = [p for p in model.parameters() if p.requires_grad]
    stepped = weights
    if kind.master:
        stepped = [p.detach().float() for p in weights]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in weights]
    apart = kind.gradients > kind.parameters
    optimizer = MAKE[plan.optimizer](stepped)
    if plan.fused and plan.optimizer == "adam":
        optimizer = torch.optim.AdamW(stepped, fused=True)
    batch = torch.zeros(2, samples, job.tokens, dtype=torch.long)

    def forward(x, y):
        if plan.loss_chunks:
            hidden = model.hidden(x)
            return chunked_loss(model.head, hidden, y, plan.loss_chunks)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def add(total, p):
        total += p.grad
        p.grad = None

    if apart:
        for p, total in zip(weights, sums, strict=True):
            p.register_post_accumulate_grad_hook(partial(add, total))

    def step():
        for part in batch.split(plan.micro_batch, 1):
            cast = nullcontext()
            if kind.autocast:
                cast = torch.autocast("cpu", torch.bfloat16)
            with cast:
                loss = forward(*part)
            if part.shape[1] < samples:
                loss = loss * (part.shape[1] / samples)
            loss.backward()
        if kind.master:
            for p, copied, total in zip(weights, stepped, sums, strict=True):
                copied.grad = total if apart else p.grad.float()
        optimizer.step()
        if kind.master:
            for p, copied in zip(weights, stepped, strict=True):
                p.data.copy_(copied)
        if apart:
            for total in sums:
                total.zero_()
        model.zero_grad()

    step()
    with WorkCounter() as counter:
        step()
    return counter.counts


NETWORKS = [
    ("llama, grouped", "autocast", True),
    ("gpt, dropout", "master-fp32-gradients", False),
    *part_of(product(SHAPES, RECIPES, (False, True)), RNG, 0),
]
PLANS = product(
    ((1, 0), (1, 1), (3, 0), (3, 2), (4, 4)),
    MAKE,
    ((5, 5), (5, 9), (5, 1), (5, 2), (6, 4), (6, 3), (1, 1)),
    (1, 2, 5, 12),
)
PLANS = list(PLANS)


@pytest.mark.parametrize(("shape", "recipe", "chunked"), NETWORKS)
def test_the_work_is_that_of_a_real_step(shape, recipe, chunked):
    """FLOPs, bytes and operators; the last micro-batch may be smaller."""
    for blocks, optimizer, batch, chunks in RNG.sample(PLANS, 7):
        depth, checkpointed = blocks
        samples, micro = batch
        job = Job(replace(SHAPES[shape], depth=depth), 11, samples)
        chunks = chunks if chunked else None
        plan = Plan(
            micro,
            checkpointed,
            chunks,
            recipe,
            optimizer,
            kept_attention=SHAPES[shape].fused and samples == 5,
            fused=chunked,
        )
        assert work(job, plan)[:3] == counted(job, plan), plan


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_work_of_adapters_is_that_of_a_real_step(family, recipe):
    for blocks, optimizer, batch, chunks in RNG.sample(PLANS, 7):
        job = Job(replace(SHAPES[family], depth=blocks[0]), 11, batch[0])
        sizes = [2, 4] if recipe == "bf16" else [4]
        targets = RNG.sample(TARGETS[family], RNG.randint(1, 4))
        adapter = Adapter(targets, 2, RNG.choice(sizes), RNG.random() < 0.5)
        plan = Plan(
            batch[1], blocks[1], chunks, recipe, optimizer, adapter=adapter
        )
        assert work(job, plan)[:3] == counted(job, plan), plan


def test_weights_in_4_bits_are_read_and_written_before_each_product():
    """Forward and backward, and once more under a checkpoint."""
    shape = Transformer(40, 64, 3, 4, family="llama", hidden=128)
    plain, packed = (
        Adapter(("query",), 4, four_bits=packed) for packed in (False, True)
    )
    more = {
        blocks: less(
            *(
                work(
                    Job(shape, 8, 4), Plan(2, blocks, None, "bf16", adapter=a)
                )[:3]
                for a in (packed, plain)
            )
        )
        for blocks in (0, 3)
    }
    assert more[0][0] == 0 and more[0][2] == 2 * 2 * 3 * 7 * 2
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 128)
    least, most = 4 * weights * 2.6, 4 * weights * 3  # with small tables
    assert least < more[0][1] < most
    assert more[3][1] == more[0][1] * 3 // 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_8_bit_adam_moves_less_than_adam(recipe):
    """It reads the gradient, and all else twice: two bytes of states, and
    their scales."""
    shape = Transformer(64, 64, 1, 4)
    counts = {way: update(shape, recipe, way, False) for way in PLANNED}
    small, adam = counts["adam-8bit"], counts["adam"]
    assert small[1] < adam[1] and small[2] < adam[2]
    copies = counts["sgd"][1] - 3 * RECIPES[recipe].stepped * shape.parameters
    states = (small[1] - copies) / shape.parameters
    item = RECIPES[recipe].stepped
    assert 3 * item + 4 < states < 3 * item + 5


@pytest.mark.parametrize("stage", PLAN_STAGES)
def test_ranks_share_the_batch_and_send(stage):
    """Fourteen sequences on four ranks: one has four, in two parts."""
    network = SHAPES["gpt"]
    plan = Plan(2, recipe="master", stage=stage, ranks=4)
    shared = work(Job(network, 8, 14), plan)
    one = work(Job(network, 8, 4), Plan(2, recipe="master"))
    assert shared.flops == one.flops
    assert shared.operators == one.operators
    split = STAGES[stage]
    assert (shared.bytes < one.bytes) == split.optimizer
    assert one.traffic == 0
    if stage == "ddp":
        assert shared.traffic == network.parameters * 2 * 2 * 3 // 4


@pytest.mark.parametrize("itemsize", [2, 4])
def test_beside_ddp_an_adapter_sends_its_own_gradients(itemsize):
    """Each in its dtype, whatever that of the frozen weights is."""
    shape, adapter = SHAPES["gpt"], Adapter(("up",), 3, itemsize)
    plan = Plan(2, recipe="bf16", ranks=4, adapter=adapter)
    numbers = shape.depth * 3 * 5 * shape.width  # up is four times as wide
    sent = 2 * itemsize * numbers * 3 // 4
    assert work(Job(shape, 8, 16), plan).traffic == sent


@pytest.mark.parametrize("stage", ["zero-2", "zero-3"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_shards_send_what_fsdp2_sends(stage, micro_batches):
    """By the collectives of its units, whose padding is the difference."""
    network = Transformer(64, 16, 2, 4, context=16)
    model = network.build()
    plan = Plan(1, recipe="master", stage=stage, ranks=4)
    found = work(Job(network, 8, 4 * micro_batches), plan).traffic
    traffic = fsdp_traffic(
        units_of(model, model.blocks),
        4,
        stage,
        gathered=2,
        reduced=2,
        accumulation_steps=micro_batches,
    )
    whole = sum(one.bytes for one in traffic.values())
    assert 0 <= whole * 3 // 4 - found < 0.01 * found


def test_an_operator_reads_and_writes_each_tensor_once():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with WorkCounter() as counter:
        (a @ b).t().view(5, 3)
    assert counter.counts == (2 * 3 * 4 * 5, 4 * (12 + 20 + 15), 1)
    with WorkCounter() as counter:
        a.add_(1)
        torch.empty(100)
        torch.ones(6)
    assert counter.counts == (0, 4 * (12 + 12) + 4 * 6, 2)


def test_a_table_is_not_read_for_a_few_rows():
    table, ids = torch.ones(1000, 2), torch.zeros(3, dtype=torch.long)
    with WorkCounter() as counter:
        F.embedding(ids, table)
    assert counter.bytes == 8 * 3 + 4 * 6
