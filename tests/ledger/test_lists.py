"""Autocast by either device's lists: where they differ, and on which paper.

``precision.Autocast`` casts on a CPU what CUDA's autocast would cast; the
kernels stay the CPU's. Whole steps by these lists are in ``test_predict``.
"""

from math import prod

import pytest
import torch
from ledger_helpers import autocast, classify, same, within
from torch import nn

from membudget.ledger import Chain, Transformer, predict
from membudget.measuring import SavedBytes
from membudget.models import mlp_blocks

DEVICES = ("cpu", "cuda")
SHAPE = Transformer(40, 16, 1, 4, context=16, fused=False)


@pytest.mark.parametrize("fused", [False, True])
def test_cudas_lists_save_softmax_in_fp32(fused):
    """Not fused: the probabilities twice, in fp32 and in 16 bits. So are the
    log-probabilities of the loss, which a CPU saves in fp32 alone.
    """
    batch, tokens, heads = 3, 10, 4
    shape = Transformer(40, 16, 1, heads, context=16, fused=fused)
    cpu, cuda = (
        predict(shape, batch, tokens, recipe="autocast", lists=lists).saved
        for lists in DEVICES
    )
    probabilities, logits = batch * heads * tokens**2, batch * tokens * 40
    assert cuda - cpu == 2 * logits + (0 if fused else 4 * probabilities)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_gpus_kernels_keep_bytes_of_dropout_and_fp32_of_norms(recipe):
    """By hand: two masks in each block, and five norms."""
    shape = Transformer(40, 16, 2, 4, context=16, dropout=True)
    cpu, cuda = (
        predict(shape, 3, 10, recipe=recipe, kernels=kernels).saved
        for kernels in DEVICES
    )
    itemsize, tokens = (4 if recipe == "fp32" else 2), 3 * 10
    masks = 2 * 2 * tokens * 16
    statistics = 5 * 2 * tokens
    saved = masks * (itemsize - 1) - statistics * (4 - itemsize)
    assert cpu - cuda == saved


@pytest.mark.parametrize("options", [{}, {"checkpointed": True}])
@pytest.mark.parametrize("lists", DEVICES)
@pytest.mark.parametrize("sample", [(5, 8), (2, 3, 8)])
def test_residual_blocks_of_tokens(options, lists, sample):
    """Samples of several vectors."""
    model = nn.Sequential(*mlp_blocks(8, 2)[:2], nn.Flatten())
    model.append(nn.Linear(prod(sample), 5))
    chain = Chain(model, sample, ((0,), (1,)))
    same(chain, 3, recipe="autocast", lists=lists, **options)


def test_cudas_lists_copy_what_a_norm_reads():
    """And save the copies, in fp32; what is saved in all is measured."""
    batch = 64
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 10)
    )
    x, y = torch.rand(batch, 16), torch.zeros(batch, dtype=torch.long)
    saved = {}
    for lists in DEVICES:
        predicted = predict(
            Chain(model, (16,)), batch, recipe="autocast", lists=lists
        )
        with SavedBytes(model, x, y) as measured:
            within(lambda lists=lists: autocast(lists), classify)(model, x, y)
        loss = 4
        assert predicted.saved == measured.total + loss
        saved[lists] = predicted.saved
    assert saved["cuda"] > saved["cpu"]


@pytest.mark.parametrize(
    ("network", "sizes"),
    [(Chain(mlp_blocks(8, 2), (8,), ((0,), (1,))), (8,)), (SHAPE, (4, 8))],
)
def test_the_recipe_in_fp32_has_no_lists(network, sizes):
    for recipe in ("fp32", "bf16", "master"):
        one = predict(network, *sizes, recipe=recipe, lists="cuda")
        assert one == predict(network, *sizes, recipe=recipe)


def test_the_default_is_the_cpu():
    default, cpu, cuda = (
        predict(SHAPE, 4, 8, recipe="autocast", optimizer=None, **lists)
        for lists in ({}, {"lists": "cpu"}, {"lists": "cuda"})
    )
    assert default == cpu != cuda
