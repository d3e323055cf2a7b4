"""The micro-batch that follows the memory: a reactive controller."""

from membudget.checks import whole

LOW, HIGH = 0.6, 0.8
"""Shares of the budget: a peak between them leaves the micro-batch alone."""

SHRINK, GROW = 0.8, 1.2


class Controller:
    """Choose each step's micro-batch by what the step before needed.

    A peak above 80 % of the budget shrinks the micro-batch by a fifth, one
    below 60 % lets it grow by a fifth, at least by one sample; both round
    down. It chooses the micro-batch and nothing else: cut the global batch
    with :func:`partition`, and the window holds the same samples, whatever
    the size. It reacts, so the first step that needs too much still fails:
    :func:`recovering_step` repeats it.

    Args:
        micro_batch: samples of the first step's micro-batches, at least 1.
        budget: bytes, at least 1.
        most: the largest micro-batch; the global batch at most.

    Attributes:
        micro_batch: samples of the next step's micro-batches.

    Example:
        >>> controller = Controller(32, budget=8 * 2**30, most=256)
        >>> for x, y in batches:
        ...     done = recovering_step(
        ...         accumulator, loss, x, y, micro_batch=controller.micro_batch
        ...     )
        ...     controller(peak(), done.micro_batch)
    """

    def __init__(self, micro_batch: int, *, budget: int, most: int) -> None:
        self.budget = whole(budget, "budget")
        self.most = whole(most, "most")
        self.micro_batch = self._size(micro_batch)

    def __call__(self, peak: int, micro_batch: int | None = None) -> int:
        """The next step's micro-batch.

        Args:
            peak: bytes of the step that ran.
            micro_batch: samples of its micro-batches, where they were fewer
                than planned.
        """
        share = whole(peak, "peak", 0) / self.budget
        size = self.micro_batch
        if micro_batch is not None:
            size = self._size(micro_batch)
        if share > HIGH:
            size = int(size * SHRINK)
        elif share < LOW:
            size = max(int(size * GROW), size + 1)
        self.micro_batch = min(max(size, 1), self.most)
        return self.micro_batch

    def _size(self, micro_batch: int) -> int:
        return whole(micro_batch, "micro_batch", 1, self.most)
