"""Wall-clock times of calls, on devices that run behind the program."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch

from membudget.checks import function, whole
from membudget.measuring.device import resolve_device

MOST = 10**6
"""Calls in a measurement."""


@dataclass(frozen=True)
class Timing:
    """Times of repeated calls.

    Attributes:
        samples: seconds of each timed call, in the order they ran.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds: half of the calls took longer."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Seconds between the quartiles: the middle half of the calls lies
        within (interquartile range, interpolated); 0 for a single call."""
        if len(self.samples) == 1:
            return 0.0
        first, _, third = quantiles(self.samples, method="inclusive")
        return third - first


def time_calls(
    call: Callable[[], object],
    device: str | torch.device | None = "cpu",
    warm_up: int = 3,
    repeats: int = 10,
) -> Timing:
    """Time a call again and again.

    A GPU runs behind the program: a call returns when its kernels are queued,
    not when they are done. So the clock starts after the device has finished
    what came before, and stops after it has finished the call.

    Args:
        call: a function without arguments.
        device: where it runs, as in
            :func:`membudget.measuring.resolve_device`.
        warm_up: calls before the first that is timed, which pay for what
            happens once (allocations, handles, the choice of kernels); 0 to
            a million.
        repeats: calls that are timed, one sample each; 1 to a million.
    """
    use = "a function without arguments, such as lambda: model(x)"
    function(call, "call", use)
    warm_up = whole(warm_up, "warm_up", 0, MOST)
    repeats = whole(repeats, "repeats", 1, MOST)
    device = resolve_device(device)
    for _ in range(warm_up):
        call()
    samples = []
    for _ in range(repeats):
        _wait(device)
        start = perf_counter()
        call()
        _wait(device)
        samples.append(perf_counter() - start)
    return Timing(tuple(samples))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
