"""A step inside the backward pass, against the ordinary one, bit by bit."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from membudget import models
from membudget.accumulation import Accumulator
from membudget.adapters import optimizer_in_backward
from membudget.measuring import PeakTracker, dry_run, trace_step, witness
from tests.alike import same


class Tied(nn.Module):
    """A GPT whose head is its embedding's table."""

    def __init__(self):
        super().__init__()
        self.gpt = models.GPT(16, 8, 8, 2)
        self.gpt.head.weight = self.gpt.token.weight

    def forward(self, tokens):
        return self.gpt(tokens)


def words(model):
    tokens = torch.randint(16, (4, 9))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def squares(model):
    return model(torch.randn(4, 8)).square().mean()


NETWORKS = {
    "gpt": (lambda: models.GPT(16, 8, 8, 2), words),
    "tied": (Tied, words),
    "llama": (
        lambda: models.Llama(16, 8, 2, 2, 1, 8),
        words,
    ),
    "mlp": (lambda: models.mlp(8, 8, 3, 8), squares),
}
ADAMW = partial(optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=1e-2, amsgrad=True),
    "adamw": ADAMW,
    "foreach": partial(ADAMW, foreach=True),
    "fused": partial(ADAMW, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=1e-2),
    "adafactor": optim.Adafactor,
}


def groups(model):
    """Weights decay and biases do not, and half have another rate."""
    every = list(model.parameters())
    flat = [p for p in every if p.ndim < 2]
    return [
        dict(params=[p for p in every if p.ndim > 1], weight_decay=0.1),
        *([dict(params=flat, lr=0.03)] if flat else []),
    ]


def trained(model, make, loss, fused, steps=4):
    """The states after a few steps, with a schedule."""
    optimizer = make(groups(model))
    schedule = LambdaLR(optimizer, lambda k: 0.5**k)
    handle = optimizer_in_backward(optimizer) if fused else None
    torch.manual_seed(1)
    for _ in range(steps):
        loss(model).backward()
        assert (next(model.parameters()).grad is None) == fused
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if handle:
        handle.remove()
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_it_is_the_ordinary_step_to_the_last_bit(network, make):
    build, loss = NETWORKS[network]
    torch.manual_seed(0)
    model = build()
    usual = trained(deepcopy(model), OPTIMIZERS[make], loss, False)
    assert same(usual, trained(model, OPTIMIZERS[make], loss, True))


def test_bf16_and_sparse_gradients_are_stepped_as_they_are():
    for module in (
        nn.Linear(8, 8).bfloat16(),
        nn.Embedding(8, 8, sparse=True),
    ):
        of = (
            torch.ones(2, 8).bfloat16()
            if isinstance(module, nn.Linear)
            else torch.tensor([1, 1, 3])
        )
        other = deepcopy(module)
        usual, ours = (optim.SGD(m.parameters(), 0.1) for m in (module, other))
        module(of).sum().backward()
        usual.step()
        with optimizer_in_backward(ours):
            other(of).sum().backward()
        assert same(module.state_dict(), other.state_dict())


def chain(width=64, depth=16):
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(depth)
        for layer in (nn.Linear(width, width, bias=False), nn.Tanh())
    ]
    return nn.Sequential(*layers), torch.randn(2, width)


WEIGHT = 64 * 64 * 4


def watched(make, fused):
    """The tracker of a second step, and the witness's peak of one."""
    model, x = chain()
    optimizer = make(model.parameters())
    if fused:
        optimizer_in_backward(optimizer)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with PeakTracker(model, optimizer, x) as tracker:
        step()
    return tracker, witness(step)


@pytest.mark.parametrize(
    "make", ["sgd", "momentum", "adamw", "foreach", "fused"]
)
def test_one_gradient_is_alive_and_the_allocator_agrees(make):
    usual, above = watched(OPTIMIZERS[make], False)
    ours, ours_above = watched(OPTIMIZERS[make], True)
    assert max(usual.timelines()["gradients"]) == 16 * WEIGHT
    assert max(ours.timelines()["gradients"]) == WEIGHT
    for tracker, seen in ((usual, above), (ours, ours_above)):
        residual = seen - (tracker.peak - tracker.start)
        assert residual == UNSEEN[make]


UNSEEN = {"sgd": 0, "momentum": 0, "adamw": 12, "foreach": 12, "fused": 0}
"""Bytes that Adam's kernels take and give back, in either way to step."""


def test_a_tied_weight_steps_once_after_both_gradients():
    model = Tied()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with optimizer_in_backward(optimizer):
        words(model).backward()
    assert model.gpt.head.weight is model.gpt.token.weight
    model = Tied()
    optimizer = optim.Adam(model.parameters())
    with optimizer_in_backward(optimizer):
        words(model).backward()
    assert optimizer.state[model.gpt.token.weight]["step"] == 1


def test_what_gets_no_gradient_does_not_step():
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    every = nn.ModuleList([used, unused, frozen])
    optimizer = optim.AdamW(every.parameters())
    before = deepcopy(every.state_dict())
    with optimizer_in_backward(optimizer):
        frozen(used(torch.ones(1, 2))).sum().backward()
    assert set(optimizer.state) == set(used.parameters())
    for name, value in every.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("0")


def fused_layer(make=OPTIMIZERS["sgd"]):
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    return model, optimizer, optimizer_in_backward(optimizer)


def test_accumulation_is_refused_before_anything_steps():
    model, optimizer, _ = fused_layer()
    model(torch.ones(1, 2)).sum().backward()
    before = deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="accumulate with the ordinary"):
        model(torch.ones(1, 2)).sum().backward()
    assert same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    assert not same(model.state_dict(), before)


def test_a_closure_is_refused():
    _, optimizer, _ = fused_layer()
    with pytest.raises(RuntimeError, match="without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="without a closure"):
        optimizer.step(closure=lambda: 0.0)
    optimizer.step(closure=None)


class Counting(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_a_group_that_counts_steps_is_refused():
    model = nn.Linear(2, 2)
    optimizer = Counting([dict(params=list(model.parameters()), k=0)], lr=0.1)
    optimizer_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="Counting counts its steps once"):
        model(torch.ones(1, 2)).sum().backward()


def test_clipping_and_a_loss_scale_are_refused():
    optimizer = OPTIMIZERS["sgd"](nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"max_norm = 1\.0 needs the norm"):
        optimizer_in_backward(optimizer, max_norm=1.0)
    with pytest.raises(ValueError, match="bf16, which needs no scale"):
        optimizer_in_backward(optimizer, scaler=torch.amp.GradScaler("cpu"))
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer_in_backward(optimizer, max_norm=float("inf"), scaler=off)


def test_bad_optimizers_are_refused():
    model, optimizer, handle = fused_layer()
    with pytest.raises(ValueError, match="in the backward pass already"):
        optimizer_in_backward(optimizer)
    handle.remove()
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="have a gradient already"):
        optimizer_in_backward(optimizer)
    optimizer.zero_grad()
    with optimizer_in_backward(optimizer):
        pass
    with pytest.raises(ValueError, match="LBFGS evaluates the loss again"):
        optimizer_in_backward(optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="no parameters that are trained"):
        optimizer_in_backward(OPTIMIZERS["sgd"]([torch.ones(1)]))
    far = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(ValueError, match="on several devices"):
        optimizer_in_backward(OPTIMIZERS["sgd"]([far, *model.parameters()]))


def test_the_other_rooms_refuse_it_where_it_would_be_wrong():
    model, optimizer, _ = fused_layer()
    x = torch.ones(4, 2)

    def loss(model, x):
        return model(x).square().mean()

    with pytest.raises(ValueError, match="parameters have hooks"):
        dry_run(model, loss, x, optimizer=optimizer)
    with (
        Accumulator(model, optimizer).window() as window,
        pytest.raises(RuntimeError, match="SGD steps in the backward pass"),
    ):
        window.backward(loss(model, x), count=4)
    tracker = trace_step(model, loss, x, optimizer=optimizer)
    assert max(tracker.timelines()["gradients"]) == 24  # weight and bias
