"""Experiments on measuring."""

import gc
from collections.abc import Iterator

import torch

from membudget.experiments.definition import experiment
from membudget.experiments.sizes import ALLOCATOR, SYNCHRONISATION
from membudget.experiments.workload import (
    META,
    FusedAttention,
    Workload,
    peak_bytes,
    seconds,
    workspace,
)
from membudget.measuring import PeakTracker, replay


@experiment(
    sizes=ALLOCATOR,
    units={
        "batch": "samples",
        "requested": "bytes, peak",
        "allocated": "bytes, peak",
        "reserved": "bytes, peak",
        "workspace": "bytes that libraries hold in the allocator",
    },
    over="batches",
)
def allocator(
    device: torch.device,
    *,
    model: str,
    shape: dict,
    batches: list[int],
    steps: int,
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """What training asks for, what is allocated and what is reserved.

    From the making of the model to the end of its second step with Adam,
    without accumulation. The prediction replays every allocation of a run on
    ``meta`` through the simulated caching allocator. It knows no workspaces
    of libraries and nothing that an operator frees before it returns. A CPU
    has no caching allocator: there only the requested bytes are measured.
    """

    def train(work: Workload) -> None:
        network, optimizer = work.build()
        for _ in range(steps):
            work.train(network, optimizer, work.window)

    peaks = []
    for batch in batches:
        meta = Workload(model, shape, META, batch)
        # On a GPU, Adam's step counts stay on the CPU.
        counted = None if device.type == "cpu" else "meta"
        gc.collect()
        with FusedAttention(device.type), PeakTracker(device=counted) as run:
            train(meta)
        simulated = replay(run.events)
        peaks.append(
            {
                "batch": batch,
                "requested": simulated.peak_requested,
                "allocated": simulated.peak_allocated,
                "reserved": simulated.peak_reserved,
            }
        )
    yield {"peak": peaks}
    held = workspace(Workload(model, shape, device, 1))
    for batch in batches:
        gc.collect()
        work = Workload(model, shape, device, batch)
        peak = peak_bytes(lambda work=work: train(work), device)
        yield {"batch": batch, **peak, "workspace": held}


@experiment(
    sizes=SYNCHRONISATION,
    units={
        "side": "rows and columns of each matrix",
        "synchronised": "s for a product, each repeat",
        "unsynchronised": "s for a product, each repeat",
    },
    over="sides",
)
def synchronisation(
    device: torch.device, *, sides: list[int], warm_up: int, repeats: int
) -> Iterator[dict]:
    """Time of a matrix product with and without waiting for the device.

    A product of two n × n matrices has 2n³ FLOPs, so its time grows eightfold
    when n doubles. A GPU gets its work in a queue: who does not wait for it
    measures the time to queue, which is that of any n. A CPU has computed
    when the call returns.
    """
    queues = device.type != "cpu"
    yield {
        "growth_per_doubling": {
            "synchronised": 8,
            "unsynchronised": 1 if queues else 8,
        },
        "flops": [{"side": n, "flops": 2 * n**3} for n in sides],
    }
    for n in sides:
        a, b = torch.rand(2, n, n, device=device)
        out = torch.empty(n, n, device=device)
        times = {
            name: seconds(
                lambda a=a, b=b, out=out: torch.mm(a, b, out=out),
                device,
                warm_up,
                repeats,
                synchronise=name == "synchronised",
            )
            for name in ("synchronised", "unsynchronised")
        }
        yield {"side": n, **times}
