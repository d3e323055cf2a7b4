"""Whole steps: predicted and traced, to the byte.

The grids are long; a seeded part of them runs every time, and all of them
with ``SOAK=1`` in the environment.
"""

import random
import re
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_helpers import (
    RUNS,
    STEPS,
    autocast,
    classify,
    master_step,
    next_token,
    same,
    transformers,
    within,
)
from torch import nn

from membudget.checkpointing import Checkpointed
from membudget.ledger import (
    GPT2,
    RECIPES,
    Chain,
    Transformer,
    predict,
    states,
)
from membudget.ledger.recipes import STEPS as RULES
from membudget.measuring import trace_step
from membudget.models import convnet, mlp, mlp_blocks
from membudget.schedules import every_first
from tests.soak import examples, part_of

RNG = random.Random(0)

PRECISIONS = {
    "fp32": {},
    "bf16": {"recipe": "bf16"},
    "autocast": {"recipe": "autocast"},
    "by a CPU's lists": {"recipe": "autocast", "lists": "cpu"},
    "by CUDA's lists": {"recipe": "autocast", "lists": "cuda"},
}


def mixed():
    """Both activation functions; under autocast the norm reads 16 bits."""
    return nn.Sequential(
        nn.Linear(12, 60),
        nn.LayerNorm(60),
        nn.GELU(),
        nn.Linear(60, 30, bias=False),
        nn.ReLU(),
        nn.Sequential(nn.Linear(30, 30), nn.ReLU()),
        nn.Linear(30, 10),
    )


NETS = {
    "mlp": lambda: Chain(mlp(12, 32, 5, 10), (12,), ((0, 1), (2, 3, 4))),
    "convnet": lambda: Chain(
        convnet((8, 16)), (3, 8, 8), ((0, 1, 2, 3), (4, 5, 6, 7))
    ),
    "mixed": lambda: Chain(mixed(), (12,), ((0, 1, 2), (3, 4, 5))),
    "residual": lambda: Chain(mlp_blocks(12, 3), (12,), ((0,), (1, 2))),
    "gpt": lambda: Transformer(40, 16, 2, 4, context=16),
    "gpt, not fused": lambda: Transformer(
        13, 16, 2, 2, context=16, fused=False
    ),
    "gpt, dropout": lambda: Transformer(
        40, 16, 2, 4, context=16, fused=False, dropout=True, tied=True
    ),
    "llama": lambda: Transformer(
        40, 16, 2, 4, hidden=40, kv_heads=2, family="llama"
    ),
    "llama, not fused": lambda: Transformer(
        13, 16, 2, 4, kv_heads=1, family="llama", fused=False, tied=True
    ),
}
GRID = list(product(NETS, PRECISIONS, RUNS, STEPS))
EACH_PAIR = [
    (*pair, RNG.choice([*RUNS]), RNG.choice([*STEPS]))
    for pair in product(NETS, PRECISIONS)
]


@pytest.mark.few(24)
@pytest.mark.parametrize(
    ("net", "precision", "run", "step"),
    [*EACH_PAIR, *part_of(GRID, RNG, 40)],
)
def test_a_step_to_the_byte(net, precision, run, step):
    network = NETS[net]()
    tokens = [12] if isinstance(network, Transformer) else []
    options = PRECISIONS[precision] | RUNS[run] | STEPS[step]
    same(network, 6, *tokens, **options)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("which", [True, 2, (0, 2)])
def test_checkpointed_blocks(family, which):
    """GPT's attention lets go of q, k and v before the MLP begins."""
    shape = Transformer(40, 16, 3, 4, context=16, family=family)
    same(shape, 6, 12, checkpointed=which)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "autocast"])
def test_attention_that_a_checkpoint_keeps(family, recipe):
    """It is not made again; a block without a checkpoint is as ever."""
    shape = Transformer(40, 16, 3, 4, context=64, family=family)
    how = {"checkpointed": 2, "recipe": recipe, "micro_batch": 2}
    kept = same(shape, 3, 64, kept_attention=True, **how)
    again = same(shape, 3, 64, **how)
    numbers = 2 * 64 * (16 * (4 if recipe == "fp32" else 2) + 4 * 4)
    assert kept.saved - again.saved == 2 * numbers
    for plain, message in (
        (Transformer(fused=False), "use fused=True, or no kept_attention"),
        (
            NETS["mlp"](),
            "leave loss_chunks, kept_attention, trained and adapter out",
        ),
    ):
        tokens = [12] if isinstance(plain, Transformer) else []
        with pytest.raises(ValueError, match=message):
            predict(plain, 4, *tokens, kept_attention=True)


def test_what_dropout_made_lives_until_the_product_is_over():
    """Under autocast by CUDA's lists it is fp32, and the product reads a
    copy."""
    how = {"recipe": "autocast", "lists": "cuda", "checkpointed": True}
    shape = Transformer(2, 8, 1, 4, context=20, fused=False, dropout=True)
    assert same(shape, 3, 20, **how).at_peak.row == "blocks.0 matmul"


@pytest.mark.parametrize("recipe", ["fp32", "autocast"])
def test_a_norm_of_one_operator(recipe):
    """A CPU's LayerNorm without bias: one number more for each token."""
    shape = Transformer(900, 16, 2, 4, family="llama")  # all norms at the peak
    model = shape.build("cpu")
    x, y = (torch.zeros(3, 12, dtype=torch.long) for _ in range(2))
    for part in (model, *model.blocks):
        for name, module in part.named_children():
            if isinstance(module, nn.RMSNorm):
                setattr(part, name, nn.LayerNorm(16, bias=False))
    context = partial(autocast, None) if recipe == "autocast" else nullcontext
    step = trace_step(model, within(context, next_token), x, y)
    found = predict(
        shape, 3, 12, recipe=recipe, optimizer=None, kernels="cuda"
    )
    means = 5 * 3 * 12 * 4
    assert (found.start, found.peak + means) == (step.start, step.peak)


def test_the_first_stages_of_a_chain_are_a_schedule():
    model = mlp_blocks(12, 3)
    x, y = torch.rand(8, 12), torch.zeros(8, dtype=torch.long)
    step = trace_step(
        Checkpointed(model, segments=every_first(4, 2)), classify, x, y
    )
    chain = Chain(model, (12,), every_first(4, 4))
    for which in (2, (1, 0)):
        found = predict(chain, 8, optimizer=None, checkpointed=which)
        assert (found.start, found.peak) == (step.start, step.peak)


MASTER = product(
    ("master", "master-fp32-gradients"),
    ("adam", "momentum", "sgd"),
    (None, 2, 4),
    (False, True),
    ("gpt", "llama"),
    (None, 3),
)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("recipe", "optimizer", "micro", "foreach", "family", "chunks"),
    part_of(MASTER, RNG, 16),
)
def test_master_copies_to_the_byte(
    recipe, optimizer, micro, foreach, family, chunks
):
    shape = Transformer(40, 16, 2, 4, context=16, family=family)
    options = {
        "recipe": recipe,
        "optimizer": optimizer,
        "micro_batch": micro,
        "foreach": foreach,
        "loss_chunks": chunks,
    }
    tracker = master_step(shape, 6, 8, **options)
    predicted = predict(shape, 6, 8, **options)
    assert (predicted.start, predicted.peak) == (tracker.start, tracker.peak)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}])
def test_a_loss_in_chunks_to_the_byte(family, chunks, options):
    """The last one is shorter; with a vocabulary above the width, so that
    the loss can be the peak."""
    shape = Transformer(100, 16, 1, 4, context=16, family=family)
    same(shape, 5, 11, loss_chunks=chunks, **options)


# Any network -------------------------------------------------------------


@st.composite
def steps(draw):
    precision = PRECISIONS[draw(st.sampled_from([*PRECISIONS]))]
    run = {
        "checkpointed": draw(st.booleans()),
        "micro_batch": draw(st.sampled_from([None, None, 1, 2, 3, 9])),
        "offloaded": draw(st.booleans()),
    }
    return precision | run | draw(st.sampled_from([*STEPS.values()]))


@settings(max_examples=examples(34))
@given(
    transformers(),
    st.integers(1, 5),
    st.sampled_from([2, 7, 20]),
    steps(),
    st.sampled_from([None, 1, 2, 3, 101]),
)
def test_any_transformer(shape, batch, tokens, options, chunks):
    """Its loss in chunks, too; the vocabulary may be above the width, so
    that the loss is the peak."""
    same(shape, batch, tokens, loss_chunks=chunks, **options)


@settings(max_examples=examples(10))
@given(transformers(), st.integers(1, 5), steps())
def test_one_token(shape, batch, options):
    """Where transposes are views."""
    same(shape, batch, 1, **options)


@st.composite
def chains(draw):
    """Vectors or pictures; any module may come first, in any segment."""
    picture = draw(st.booleans())
    channels = draw(st.sampled_from([1, 3, 8]))
    side = 8 if picture else 1
    sample = (channels, side, side) if picture else (channels,)
    layers = []
    for _ in range(draw(st.integers(0, 6))):
        kinds = [nn.ReLU, nn.GELU]
        kind = draw(st.sampled_from(["weights", "norm", "pool", *kinds]))
        if kind == "weights":
            before, channels = channels, draw(st.sampled_from([1, 4, 8, 20]))
            bias = draw(st.booleans())
            layers.append(
                nn.Conv2d(before, channels, 3, padding=1, bias=bias)
                if picture
                else nn.Linear(before, channels, bias=bias)
            )
        elif kind == "norm":
            kind = nn.BatchNorm2d if picture else nn.LayerNorm
            layers.append(kind(channels))
        elif kind == "pool":
            if picture and side > 2:
                side //= 2
                layers.append(nn.MaxPool2d(2))
            else:
                layers.append(nn.Sequential())
        else:
            layers.append(kind())
    if picture and draw(st.booleans()):
        layers.append(nn.AdaptiveAvgPool2d(1))
        side = 1
    layers += [nn.Flatten(), nn.Linear(channels * side**2, 5)]
    segments, start = [], 0
    while start < len(layers):
        end = draw(st.integers(start + 1, len(layers)))
        if draw(st.booleans()):
            segments.append(tuple(range(start, end)))
        start = end
    return Chain(nn.Sequential(*layers), sample, tuple(segments))


@settings(max_examples=examples(30))
@given(chains(), st.sampled_from([2, 3, 5, 33]), steps())
def test_any_chain(chain, batch, options):
    same(chain, batch, **options)


def test_what_the_outer_of_two_sequences_still_holds():
    """Nothing before it is trained, so no tape holds it either."""
    inner = nn.Sequential(nn.GELU(), nn.ReLU())
    model = nn.Sequential(nn.ReLU(), inner, nn.Linear(16, 5))
    predicted = same(Chain(model, (16,)), 64)
    first = [m.live - predicted.start for m in predicted.moments[:3]]
    assert first == [4096, 8192, 12288]


# Which moment wins -------------------------------------------------------


def test_a_checkpointed_step_peaks_in_a_recomputation_or_in_backward():
    shape = Transformer(13, 16, 2, 4, context=64, fused=False)
    plain = predict(shape, 2, 64, optimizer=None)
    less = predict(shape, 2, 64, optimizer=None, checkpointed=True)
    assert less.peak < plain.peak
    assert less.peak_in("recomputation") > 0 == plain.peak_in("recomputation")
    for phase in ("forward", "backward", "recomputation", "optimizer"):
        assert less.peak_in(phase) <= less.peak


def test_logits_win_in_gpt2():
    """With its vocabulary, the loss's backward pass is the peak."""
    at = predict(GPT2, 8, 1024, optimizer=None).at_peak
    assert (at.row, at.phase) == ("log_softmax", "backward")


def test_a_loss_in_chunks_leaves_the_peak_to_the_weights():
    """More and more chunks save less and less: the head's gradients stay."""
    peaks = [
        predict(GPT2, 8, 1024, loss_chunks=2**n).at_peak for n in range(7)
    ]
    saved = [a.live - b.live for a, b in pairwise(peaks)]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 2 * 2**30 and saved[-1] < 2**20
    assert peaks[-1].row == "head linear (sum of gradients)"


def test_what_was_there_before_the_step():
    shape = NETS["gpt"]()
    for recipe, optimizer in product(RECIPES, RULES):
        predicted = predict(shape, 4, 8, recipe=recipe, optimizer=optimizer)
        weights = [w.elements for w in shape.write(4, 8).parameters]
        held = states(weights, recipe, optimizer)
        late = held.gradients if recipe == "master-fp32-gradients" else 0
        batch = 2 * 8 * 4 * 8
        assert predicted.start == (
            held.parameters + held.optimizer + late + batch
        )


@pytest.mark.parametrize("micro", [None, 2])
def test_gradients_that_stay(micro):
    shape = NETS["gpt"]()
    torch.manual_seed(0)
    model = shape.build("cpu")
    x = torch.zeros(4, 12, dtype=torch.long)
    step = trace_step(
        model, next_token, x, x.clone(), micro_batch=micro, keep_gradients=True
    )
    options = {"micro_batch": micro, "optimizer": None}
    found = predict(shape, 4, 12, keep_gradients=True, **options)
    assert (found.start, found.peak) == (step.start, step.peak)
    gradients = sum(p.nbytes for p in model.parameters())
    assert found.start == predict(shape, 4, 12, **options).start + gradients


def test_buffers_count_as_parameters():
    """They are the chain's own: mean, variance and count of two norms."""
    chain = NETS["convnet"]()
    buffers = sum(b.nbytes for b in chain.model.buffers())
    weights = sum(p.nbytes for p in chain.model.parameters())
    assert buffers == 2 * 4 * (8 + 16) + 2 * 8
    at = predict(chain, 4).at_peak
    assert at.split["parameters"] == weights + buffers


def test_a_micro_batch_larger_than_the_batch_is_the_batch():
    shape = NETS["llama"]()
    whole = predict(shape, 4, 8)
    for size in (4, 5, 100):
        assert predict(shape, 4, 8, micro_batch=size) == whole


def test_many_micro_batches_are_like_two():
    """Every full one but the first is like the second."""
    shape = NETS["gpt"]()
    few = predict(shape, 4, 8, micro_batch=2)
    many = predict(shape, 4000, 8, micro_batch=2)
    more = (4000 - 4) * 2 * 8 * 8  # the batch itself
    assert many.peak - more == few.peak
    assert len(many.moments) == len(few.moments)


# What cannot be ----------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (
            3,
            "checkpointed, the number of blocks, is 3: use a whole number "
            "from 0 to 2",
        ),
        (
            [0, 2],
            "there is no block 2 to checkpoint: there are 2, numbered from 0",
        ),
        ([1, 0, 1], "checkpointed is [1, 0, 1]: name each block once"),
        ([-1], "the number of a block is -1: use a whole number of at least"),
        (
            None,
            "checkpointed is None: use a list of numbers of blocks, how many "
            "of the first, True or False",
        ),
    ],
)
def test_blocks_that_cannot_be_checkpointed(which, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        predict(NETS["gpt"](), 4, 8, checkpointed=which)


def test_what_a_chain_has_not():
    with pytest.raises(ValueError, match="no segment 2 to checkpoint"):
        predict(NETS["mlp"](), 4, checkpointed=(2,))
    with pytest.raises(ValueError, match="only a Transformer's loss is cut"):
        predict(NETS["mlp"](), 4, loss_chunks=2)


def test_a_flag_that_nothing_reads():
    with pytest.raises(TypeError, match=r"^foreach is 1: use"):
        predict(NETS["gpt"](), 4, 8, optimizer=None, foreach=1)


def test_a_prediction_touches_neither_the_model_nor_random_numbers():
    chain = NETS["convnet"]()
    before = torch.get_rng_state()
    values = [t.clone() for t in chain.model.state_dict().values()]
    predict(chain, 4, checkpointed=True)
    assert torch.equal(before, torch.get_rng_state())
    after = chain.model.state_dict().values()
    assert all(map(torch.equal, values, after))
