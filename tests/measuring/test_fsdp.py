"""The tracker on one of two ranks with ``fully_shard``, by category.

No other rank runs: real ones are compared in ``tests/sharding``.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from membudget.measuring import PeakTracker
from membudget.sharding._private import fake_group

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch has no torch.distributed"
)

WORLD, WIDTH, DEPTH, ROWS = 2, 16, 4, 8
FULL = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)  # bytes of all parameters
UNIT = 4 * ROWS * WIDTH  # of one layer's output
STATES = FULL + 2 * DEPTH * 4  # two moments of the shards, and the counts


def sharded(reshard_after_forward):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (*model, model):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard_after_forward
        )
    return model


def track(model, warm):
    """A step, after another one if warm; what was alive at each end."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(ROWS, WIDTH)

    def step(mark):
        loss = model(x).sum()
        torch.zeros(0)  # the tracker looks after each operator
        mark("forward")
        loss.backward()
        del loss
        torch.zeros(0)
        mark("backward")
        optimizer.step()
        mark("step")
        optimizer.zero_grad()
        mark("end")

    if warm:
        step(lambda label: None)
    with PeakTracker(model, optimizer, x) as tracker:
        step(tracker.mark)
    columns = zip(*tracker.timelines().values(), strict=True)
    assert list(map(sum, columns)) == tracker.timeline
    found = {label: tracker.split(i - 1) for i, label in tracker.marks}
    names = [o.name for o in tracker.operators]
    return tracker.split(-1), found, names.count("storage.resize_")


@pytest.mark.parametrize(
    ("kept", "warm", "resized"),
    [
        (False, False, 1 + 1 + 1),  # freed, gathered again, freed
        (False, True, 1 + 1 + 1 + 1),  # gathered into the old ones
        (True, False, 1),
        (True, True, 1 + 1),
    ],
)
def test_a_rank_holds_its_share(kept, warm, resized):
    """Parameters, gradients and Adam's moments: exactly 1/2."""
    with fake_group(WORLD, 0):
        start, found, times = track(sharded(not kept), warm)
    assert start == dict.fromkeys(start, 0) | {
        "parameters": FULL / WORLD,
        "optimizer": STATES if warm else 0,
        "inputs": UNIT,
    }
    for split in found.values():
        assert split["parameters"] == FULL / WORLD
        assert split["inputs"] == UNIT
    assert found["backward"]["gradients"] == FULL / WORLD
    assert found["step"]["gradients"] == FULL / WORLD
    assert found["step"]["optimizer"] == STATES
    assert found["end"] == start | {"optimizer": STATES}
    # The inputs of the layers but the first, the loss, and what was kept.
    held = sum(found["forward"].values()) - sum(start.values())
    assert held == 3 * UNIT + 4 + (FULL if kept else 0)
    assert times == 2 * DEPTH * resized  # of a weight and a bias each
