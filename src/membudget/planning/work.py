"""What a plan has a machine do, counted on steps without data.

A step of the network with one block or two, of two sequences or three, runs
without data, and every operator is counted. The counts are affine in the
sequences, in the blocks and in those that are checkpointed. So six such steps
give the counts of all larger ones. Single sequences are counted by themselves:
without fused attention they need fewer copies.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from membudget.adapters import adapt
from membudget.checkpointing import ATTENTION
from membudget.checks import instance
from membudget.internals import FakeTensorMode
from membudget.ledger import (
    RECIPES,
    Adapter,
    host_step,
    optimizer_bytes,
)
from membudget.ledger.adapters import packed_bytes, stepped_recipe
from membudget.measuring.dry import without_data
from membudget.measuring.fakes import Fakes
from membudget.models import chunked_loss
from membudget.planning.copies import Copy, copies
from membudget.planning.counter import Counts, WorkCounter, added, less
from membudget.planning.own import OwnJob
from membudget.planning.plan import JOBS, Network, Plan, TrainedJob, as_job
from membudget.sharding import STAGES

MAKE = {
    "sgd": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "adam": partial(torch.optim.AdamW, foreach=False),
}
"""PyTorch's optimizers by the ledger's names, one parameter at a time."""


class Work(NamedTuple):
    """What one rank does in one optimizer step.

    Attributes:
        flops: floating-point operations of matrix products, as
            :class:`membudget.measuring.FlopCounter` counts them.
        bytes: that operators read and write; views move nothing.
        operators: that move data.
        traffic: bytes that the rank sends to the others.
        copies: to the host and back.
        host: bytes that an optimizer on the host reads and writes there.
    """

    flops: int
    bytes: int
    operators: int
    traffic: int
    copies: tuple[Copy, ...] = ()
    host: int = 0


def work(job: TrainedJob, plan: Plan) -> Work:
    """What a plan has one rank do in one optimizer step.

    The step is the one of :func:`membudget.ledger.predict`, with the kernels
    of a CPU. A fused Adam reads the gradient, and reads and writes the
    parameter and its states, in one kernel; else an optimizer steps one
    parameter at a time. Of several ranks it is the one with the most
    sequences. What is added for sharding: each rank updates its share of the
    parameters where the optimizer's states are split. Under DDP the last
    micro-batch alone reduces the gradients. With FSDP2 each one gathers the
    parameters, under ZeRO-3 twice, and reduces its gradients
    (:func:`membudget.sharding.fsdp_traffic`). Neither padding nor the copies
    that FSDP makes before and after each collective are counted. Optimizers
    in 8 bits, which PyTorch lacks, are taken to be fused for each parameter
    by itself. What is copied to the host and back is told apart
    (:mod:`membudget.planning.copies`), as is what an optimizer does there
    (:func:`membudget.ledger.host_step`).

    Where attention is local in some blocks of a model of transformers and not
    in others, bytes and operators are those of its first two, and off by 1 %.

    The first call for a network, a length and a recipe takes a second; then
    it is below a millisecond. Of an :class:`OwnJob` its own model is counted.
    """
    instance(job, TrainedJob, "job", JOBS)
    instance(plan, Plan, "plan", "a Plan")
    if isinstance(job, OwnJob):
        plan.share(job)
        return Work(*job.dry.counts(plan), 0)
    job = as_job(job)
    network, stage = job.network, STAGES[plan.stage]
    depth, again = network.depth, plan.checkpointed
    bare = plan.adapter and replace(plan.adapter, four_bits=False)
    key = replace(network, depth=1), job.tokens, plan.recipe, bare
    kept = plan.kept_attention and again > 0
    asked = job.hub and again > 0
    wanted = plan.loss_chunks
    base = None if wanted is None else 1
    sequences = -(-job.batch // plan.ranks)
    micro = min(plan.micro_batch, sequences)
    full, rest = divmod(sequences, micro)
    steps, chunks, terms = full + bool(rest), 0, []
    moved: list[Copy] = []
    for times, size in ((full, micro), (1, rest)):
        if not size:
            continue
        if wanted is not None:
            chunks += times * _chunks(size * job.tokens, wanted)
        # those of two sequences and of three stand for all larger ones
        alike = {1: 1} if size == 1 else {2: 3 - size, 3: size - 2}
        passes: list[tuple[int, Counts]] = []
        blocks: list[tuple[int, Counts]] = []
        for measured, share in alike.items():
            if not share:
                continue
            one, two, once_more = counts_of_blocks(
                *key, base, measured, kept, asked
            )
            terms += [
                (times * share * (2 - depth - again), one),
                (times * share * (depth - 1), two),
                (times * share * again, once_more),
            ]
            passes.append((share, less(once_more, one)))
            blocks.append((share, less(two, one)))
        if plan.offloaded:
            block = added(passes), added(blocks)
            for copy in copies(job, plan, size, *block):
                moved.append(copy._replace(times=times * copy.times))
    if steps > 1:
        sums, shared = _accumulated(*key, base)
        terms += [
            ((steps - 1) * (2 - depth), sums[0]),
            ((steps - 1) * (depth - 1), sums[1]),
            (steps, shared),
        ]
    if base:
        terms.append((chunks - steps, _chunk(*key)))
    if plan.adapter and plan.adapter.four_bits:
        one = _dequantised(key[0], RECIPES[plan.recipe].parameters)
        terms.append((steps * (2 * depth + again), one))
    flops, touched, operators = added(terms)
    trained = _trained(network, plan.adapter)
    if plan.optimizer_on_host:
        recipe = stepped_recipe(plan.recipe, plan.adapter)
        there = host_step([trained], recipe, plan.optimizer)
        moved += Copy(1, there.out), Copy(1, there.back)
        return Work(flops, touched, operators, 0, tuple(moved), there.touched)
    how = plan.recipe, plan.optimizer, plan.fused, bare
    ends = _updates(key[0], *how)
    _, stepped, called = added([(2 - depth, ends[0]), (depth - 1, ends[1])])
    return Work(
        flops,
        touched + -(-stepped // (plan.ranks if stage.optimizer else 1)),
        operators + called,
        _sent(trained, plan, steps),
        tuple(moved),
    )


@lru_cache(maxsize=256)
def _trained(network: Network, adapter: Adapter | None) -> int:
    """Parameters that have a gradient."""
    if adapter is None:
        return network.parameters
    paper = network.write(1, 1, trained=(), adapter=adapter)
    return sum(p.elements for p in paper.parameters)


@lru_cache(maxsize=256)
def _dequantised(network: Network, itemsize: int) -> Counts:
    """A block's weights in 4 bits, read, and written in the dtype of the
    model, with the scales of each 64."""
    [block] = blocks_of(replace(network, depth=1).build())
    sizes = [
        layer.weight.numel()
        for layer in block.modules()
        if isinstance(layer, nn.Linear)
    ]
    scales = 2 * 4 * sum(-(-n // 64) for n in sizes)
    moved = sum(map(packed_bytes, sizes)) + scales + itemsize * sum(sizes)
    return 0, moved, 2 * len(sizes)


def _adapted(model: nn.Module, adapter: Adapter | None) -> nn.Module:
    """With this adapter, which alone is trained; transformers' models have
    ``peft``'s."""
    if adapter is None:
        return model
    if not hasattr(model, "blocks"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=adapter.rank,
            target_modules=list(adapter.targets),
            lora_dropout=0.1 * adapter.dropout,
        )
        wide = adapter.itemsize == 4
        get_peft_model(model, config, autocast_adapter_dtype=wide)
        return model
    return adapt(
        model,
        adapter.targets,
        adapter.rank,
        dropout=0.1 * adapter.dropout,
        dtype={2: torch.bfloat16, 4: torch.float32}[adapter.itemsize],
    )


def _sent(parameters: int, plan: Plan, micro_batches: int) -> int:
    """Bytes that a rank sends in a step."""
    recipe = RECIPES[stepped_recipe(plan.recipe, plan.adapter)]
    moved = 2 * recipe.gradients
    if plan.stage != "ddp":
        gathers = 2 if plan.stage == "zero-3" else 1
        each = gathers * recipe.parameters + recipe.gradients
        moved = micro_batches * each
    return parameters * moved * (plan.ranks - 1) // plan.ranks


def _chunks(rows: int, wanted: int) -> int:
    """Into how many parts ``torch.chunk`` cuts them."""
    return -(-rows // -(-rows // wanted))


@lru_cache(maxsize=1024)
def counts_of_blocks(
    network: Network,
    tokens: int,
    recipe: str,
    adapter: Adapter | None,
    chunks: int | None,
    sequences: int,
    kept: bool = False,
    asked: bool = False,
) -> tuple[Counts, Counts, Counts]:
    """A micro-batch with one block, with two, with one checkpointed."""
    one, two, again = (
        micro_batches(
            replace(network, depth=depth),
            sequences,
            tokens,
            checkpointed,
            chunks,
            recipe,
            kept_attention=kept,
            asked=asked,
            adapter=adapter,
        )[0]
        for depth, checkpointed in ((1, 0), (2, 0), (1, 1))
    )
    return one, two, again


@lru_cache(maxsize=256)
def _accumulated(
    network: Network,
    tokens: int,
    recipe: str,
    adapter: Adapter | None,
    chunks: int | None,
) -> tuple[tuple[Counts, Counts], Counts]:
    """What accumulation adds, however many sequences run at once.

    Returns:
        Adding to the gradients, with one block and with two, and multiplying
        a loss with its share of the step.
    """
    how = 1, tokens, 0, chunks, recipe
    deeper = replace(network, depth=2)
    count = partial(micro_batches, adapter=adapter)
    one, second, shared = count(network, *how, (None, None, 0.5))
    two, other = count(deeper, *how, (None, None))
    return (less(second, one), less(other, two)), less(shared, second)


@lru_cache(maxsize=256)
def _chunk(
    network: Network, tokens: int, recipe: str, adapter: Adapter | None
) -> Counts:
    """One more chunk of the loss."""
    [more] = micro_batches(network, 2, tokens, 0, 2, recipe, adapter=adapter)
    return less(
        more, counts_of_blocks(network, tokens, recipe, adapter, 1, 2)[0]
    )


def micro_batches(
    network: Network,
    sequences: int,
    tokens: int,
    checkpointed: int,
    chunks: int | None,
    recipe: str,
    shares: Sequence[float | None] = (None,),
    kept_attention: bool = False,
    asked: bool = False,
    adapter: Adapter | None = None,
) -> list[Counts]:
    """Counts of micro-batches that run one after the other, without data.

    Args:
        network: with all its blocks.
        sequences, tokens: of each.
        checkpointed: how many blocks, the first ones.
        chunks: of the loss; None for the plain loss.
        recipe: one of :data:`membudget.ledger.RECIPES`.
        shares: in the step, of each; None for the whole.
        kept_attention: whether checkpointed blocks keep its results.
        asked: whether the embedding's gradient is wanted, as transformers
            has it beside checkpoints.
        adapter: what alone is trained; None for all weights.
    """
    kind = RECIPES[recipe]
    built = network.build()
    if kind.parameters == 2:  # the buffers of transformers stay as they are
        for p in built.parameters():
            p.data = p.data.to(torch.bfloat16)
    built = _adapted(built, adapter)
    fake = FakeTensorMode()
    bases: dict = {}
    copies = {
        id(p): without_data(fake, p, "cpu", bases)
        for p in chain(built.parameters(), built.buffers())
    }
    model = copy.deepcopy(built, copies)
    how: dict[str, object] = {"use_reentrant": False}
    if kept_attention:
        make = create_selective_checkpoint_contexts
        how["context_fn"] = partial(make, list(ATTENTION))
    for block in blocks_of(model)[:checkpointed]:
        block.forward = partial(checkpoint, block.forward, **how)
    if asked:
        embedding = cast("Any", model).get_input_embeddings()
        embedding.register_forward_hook(lambda *call: _ask(call[-1]))
    lowered: AbstractContextManager = nullcontext()
    if kind.autocast:
        lowered = torch.autocast("cpu", torch.bfloat16)
    with fake, Fakes(fake), WorkCounter() as counter:
        shape = 2, sequences, tokens
        ids, targets = torch.empty(shape, dtype=torch.long)
        if kind.gradients > kind.parameters:
            for p in model.parameters():
                total = torch.zeros_like(p, dtype=torch.float32)
                p.register_post_accumulate_grad_hook(partial(_add, total))
        found = [counter.counts]
        for share in shares:
            with lowered:
                loss = _loss(model, ids, targets, chunks)
            (loss if share is None else loss * share).backward()
            found.append(counter.counts)
    return [less(b, a) for a, b in pairwise(found)]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Those of the course's models, or of transformers'."""
    if hasattr(model, "blocks"):
        return cast("nn.ModuleList", model.blocks)
    inner = cast("Any", model).base_model
    return inner.h if hasattr(inner, "h") else inner.layers


def _loss(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    chunks: int | None,
) -> torch.Tensor:
    if not hasattr(model, "blocks"):
        return model(input_ids=ids, labels=targets, use_cache=False).loss
    if chunks:
        return chunked_loss(model.head, model.hidden(ids), targets, chunks)
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _ask(x: torch.Tensor) -> None:
    """Want its gradient."""
    x.requires_grad_()


def _add(total: torch.Tensor, p: torch.Tensor) -> None:
    """Add a gradient to a sum in fp32, and let it go."""
    total.add_(p.grad)
    p.grad = None


@lru_cache(maxsize=256)
def _updates(
    network: Network,
    recipe: str,
    optimizer: str,
    fused: bool,
    adapter: Adapter | None,
) -> tuple[Counts, Counts]:
    """What the optimizer's step takes with one block and with two."""
    one, two = (
        update(
            replace(network, depth=depth), recipe, optimizer, fused, adapter
        )
        for depth in (1, 2)
    )
    return one, two


def update(
    network: Network,
    recipe: str,
    optimizer: str,
    fused: bool = True,
    adapter: Adapter | None = None,
) -> Counts:
    """Counts of the optimizer's step, without data.

    Args:
        network: with all its blocks.
        recipe: one of :data:`membudget.ledger.RECIPES`; a master copy's
            gradients are cast before the step, and the copy back after it.
        optimizer: one of :data:`membudget.ledger.PLANNED`.
        fused: whether one kernel does Adam's.
        adapter: what alone is stepped; None for all weights.
    """
    recipe = stepped_recipe(recipe, adapter)
    kind = RECIPES[recipe]
    model = _adapted(network.build(), adapter)
    weights = [p for p in model.parameters() if p.requires_grad]
    if kind.parameters == 2:
        weights = [p.detach().bfloat16() for p in weights]
    stepped = weights
    if kind.master:
        stepped = [p.detach().float() for p in weights]
    dtype = {2: torch.bfloat16, 4: torch.float32}[kind.gradients]
    gradients = [torch.zeros_like(p, dtype=dtype) for p in weights]
    apart = kind.gradients > kind.parameters

    def step() -> None:
        for p, gradient in zip(stepped, gradients, strict=True):
            p.grad = gradient.to(p.dtype)
        if stepper is not None:
            stepper.step()
        if kind.master:
            for p, copied in zip(weights, stepped, strict=True):
                p.data.copy_(copied)
        if apart:
            for gradient in gradients:
                gradient.zero_()

    stepper = None
    if optimizer in MAKE and not (fused and optimizer == "adam"):
        stepper = MAKE[optimizer](stepped)
    step()  # which makes the states
    with WorkCounter() as counter:
        step()
    counts = counter.counts
    if stepper is not None:
        return counts
    sizes = [p.numel() for p in weights]
    states = optimizer_bytes(sizes, recipe, optimizer)
    states -= kind.master * sum(sizes)
    moved = 3 * kind.stepped * sum(sizes) + 2 * states
    calls = len(sizes)
    if optimizer == "adam":  # one kernel, and one that counts the steps
        moved, calls = moved + 4 * len(sizes), 2
    return added([(1, counts), (1, (0, moved, calls))])
