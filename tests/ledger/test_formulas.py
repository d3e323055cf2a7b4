"""The closed forms: against the rows, the tracker and their source."""

import random
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_helpers import DTYPES, next_token
from torch import nn

from membudget.ledger import (
    GPT2,
    LLAMA3_8B,
    Transformer,
    activations,
    block_activations,
    korthikanti,
)
from membudget.ledger.formulas import head_activations
from membudget.ledger.walk import walk
from membudget.measuring import SavedBytes, trace_step
from membudget.models import rotary
from tests.soak import examples, part_of

RNG = random.Random(0)

SHAPES = [
    Transformer(
        vocabulary,
        heads * size,
        depth,
        heads,
        context=40,
        fused=fused,
        tied=depth == 1,
        **options,
    )
    for vocabulary, heads, size, depth in [(40, 4, 4, 1), (7, 2, 8, 3)]
    for fused in (True, False)
    for options in [
        {},
        {"dropout": True},
        {"family": "llama"},
        {"family": "llama", "kv_heads": 1, "hidden": 50},
        {"family": "llama", "kv_heads": 2, "hidden": 7},
    ]
]
SIZES = [(1, 1), (1, 16), (2, 5), (5, 40), (3, 1)]
GRID = list(product(SHAPES, SIZES, (4, 2)))


def test_the_rows_add_up_to_the_closed_form():
    for shape, (batch, tokens), itemsize in part_of(GRID, RNG, 60):
        paper = shape.write(batch, tokens, itemsize=itemsize)
        found = activations(shape, batch, tokens, itemsize)
        assert found == walk([paper]).saved


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("shape", "sizes", "itemsize"), part_of(GRID, RNG, 30)
)
def test_the_tracker_finds_the_closed_form(shape, sizes, itemsize):
    """To the byte; with the loss and the weight of its targets."""
    batch, tokens = sizes
    model = shape.build("cpu").to(DTYPES[itemsize])
    x = torch.zeros(batch, tokens, dtype=torch.long)
    tracker = trace_step(model, next_token, x, x.clone())
    ((backward, _),) = (m for m in tracker.marks if m[1] == "backward")
    found = activations(shape, batch, tokens, itemsize)
    assert found == tracker.split(backward - 1)["activations"]


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("shape", "sizes", "itemsize"), part_of(GRID, RNG, 30)
)
def test_a_block_alone(shape, sizes, itemsize):
    """Saved by autograd: its input too, and not its output.

    A Llama's block saves the turns besides, which all blocks share.
    """
    batch, tokens = sizes
    block = shape.build("cpu").to(DTYPES[itemsize]).blocks[0]
    x = torch.rand(batch, tokens, shape.width).to(DTYPES[itemsize])
    x.requires_grad_()
    given, shared = (x,), 0
    if shape.family == "llama":
        turns = rotary(tokens, shape.width // shape.heads)
        given, shared = (x, turns), turns.nbytes
    with SavedBytes(block) as saved:
        block(*given)
    found = block_activations(shape, batch, tokens, itemsize)
    assert saved.total - shared == found


def test_gpt2_by_its_formula():
    """b·t·(16·s·D + 4·s + 4·a) for a block; 3·b·t·s·V at the loss."""
    n = 8 * 1024
    assert block_activations(GPT2, 8, 1024) == n * (64 * 768 + 16 + 48)
    head = n * (4 * 50257 + 8 * 768 + 8) + 8
    assert head_activations(GPT2, 8, 1024) == head


def test_llama_by_its_formula():
    """b·t·(s·(6·D + 2·K + 4·F) + 8·D + 8 + 4·a), s = 2."""
    n, d = 8192, 4096
    per_token = 2 * (4 * d + 2 * 1024 + 4 * 14336) + 16 * d + 8 + 4 * 32
    assert block_activations(LLAMA3_8B, 1, 8192, 2) == n * per_token
    per_token = 4 * (6 * d + 2 * 1024 + 4 * 14336) + 8 * d + 8 + 4 * 32
    assert block_activations(LLAMA3_8B, 1, 8192, 4) == n * per_token


# The loss ----------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self, batch, tokens, vocabulary, itemsize):
        super().__init__()
        self.values = nn.Parameter(
            torch.rand(batch, tokens, vocabulary).to(DTYPES[itemsize])
        )

    def forward(self, x):
        return self.values * 2


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7)])
def test_the_peak_of_the_loss(sizes, itemsize):
    """Beyond 3·s·b·t·V: the loss, its gradient, and the targets' weight."""
    batch, tokens, _ = sizes
    model = Logits(*sizes, itemsize)
    x = torch.zeros(batch, tokens, dtype=torch.long)
    tracker = trace_step(model, next_token, x, x.clone())
    at = [o.name for o in tracker.operators].index(
        "aten._log_softmax_backward_data"
    )
    found = tracker.timeline[at] - tracker.start
    assert found == (3 * prod(sizes) + 2) * itemsize


# Korthikanti et al. ------------------------------------------------------

sizes = st.integers(1, 64)


@settings(max_examples=examples(10))
@given(sizes, sizes, sizes, st.integers(1, 8))
def test_the_usual_formula_and_its_residuals(batch, tokens, size, heads):
    """A 16-bit GPT-2 block with dropout, attention operator by operator.

    Beyond s·b·h·(34 + 5·a·s/h) a CPU's block has: 1 byte more for each
    number of the three dropout masks, which are of 2 bytes there (2·s·b·h,
    a·s²·b), mean and 1/σ of two norms (8·s·b), and the causal mask (s²).
    """
    width = heads * size
    shape = Transformer(9, width, 1, heads, fused=False, dropout=True)
    masks = 2 * tokens * batch * width + heads * tokens**2 * batch
    statistics, causal = 8 * tokens * batch, tokens**2
    found = block_activations(shape, batch, tokens, 2)
    usual = korthikanti(batch, tokens, width, heads)
    assert found == usual + masks + statistics + causal


def test_the_usual_formula_by_hand():
    """sbh(34 + 5as/h) of the shape in the paper's table 3, 22 B."""
    s, b, h, a = 2048, 4, 6144, 64
    assert korthikanti(b, s, h, a) == s * b * (34 * h + 5 * a * s)
