"""What a step saves in another memory: the ledger against ``Offload``."""

import random
from functools import partial
from itertools import product

import causal_helpers as causal
import pytest
import torch
from ledger_helpers import (
    autocast,
    classify,
    next_token,
    offloading,
    same,
    within,
)
from test_predict import NETS, PRECISIONS, RUNS
from torch.utils.checkpoint import checkpoint

from membudget.ledger import Adapter, Chain, Transformer, predict
from membudget.ledger.walk import kept
from membudget.measuring import witness
from membudget.measuring.step import Step
from membudget.models import mlp
from membudget.offloading import Offload
from tests.soak import part_of

SHAPES = {
    family: Transformer(40, 16, 3, 4, context=16, family=family)
    for family in ("gpt", "llama")
}
GRID = list(product(NETS, PRECISIONS, RUNS))


@pytest.mark.few(24)
@pytest.mark.parametrize(
    ("net", "precision", "run"), part_of(GRID, random.Random(0), 70)
)
def test_a_step_to_the_byte(net, precision, run):
    """Its peak and split, what left and what came back."""
    network = NETS[net]()
    tokens = [12] if isinstance(network, Transformer) else []
    how = PRECISIONS[precision] | RUNS[run]
    same(network, 6, *tokens, offloaded=True, **how)


@pytest.mark.few(4)
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("chunks", [None, 3])
def test_attention_that_a_checkpoint_keeps_stays(family, recipe, chunks):
    """Its cache is a dict of tensors, which no hook sees."""
    how = {"checkpointed": 2, "recipe": recipe, "micro_batch": 2}
    how |= {"loss_chunks": chunks, "offloaded": True}
    kept_here = same(SHAPES[family], 3, 16, kept_attention=True, **how)
    again = same(SHAPES[family], 3, 16, **how)
    assert kept_here.moved == again.moved
    numbers = 2 * 16 * (16 * (4 if recipe == "fp32" else 2) + 4 * 4)
    assert kept_here.saved - again.saved == 2 * numbers


@pytest.mark.few(8)
@pytest.mark.parametrize("family", causal.FAMILIES)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("checkpointed", [False, (0,), True])
def test_a_model_of_transformers(family, recipe, checkpointed):
    """Its checkpoints hold cosines, sines and masks in a closure, where they
    stay, also while a block without a checkpoint has them back."""
    config = causal.config_of(family)
    how = {"recipe": recipe, "checkpointed": checkpointed}
    causal.same(config, 2, 12, optimizer=None, offloaded=True, **how)


@pytest.mark.parametrize("checkpointed", [False, (0,), True])
def test_an_adapter_of_transformers(checkpointed):
    """The embedding, whose gradient it asks for, stays as well as leaves."""
    config = causal.config_of("Llama")
    adapter = Adapter(("q_proj", "down_proj"), 2)
    how = {"adapter": adapter, "checkpointed": checkpointed}
    causal.same(config, 2, 12, offloaded=True, **how)


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "autocast"])
def test_by_the_allocators_own_account(family, checkpointed, recipe):
    """Nothing is left but, in 16 bits, the buffers of each thread in which
    attention's backward kernel adds up. (Checkpoints save no state of a
    generator here.)"""
    shape = SHAPES[family]
    model = shape.build("cpu")
    if recipe == "bf16":
        model = model.to(torch.bfloat16)
    how = {"use_reentrant": False, "preserve_rng_state": False}
    for block in model.blocks if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, **how)
    loss = next_token
    if recipe == "autocast":
        loss = within(partial(autocast, None), loss)
    batch = [torch.zeros(3, 16, dtype=torch.long) for _ in range(2)]
    step = Step(model, offloading(loss, [], *batch), tuple(batch))
    options = {"recipe": recipe, "checkpointed": checkpointed}
    found = predict(shape, 3, 16, optimizer=None, offloaded=True, **options)
    with torch.backends.mkldnn.flags(enabled=False):
        left = witness(step) - (found.peak - found.start)
    buffers = recipe != "fp32" and family == "gpt" and not checkpointed
    assert 0 <= left <= 3136 * buffers * torch.get_num_threads()


@pytest.mark.few(8)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("micro", [None, 4])
def test_gradients_are_equal_to_the_last_bit(net, precision, micro):
    def gradients(offloads):
        torch.manual_seed(0)
        network = NETS[net]()
        if isinstance(network, Transformer):
            model, loss = network.build("cpu"), next_token
            x = y = torch.randint(network.vocabulary, (6, 12))
        else:
            model, x = network.model, torch.rand(6, *network.sample)
            y = torch.zeros(6, dtype=torch.long)
            loss = classify
        if precision == "bf16":
            model = model.to(torch.bfloat16)
            x = x.to(torch.bfloat16) if x.is_floating_point() else x
        if precision == "autocast":
            loss = within(partial(autocast, None), loss)
        if offloads:
            loss = offloading(loss, [], x, y)
        keeps = {"micro_batch": micro, "keep_gradients": True}
        torch.manual_seed(1)
        step = Step(model, loss, (x, y), **keeps)
        step.model.zero_grad = lambda **_: None
        step()
        return [p.grad for p in model.parameters()]

    pairs = zip(gradients(False), gradients(True), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# What follows ------------------------------------------------------------


@pytest.mark.parametrize("family", SHAPES)
def test_all_that_is_kept_leaves(family):
    """But the loss; of checkpoints the inputs, and what is around them."""
    shape = SHAPES[family]
    for how in ({}, {"checkpointed": True}, {"loss_chunks": 3}):
        found = predict(shape, 3, 16, offloaded=True, **how)
        plain = predict(shape, 3, 16, **how)
        tensors = [t for t, _ in kept(shape.write(3, 16, **how))]
        assert found.moved == sum(t.bytes for t in tensors)
        assert (found.moved, found.saved) == (plain.saved - 4, 4)
        assert plain.moved == 0


def test_the_peak_is_that_of_a_checkpointed_step_or_less():
    shape = Transformer(13, 16, 6, 4, context=64)
    plain, away, again, both = (
        predict(shape, 2, 64, optimizer=None, offloaded=o, checkpointed=c)
        for c in (False, True)
        for o in (False, True)
    )
    assert both.peak < again.peak < plain.peak
    assert away.peak < plain.peak
    assert both.moved < away.moved / 5


def test_every_micro_batch_moves_its_own():
    shape = SHAPES["gpt"]
    one = predict(shape, 1, 8, offloaded=True).moved
    many = predict(shape, 7, 8, offloaded=True, micro_batch=1).moved
    assert many == 7 * one
    found = predict(shape, 7, 8, offloaded=True, micro_batch=3)
    sizes = [predict(shape, n, 8, offloaded=True).moved for n in (3, 1)]
    assert found.moved == 2 * sizes[0] + sizes[1]


def test_dora_has_no_rule():
    adapter = Adapter(["up"], dora=True)
    with pytest.raises(ValueError, match=r"no rule for DoRA that is offl"):
        predict(SHAPES["gpt"], 2, 8, adapter=adapter, offloaded=True)


def test_a_flag():
    chain = Chain(mlp(12, 32, 2, 10), (12,))
    with pytest.raises(TypeError, match=r"^offloaded is 1: use"):
        predict(chain, 4, offloaded=1)
    assert Offload().out == predict(chain, 4).moved == 0
