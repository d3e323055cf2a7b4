"""What runs on two gloo ranks; started by ``test_fsdp``."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from membudget.internals import without_modes
from membudget.measuring import PeakTracker

WORLD = 2
WIDTH, DEPTH, ROWS = 16, 4, 8
FULL = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def shard(model, reshard_after_forward):
    options = {
        "mesh": init_device_mesh("cpu", (WORLD,)),
        "reshard_after_forward": reshard_after_forward,
    }
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def settle():
    """Wait until the threads of gloo have let go of their buffers."""
    with without_modes():  # in some versions it keeps a byte
        dist.barrier()
    time.sleep(0.1)
    torch.zeros(0)  # the tracker looks after each operator


def track(model, warm):
    """A step: forward, backward, optimizer; what was alive at each end."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(ROWS, WIDTH)

    def step(mark):
        loss = model(x).sum()
        settle()
        mark("forward")
        loss.backward()
        del loss
        settle()
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
    names = [o.name for o in tracker.operators]
    return {
        "start": tracker.split(-1),
        **{label: tracker.split(i - 1) for i, label in tracker.marks},
        "resized": names.count("storage.resize_"),
        "adds up": list(map(sum, columns)) == tracker.timeline,
    }


def gradients_are_the_same():
    """Tracked and not, bit by bit."""
    found = []
    for tracked in (True, False):
        model, x = shard(build(), True), torch.ones(ROWS, WIDTH)
        if tracked:
            with PeakTracker(model, x):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        found.append([p.grad.to_local() for p in model.parameters()])
    return all(map(torch.equal, *found))


def found():
    """What the tracker said about each setting."""
    return {
        f"{kind}, {when}": track(shard(build(), kind == "resharded"), warm)
        for kind in ("resharded", "kept")
        for when, warm in (("first step", False), ("later step", True))
    } | {"same gradients": gradients_are_the_same()}
