"""The micro-batch that follows the memory: a reactive controller."""

from membudget.checks import number, whole

ROUNDING = 1e-12
"""0.8 is within 0.1 of 0.7, though not in floating-point numbers."""


class Controller:
    """Choose each step's micro-batch by what the step before needed.

    A peak above ``target + tolerance`` of the budget shrinks the micro-batch,
    one below ``target - tolerance`` lets it grow; in between it stays. It
    chooses the micro-batch and nothing else: cut the global batch with
    :func:`partition`, and the window holds the same samples, whatever the
    size. It reacts, so the first step that needs too much still fails:
    :func:`recovering_step` repeats it.

    Args:
        micro_batch: samples of the first step's micro-batches.
        budget: bytes.
        most: the largest micro-batch; the global batch at most.
        least: the smallest.
        target: share of the budget that is aimed at.
        tolerance: how far from it a peak may be.
        shrink: factor above, rounded down.
        grow: factor below, rounded down, but at least one sample more.

    Attributes:
        micro_batch: samples of the next step's micro-batches.

    Raises:
        TypeError: an argument of a wrong kind; when called, too.
        ValueError: sizes that are not 1 <= least <= micro_batch <= most, a
            budget below 1, a target and a tolerance that leave the range from
            0 to 1, or factors that are not 0 < shrink < 1 < grow; when
            called, a negative peak or a micro-batch outside the limits.

    Example:
        >>> controller = Controller(32, budget=8 * 2**30, most=256)
        >>> for x, y in batches:
        ...     done = recovering_step(
        ...         accumulator, loss, x, y, micro_batch=controller.micro_batch
        ...     )
        ...     controller(peak(), done.micro_batch)
    """

    def __init__(
        self,
        micro_batch: int,
        *,
        budget: int,
        most: int,
        least: int = 1,
        target: float = 0.7,
        tolerance: float = 0.1,
        shrink: float = 0.8,
        grow: float = 1.2,
    ) -> None:
        self.budget = whole(budget, "budget")
        self.least = whole(least, "least")
        self.most = whole(most, "most", self.least)
        self.micro_batch = self._size(micro_batch)
        self.target = number(target, "target", above=0, most=1)
        room = min(self.target, 1 - self.target)
        self.tolerance = number(tolerance, "tolerance", 0, room)
        self.shrink = number(shrink, "shrink", above=0)
        if self.shrink >= 1:
            raise ValueError(
                f"shrink is {self.shrink}: use a factor above 0 and below 1"
            )
        self.grow = number(grow, "grow", above=1)

    def __call__(self, peak: int, micro_batch: int | None = None) -> int:
        """The next step's micro-batch.

        Args:
            peak: bytes of the step that ran.
            micro_batch: samples of its micro-batches, where they were fewer
                than planned.
        """
        off = whole(peak, "peak", 0) / self.budget - self.target
        size = self.micro_batch
        if micro_batch is not None:
            size = self._size(micro_batch)
        if off > self.tolerance + ROUNDING:
            size = int(size * self.shrink)
        elif off < -self.tolerance - ROUNDING:
            size = max(int(size * self.grow), size + 1)
        self.micro_batch = min(max(size, self.least), self.most)
        return self.micro_batch

    def _size(self, micro_batch: int) -> int:
        return whole(micro_batch, "micro_batch", self.least, self.most)
