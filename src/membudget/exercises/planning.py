"""The exercises on planning."""

from membudget.exercises.core import Exercise, given
from membudget.exercises.observe import answer

PLANS = [(9, 10), (5, 14), (4, 17), (5, 12), (7, 12), (3, 20), (6, 12)]
"""Peaks and seconds: three are equally fast, and two have equal peaks."""


def frontier(plans):
    best, kept = float("inf"), []
    for peak, seconds in sorted(plans):
        if seconds < best:
            best = seconds
            kept.append((peak, seconds))
    return kept


check_frontier = Exercise(
    frontier,
    cases=[
        given(plans=[(5, 14), *PLANS, (8, 18), (10, 11)]),
        given(plans=[(1, 9), (2, 8), (3, 7)]),
        given(plans=[(3, 7), (2, 7), (1, 7)]),
    ],
    observe=answer,
    mistakes="""
        if seconds < best => if seconds <= best
            this keeps plans that need more bytes and are no faster.
        sorted(plans) => plans
            take the plans by rising peak: sort them first.
        sorted(plans) => sorted(plans, key=lambda plan: plan[1])
            this goes by rising seconds, so only the fastest is kept: sort by
            the peak.
        sorted(plans) => sorted(plans, reverse=True)
            this begins with the largest peak: begin with the smallest.
        best = seconds => pass
        or if seconds < best => if True
            a plan must be faster than all that are kept: remember the best
            seconds, and leave out the others.
        """,
    shown=(
        "Sort once, go through once: a million plans are no trouble. The "
        "answer to every budget is on it."
    ),
)
