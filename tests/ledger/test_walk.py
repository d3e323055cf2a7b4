"""The walk through rows that are written by hand."""

import dataclasses

import pytest
import torch
from ledger_helpers import total
from torch import nn

from membudget import ledger
from membudget.ledger import PaperMoment, Transformer
from membudget.ledger import operators as op
from membudget.ledger.paper import Paper
from membudget.ledger.walk import kept, walk
from membudget.measuring import CATEGORIES, PHASES, trace_step


def told(prediction):
    """Row, phase and live bytes of every moment."""
    return [(m.row, m.phase, m.live) for m in prediction.moments]


def two_layers(checkpointed=False):
    """Input 4 × 2, linear 2 → 3, ReLU, linear 3 → 1, sum, without biases."""
    paper = Paper()
    x = paper.input(8)
    first, second = paper.parameter(6), paper.parameter(3)
    y = op.of_output(paper, op.linear(paper, x, first, 3), "relu")
    z = op.linear(paper, y, second, 1)
    if checkpointed:
        paper.checkpoint(0)
    total(paper, z)
    return paper


BEFORE = 4 * (6 + 3)


def test_every_moment_of_a_step_by_hand():
    """Weights 24 and 12 bytes; x·w: 48, ReLU: 48 (saved), output: 16."""
    found = walk([two_layers()], inputs=32)
    assert found.start == BEFORE + 32 == 68
    assert told(found) == [
        ("linear", "forward", 68 + 48),
        ("relu", "forward", 68 + 48 + 48),
        ("linear", "forward", 68 + 48 + 16),
        ("sum", "forward", 68 + 48 + 16 + 4),
        ("loss gradient", "backward", 68 + 48 + 4 + 4),
        ("sum", "backward", 68 + 48 + 8),
        ("linear", "backward", 68 + 48 + 8 + 12 + 48),
        # the ReLU's output is let go after it
        ("relu", "backward", 68 + 48 + 8 + 12 + 48 + 48),
        ("linear", "backward", 68 + 8 + 12 + 48 + 24),
    ]
    assert found.saved == 48 + 4
    assert found.peak == 232
    assert found.at_peak == found.moments[7]
    assert found.at_peak.split == {
        "parameters": 36,
        "gradients": 12,
        "optimizer": 0,
        "activations": 48 + 8,
        "inputs": 32,
        "temporaries": 96,
    }
    assert found.peak_in("forward") == 68 + 96
    assert found.peak_in("backward") == 232
    assert found.peak_in("recomputation") == found.peak_in("optimizer") == 0


def test_the_same_step_under_a_checkpoint():
    """It keeps its input alone, which is the batch, and recomputes up to the
    ReLU, because of the last linear layer only the input is needed."""
    found = walk([two_layers(checkpointed=True)], inputs=32)
    assert found.saved == 4
    rows = [(row, phase) for row, phase, _ in told(found)]
    assert rows[4:] == [
        ("loss gradient", "backward"),
        ("sum", "backward"),
        ("linear", "recomputation"),
        ("relu", "recomputation"),
        ("linear", "backward"),
        ("relu", "backward"),
        ("linear", "backward"),
    ]


def test_categories_and_phases_are_the_trackers():
    moment = PaperMoment("x", "forward", (1, 2, 3, 4, 5, 6))
    assert moment.live == 21
    assert list(moment.split) == list(CATEGORIES)
    assert list(moment.split.values()) == [1, 2, 3, 4, 5, 6]
    found = walk([two_layers(True)], workspace=[0])
    assert {m.phase for m in found.moments} == set(PHASES)


def test_gradients_that_are_there_before():
    """The new ones are added to them and go."""
    found = walk([two_layers()], gradients=36)
    assert found.start == BEFORE + 36
    assert {m.split["gradients"] for m in found.moments} == {36}
    assert found.moments[-1].split["temporaries"] == 48 + 24


def test_the_optimizers_moments_come_last():
    found = walk([two_layers()], workspace=[0, 1000, 40])
    update = [(m.row, m.phase) for m in found.moments[-3:]]
    assert update == [("update", "optimizer")] * 3
    assert [m.live for m in found.moments[-3:]] == [
        2 * BEFORE + n for n in (0, 1000, 40)
    ]
    assert found.at_peak.split["gradients"] == 36
    found = walk([two_layers()], workspace=[500, 500])
    assert found.at_peak is found.moments[-2]  # the first of equal ones


def test_rows_are_named_after_their_modules():
    paper = Transformer(depth=2).write(1, 4)
    names = [row.name for row in paper.rows]
    assert "blocks.1.up linear" in names
    assert "blocks.0 gelu" in names
    assert names[-1] == "nll_loss"


def test_a_chain_by_hand_is_the_tracker_too():
    """The hand-written rows of two layers, on a real model."""
    model = nn.Sequential(
        nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False)
    )
    tracker = trace_step(model, lambda m, x: m(x).sum(), torch.rand(4, 2))
    assert tracker.peak == walk([two_layers()], inputs=32).peak


def test_results_cannot_be_changed():
    made = [k for k in vars(ledger).values() if isinstance(k, type)]
    made = [k for k in made if dataclasses.is_dataclass(k)]
    assert all(k.__dataclass_params__.frozen for k in made)


def test_a_row_that_makes_nothing_has_what_is_alive_then():
    """The gradient of a sum of two is handed on; the head's is gone."""
    shape = Transformer(width=8, depth=1, heads=2, context=4, vocabulary=8)
    moments = ledger.predict(shape, 2, 4, optimizer=None).moments
    rows = [m.row for m in moments]
    add = len(rows) - 1 - rows[::-1].index("blocks.0 add")
    assert moments[add].phase == "backward"
    assert moments[add].live < moments[add - 1].live


# What is kept ------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize("checkpointed", [False, True, [1]])
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("trained", ["*", "blocks.1.*", "token.weight"])
def test_what_is_kept_is_what_is_saved(family, checkpointed, kernels, trained):
    """Tensor by tensor, with statistics; the loss is the rest."""
    shape = Transformer(40, 16, 2, 4, 32, family=family)
    how = {"checkpointed": checkpointed, "kernels": kernels}
    paper = shape.write(3, 5, trained=[trained], **how)
    found = ledger.predict(shape, 3, 5, trained=[trained], **how)
    tensors = kept(paper)
    assert len({id(t) for t, _ in tensors}) == len(tensors)
    assert not any(t.kind for t, _ in tensors)
    assert sum(t.bytes for t, _ in tensors) + 4 == found.saved


def test_what_several_rows_save_is_kept_once_with_all_of_them():
    shape = Transformer(40, 16, 1, 4, kv_heads=2, family="llama")
    rows = [[row.name for row in of] for _, of in kept(shape.write(2, 3))]
    both = ["blocks.0.gate linear", "blocks.0.up linear"]
    assert rows.count(both) == 1
    assert not any(both[0] in of for of in rows if of != both)
