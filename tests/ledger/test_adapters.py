"""Adapters and frozen weights: the ledger against the tracker, with the
course's LoRA and with ``peft``'s."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_helpers import same, transformers

from membudget.ledger import TARGETS, Adapter, Chain, Transformer, predict
from membudget.models import mlp
from tests.soak import examples

FAMILIES = ["gpt", "llama"]
NETS = {
    "gpt": Transformer(40, 16, 2, 4, context=16),
    "llama": Transformer(40, 16, 2, 4, kv_heads=2, hidden=44, family="llama"),
    "mlp": Chain(mlp(12, 32, 5, 10), (12,)),
}


@st.composite
def adapters(draw, shape, itemsizes):
    names = st.sampled_from(TARGETS[shape.family])
    targets = draw(st.lists(names, min_size=1, unique=True))
    most = min(3, shape.width, shape.shared, shape.hidden)
    rank = draw(st.integers(1, most))
    size = draw(st.sampled_from(itemsizes))
    return Adapter(targets, rank, size, draw(st.booleans()))


@st.composite
def runs(draw):
    return {
        "checkpointed": draw(st.sampled_from([False, False, True, 1])),
        "micro_batch": draw(st.sampled_from([None, None, 1, 2])),
        "loss_chunks": draw(st.sampled_from([None, None, 2])),
        "optimizer": draw(st.sampled_from([None, "sgd", "adam"])),
        "foreach": draw(st.booleans()),
        "offloaded": draw(st.booleans()),
    }


@settings(max_examples=examples(24))
@given(st.data(), transformers(), st.sampled_from([2, 7, 20]), runs())
def test_any_adapter(data, shape, tokens, run):
    """Alone, or beside weights that are trained, too."""
    recipe = data.draw(st.sampled_from(["fp32", "bf16", "autocast"]))
    base = 2 if recipe == "bf16" else 4
    beside = data.draw(st.sampled_from([(), (), ("*norm*",)]))
    sizes = [base] if beside else [base, 4]
    batch, peft = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    adapter = data.draw(adapters(shape, sizes))
    dora = peft and not run["offloaded"] and data.draw(st.booleans())
    adapter = replace(adapter, dora=dora)
    options = {"recipe": recipe, "trained": beside, "adapter": adapter}
    same(shape, batch, tokens, peft=peft, **options, **run)


@pytest.mark.few(4)
@pytest.mark.parametrize("checkpointed", [False, True, 1])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    ("recipe", "itemsize"),
    [("fp32", 4), ("bf16", 4), ("bf16", 2), ("autocast", 4)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_dora(family, recipe, itemsize, dropout, checkpointed):
    """``peft``'s, in all layers: the adapter, its graph that nobody goes back
    through, and what a checkpoint drops of it."""
    adapter = Adapter(TARGETS[family], 2, itemsize, dropout, dora=True)
    how = {"checkpointed": checkpointed, "optimizer": "adam", "peft": True}
    same(NETS[family], 3, 8, recipe=recipe, adapter=adapter, **how)


@pytest.mark.parametrize("dropout", [False, True])
def test_what_dora_keeps(dropout):
    """Of an upper block: W x, the branch and three numbers an output. With
    dropout W x is done again in the adapter's dtype, for which 16-bit
    weights are copied, and the copies stay."""

    def upper(dora):
        adapter = Adapter(("up", "down"), 2, 4, dropout, dora=dora)
        shapes = (replace(NETS["llama"], depth=depth) for depth in (2, 3))
        run = {"recipe": "bf16", "adapter": adapter, "peft": True}
        saved = [same(shape, 3, 8, **run).saved for shape in shapes]
        return saved[1] - saved[0]

    n, d, f = 3 * 8, NETS["llama"].width, NETS["llama"].hidden
    more = (4 * n + 3 * 4 + (4 if dropout else 2) * n) * (d + f)
    copies = 2 * 4 * d * f if dropout else 0
    assert upper(True) - upper(False) == more + copies


@settings(max_examples=examples(16))
@given(
    transformers(),
    st.integers(1, 4),
    st.sampled_from([1, 2, 7, 20]),
    st.sampled_from(["fp32", "bf16", "autocast"]),
    st.sampled_from(
        [
            ("blocks.0.*",),
            ("norm.weight", "blocks.0.norm?.weight"),
            ("token.weight",),
            ("blocks.*.up.*", "blocks.*.out.weight"),
        ]
    ),
    runs(),
)
def test_any_frozen_weights(shape, batch, tokens, recipe, trained, run):
    same(shape, batch, tokens, recipe=recipe, trained=trained, **run)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_biases_alone(checkpointed):
    """Their gradients are sums: of the inputs of linear layers nothing stays.

    A block keeps what GELU, the norms and attention need.
    """
    shape = NETS["gpt"]
    options = {"checkpointed": checkpointed, "optimizer": "adam"}
    biases = same(shape, 3, 8, trained=["*.bias"], **options)
    assert biases.saved <= same(shape, 3, 8, **options).saved


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_below_the_first_trained_weight_is_kept(family):
    """Frozen from the bottom, block by block; from the top nothing goes."""
    shape = Transformer(40, 16, 4, 4, context=16, family=family)

    def saved(blocks):
        names = [f"blocks.{number}.*" for number in blocks]
        return same(shape, 3, 8, trained=[*names, "norm.*"]).saved

    whole, *fewer = [saved(range(first, 4)) for first in range(4)]
    steps = [a - b for a, b in zip([whole, *fewer], fewer, strict=False)]
    assert steps[1:] == steps[:1] * 2 and steps[0] > whole / 6
    assert saved(range(2)) > 3 / 4 * whole


@pytest.mark.parametrize(
    ("family", "target"), [(f, t) for f in FAMILIES for t in TARGETS[f]]
)
def test_attention_that_is_kept_and_has_no_gradient(family, target):
    """In the first block, behind frozen weights; it is let go of when it is
    read again, and the second micro-batch does not find it."""
    shape = Transformer(40, 16, 3, 4, context=16, family=family)
    adapter = Adapter((target,), 2, dropout=True)
    run = {"micro_batch": 2, "checkpointed": True, "kept_attention": True}
    same(shape, 4, 8, adapter=adapter, **run)


def test_an_input_that_is_cast_is_kept_for_each_target():
    """Beside 16-bit weights an adapter in fp32 has copies of its own; one in
    16 bits shares what other layers read, and attention's output is kept by
    attention anyway."""
    shape = NETS["llama"]
    n, d, f, r = 4 * 12, shape.width, shape.hidden, 2
    wide, same_dtype = (
        same(shape, 4, 12, recipe="bf16", adapter=Adapter(names, r, itemsize))
        for names, itemsize in ((TARGETS["llama"], 4), (TARGETS["llama"], 2))
    )
    copies = shape.depth * n * (4 * (6 * d + f) - 2 * (2 * d + f))
    thin = shape.depth * n * 7 * r * 2
    assert wide.saved - same_dtype.saved == copies + thin


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (
            "gpt",
            {"adapter": Adapter(["query"])},
            "a block has no linear layer 'query': use qkv, out, up, down",
        ),
        (
            "llama",
            {"adapter": Adapter(["gate"], 17)},
            "rank is 17: use a whole number from 1 to 16",
        ),
        (
            "gpt",
            {"adapter": Adapter(["out"]), "recipe": "master"},
            'use the recipe "bf16" with an adapter of 4 bytes',
        ),
        (
            "gpt",
            {"adapter": Adapter(["out"], itemsize=2)},
            "use an adapter of 4 bytes",
        ),
        (
            "gpt",
            {
                "adapter": Adapter(["out"]),
                "recipe": "bf16",
                "trained": ["*.bias"],
            },
            "use an adapter of 2 bytes",
        ),
        (
            "gpt",
            {"trained": ["*.wight"]},
            r"no weight is named '\*.wight': use names such as token.weight",
        ),
        ("gpt", {"trained": []}, "no parameter is trained"),
        (
            "gpt",
            {"adapter": Adapter(["up"], dora=True), "trained": ["*.up.*"]},
            r"blocks.0.up is trained, and DoRA has rules beside frozen layers",
        ),
        ("mlp", {"trained": ["*"]}, "trained and adapter out for a Chain"),
    ],
)
def test_what_cannot_be_trained(network, options, message):
    shape = NETS[network]
    tokens = [8] if isinstance(shape, Transformer) else []
    with pytest.raises(ValueError, match=message):
        predict(shape, 2, *tokens, **options)


def test_what_no_adapter_is():
    with pytest.raises(ValueError, match="no rules for DoRA over 4 bits"):
        Adapter(["out"], four_bits=True, dora=True)
    with pytest.raises(ValueError, match=r"itemsize is 3: use 4 \(fp32\) or"):
        Adapter(["out"], itemsize=3)
    with pytest.raises(TypeError, match="use an Adapter"):
        predict(NETS["gpt"], 2, 8, adapter=["out"])
