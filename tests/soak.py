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


def few_cases(items) -> list:
    """Tests without most cases of those marked ``few(n)``: n are left of each,
    and none of those marked ``few(0)``.

    They lie evenly, and begin at another place in each test: tests of the same
    eleven widgets look at all eleven among them. A soak tries every case.
    """
    families = {}
    for item in items:
        if mark := item.get_closest_marker("few"):
            family = families.setdefault(item.nodeid.split("[")[0], [])
            family.append((item, *mark.args))
    dropped = set()
    for place, family in enumerate(families.values()):
        cases, count = [case for case, _ in family], family[0][1]
        chosen = (place + k * len(cases) // count for k in range(count))
        kept = {cases[k % len(cases)] for k in chosen}
        if len(cases) > count and not SOAK:
            dropped.update(case for case in cases if case not in kept)
    return [item for item in items if item not in dropped]
