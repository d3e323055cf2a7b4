"""The solutions of chapter 7 against real layers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.adapters import LoRA, adapt
from membudget.exercises.adapters import (
    adapter_states,
    check_adapter_states,
    fine_tunable,
    kept_inputs,
)
from membudget.ledger import LLAMA3_8B, TARGETS
from membudget.measuring import PeakTracker, SavedBytes
from membudget.models import Llama

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


def adapted():
    torch.manual_seed(0)
    model = adapt(Llama(32, 16, depth=4, hidden=32), ["query", "down"], 2)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.constant_(p, 0.1)
    return model


def gradients(model, trained):
    tokens = torch.arange(64).view(1, 64) % 32
    with PeakTracker(model, tokens) as tracker:
        value = model(tokens).square().mean()
        kept = tracker.live - tracker.start
        value.backward()
    return [p.grad for p in trained], kept


def test_a_repaired_fine_tune_has_the_gradients_of_the_plain_one():
    plain, model = adapted(), adapted().requires_grad_(True)
    of_plain = [p for p in plain.parameters() if p.requires_grad]
    trained = fine_tunable(model)
    assert all(p.requires_grad == any(p is t for t in trained)
               for p in model.parameters())  # fmt: skip
    right, much = gradients(plain, of_plain)
    found, little = gradients(model, trained)
    assert all(map(torch.equal, found, right))
    assert little < much / 2


def awake(model):
    """Reentrant checkpoints, and an input that has a gradient."""
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    model.requires_grad_(False)
    for p in trained:
        p.requires_grad_()
    model.token.register_forward_hook(lambda *args: args[2].requires_grad_())
    for block in model.blocks:
        again = partial(checkpoint, block.forward, use_reentrant=True)
        block.forward = again
    return trained


def stub_of_the_page(model):
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    model.requires_grad_(False)
    again = partial(checkpoint, use_reentrant=True)
    for block in model.blocks:
        block.forward = partial(again, block.forward)
    return trained


def frozen_adapters(model):
    stub_of_the_page(model)
    return [torch.zeros(2)]


def test_another_repair_is_right():
    accepts("fine_tunable", awake)


def test_the_page_asks_for_two_repairs():
    rejects("fine_tunable", stub_of_the_page, "nothing is trained")
    rejects("fine_tunable", frozen_adapters, "parameters of the model")


def half_repaired(model):
    trained = stub_of_the_page(model)
    for p in trained:
        p.requires_grad_()
    return trained


def test_after_the_first_repair_the_second_is_named():
    rejects("fine_tunable", half_repaired, "asks whether one of its inputs")
