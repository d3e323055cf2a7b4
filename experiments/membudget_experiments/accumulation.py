"""Experiments on gradient accumulation."""

import gc
from collections.abc import Iterator

import torch

from membudget.accumulation import footprint
from membudget.measuring import optimizer_tensors as states
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import MICRO_BATCH
from membudget_experiments.workload import (
    META,
    FusedAttention,
    Workload,
    peak_bytes,
    seconds,
    workspace,
)


@experiment(
    sizes=MICRO_BATCH,
    units={
        "micro_batch": "samples",
        "seconds": "s for a window, each repeat",
        "requested": "bytes, peak of a window",
        "allocated": "bytes, peak of a window",
        "reserved": "bytes, peak of a window",
        "workspace": "bytes that libraries hold in the allocator",
    },
    over="micro_batches",
    compares={"requested": "bytes"},
)
def micro_batch(
    device: torch.device,
    *,
    model: str,
    shape: dict,
    window: int,
    micro_batches: list[int],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Time and peak bytes of one window against the micro-batch size.

    The window has as many samples throughout, so what differs is the size of
    its micro-batches alone. Adam's states are there before it begins;
    gradients are not. One window makes the states, in the second the peak is
    measured, then come ``warm_up`` more and those that are timed.

    The peak is predicted from windows of 2, 4 and 7 samples on ``meta``
    (:func:`membudget.accumulation.footprint`). It holds Adam's step counts,
    4 bytes for each parameter, which stay on the CPU when the model is on a
    GPU, and no library's workspace.
    """
    meta = Workload(model, shape, META, window)
    with FusedAttention(device.type):
        cost = footprint(meta.build, meta.loss)
        flops = meta.flops()
    yield {
        "flops_per_sample": flops,
        "peak": [
            {"micro_batch": size, "bytes": cost.peak(size, window // size)}
            for size in micro_batches
        ],
    }
    work = Workload(model, shape, device, window)
    held = workspace(work)
    for size in micro_batches:
        sample = _window(work, size, warm_up, repeats)
        yield {"micro_batch": size, **sample, "workspace": held}


def _window(work: Workload, size: int, warm_up: int, repeats: int) -> dict:
    """Seconds and peak bytes of a window, with a new model."""
    gc.collect()
    network, optimizer = work.build()

    def train() -> None:
        work.train(network, optimizer, size)

    train()  # makes Adam's states
    alive = [*network.parameters(), *states(optimizer)]
    peak = peak_bytes(train, work.device, sum(t.nbytes for t in alive))
    times = seconds(train, work.device, warm_up, repeats)
    return {"seconds": times, **peak}
