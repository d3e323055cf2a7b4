"""A memory monitor for training loops: readings, a window, a status."""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from numbers import Integral, Real
from typing import NamedTuple

import torch

from membudget.checks import device as checked_device
from membudget.checks import function, number, told, whole
from membudget.measuring.device import (
    read_memory,
    reset_peak,
    resolve_device,
)
from membudget.measuring.units import format_bytes

MOST = 10**6
"""Readings in a window."""


class Status(IntEnum):
    """How full the memory is; a later one is fuller."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


class Reading(NamedTuple):
    """What a monitor read, and at which step."""

    step: int
    bytes: int


class MemoryMonitor:
    """A callback that reads the memory and says how full it is.

    Each call takes one reading. The status looks at the largest reading of
    the last ``window``, so that a dip does not hide a peak: from ``warning``
    and ``critical`` on, as shares of the budget.

    On CUDA a reading is the peak of the allocated bytes since the last call;
    the device's peak is reset for that, also for others who read it. The
    budget is what this process could have when the monitor was made
    (:func:`process_limit`). On a CPU a reading is the process' resident set
    at the moment of the call, everything in the process included.

    Args:
        device: what to read; by default CUDA where there is one.
        read: read this instead: a function that returns bytes. Needs a
            budget; the device is not touched.
        budget: bytes, at least 1, instead of what the process can have.
        window: readings that the status looks at, 1 to a million.
        warning: share of the budget from which the status is WARNING, above
            0 and below ``critical``.
        critical: share of the budget from which it is CRITICAL, at most 1.

    Attributes:
        budget: bytes.
        readings: all of them, in order.
        status: the :class:`Status` after the last reading, NORMAL at first.

    Example:
        >>> monitor = MemoryMonitor()
        >>> for step, (x, y) in enumerate(loader):
        ...     loss = train(x, y)
        ...     if monitor(step, loss=loss) > Status.NORMAL:
        ...         print(monitor.line())
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        read: Callable[[], int] | None = None,
        budget: int | None = None,
        window: int = 20,
        warning: float = 0.8,
        critical: float = 0.9,
    ) -> None:
        warning = number(warning, "warning", above=0, most=1)
        critical = number(critical, "critical", above=0, most=1)
        if warning >= critical:
            raise ValueError(
                f"warning is {warning} and critical {critical}: use shares "
                "of the budget with 0 < warning < critical <= 1"
            )
        if device is not None:
            checked_device(device)
        if read is None:
            where = resolve_device(device)
            read = _reader(where)
            if budget is None:
                budget = process_limit(where)
        elif budget is None:
            raise ValueError(
                "read= needs budget=: say of how many bytes a reading is a "
                "part"
            )
        self._read = function(read, "read", "a function that returns bytes")
        self.budget = whole(budget, "budget")
        self.window = whole(window, "window", 1, MOST)
        self.warning, self.critical = warning, critical
        self.readings: list[Reading] = []
        self.status = Status.NORMAL
        self._last: deque[int] = deque(maxlen=self.window)
        self._values: dict[str, object] = {}

    def __call__(self, step: int | None = None, **values: object) -> Status:
        """Take a reading.

        Args:
            step: its number; by default one more than the last, from 0.
            **values: what :meth:`line` is to show with it, such as
                ``loss=loss``. Of a tensor, no graph is kept.
        """
        values = {k: _without_graph(k, v) for k, v in values.items()}
        count = whole(self._read(), "a reading of memory", 0)
        if step is not None:
            step = whole(step, "step", 0)
        else:
            step = self.readings[-1].step + 1 if self.readings else 0
        self.readings.append(Reading(step, count))
        self._last.append(count)
        self._values = values
        self.status = self._judge()
        return self.status

    def _judge(self) -> Status:
        share = self.window_peak / self.budget
        if share >= self.critical:
            return Status.CRITICAL
        return Status.WARNING if share >= self.warning else Status.NORMAL

    @property
    def peak(self) -> int:
        """The largest reading of all, in bytes; 0 before the first."""
        return max((r.bytes for r in self.readings), default=0)

    @property
    def window_peak(self) -> int:
        """The largest of the last ``window`` readings, in bytes."""
        return max(self._last, default=0)

    def line(self) -> str:
        """The last reading as one line of a log.

        The share is rounded down: ``90.0 %`` are no less than 90 %.

        Raises:
            RuntimeError: there is no reading yet.
        """
        if not self.readings:
            raise RuntimeError(
                "there is no reading yet: call the monitor, then line()"
            )
        step, count = self.readings[-1]
        parts = [
            f"step {step}",
            f"{format_bytes(count)} of {format_bytes(self.budget)} "
            f"({1000 * count // self.budget / 10} %)",
            f"peak of the last {self.window}: "
            f"{format_bytes(self.window_peak)}",
            self.status.name,
            *(f"{name} {_rounded(v)}" for name, v in self._values.items()),
        ]
        return " | ".join(parts)


def process_limit(device: torch.device | str | None = None) -> int:
    """Bytes that this process can have on a device, those it has included.

    On CUDA what the allocator has reserved and what is free, or the
    per-process fraction of the total where that is less
    (``torch.cuda.set_per_process_memory_fraction``). On a CPU the process'
    resident set and what the system has available.

    Raises:
        ModuleNotFoundError: the CPU is to be read and psutil is missing.
    """
    where = resolve_device(device)
    now = read_memory(where)
    if where.type == "cuda":
        fraction = torch.cuda.get_per_process_memory_fraction(where)
        within = int(now.total * fraction)
        return min(told(now.reserved) + now.free, within)
    return told(now.process) + now.free


def _reader(device: torch.device) -> Callable[[], int]:
    """What a monitor reads on this device."""
    if device.type != "cuda":
        return lambda: told(read_memory(device).process)

    def peak() -> int:
        since = told(read_memory(device).peak_allocated)
        reset_peak(device)
        return since

    reset_peak(device)
    return peak


def _without_graph(name: str, value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)}: hand over one "
            "number"
        )
    return value.detach()


def _rounded(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item()
    exact = isinstance(value, Integral) or not isinstance(value, Real)
    return str(value) if exact else f"{value:.4g}"
