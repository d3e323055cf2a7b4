"""The census, against the tracker that has seen every operator."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.command.census import data_size, look, optimizer_of
from membudget.command.watch import Call
from membudget.measuring import CATEGORIES, PeakTracker
from membudget.measuring.tracker import by_category
from membudget.models import GPT, mlp

META = torch.device("meta")


def seen(call=None):
    gc.collect()
    return look(META, call, limit=2**40)


def trained(model, x):
    """An optimizer with states, after a step on meta."""
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("again", [False, True])
def test_the_census_counts_what_the_tracker_counts(again):
    model, x = mlp(inputs=8, width=32, depth=4).to(META), torch.ones(64, 8)
    x = x.to(META)
    optimizer = trained(model, x)
    with PeakTracker(model, optimizer, x, device=META) as tracker:
        loss = checkpoint(model, x, use_reentrant=False) if again else model(x)
        loss = loss.square().sum()
        found = by_category(seen(Call.of(model, (x,), {})).alive)
        now = by_category(a for a in tracker.allocations if a.death is None)
    # The tracker's activations are temporaries until the backward pass.
    now["activations"] += now.pop("temporaries")
    assert found.pop("temporaries") == 0
    assert found == {k: now[k] for k in CATEGORIES if k in now}
    assert all(found[k] for k in ("parameters", "gradients", "optimizer"))
    del loss


def test_what_was_made_is_named_with_its_module():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.tanh()  # after the last module with parameters

    net, x = Net().to(META), torch.ones(32, 4, device=META)
    out = net(x)
    found = seen(Call.of(net, (x,), {}))
    made = {a.operator[:2]: a.bytes for a in found.alive if a.operator.name}
    for n in range(3):
        assert made["addmm", f"blocks.{n}.up"] == 32 * 16 * 4
        assert made["gelu", f"blocks.{n}"] == 32 * 16 * 4
    assert made["tanh", ""] == 32 * 4 * 4
    held = {a.operator.module for a in found.alive if not a.operator.name}
    assert held == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert found.paths[id(net.blocks[1].up)] == "blocks.1.up"
    del out


def test_packed_tensors_are_not_unpacked():
    def never(packed):
        raise AssertionError("unpacked")

    model, x = GPT(vocabulary=16, context=8, width=8, depth=1, heads=2), None
    x = torch.zeros(2, 8, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: None, never):
        out = model(x)
    look(torch.device("cpu"), None, limit=2**40)
    del out


def test_the_optimizer_is_the_one_that_trains_the_model():
    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, []
            self.param_groups = optimizer.param_groups

    one, other = mlp(width=8, depth=2), mlp(width=8, depth=2)
    theirs = torch.optim.SGD(other.parameters())
    assert optimizer_of(one) is None
    mine = torch.optim.SGD(one.parameters())
    around = Around(mine)
    assert optimizer_of(one) is mine and optimizer_of(other) is theirs
    del around


@pytest.mark.skipif("sys.platform != 'linux'")
def test_the_data_of_the_process_grow_by_what_is_allocated():
    before = data_size()
    block = bytearray(2**26)
    assert 2**26 <= data_size() - before < 2**27
    del block
