"""Little at every change, much in a soak: ``SOAK=1`` in the environment."""

import os
from random import Random

SOAK = bool(os.environ.get("SOAK"))
"""Whether whole grids run and properties meet many examples."""


def examples(few: int) -> int:
    """How many examples a property meets: few, or 30 times as many."""
    return 30 * few if SOAK else few


def part_of(grid, rng: Random, count: int) -> list:
    """Some of the grid; all of it in a soak."""
    grid = list(grid)
    return grid if SOAK else rng.sample(grid, min(count, len(grid)))
