"""Shapes of networks against the real ones, and shapes that cannot be."""

import re

import pytest
import torch
from hypothesis import given, settings
from ledger_helpers import transformers
from torch import nn

from membudget.ledger import (
    GPT2,
    LLAMA3_8B,
    PRESETS,
    Chain,
    Transformer,
    predict,
)
from tests.soak import examples

PUBLISHED = {
    "GPT-2 124M": 124_439_808,
    "GPT-2 XL 1.5B": 1_557_611_200,
    "Llama 3.2 1B": 1_235_814_400,
    "Llama 2 7B": 6_738_415_616,
    "Mistral 7B": 7_241_732_096,
    "Llama 3 8B": 8_030_261_248,
    "Llama 3 70B": 70_553_706_496,
}


def counted(module):
    return sum(p.numel() for p in module.parameters())


@settings(max_examples=examples(20))
@given(transformers())
def test_parameters_are_those_of_the_model(shape):
    model = shape.build()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert counted(model) == shape.parameters
    assert len(model.blocks) == shape.depth
    assert counted(model.blocks[0]) == shape.block_parameters
    paper = shape.write(1, 1)
    # in the model's order, but for the token embedding that comes first
    assert sorted(p.numel() for p in model.parameters()) == sorted(
        w.elements for w in paper.parameters
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    shape = PRESETS[name]
    assert shape.parameters == PUBLISHED[name]
    assert counted(shape.build()) == PUBLISHED[name]


def test_the_two_shapes_of_the_chapter():
    assert list(PRESETS) == list(PUBLISHED)
    assert PRESETS["GPT-2 124M"] is GPT2
    assert PRESETS["Llama 3 8B"] is LLAMA3_8B
    assert GPT2.block_parameters == 12 * 768**2 + 13 * 768
    assert LLAMA3_8B.shared == 1024


def test_what_a_shape_leaves_out():
    shape = Transformer(width=12, heads=3)
    assert (shape.hidden, shape.kv_heads, shape.shared) == (48, 3, 12)
    llama = Transformer(width=12, heads=3, family="llama", kv_heads=1)
    assert (llama.hidden, llama.kv_heads, llama.shared) == (48, 1, 4)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(("tied", "fused"), [(False, True), (True, False)])
def test_the_model_is_built_as_said(family, tied, fused):
    shape = Transformer(
        9, 8, 3, 2, context=5, family=family, tied=tied, fused=fused
    )
    before = torch.get_rng_state()
    model = shape.build("cpu")
    assert not torch.equal(before, torch.get_rng_state())  # weights are drawn
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert (model.head.weight is model.token.weight) == tied
    assert all(block.fused == fused for block in model.blocks)
    if family == "gpt":
        dropped = Transformer(9, 8, 1, 2, dropout=True).build()
        assert dropped.blocks[0].dropout > 0 == model.blocks[0].dropout
    tokens = torch.zeros(2, 5, dtype=torch.long)
    assert model(tokens).shape == (2, 5, 9)


# What cannot be ----------------------------------------------------------


def refused(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"width": 10, "heads": 4},
            "width 10 is not a multiple of 4 heads: use a number of heads "
            "that divides it",
        ),
        (
            {"heads": 4, "kv_heads": 3, "family": "llama"},
            "4 heads cannot share 3 heads of keys and values: use a number "
            "that divides the heads",
        ),
        (
            {"width": 12, "heads": 4, "family": "llama"},
            "3 numbers for each head cannot be paired for rotary positions: "
            "use an even number",
        ),
        (
            {"kv_heads": 2},
            "the family gpt has as many heads of keys as of queries and an "
            "MLP of 4 × width: leave kv_heads and hidden out, or use the "
            "family llama",
        ),
        ({"hidden": 100}, "the family gpt has as many heads of keys"),
        (
            {"family": "llama", "dropout": True},
            "the family llama has no dropout: leave it out",
        ),
    ],
)
def test_shapes_that_cannot_be(options, message):
    with refused(message):
        Transformer(**options)


def test_more_tokens_than_positions():
    shape = Transformer(context=8)
    shape.write(1, 8)
    with refused(
        "9 tokens are more than the 8 learned positions: use fewer tokens "
        "or a larger context"
    ):
        shape.write(1, 9)
    Transformer(context=8, family="llama").write(1, 9)


# Chains ------------------------------------------------------------------


@pytest.mark.parametrize(
    "segments",
    [
        ((),),
        ((-1,),),
        ((1, 2, 3),),
        ((0, 2),),
        ((0, 0),),
        ((0, 1), (1, 2)),
    ],
)
def test_segments_that_are_no_runs_of_children(segments):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    words = "segment is empty|number of a child|of the children 0 to 2$"
    with pytest.raises(ValueError, match=words) as e:
        Chain(model, (4,), segments)
    assert str(segments[-1][-1:]).strip("(),") in str(e.value)


SAME = nn.Linear(4, 4)


class Odd(nn.Linear):
    """No module that a chain knows."""


@pytest.mark.parametrize(
    ("layers", "sample", "message"),
    [
        ([nn.Linear(4, 4).double()], (4,), "not in fp32: .* predict's recipe"),
        (
            [SAME, nn.Linear(4, 4).requires_grad_(False)],
            (4,),
            r"frozen.*ledger\.account",
        ),
        ([SAME, nn.ReLU(), SAME], (4,), "share a parameter"),
        ([SAME], (9,), r"does not take .*\(9,\)"),
        ([nn.Conv2d(3, 4, 3)], (1, 8, 8), "does not take"),
        ([SAME], (3, 4), "a row of logits"),
        ([SAME, Odd(4, 4)], (4,), "no rule for Odd: use Linear, Conv2d, "),
        ([nn.Sequential(nn.Softplus())], (4,), "no rule for Softplus"),
        (
            [SAME, nn.BatchNorm1d(4)],
            (4,),
            r"no rule for BatchNorm1d.*membudget\.ledger\.account$",
        ),
        *(
            (
                [nn.Conv2d(1, 4, 1), nn.AdaptiveAvgPool2d(size)],
                (1, 8, 8),
                r"no rule for an average over parts, \(4, ",
            )
            for size in (2, (1, None))
        ),
    ],
)
def test_chains_that_cannot_be(layers, sample, message):
    with pytest.raises(ValueError, match=message):
        Chain(nn.Sequential(*layers), sample).write(2)


def test_only_sequentials_are_chains():
    with pytest.raises(TypeError, match="Linear is no Sequential"):
        Chain(nn.Linear(8, 8), (8,))


def test_a_chain_without_parameters_has_no_step():
    with pytest.raises(
        ValueError, match="use a network with a layer that has weights"
    ):
        predict(Chain(nn.Sequential(nn.ReLU()), (4,)), 2)


@pytest.mark.parametrize(
    ("module", "option"),
    [
        (nn.ReLU(True), "inplace=False"),
        (nn.BatchNorm2d(4, affine=False), "affine=True"),
        (nn.LayerNorm((8, 8), bias=False), "bias=True"),
        (nn.Conv2d(4, 4, 1, padding_mode="circular"), "padding_mode=zeros"),
        (nn.MaxPool2d(2, return_indices=True), "return_indices=False"),
        (
            nn.LayerNorm((8, 8), elementwise_affine=False),
            "elementwise_affine=True",
        ),
    ],
)
def test_options_without_a_rule(module, option):
    """Each would be predicted wrongly by the rule of its module."""
    name = type(module).__name__
    with refused(f"there is a rule for {name} with {option} only, and here "):
        Chain(nn.Sequential(nn.Conv2d(1, 4, 1), module), (1, 8, 8)).write(2)
