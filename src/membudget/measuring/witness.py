"""The witness: what a step takes by the allocator's own account."""

import os
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.autograd import profiler

from membudget.checks import function
from membudget.internals import profiling
from membudget.measuring.device import resolve_device

_SECOND = "the step that is watched"


def witness(
    step: Callable[[], object], device: torch.device | str | None = None
) -> int:
    """The most bytes that a step requests above what was there before it.

    Only the allocator watches: on a CPU its events, which PyTorch's
    profiler writes down, on CUDA its counter ``requested_bytes.all.peak``.
    So the step runs as it does unwatched. Under a dispatch mode, as
    :class:`PeakTracker` is one, PyTorch takes other branches
    (``isTensorSubclassLike``), which the tracker has to make up for; and no
    mode sees what a kernel takes and gives back, which counts here.

    Args:
        step: called twice, as the first step makes an optimizer's states;
            the second is watched.
        device: the CPU, which is the default, or a CUDA device.

    Returns:
        Bytes, not rounded. On a CPU those that this thread and the autograd
        engine request.

    Raises:
        RuntimeError: a profiler is running already.
    """
    function(step, "step", "a function without arguments")
    on = resolve_device("cpu" if device is None else device)
    if on.type == "cuda":
        return _of_counters(step, on)
    # The profiler's library reports its start on stderr, unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if profiling():
        raise RuntimeError(
            "a profiler is running already, and PyTorch has but one: leave "
            "its block before you call the witness"
        )
    with profiler.profile(profile_memory=True) as events:
        step()
        with profiler.record_function(_SECOND):
            step()
    return _most(events.kineto_results.events())


def _most(events: list) -> int:
    """The highest sum of the requests since the second step began."""
    (start,) = (e.start_ns() for e in events if e.name() == _SECOND)
    later = [
        e for e in events if e.name() == "[memory]" and e.start_ns() >= start
    ]
    later.sort(key=lambda e: e.start_ns())
    return max(accumulate((e.nbytes() for e in later), initial=0))


def _of_counters(step: Callable[[], object], device: torch.device) -> int:
    step()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    step()
    stats = torch.cuda.memory_stats(device)
    return stats["requested_bytes.all.peak"] - before
