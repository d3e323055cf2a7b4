"""The solutions of chapter 7 against real layers."""

import pytest
import torch
from torch import nn

from membudget.adapters import LoRA, adapt
from membudget.exercises.adapters import (
    adapter_states,
    check_adapter_states,
    kept_inputs,
)
from membudget.ledger import LLAMA3_8B, TARGETS
from membudget.measuring import SavedBytes

from .judging import accepts, rejects


def test_the_states_are_those_of_a_real_model():
    model = nn.Sequential(nn.Linear(16, 44, bias=False), nn.Linear(44, 8))
    base = sum(p.numel() for p in model.parameters())
    adapt(model.bfloat16(), ["0", "1"], 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    found = sum(p.nbytes for p in model.parameters())
    found += sum(p.grad.nbytes for p in trained)
    for state in optimizer.state.values():
        found += sum(t.nbytes for name, t in state.items() if name != "step")
    assert adapter_states(base, [(16, 44), (44, 8)], 3) == found


def test_the_sentence_about_llama():
    d, k, f = LLAMA3_8B.width, LLAMA3_8B.shared, LLAMA3_8B.hidden
    layers = [(d, d), (d, k), (d, k), (d, d), (d, f), (d, f), (f, d)]
    assert len(layers) == len(TARGETS["llama"])
    found = adapter_states(LLAMA3_8B.parameters, layers * 32, 16)
    assert f"{found / 2**30:.1f} GiB" in check_adapter_states.shown


@pytest.mark.parametrize("kinds", ["aaa", "atf", "fff", "tta"])
def test_what_is_kept_is_what_autograd_saves(kinds):
    """Beside the numbers between an adapter's two matrices."""
    how = {"a": "adapted", "t": "trained", "f": "frozen"}
    layers, rows = [], []
    for kind, (name, width) in zip(
        kinds, [("x", 16), ("x", 16), ("y", 44)], strict=True
    ):
        layer = nn.Linear(width, 8, bias=False, dtype=torch.bfloat16)
        layer.requires_grad_(kind == "t")
        if kind == "a":
            layer = LoRA(layer, 3)
        layers.append((name, layer))
        rows.append((name, width, how[kind]))
    inputs = {
        name: torch.ones(10, width, dtype=torch.bfloat16, requires_grad=True)
        for name, width in (("x", 16), ("y", 44))
    }
    made = {name: 1 * x for name, x in inputs.items()}
    with SavedBytes(*(layer for _, layer in layers)) as saved:
        sum(layer(made[name]).sum() for name, layer in layers)
    between = 4 * 10 * 3 * kinds.count("a")
    assert saved.total - between == kept_inputs(10, rows)


def by_counting(base, layers, rank):
    trained = sum(rank * width for layer in layers for width in layer)
    return base * 2 + 16 * trained


def test_another_right_answer():
    accepts("adapter_states", by_counting)


def test_a_list_of_bytes_is_no_answer():
    rejects("kept_inputs", lambda *_: [1, 2], "must be a single number")
