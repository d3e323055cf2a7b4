"""Experiments on checkpointing."""

import gc
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from math import isqrt

import torch
import torch.nn.functional as F
from torch import nn

from membudget import models
from membudget.accumulation import peak_at, peak_lines
from membudget.checkpointing import (
    Checkpointed,
    equal_segments,
    no_segments,
)
from membudget.ledger.largest import last_that
from membudget.measuring import (
    FlopCounter,
    PeakTracker,
    replay,
)
from membudget.measuring import optimizer_tensors as states
from membudget.measuring.device import read_memory, reset_peak
from membudget.measuring.out_of_memory import wait_for_autograd
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import (
    LARGEST_BATCH,
    SEGMENTS_GPT,
    SEGMENTS_MLP,
    SEGMENTS_UNITS,
)
from membudget_experiments.workload import (
    META,
    FusedAttention,
    Workload,
    peak_bytes,
    seconds,
    workspace,
)


@experiment(
    sizes=SEGMENTS_MLP,
    units=SEGMENTS_UNITS,
    over="runs",
    compares={"requested": "bytes"},
)
def segments_mlp(
    device: torch.device,
    *,
    model: str,
    shape: dict,
    runs: list[list[int]],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Time and peak bytes of a step of the deep MLP against its segments.

    ``runs`` are pairs of a batch and a number of equal segments, 0 for none.
    A step is forward, backward and Adam, whose states are there before it
    begins; gradients are not.

    The peak is predicted from the same step on ``meta`` under the
    :class:`membudget.measuring.PeakTracker`. On a CPU it is exact up to the
    few bytes that an operator asks for and frees before it returns. For a
    GPU it leaves out those, the rounding of the allocator and the workspaces
    of libraries. The time is predicted as the
    FLOPs of the matrix products, those of the recomputation included, as a
    multiple of the plain step's. What is not in it: the optimizer's step,
    elementwise work, and how well a batch fills the device.
    """
    yield from _sweep(device, model, shape, runs, warm_up, repeats)


@experiment(
    sizes=SEGMENTS_GPT,
    units=SEGMENTS_UNITS,
    over="runs",
    compares={"requested": "bytes"},
)
def segments_gpt(
    device: torch.device,
    *,
    model: str,
    shape: dict,
    runs: list[list[int]],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Time and peak bytes of a step of a GPT against its blocks' segments.

    As ``segments_mlp``; the segments are of the blocks, so the embeddings,
    the last norm, the head and the loss keep their tapes. The vocabulary is
    that of bytes: with a large one the logits are most of the peak, however
    the blocks are cut. Attention counts in full among the FLOPs, without its
    causal mask.
    """
    yield from _sweep(device, model, shape, runs, warm_up, repeats)


@experiment(
    sizes=LARGEST_BATCH,
    units={
        "variant": "none, root (√L segments) or each (one block a segment)",
        "count": "segments, 0 for no checkpointing",
        "batch": "samples, the most that fit; one more does not",
        "tried": "samples, in the order in which they were tried",
        "seconds": "s for a step with that batch, each repeat",
        "requested": "bytes, peak of a step with that batch",
        "allocated": "bytes, peak of a step with that batch",
        "reserved": "bytes, peak of a step with that batch",
        "workspace": "bytes that libraries hold in the allocator",
    },
    over="variants",
    compares={"batch": "batch"},
)
def largest_batch(
    device: torch.device,
    *,
    model: str,
    shape: dict,
    variants: list[str],
    budget: int,
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """The largest batch that fits a budget, with and without checkpointing.

    A batch fits if a new model trains two steps with it. On a GPU the budget
    is a cap on what PyTorch's allocator may reserve, and what does not fit
    ends with its out-of-memory error. On a CPU the budget is simulated by
    :class:`membudget.measuring.PeakTracker`, in requested bytes. The search
    starts at the prediction and bisects.

    Two predictions. ``batch`` is from the requested bytes of steps with 2, 4
    and 7 samples on ``meta`` (:func:`membudget.accumulation.peak_lines`); on
    a CPU it is exact. ``reserved_batch``, for a GPU alone, replays every
    allocation through the simulated caching allocator with the budget as its
    capacity, so it knows rounding and fragmentation. Neither knows the
    workspaces of libraries.
    """
    rows = []
    for variant in variants:
        count = _count_of(variant, shape["depth"])
        meta = Segmented(model, shape, META, 1, count)
        row = _predict_largest(meta, budget, device.type)
        rows.append({"variant": variant, "count": count, **row})
    yield {"largest": rows}
    held = workspace(Segmented(model, shape, device, 1))
    for row in rows:
        work = Segmented(model, shape, device, 1, row["count"])
        start = row["reserved_batch"] or row["batch"]
        with capped(device, budget):
            sample = _measure_largest(work, budget, start, warm_up, repeats)
        yield {
            "variant": row["variant"],
            "count": row["count"],
            **sample,
            "workspace": held,
        }


# What is trained -----------------------------------------------------------


@dataclass(frozen=True)
class Segmented(Workload):
    """A workload whose stages are checkpointed in equal segments.

    Args:
        model: ``chain`` (:func:`membudget.models.chain`, all of it) or
            ``gpt`` (its blocks).
        count: segments; 0 for no checkpointing.
    """

    count: int = 0

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and its Adam.

        There is no dropout, so no random state is stashed. The learning rate
        of the chain is so small that its model stays what it is: a loss that
        is a sum would soon have nothing but zeros behind its ReLUs.
        """
        depth, options = self.shape["depth"], {"preserve_rng_state": False}
        options["segments"] = (
            equal_segments(depth, self.count)
            if self.count
            else no_segments(depth)
        )
        if self.model == "gpt":
            network, optimizer = super().build()
            network.blocks = Checkpointed(network.blocks, **options)
            return network, optimizer
        with torch.device(self.device):
            network = Checkpointed(models.chain(**self.shape), **options)
        return network, torch.optim.Adam(
            network.parameters(), lr=1e-6, foreach=True
        )

    def loss(self, network: nn.Module, size: int) -> torch.Tensor:
        """Of ``size`` new samples; of a chain the sum of its output.

        The sum holds nothing and its gradient is a single number, as in
        :func:`membudget.checkpointing.simulate`.
        """
        if self.model == "gpt":
            return super().loss(network, size)
        x = torch.rand(size, self.shape["width"], device=self.device)
        return network(x).sum()

    def boundary(self) -> int:
        """Bytes of the input of a stage, for the whole window."""
        tokens = self.shape.get("context", 1)
        return 4 * self.window * tokens * self.shape["width"]


@contextmanager
def attention_of(kind: str) -> Iterator[None]:
    """:class:`FusedAttention` that recomputations see as well.

    They run inside ``backward``, where a mode for functions is off.

    Args:
        kind: ``cpu`` or ``cuda``.
    """
    plain, mode = F.scaled_dot_product_attention, FusedAttention(kind)

    def fused(*args, **kwargs):
        return mode.__torch_function__(fused, (), args, kwargs)

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def traced(work: Segmented, kind: str) -> tuple[PeakTracker, int]:
    """A step of the whole window after the one that makes Adam's states.

    Args:
        work: on ``meta``.
        kind: ``cpu`` or ``cuda``, the device that is meant. Adam's step
            counts stay on the CPU: they count for that alone.

    Returns:
        The tracker, which began with the parameters and Adam's states, and
        the FLOPs of the matrix products.
    """
    network, optimizer = work.build()
    counted = None if kind == "cpu" else "meta"
    with attention_of(kind):
        work.train(network, optimizer, work.window)
        alive = [*network.parameters(), *states(optimizer)]
        with (
            PeakTracker(*alive, device=counted) as run,
            FlopCounter() as flops,
        ):
            work.train(network, optimizer, work.window)
    return run, flops.total


def _phase(run: PeakTracker, budget: int) -> str | None:
    """Where the budget is exceeded first; None where it is not."""
    for live, operator in zip(run.timeline, run.operators, strict=True):
        if live > budget:
            return operator.phase
    return None


# The sweep over segments ---------------------------------------------------


def _sweep(
    device: torch.device,
    model: str,
    shape: dict,
    runs: list[list[int]],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    rows, plain = [], {}
    for batch, count in runs:
        meta = Segmented(model, shape, META, batch, count)
        run, flops = traced(meta, device.type)
        if batch not in plain:
            _, plain[batch] = traced(replace(meta, count=0), device.type)
        rows.append(
            {
                "batch": batch,
                "count": count,
                "bytes": run.peak,
                "phase": _phase(run, run.peak - 1),
                "alive": run.start,
                "boundary": meta.boundary(),
                "flops": flops,
                "time": round(flops / plain[batch], 6),
            }
        )
    yield {"peak": rows}
    held = workspace(Segmented(model, shape, device, 1))
    for batch, count in runs:
        work = Segmented(model, shape, device, batch, count)
        sample = _step(work, warm_up, repeats)
        yield {"batch": batch, "count": count, **sample, "workspace": held}


def _step(work: Segmented, warm_up: int, repeats: int) -> dict:
    """Seconds and peak bytes of a step of the whole window, anew."""
    gc.collect()
    network, optimizer = work.build()

    def train() -> None:
        work.train(network, optimizer, work.window)

    train()  # makes Adam's states
    alive = [*network.parameters(), *states(optimizer)]
    peak = peak_bytes(train, work.device, sum(t.nbytes for t in alive))
    times = seconds(train, work.device, warm_up, repeats)
    return {"seconds": times, **peak}


# Under a budget ------------------------------------------------------------


@contextmanager
def capped(device: torch.device, budget: int) -> Iterator[None]:
    """On a GPU, let PyTorch's allocator reserve no more than the budget.

    Afterwards the cap is what it was before. On a CPU nothing is done.

    Args:
        budget: bytes.
    """
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    _release(device)
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _simulated(device: torch.device, budget: int) -> AbstractContextManager:
    """On a CPU, a tracker with the budget; a GPU has its cap."""
    if device.type == "cpu":
        return PeakTracker(budget=budget)
    return nullcontext()


def _release(device: torch.device) -> None:
    """Free what nobody holds, the allocator's cache included."""
    wait_for_autograd(device)
    gc.collect()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _count_of(variant: str, depth: int) -> int:
    """The number of segments."""
    if variant == "root":
        return isqrt(depth - 1) + 1  # ⌈√depth⌉
    return {"none": 0, "each": depth}[variant]


STEPS = 2
"""Steps that a batch has to survive: the first makes Adam's states."""

SMALL = (2, 4, 7)
"""Batches whose steps are traced; every other's peak follows from them."""


def _predict_largest(meta: Segmented, budget: int, kind: str) -> dict:
    """The largest batch by two predictions.

    Args:
        meta: on ``meta``.
        budget: bytes.
        kind: of the device.
    """
    traces = [traced(replace(meta, window=size), kind)[0] for size in SMALL]
    lines = peak_lines(SMALL, [run.timeline for run in traces])
    batch = last_that(lambda size: peak_at(lines, size) <= budget, 1, 0)
    if kind == "cpu":
        return {"batch": batch, "reserved_batch": None}

    def fits(size: int) -> bool:
        with attention_of(kind), PeakTracker(device="meta") as run:
            _train(replace(meta, window=size))
        try:
            replay(run.events, capacity=budget)
        except torch.OutOfMemoryError:
            return False
        return True

    return {
        "batch": batch,
        "reserved_batch": last_that(fits, max(1, batch), 0),
    }


def _train(work: Segmented) -> None:
    """Train a new model as long as a batch has to survive."""
    network, optimizer = work.build()
    for _ in range(STEPS):
        work.train(network, optimizer, work.window)


def _measure_largest(
    work: Segmented, budget: int, start: int, warm_up: int, repeats: int
) -> dict:
    """The largest batch that trains, and what a step with it takes.

    Args:
        work: of any window.
        budget: bytes.
        start: the size to begin with.
    """
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return _survives(replace(work, window=size), budget)

    batch = last_that(fits, start or 1, 0)
    found = dict.fromkeys(("seconds", "requested", "allocated", "reserved"))
    if batch:
        with suppress(torch.OutOfMemoryError):  # in a later step after all
            found = _going_on(replace(work, window=batch), warm_up, repeats)
    _release(work.device)
    return {"batch": batch, "tried": tried, **found}


def _going_on(work: Segmented, warm_up: int, repeats: int) -> dict:
    """As :func:`_step`, with the cache as the steps before have left it.

    What fits because of what is in the cache would not fit without it.
    """
    if work.device.type == "cpu":
        return _step(work, warm_up, repeats)
    network, optimizer = work.build()

    def train() -> None:
        work.train(network, optimizer, work.window)

    for _ in range(STEPS):
        reset_peak(work.device)
        train()
    torch.cuda.synchronize(work.device)
    memory = read_memory(work.device)
    return {
        "seconds": seconds(train, work.device, warm_up, repeats),
        "requested": memory.peak_requested,
        "allocated": memory.peak_allocated,
        "reserved": memory.peak_reserved,
    }


def _survives(work: Segmented, budget: int) -> bool:
    """Whether a new model can be trained within the budget."""
    fits = True
    try:
        with _simulated(work.device, budget):
            _train(work)
    except torch.OutOfMemoryError:
        fits = False
    _release(work.device)
    return fits
