"""The search for the largest that fits."""

from collections.abc import Callable


def last_that(fits: Callable[[int], bool], guess: int, least: int) -> int:
    """A size that fits, while the next one does not.

    Args:
        guess: where to begin.
        least: a size that fits.
    """
    low, high, step = guess, guess + 1, 1
    while low > least and not fits(low):
        low, high, step = max(low - step, least), low, 2 * step
    while fits(high):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
