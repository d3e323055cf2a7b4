"""Autocast by either device's lists: predicted and traced, to the byte.

``precision.Autocast`` casts on a CPU what CUDA's autocast would cast; the
kernels stay the CPU's. A seeded part of the grids runs every time, and all of
them with ``SOAK=1`` in the environment.
"""

import random
import re
from contextlib import nullcontext
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from ledger_helpers import MAKE, agree
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.ledger import Chain, Paper, Transformer, predict
from membudget.measuring import SavedBytes, trace_step
from membudget.models import mlp_blocks
from membudget.precision import Autocast
from tests.soak import part_of

RNG = random.Random(6)
DEVICES = ("cpu", "cuda")


class Within(nn.Module):
    """Stages under checkpoints, run again under the autocast of the loss."""

    def __init__(self, stages, segments, lists):
        super().__init__()
        self.stages = stages
        self.segments = {part[0]: part for part in segments}
        self.lists = lists

    def forward(self, x):
        number = 0
        while number < len(self.stages):
            part = self.segments.get(number, (number,))
            run = self.stages[part[0] : part[-1] + 1]
            x = self.again(run, x) if number in self.segments else run(x)
            number = part[-1] + 1
        return x

    def again(self, run, x):
        def contexts():
            return nullcontext(), context(self.lists)

        return checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def context(lists):
    return nullcontext() if lists is None else Autocast(lists)


def under(lists):
    """The loss, its forward pass under an autocast (None: without)."""

    def loss(model, x, y):
        with context(lists):
            return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return loss


def traced(network, batch, *tokens, lists, options):
    """A step of the network under the tracker."""
    torch.manual_seed(0)
    checkpointed = options.get("checkpointed", False)
    if isinstance(network, Transformer):
        model = network.build("cpu")
        x = torch.zeros(batch, *tokens, dtype=torch.long)
        y = x.clone()
        if checkpointed:
            for block in model.blocks:
                block.forward = _again(block.forward, lists)
    else:
        model = network.model
        x = torch.rand(batch, *network.sample)
        y = torch.zeros(batch, dtype=torch.long)
        if checkpointed:
            model = Within(model, network.segments, lists)
    optimizer = MAKE[options.get("optimizer", "adam")]
    return trace_step(
        model,
        under(lists),
        x,
        y,
        optimizer=optimizer(model.parameters(), options.get("foreach", False)),
        micro_batch=options.get("micro_batch"),
    )


def _again(run, lists):
    def contexts():
        return nullcontext(), context(lists)

    return lambda *args: checkpoint(
        run, *args, use_reentrant=False, context_fn=contexts
    )


def same(network, batch, *tokens, recipe="autocast", lists="cpu", **options):
    """Predicted and traced are the same; returns the prediction."""
    tracker = traced(
        network,
        batch,
        *tokens,
        lists=lists if recipe == "autocast" else None,
        options=options,
    )
    predicted = predict(
        network, batch, *tokens, recipe=recipe, lists=lists, **options
    )
    micro = options.get("micro_batch")
    agree(predicted, tracker, bool(micro) and micro < batch)
    return predicted


# Transformers ------------------------------------------------------------

SHAPES = {
    "gpt": {},
    "gpt, not fused": {"fused": False},
    "gpt, dropout": {"fused": False, "dropout": True, "tied": True},
    "llama": {"family": "llama", "kv_heads": 2, "hidden": 40},
    "llama, not fused": {"family": "llama", "fused": False, "kv_heads": 1},
}
STEPS = {
    "adam": {},
    "adam, all at once": {"foreach": True},
    "momentum": {"optimizer": "momentum"},
    "no optimizer": {"optimizer": None},
}
RUNS = {
    "plain": {},
    "accumulated": {"micro_batch": 2},
    "with a remainder": {"micro_batch": 4},
    "checkpointed": {"checkpointed": True},
    "both": {"checkpointed": True, "micro_batch": 4},
}
GRID = list(product(SHAPES, DEVICES, RUNS, STEPS))
CORNERS = list(product(SHAPES, DEVICES, ("plain", "checkpointed"), ["adam"]))


@pytest.mark.parametrize(
    ("shape", "lists", "run", "step"), [*CORNERS, *part_of(GRID, RNG, 16)]
)
def test_a_transformer_to_the_byte(shape, lists, run, step):
    network = Transformer(40, 16, 2, 4, context=16, **SHAPES[shape])
    options = {**RUNS[run], **STEPS[step]}
    same(network, 6, 12, lists=lists, **options)


@pytest.mark.parametrize("lists", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (9, 2)])
def test_other_sizes(shape, lists, batch, tokens):
    network = Transformer(13, 8, 1, 2, context=16, **_two_heads(shape))
    same(network, batch, tokens, lists=lists)


def _two_heads(shape):
    options = dict(SHAPES[shape])
    return options | ({"kv_heads": 1} if "kv_heads" in options else {})


def test_cudas_lists_save_softmax_in_fp32():
    """Not fused: the probabilities twice, in fp32 and in 16 bits."""
    batch, tokens, heads = 3, 10, 4
    shape = Transformer(40, 16, 1, heads, context=16, fused=False)
    on = {
        lists: predict(
            shape, batch, tokens, recipe="autocast", lists=lists
        ).saved
        for lists in DEVICES
    }
    probabilities = batch * heads * tokens**2
    assert on["cuda"] - on["cpu"] == 4 * probabilities
    fused = Transformer(40, 16, 1, heads, context=16)
    on = {
        lists: predict(
            fused, batch, tokens, recipe="autocast", lists=lists
        ).saved
        for lists in DEVICES
    }
    assert on["cuda"] == on["cpu"]


# Chains ------------------------------------------------------------------

BLOCKS = list(
    product(
        ("fp32", "autocast"),
        DEVICES,
        (False, True),
        (1, 8, 30),
        (None, 4),
        ("adam", "sgd"),
    )
)


@pytest.mark.parametrize(
    ("recipe", "lists", "checkpointed", "batch", "micro", "optimizer"),
    part_of(BLOCKS, RNG, 24),
)
def test_residual_blocks_to_the_byte(
    recipe, lists, checkpointed, batch, micro, optimizer
):
    chain = Chain(mlp_blocks(16, 3), (16,), ((0,), (1, 2)))
    same(
        chain,
        batch,
        recipe=recipe,
        lists=lists,
        checkpointed=checkpointed,
        micro_batch=micro,
        optimizer=optimizer,
    )


@pytest.mark.parametrize("recipe", ["fp32", "autocast"])
@pytest.mark.parametrize("lists", DEVICES)
@pytest.mark.parametrize("sample", [(8,), (5, 8), (2, 3, 8)])
def test_residual_blocks_of_tokens(recipe, lists, sample):
    """Samples of several vectors."""
    model = nn.Sequential(*mlp_blocks(8, 2)[:2], nn.Flatten())
    model.append(nn.Linear(prod(sample), 5))
    chain = Chain(model, sample, ((0,), (1,)))
    for checkpointed in (False, True):
        same(chain, 3, recipe=recipe, lists=lists, checkpointed=checkpointed)


def norms():
    """Norms that read what a product made, in 16 bits."""
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 16, bias=False),
        nn.LayerNorm(16),
        nn.Linear(16, 10),
    )


@pytest.mark.parametrize("lists", DEVICES)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("run", RUNS)
def test_norms_of_16_bits(lists, batch, run):
    chain = Chain(norms(), (16,), ((0, 1, 2), (3, 4)))
    same(chain, batch, lists=lists, optimizer=None, **RUNS[run])


def test_cudas_lists_copy_what_a_norm_reads():
    """And save the copies, in fp32; what is saved in all is measured."""
    batch = 64
    saved = {}
    for lists in DEVICES:
        chain = Chain(norms(), (16,))
        predicted = predict(
            chain, batch, recipe="autocast", lists=lists, optimizer=None
        )
        model = norms()
        x, y = torch.rand(batch, 16), torch.zeros(batch, dtype=torch.long)
        with SavedBytes(model, x, y) as measured:
            under(lists)(model, x, y)
        loss = 4
        assert predicted.saved == measured.total + loss
        saved[lists] = predicted.saved
    assert saved["cuda"] > saved["cpu"]


def test_the_recipe_in_fp32_has_no_lists():
    chain = Chain(mlp_blocks(8, 2), (8,), ((0,), (1,)))
    shape = Transformer(40, 16, 2, 4, context=16, fused=False)
    for recipe in ("fp32", "bf16", "master"):
        one = predict(chain, 8, recipe=recipe, lists="cuda")
        assert one == predict(chain, 8, recipe=recipe)
        one = predict(shape, 4, 8, recipe=recipe, lists="cuda")
        assert one == predict(shape, 4, 8, recipe=recipe)


def test_the_default_is_the_cpu():
    shape = Transformer(40, 16, 2, 4, context=16, fused=False)
    options = {"recipe": "autocast", "optimizer": None}
    assert predict(shape, 4, 8, **options) == predict(
        shape, 4, 8, lists="cpu", **options
    )
    assert predict(shape, 4, 8, **options) != predict(
        shape, 4, 8, lists="cuda", **options
    )


def test_the_network_of_the_lab():
    """On paper: 32 blocks of width 1024; nothing is allocated."""
    with torch.device("meta"):
        model = mlp_blocks(1024, 32)
    chain = Chain(model, (1024,))
    weights = [p.numel() for p in model.parameters()]
    states = 12 * sum(weights) + 4 * len(weights)  # Adam counts steps
    for lists, batch in product(DEVICES, (1, 16384)):
        plain = predict(chain, batch)
        cast = predict(chain, batch, recipe="autocast", lists=lists)
        for predicted in (plain, cast):
            assert predicted.start == states + batch * (4 * 1024 + 8)
        # a sample alone: copies of the weights, 2 bytes each, and no less
        assert (cast.saved < plain.saved) == (batch > 1)
        assert (cast.peak < plain.peak) == (batch > 1)


# Errors ------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["gpu", "CUDA", ""])
def test_other_lists(bad):
    message = f"for {bad!r}: use one of cpu, cuda"
    refused = pytest.raises(
        ValueError,
        match=f"^there is no lists? of operators {re.escape(message)}$",
    )
    chain = Chain(mlp_blocks(8, 1), (8,))
    shape = Transformer(40, 16, 1, 4, context=16)
    with refused:
        Paper(2, bad)
    for recipe in ("autocast", "fp32"):
        with refused:
            predict(chain, 4, recipe=recipe, lists=bad)
        with refused:
            predict(shape, 4, 8, recipe=recipe, lists=bad)
    for network, sizes in ((chain, ()), (shape, (8,))):
        with refused:
            network.write(4, *sizes, lists=bad)
