"""Schedules: what is best to forget, and how often to run it again."""

from membudget.schedules.law import (
    binomial_segments,
    every_first,
    longest_chain,
    peak_of_runs,
)
from membudget.schedules.optimal import (
    FrontierPoint,
    frontier,
    least_budget,
    optimal_segments,
)

__all__ = [
    "FrontierPoint",
    "binomial_segments",
    "every_first",
    "frontier",
    "least_budget",
    "longest_chain",
    "optimal_segments",
    "peak_of_runs",
]
