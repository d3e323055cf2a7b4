"""Master weights, against a loop by hand and the ledger."""

import copy
from functools import partial
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from precision_helpers import begins, classifier, equal, samples, says
from torch import nn

from membudget.ledger import Transformer, predict
from membudget.measuring import PeakTracker
from membudget.precision import MasterWeights
from tests.soak import part_of


def masters_by_hand(model, make):
    """The copies, their optimizer, and a function that steps."""
    weights = [p for p in model.parameters() if p.requires_grad]
    copies = [p.detach().clone() for p in weights]
    model.to(torch.bfloat16)
    optimizer = make(copies)

    def step():
        for p, c in zip(weights, copies, strict=True):
            c.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, c in zip(weights, copies, strict=True):
            p.data = c.to(p.dtype)
            p.grad = c.grad = None

    return copies, optimizer, step


MAKE = {
    "adam": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def backward(model, x, y):
    dtype = next(model.parameters()).dtype
    output = model(x.to(dtype)).float()
    F.cross_entropy(output, y).backward()


@pytest.mark.parametrize(
    ("make", "frozen"), [("adam", False), ("momentum", True)]
)
def test_master_weights_are_those_of_a_loop_by_hand(make, frozen):
    one, two = classifier(), classifier()
    for model in (one, two):
        model.append(nn.BatchNorm1d(5))
        model[0].weight.requires_grad_(not frozen)
    master = MasterWeights(one, MAKE[make])
    copies, optimizer, step = masters_by_hand(two, MAKE[make])
    assert len(master.copies) == 8 - frozen
    x, y = samples(8)
    for _ in range(6):
        backward(one, x, y)
        backward(two, x, y)
        master.step()
        step()
        assert equal(master.copies, copies)
        assert equal(one.state_dict(), two.state_dict())
        assert equal(master.optimizer.state_dict(), optimizer.state_dict())
        assert all(p.grad is None for p in [*master.copies, *master.weights])
    for p, c in zip(master.weights, master.copies, strict=True):
        assert c.dtype == torch.float32 and torch.equal(c.to(p.dtype), p)


def test_an_update_that_vanishes_in_bf16_stays_in_the_copy():
    """1 + 2^-10 is 1 in bf16; after 4 steps of it the copy rounds up."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    master = MasterWeights(layer, lambda p: torch.optim.SGD(p, lr=2.0**-10))
    found = []
    for _ in range(6):
        layer.weight.grad = -torch.ones_like(layer.weight)
        master.step()
        found.append(layer.weight.item())
    assert master.copies[0].item() == 1 + 6 * 2.0**-10
    assert found == [1, 1, 1, 1, 1 + 2.0**-7, 1 + 2.0**-7]


def test_a_weight_without_gradient_is_left():
    model = classifier()
    master = MasterWeights(model, torch.optim.AdamW)
    before = copy.deepcopy(master.copies)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    master.step()
    assert not torch.equal(master.copies[0], before[0])
    assert equal(master.copies[1:], before[1:])
    assert len(master.optimizer.state) == 1


RUNS = product(["adam", "momentum", "sgd"], [False, True], [None, 2, 4])


@pytest.mark.parametrize(
    ("optimizer", "foreach", "micro"), part_of(RUNS, Random(0), 5)
)
def test_the_peak_of_a_step_is_the_ledgers(optimizer, foreach, micro):
    torch.manual_seed(0)
    shape, batch = Transformer(40, 16, 2, 4, context=16), 6
    model = shape.build("cpu")
    make = partial(MAKE[optimizer], foreach=foreach)
    master = MasterWeights(model, make)
    x = torch.zeros(batch, 8, dtype=torch.long)
    y = x.clone()

    def step():
        parts = [t.split(micro or batch) for t in (x, y)]
        for x_part, y_part in zip(*parts, strict=True):
            logits = model(x_part).flatten(0, 1)
            loss = F.cross_entropy(logits, y_part.flatten())
            del logits
            if micro:
                loss = loss * (len(x_part) / batch)
            loss.backward()
            del loss
        master.step()

    step()
    held = [model, master.optimizer, *master.copies, x, y]
    with PeakTracker(*held) as tracker:
        step()
    predicted = predict(
        shape,
        batch,
        8,
        recipe="master",
        optimizer=optimizer,
        micro_batch=micro,
        foreach=foreach,
    )
    assert (predicted.start, predicted.peak) == (tracker.start, tracker.peak)


def test_a_master_of_nothing():
    said = (
        "has no parameters that are trained (requires_grad): hand over one "
        "that is to be trained"
    )
    for model in (nn.ReLU(), classifier().requires_grad_(False)):
        message = says(f"{type(model).__name__} {said}")
        with pytest.raises(ValueError, match=message):
            MasterWeights(model, torch.optim.AdamW)


def test_a_master_whose_optimizer_cannot_be_made():
    model = classifier()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=begins("Invalid learning rate")):
        MasterWeights(model, lambda p: torch.optim.AdamW(p, lr=-1.0))
    assert equal(model.state_dict(), before)


def test_a_master_step_without_backward():
    model = classifier()
    master = MasterWeights(model, torch.optim.AdamW)
    message = "no parameter has a gradient: run a backward pass before"
    for _ in range(2):  # after a step, too
        before = copy.deepcopy([master.copies, model.state_dict()])
        with pytest.raises(RuntimeError, match=says(message)):
            master.step()
        assert equal([master.copies, model.state_dict()], before)
        backward(model, *samples(8))
        master.step()
        assert not equal(master.copies, before[0])
