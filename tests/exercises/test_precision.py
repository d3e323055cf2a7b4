"""The solutions of chapter 6 against PyTorch and the room."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from membudget import exercises, precision
from membudget.exercises.precision import (
    autocast_saved,
    loss_scale,
    round_to,
    stochastic_round,
    survives,
)
from membudget.measuring import SavedBytes

from .judging import accepts, edits, rejects


@given(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(["bf16", "fp16", "fp8-e5m2"]),
)
def test_round_to_is_a_cast(x, name):
    kind = precision.FORMATS[name]
    cast = torch.tensor(x).to(kind.dtype).item()
    assert round_to(x, kind.exponent_bits, kind.fraction_bits) == cast


def by_the_format(x, exponent_bits, fraction_bits):
    kind = precision.Format("", exponent_bits, fraction_bits, 0, None)
    return torch.tensor(kind.round(x))


def saved_by_autograd(batch, widths):
    layers = [nn.Linear(widths[0], widths[1])]
    for pair in pairwise(widths[1:]):
        layers += [nn.ReLU(), nn.Linear(*pair)]
    model, x = nn.Sequential(*layers), torch.randn(batch, widths[0])
    with SavedBytes(model, x) as saved, precision.Autocast("cpu"):
        model(x)
    return saved.total


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=2))
def test_autocast_saved_is_exact(batch, widths):
    assert autocast_saved(batch, widths) == saved_by_autograd(batch, widths)


def test_copies_outweigh_what_16_bits_save():
    def fp32(batch, widths):
        return 4 * batch * sum(widths[1:-1])

    widths = [3, 7, 11, 4]
    assert autocast_saved(1, widths) > fp32(1, widths)
    assert autocast_saved(4096, widths) < fp32(4096, widths)


@pytest.mark.parametrize("case", exercises.check_loss_scale.cases[:3])
def test_loss_scale_is_that_of_the_room(case):
    gradients, largest, smallest = case.make()
    scale, share = loss_scale(gradients, largest, smallest)
    assert scale == precision.best_scale(gradients)
    assert share == precision.lost(gradients, "fp16", scale).below
    assert 0 < share < 1
    cast = (gradients * scale).half()
    assert cast.isfinite().all()
    assert (gradients * scale * 2).half().isinf().any()
    assert share == (cast[gradients != 0] == 0).double().mean()


@given(
    st.floats(-1e6, 1e6, width=32),
    st.floats(-1024, 1024, width=32),
    st.integers(-20, 0),
)
def test_survives_is_a_subtraction_and_a_cast(weight, update, power):
    weight = torch.tensor(weight).bfloat16().double()
    update = torch.tensor(update, dtype=torch.float64) * 2.0**power
    left = weight - update
    if 0 < left.abs() < 1e-30 or left.float() != left:
        return  # not exact in fp32, from which PyTorch rounds
    expected = bool(left.float().bfloat16().double() != weight)
    assert survives(weight.item(), update.item(), 7) == expected


def test_stochastic_round_is_right_on_average():
    x = torch.tensor([1.001, -1.005, 3.14159, 0.3, 100.1])
    noise = torch.arange(65536, dtype=torch.int32)[:, None]
    found = stochastic_round(x.expand(65536, 5), noise)
    assert torch.equal(found, found.bfloat16().float())
    mean = found.double().mean(0)
    assert torch.equal(mean, x.double())  # every noise once: exact
    assert all(len(column.unique()) == 2 for column in found.T)


def scale_by_loop(gradients, largest, smallest):
    sizes, scale = gradients.abs().double(), 1.0
    while sizes.max() * scale > largest:
        scale /= 2
    while sizes.max() * scale * 2 <= largest:
        scale *= 2
    lost = (sizes > 0) & (sizes * scale <= smallest / 2)
    return [torch.tensor(scale), lost.sum() / (sizes > 0).sum()]


def compared(x, noise):
    bits = x.view(torch.int32)
    below = (bits & -65536).view(torch.float32)
    above = ((bits & -65536) + 65536).view(torch.float32)
    return torch.where((bits & 65535) > noise, above, below)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("round_to", by_the_format),
        ("loss_scale", scale_by_loop),
        ("survives", lambda *a: np.bool_(survives(*a))),
        ("stochastic_round", compared),
    ],
)
def test_other_right_answers(name, answer):
    accepts(name, answer)


WRONG = {
    "loss_scale": """
        scale, lost.double().mean().item() => 1.0
            2 numbers are needed, loss scale and share
        scale, lost.double().mean().item() => 1, 2, 3
            your function returns a tuple: 2 numbers
        """,
    "stochastic_round": """
        .view(torch.float32) => .view(torch.float32).tolist()
            your function returns a list: a tensor
        .view(torch.float32) => .view(torch.float32).bfloat16()
            is of torch.bfloat16; torch.float32 is
        .view(torch.float32) => .view(torch.float32).flatten()
            ; x is a table of 65536 × 6 numbers
        """,
}


@pytest.mark.parametrize(("name", "answer", "words"), edits(WRONG))
def test_results_of_another_kind(name, answer, words):
    rejects(name, answer, words)
