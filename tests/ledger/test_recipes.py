"""Bytes per parameter, against the states of real optimizers."""

from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ledger_helpers import DTYPES, MAKE
from torch import nn

from membudget.ledger import (
    PLANNED,
    RECIPES,
    States,
    Transformer,
    bytes_per_parameter,
    optimizer_bytes,
    states,
    update_workspace,
)
from membudget.measuring import trace_step, witness
from membudget.models import mlp
from tests.soak import examples

BYTES = {
    # parameters, gradients, master copy, and of each of Adam's two states
    "fp32": (4, 4, 0, 4),
    "autocast": (4, 4, 0, 4),
    "bf16": (2, 2, 0, 2),
    "master": (2, 2, 4, 4),
    "master-fp32-gradients": (2, 4, 4, 4),
}
TABLE = {
    (recipe, optimizer): (parameters, gradients, master + states)
    for recipe, (parameters, gradients, master, state) in BYTES.items()
    for optimizer, states in {
        "sgd": 0,
        "momentum": state,
        "adam": 2 * state,
        "adam-8bit": 2,
        "lion-8bit": 1,
    }.items()
}


def test_bytes_per_parameter():
    assert list(TABLE) == list(product(RECIPES, PLANNED))
    for names, row in TABLE.items():
        found = bytes_per_parameter(*names)
        assert found == States(*row)
        assert found.total == sum(row)
        assert states([], *names) == States(0, 0, 0)


@pytest.mark.parametrize(("recipe", "optimizer"), TABLE)
def test_the_rule_of_thumb_is_the_account_but_for_counters(recipe, optimizer):
    """Adam counts in 4 bytes for each tensor; 8-bit states have a scale of
    4 bytes for every 256 numbers, and a table of 1 KiB for each of them."""
    sizes = [4096, 256 * 100, 10**6 * 256]
    thumb = bytes_per_parameter(recipe, optimizer)
    found = states(sizes, recipe, optimizer)
    assert found.parameters == thumb.parameters * sum(sizes)
    assert found.gradients == thumb.gradients * sum(sizes)
    one = sum(sizes) // 64 + 1024
    rest = {"adam": 4 * len(sizes), "adam-8bit": 2 * one, "lion-8bit": one}
    assert found.optimizer == (
        thumb.optimizer * sum(sizes) + rest.get(optimizer, 0)
    )


@pytest.mark.few(6)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("recipe", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_states_of_real_optimizers(recipe, optimizer, tied):
    shape = Transformer(40, 16, 2, 4, tied=tied)
    model = shape.build("cpu").to(DTYPES[RECIPES[recipe].parameters])
    stepper = MAKE[optimizer](model.parameters(), tied)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    stepper.step()
    kept = [
        value.nbytes
        for state in stepper.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    weights = sum(p.nbytes for p in model.parameters())
    found = states(model, recipe, optimizer)
    assert found == States(weights, weights, sum(kept))
    assert found.total == 2 * weights + sum(kept)
    assert found == states(shape.build(), recipe, optimizer)


def test_frozen_parameters_have_neither_gradients_nor_states():
    model = mlp(8, 16, 3)
    whole = states(model)
    model[0].requires_grad_(False)
    found = states(model)
    frozen = 8 * 16 + 16
    assert found.parameters == whole.parameters
    assert whole.gradients - found.gradients == 4 * frozen
    assert whole.optimizer - found.optimizer == 8 * frozen + 2 * 4
    model.requires_grad_(False)
    assert states(model) == States(whole.parameters, 0, 0)


def test_buffers_are_not_counted():
    model = nn.BatchNorm2d(8)
    assert states(model).parameters == 4 * 16


@settings(max_examples=examples(10))
@given(st.lists(st.integers(1, 20_000), max_size=6))
@example([4095])
@example([4096, 4097])
def test_eight_bit_states_by_hand(sizes):
    """Two bytes for each number, a scale for each 256 begun; in fp32 where
    a tensor has fewer than 4096 numbers; two tables for all together."""
    total, tables = 0, 0
    for size in sizes:
        if size < 4096:
            total += 2 * 4 * size
        else:
            blocks = len(range(0, size, 256))
            total += 2 * (size + 4 * blocks)
            tables = 2 * 256 * 4
    for recipe in RECIPES:
        master = sum(sizes) * RECIPES[recipe].master
        found = optimizer_bytes(sizes, recipe, "adam-8bit")
        assert found == total + tables + master
    assert states(sizes, "fp32", "adam-8bit") == States(
        4 * sum(sizes), 4 * sum(sizes), total + tables
    )


# What the optimizer's step allocates -------------------------------------


def test_the_workspace_by_hand():
    sizes = [10, 4, 6]
    # √v and the denominator; the denominator before is still there
    assert update_workspace(sizes) == [0, 80, 40 + 32, 16 + 48]
    assert update_workspace(sizes, foreach=True) == [80]
    assert update_workspace(sizes, "bf16") == [0, 40, 20 + 16, 8 + 24]
    assert update_workspace(sizes, "bf16", foreach=True) == [40]
    for optimizer in ("sgd", "momentum", "adam-8bit"):
        for foreach in (False, True):
            assert update_workspace(sizes, "fp32", optimizer, foreach) == [0]
    # the gradients of all are copied to fp32 first
    assert update_workspace(sizes, "master", "sgd") == [80]
    assert update_workspace(sizes, "master") == [80, 160, 152, 144]
    assert update_workspace(sizes, "master-fp32-gradients") == (
        update_workspace(sizes)
    )


@pytest.mark.few(6)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sizes", [[7], [1, 5, 100, 100, 3]])
def test_the_workspace_of_real_optimizers(sizes, optimizer, foreach):
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.ws = nn.ParameterList(torch.rand(n) for n in sizes)

    def loss(model):
        return sum(w.sum() for w in model.ws)

    model = Sizes()
    stepper = MAKE[optimizer](model.parameters(), foreach)
    tracker = trace_step(model, loss, optimizer=stepper)
    ((first, _),) = (m for m in tracker.marks if m[1] == "step")
    before = tracker.timeline[first - 1] - 8  # the loss and its gradient
    most = max(tracker.timeline[first:])
    # numbers of 4 bytes, such as the step, come and go
    workspace = max(update_workspace(sizes, "fp32", optimizer, foreach))
    assert 0 <= most - before - workspace <= 16


def test_a_fused_adam_makes_nothing():
    """By the allocator's own events, and none of the tracker's."""
    assert update_workspace([10, 4], fused=True) == [0]
    assert update_workspace([10, 4], "master", fused=True) == [56]
    with pytest.raises(ValueError, match="two ways of one step"):
        update_workspace([10], foreach=True, fused=True)
    weights = [torch.rand(1000, requires_grad=True) for _ in range(3)]

    def peak(**way):
        adam = torch.optim.AdamW(weights, **way)

        def step():
            for w in weights:
                w.grad = torch.ones_like(w)
            adam.step()
            adam.zero_grad()

        return witness(step)

    gradients = 3 * 4000
    fused, at_once = peak(fused=True), peak(foreach=True)
    assert 0 <= fused - gradients <= 64
    assert 0 <= at_once - gradients - 3 * 4000 <= 128
