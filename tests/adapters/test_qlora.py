"""QLoRA: ``peft`` over bitsandbytes, watched by the allocator alone, and the
ledger's rows for a base in 4 bits."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.adapters import Quantised4
from membudget.ledger import TARGETS, Adapter, Transformer, predict
from membudget.ledger.adapters import packed_bytes
from membudget.measuring import witness
from tests.four_bits import in_four_bits

NETS = {
    "llama": Transformer(
        512, 128, 2, 4, kv_heads=2, hidden=192, family="llama"
    ),
    "gpt": Transformer(64, 64, 2, 4, context=64),
}
SOME = {"llama": ("query", "up"), "gpt": ("qkv",)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = list(
    product(
        NETS,
        [TARGETS, SOME],
        ["bf16", "fp32"],
        [False, True],  # dropout
        [False, True],  # checkpointed
        [(1, 8), (2, 64), (4, 32)],
    )
)


def qlora(shape, adapter, recipe, checkpointed):
    """The model, and a step of AdamW."""
    torch.manual_seed(0)
    base = shape.build("cpu").to(DTYPES[recipe])
    in_four_bits(base, base.blocks)
    config = LoraConfig(
        r=adapter.rank,
        target_modules=list(adapter.targets),
        lora_dropout=0.1 * adapter.dropout,
    )
    model = get_peft_model(base, config).train()
    for block in base.blocks if checkpointed else []:
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)

    def step(x, y):
        F.cross_entropy(base(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return base, step


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "targets", "recipe", "dropout", "checkpointed", "size"), CASES
)
def test_a_step(family, targets, recipe, dropout, checkpointed, size):
    """What is left has a name: the number that scales a branch, which
    autograd keeps, 8 bytes, and while one is made some more.

    Without oneDNN, whose products of 16-bit numbers have a workspace.
    """
    shape, adapter = (
        NETS[family],
        Adapter(targets[family], 4, 4, dropout, True),
    )
    _, step = qlora(shape, adapter, recipe, checkpointed)
    x = torch.arange(size[0] * size[1]).view(size) % shape.vocabulary
    with torch.backends.mkldnn.flags(enabled=False):
        found = witness(lambda: step(x, x.clone()))
    expected = predict(
        shape, *size, recipe=recipe, adapter=adapter, checkpointed=checkpointed
    )
    clone = x.nbytes  # the targets, which are there before in the ledger
    left = found - clone - (expected.peak - expected.start)
    branches = shape.depth * len(adapter.targets)
    assert 0 <= left <= 16 * branches, left


def test_the_weights_bytes_are_those_of_bitsandbytes():
    shape = NETS["llama"]
    model = shape.build("cpu").to(torch.bfloat16)
    in_four_bits(model, model.blocks)
    for block in model.blocks:
        for layer in block.children():
            if isinstance(layer, nn.Linear):
                state = layer.weight.quant_state
                tensors = [layer.weight, state.absmax, state.code]
                tensors += [
                    state.offset,
                    state.state2.absmax,
                    state.state2.code,
                ]
                weights = layer.in_features * layer.out_features
                assert sum(t.nbytes for t in tensors) == packed_bytes(weights)


@pytest.mark.parametrize("shape", [(64, 64), (192, 128), (64, 1024)])
def test_the_courses_layer_has_no_tables(shape):
    weight = torch.randn(shape)
    bits = Quantised4(weight).bits
    assert packed_bytes(weight.numel()) - bits.nbytes == 4 * (16 + 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "autocast"}, 'use the recipe "bf16" or "fp32"'),
        (
            {"trained": ["blocks.1.up.*"]},
            "blocks.1.up.weight lies in 4 bits, which have no gradient",
        ),
    ],
)
def test_what_4_bits_cannot_do(options, message):
    adapter = Adapter(("query",), four_bits=True)
    with pytest.raises(ValueError, match=message):
        predict(NETS["llama"], 1, 8, adapter=adapter, **options)
