"""The solutions of chapter 1 against what is measured, and other answers."""

import gc
import weakref
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget import exercises
from membudget.measuring import trace_step

from .judging import accepts, checker, edits, rejects


def network(width, depth):
    layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*[layer for pair in layers for layer in pair])


def summed(model, x):
    return model(x).sum()


SIZES = [
    *(case.make() for case in exercises.check_predict_peak.cases),
    *product([1, 9, 60], [1, 24], [2, 5]),
]


@pytest.mark.parametrize(("batch", "width", "depth"), SIZES)
def test_peak_formula_is_exact(batch, width, depth):
    step = trace_step(network(width, depth), summed, torch.ones(batch, width))
    formula = exercises.check_predict_peak.solution(batch, width, depth)
    assert formula + 8 == step.peak  # the loss and its gradient


def test_collector_is_judged_without_other_garbage():
    layer = nn.Linear(2, 2)
    layer.itself = [layer]
    other = weakref.ref(layer)
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        del layer
        accepts("collect_above", checker("collect_above").solution)
        assert not gc.isenabled()
        assert other() is not None
        assert gc.get_freeze_count() <= frozen
        gc.collect()
        assert other() is None
    finally:
        gc.enable()


# Wrong answers: edits of the solutions, with words of the hint


WRONG = {
    "train": """
        loss.item() => loss
            The losses in the list are tensors, and each holds the graph it
            was computed with
        loss.item() => loss.detach()
            detached, so they hold no graph; but they are tensors, and memory
            grows by 8 bytes with every step. Floats are asked
        return losses => return torch.tensor(losses)
            but they are tensors. Floats are asked
        losses = [] => losses, outputs = [], []
        model(x) => outputs.append(model(x)) or outputs[-1]
            memory grows by 192 bytes with every step. The largest tensor that
            stays has 192 bytes and was made by `aten.addmm` in layer 2 of the
            model.
        losses = [] => losses, total = [], 0
        loss.backward() => loss.backward(retain_graph=True); total += loss
            made by `aten.relu` in layer 1 of the model.
        losses = [] => losses, sure = [], []
        model(x) => (logits := model(x))
        loss.item() => loss.item()); sure.append(logits.detach().exp()
            made by `aten.exp` after the model.
        losses = [] => losses, kept = [], None
        model(x) => (logits := model(x))
        optimizer.zero_grad() => \
        optimizer.zero_grad(); \
        kept = logits if len(losses) == len(batches) - 2 else kept; \
        del logits
            memory grows by 64 bytes with every step. The largest tensor
        loss.backward() => loss.backward(retain_graph=True)
            512 bytes of a step's activations are still alive
        optimizer.zero_grad() => optimizer.zero_grad(set_to_none=False)
            gradients are still there at the end
        loss = => model.logits = model(x); loss = model.loss =
        (model(x), y) => (model.logits, y)
            200 bytes that were made in the loop are still alive at the end.
            The largest tensor that stays has 192 bytes
        in batches => in [b for b in batches if len(b[0]) in (8, 5)]
            the list of losses is 1 number; it must be 3 numbers
        return losses =>
            returns None: end it with `return`
        """,
    "predict_peak": """
        return depth * layer + peak => return 2**16
            the answer is 65536; 272256 is right
        """,
    "collect_above": """
        before < => before >
            nothing was collected
        """,
}


@pytest.mark.parametrize(("name", "answer", "words"), edits(WRONG))
def test_wrong_answer(name, answer, words):
    rejects(name, answer, words)


# Other right answers


def kept_outputs(model, optimizer, batches):
    losses = np.zeros(len(batches))
    optimizer.zero_grad()
    for k in range(len(batches)):
        x, y = batches[k]
        logits = model(x)
        chances = logits.softmax(1)
        loss = -chances.log().gather(1, y[:, None]).mean()
        with torch.no_grad():
            model(x).argmax(1)
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None
        losses[k] = loss
    return tuple(losses)


def numbers_at_the_end(model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def again_and_again(used, budget, threshold):
    before = used()
    if before / budget >= threshold:
        while gc.collect():
            pass
    return torch.tensor(before - used())


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("train", kept_outputs),
        ("train", numbers_at_the_end),
        ("collect_above", again_and_again),
    ],
)
def test_other_right_answers(name, answer):
    accepts(name, answer)
