"""The solutions of chapter 2 against models and real steps, other answers."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from membudget import exercises, ledger
from membudget.measuring import SavedBytes

from .judging import accepts, checker, edits, judged, rejects
from .pages import cells, page_of


def solution(name):
    return checker(name).solution


# Against what is measured


class GatedBlock(nn.Module):
    """A pre-norm block with fused attention and a gated GELU MLP."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        n = self.norm2(x)
        return x + self.down(F.gelu(self.gate(n)) * self.up(n))


def saved_in(model, *exclude, x):
    with SavedBytes(model, *exclude) as saved:
        output = model(x)
    del output
    return saved.total


def saved_by_block(batch, tokens, width, heads, hidden):
    x = torch.zeros(batch, tokens, width, requires_grad=True)
    return saved_in(GatedBlock(width, heads, hidden), x=x)


def test_gated_block_is_what_is_measured():
    for case in exercises.check_gated_block.cases:
        call = case.make()
        assert solution("gated_block")(*call) == saved_by_block(*call)


LAYERS = {
    "linear": lambda width: nn.Linear(width, width),
    "relu": lambda width: nn.ReLU(),
    "gelu": lambda width: nn.GELU(),
    "layernorm": nn.LayerNorm,
    "tanh": lambda width: nn.Tanh(),
}


def saved_by_chain(layers, rows, width):
    model = nn.Sequential(*[LAYERS[word](width) for word in layers])
    x = torch.zeros(rows, width, requires_grad=True)
    return saved_in(model, x, x=x)


def test_saved_bytes_are_those_of_every_short_chain():
    calls = [(chain, 2, 3) for chain in product(LAYERS, repeat=3)]
    for case in exercises.check_saved_bytes.cases:
        calls += case.make()
    for call in calls:
        assert solution("saved_bytes")(*call) == saved_by_chain(*call)


LINES = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1
)


@settings(max_examples=50)
@given(LINES, st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_the_line_is_never_too_high(lines, first, more, beyond):
    batch = first + more + beyond
    line, peak = solution("extrapolate")(lines, first, first + more, batch)
    assert line <= peak + 1e-6
    assert peak == ledger.peak_at(lines, batch)


@settings(max_examples=50)
@given(LINES, st.integers(1, 2 * 10**6))
def test_largest_batch_is_exact(lines, limit):
    lines = [*lines, (0, 10**4)]
    batch = solution("largest_batch")(lines, limit)
    assert not batch or ledger.peak_at(lines, batch) <= limit
    assert ledger.peak_at(lines, batch + 1) > limit


@pytest.mark.parametrize("case", exercises.check_estimate.cases)
def test_estimate_is_near_and_in_the_losses_backward(case):
    parameters, batch, tokens, width, depth, heads, vocabulary = case.make()
    shape = ledger.Transformer(vocabulary, width, depth, heads, context=tokens)
    step = ledger.predict(shape, batch, tokens)
    assert shape.parameters == parameters
    assert step.at_peak.phase == "backward"
    assert step.at_peak.row == "log_softmax"
    assert solution("estimate")(*case.make()) == pytest.approx(step.peak, 0.02)


# The figures in the sentences after "Correct."


def gpt2_peak(batch):
    shape = ledger.Transformer(50257, 768, 12, 12, context=1024)
    return ledger.predict(shape, batch, 128).peak


def test_lines_and_words_about_gpt2():
    lines, *_ = exercises.check_extrapolate.cases[1].make()
    for batch in (1, 2, 3, 8, 32, 100):
        assert ledger.peak_at(lines, batch) == gpt2_peak(batch)
    for number in solution("extrapolate")(lines, 1, 2, 32):
        assert f"{number / 1e9:.2f}" in exercises.check_extrapolate.shown
    fits = solution("largest_batch")(lines, 16 * 10**9)
    assert gpt2_peak(fits) <= 16 * 10**9 < gpt2_peak(fits + 1)
    assert f" {fits} sequences" in exercises.check_largest_batch.shown


# Other answers


def tried(lines, limit):
    batch = 0
    while ledger.peak_at(lines, batch + 1) <= limit:
        batch += 1
    return batch


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("largest_batch", tried),
        ("extrapolate", lambda *a: np.array(solution("extrapolate")(*a))),
    ],
)
def test_other_right_answers(name, answer):
    accepts(name, answer)


WRONG = {
    "saved_bytes": """
        len(saved) * width + 2 * norms => width
            the answer for ["linear", "gelu", "linear"] is 240; 480 is right:
            too small by 240. Write down for each layer which
        """,
    "extrapolate": """
        line, peak(batch) => line / 2, peak(batch)
            the line at `batch` is 867.5; 1735 is right: too small by 867.5.
        line, peak(batch) => line, peak(batch) + 60
            the peak at `batch` is 3460; 3400 is right: too large by 60. The
            peak at a batch size is the highest
        """,
    "largest_batch": """
        if slope) => )
            ZeroDivisionError in line 4
        """,
}


@pytest.mark.parametrize(("name", "answer", "words"), edits(WRONG))
def test_a_mistake_that_is_not_known(name, answer, words):
    rejects(name, answer, words)


# The calculator to repair

REPAIRS = {
    "adam = 4 *": ("adam = 2 * 4 *", "Adam keeps two numbers for each"),
    "logits = 4 *": ("logits = 3 * 4 *", "the logits count once"),
    "n * width * (34 + 5 * heads * tokens / width)": (
        "4 * n * (16 * width + heads)",
        "34 + 5·heads·tokens/width bytes are those of a 16-bit block",
    ),
}


@pytest.mark.parametrize("repaired", list(product((False, True), repeat=3)))
def test_repairing_the_estimate_step_by_step(repaired):
    (cell,) = (c for c in cells(page_of("estimate")) if "def estimate(" in c)
    source, _ = cell.split("\n\n\n")
    left = []
    for broken, done in zip(REPAIRS, repaired, strict=True):
        right, hint = REPAIRS[broken]
        assert broken in source
        source = source.replace(broken, right) if done else source
        left += [] if done else [hint]
    room = {}
    exec(source, room)
    if all(repaired):
        accepts("estimate", room["estimate"])
    else:
        text = judged("estimate", room["estimate"]).text
        assert text.startswith(tuple(left))
