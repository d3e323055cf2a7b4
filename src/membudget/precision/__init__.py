"""Precision: what 16 bits save, what they add and what they break."""

from membudget.precision.casting import LISTS, Autocast, list_of
from membudget.precision.devices import support, tf32
from membudget.precision.formats import FORMATS, Format, format_of
from membudget.precision.masters import MasterWeights
from membudget.precision.scaling import (
    DynamicScale,
    Lost,
    ScaleTrace,
    best_scale,
    binades,
    lost,
)

__all__ = [
    "FORMATS",
    "LISTS",
    "Autocast",
    "DynamicScale",
    "Format",
    "Lost",
    "MasterWeights",
    "ScaleTrace",
    "best_scale",
    "binades",
    "format_of",
    "list_of",
    "lost",
    "support",
    "tf32",
]
