"""Accumulation: the batch's gradient without the batch's activations."""

from membudget.accumulation.accumulator import Accumulator, Report, Window
from membudget.accumulation.controller import Controller
from membudget.accumulation.noise import GradientNoise, gradient_noise
from membudget.accumulation.partition import (
    IGNORE,
    NORMALISATIONS,
    mean_of_means_error,
    partition,
    weights,
    windows,
)
from membudget.accumulation.plan import (
    Footprint,
    Plan,
    footprint,
)
from membudget.accumulation.recovery import Recovered, recovering_step
from membudget.accumulation.strategies import (
    in_place,
    memory_aware,
    new_sum,
    sum_gradients,
)
from membudget.ledger import PeakLine, peak_at, peak_lines

__all__ = [
    "IGNORE",
    "NORMALISATIONS",
    "Accumulator",
    "Controller",
    "Footprint",
    "GradientNoise",
    "PeakLine",
    "Plan",
    "Recovered",
    "Report",
    "Window",
    "footprint",
    "gradient_noise",
    "in_place",
    "mean_of_means_error",
    "memory_aware",
    "new_sum",
    "partition",
    "peak_at",
    "peak_lines",
    "recovering_step",
    "sum_gradients",
    "weights",
    "windows",
]
