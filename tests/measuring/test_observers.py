"""What all observers of a block promise: they change, hold and leave nothing.

What they tell is tested in a file for each.
"""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from measuring_helpers import WIDTH, chain, hooked
from torch.utils.checkpoint import checkpoint

from membudget.measuring import FlopCounter, PeakTracker, SavedBytes
from membudget.measuring.modules import ModuleStack
from membudget.models import GPT

OBSERVERS = {
    "PeakTracker": PeakTracker,
    "SavedBytes": SavedBytes,
    "FlopCounter": lambda model, x: FlopCounter(),
    "ModuleStack": lambda model, x: ModuleStack(model),
}
every = pytest.mark.parametrize("watch", OBSERVERS.values(), ids=OBSERVERS)


def small():
    return chain(2), torch.randn(2, WIDTH)


@every
def test_a_step_is_bitwise_the_same(watch):
    found = []
    for observer in (watch, lambda model, x: nullcontext()):
        torch.manual_seed(1)
        model = GPT(vocabulary=11, context=6, width=8, depth=2, heads=2)
        x = torch.randint(11, (3, 6))
        with observer(model, x), torch.autocast("cpu", torch.bfloat16):
            logits = checkpoint(model, x, use_reentrant=False).flatten(0, 1)
            loss = F.cross_entropy(F.dropout(logits, 0.3), x.flatten())
            loss.backward(retain_graph=True)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        found.append([loss, torch.get_rng_state(), *gradients])
    assert all(map(torch.equal, *found))


@every
def test_neither_model_nor_graph_is_held(watch):
    model, x = small()
    gc.disable()
    try:
        with watch(model, x):
            y = model(x)
            things = model, model[0], model[0].weight, y.untyped_storage()
            refs = list(map(weakref.ref, things))
            del model, y, things
            assert [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()


@every
def test_an_error_leaves_nothing_behind(watch):
    model, x = small()
    before = hooked(model)
    refused = pytest.raises(RuntimeError, match="cannot be multiplied")
    with refused, watch(model, x):
        model(x).sum().backward()
        assert hooked(model) != before
        x @ x
    assert hooked(model) == before


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PeakTracker, "this tracker is running already: use another one"),
        (SavedBytes, "this SavedBytes is counting already: use another one"),
        (ModuleStack, "kept already: use another"),
    ],
)
def test_it_cannot_be_entered_twice_at_once(kind, message):
    model, x = small()
    before, observer = hooked(model), kind(model)
    with observer:
        inside = hooked(model)
        with pytest.raises(RuntimeError, match=message), observer:
            pass
        model(x).sum().backward()  # the first goes on
        assert hooked(model) == inside != before
    assert hooked(model) == before
