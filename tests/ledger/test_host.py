"""An optimizer on the host: the ledger against one that steps there."""

from functools import partial
from itertools import product

import pytest
import torch
from ledger_helpers import MAKE, autocast, next_token, offloading, within

from membudget.adapters import adapt
from membudget.ledger import (
    PLANNED,
    RECIPES,
    Adapter,
    Transformer,
    host_step,
    predict,
    states,
)
from membudget.measuring import trace_step
from membudget.offloading import optimizer_on_host

SHAPES = {
    family: Transformer(40, 16, 2, 4, context=16, family=family)
    for family in ("gpt", "llama")
}
RULES = "master", "fp32", "autocast"
RUNS = {
    "plain": {},
    "accumulated": {"micro_batch": 2},
    "offloaded": {"offloaded": True, "micro_batch": 4},
}
GRID = list(product(SHAPES, RULES, ("sgd", "momentum", "adam"), RUNS))


def stepped(shape, batch, tokens, recipe, optimizer, run, adapter=None):
    """Such a step; its tracker, and the optimizer."""
    torch.manual_seed(0)
    model, loss = shape.build("cpu"), next_token
    if recipe in ("master", "bf16"):
        model = model.to(torch.bfloat16)
    if recipe == "autocast":
        loss = within(partial(autocast, None), loss)
    if adapter:
        adapt(model, adapter.targets, adapter.rank)
    x, y = (torch.zeros(batch, tokens, dtype=torch.long) for _ in range(2))
    if run.get("offloaded"):
        loss = offloading(loss, [], x, y)
    trained = [p for p in model.parameters() if p.requires_grad]
    make = partial(MAKE[optimizer], foreach=False)
    stepper = optimizer_on_host(trained, make)
    micro = run.get("micro_batch")
    tracker = trace_step(
        model, loss, x, y, optimizer=stepper, micro_batch=micro
    )
    return tracker, stepper


@pytest.mark.few(12)
@pytest.mark.parametrize(("family", "recipe", "optimizer", "run"), GRID)
def test_a_step_to_the_byte(family, recipe, optimizer, run):
    step = SHAPES[family], 6, 8, recipe, optimizer, RUNS[run]
    tracker, stepper = stepped(*step)
    how = {"recipe": recipe, "optimizer": optimizer, **RUNS[run]}
    found = predict(*step[:3], optimizer_on_host=True, **how)
    assert (found.start, found.peak) == (tracker.start, tracker.peak)
    weights = [p for group in stepper.param_groups for p in group["params"]]
    host = host_step([p.numel() for p in weights], recipe, optimizer)
    kept = [p for g in stepper.host.param_groups for p in g["params"]]
    for state in stepper.host.state.values():
        kept += [t for t in state.values() if isinstance(t, torch.Tensor)]
    assert host.kept == sum(t.nbytes for t in kept)
    twice = 2 * host.out, 2 * host.back  # trace_step takes a step before
    assert (stepper.out, stepper.back) == twice


def test_an_adapter():
    """Alone it leaves and comes back."""
    adapter, run = Adapter(("up", "down"), 2), {"micro_batch": 2}
    step = SHAPES["gpt"], 6, 8, "bf16", "adam", run
    tracker, _ = stepped(*step, adapter)
    how = {"recipe": "bf16", "adapter": adapter, "micro_batch": 2}
    found = predict(*step[:3], optimizer_on_host=True, **how)
    assert (found.start, found.peak) == (tracker.start, tracker.peak)


def test_what_the_device_saves():
    """8 bytes a parameter in fp32, the states; 12 beside a 16-bit model."""
    shape = SHAPES["gpt"]
    for recipe in RULES:
        there, away = (
            predict(shape, 2, 8, recipe=recipe, optimizer_on_host=on)
            for on in (False, True)
        )
        kept = states(shape.build(), recipe).optimizer
        assert there.start - away.start == kept
        assert there.peak - away.peak >= kept


@pytest.mark.parametrize("recipe", RULES)
def test_28_bytes_a_parameter(recipe):
    """Read: gradient, copy and two moments; written: all but the gradient,
    and in 16 bits the weight that goes back."""
    model = torch.nn.Linear(100, 10, bias=False)
    frozen = torch.nn.Linear(100, 10).requires_grad_(False)
    host = host_step(torch.nn.Sequential(model, frozen), recipe)
    size = 2 if recipe == "master" else 4
    assert host.kept == 12 * 1000 + 4  # and a counter
    assert (host.out, host.back) == (size * 1000, size * 1000)
    read, written = size + 12, 12 + (2 if size == 2 else 0)
    assert host.touched == (read + written) * 1000 == 28 * 1000


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"recipe": "bf16"}, "no rule for the recipe 'bf16'.*use 'master'"),
        ({"recipe": "master-fp32-gradients"}, "takes gradients in the dtype"),
        ({"optimizer": "adam-8bit"}, "'adam-8bit' steps on a GPU"),
        ({"optimizer": None}, "name an optimizer, and leave"),
        ({"keep_gradients": True}, "leave keep_gradients out"),
        ({"optimizer": "lion"}, "optimizer"),
    ],
)
def test_what_has_no_rule(how, message):
    with pytest.raises(ValueError, match=message):
        predict(SHAPES["gpt"], 2, 8, optimizer_on_host=True, **how)


def test_all_others_have_one():
    named = {"recipe": RECIPES, "optimizer": PLANNED}
    refused = []
    for recipe, optimizer in product(*named.values()):
        try:
            host_step([10], recipe, optimizer)
        except ValueError:
            refused.append((recipe, optimizer))
    assert len(refused) == len(RECIPES) * len(PLANNED) - 9
