"""Widgets: each subject's numbers, to be moved by hand."""

from membudget.checks import installed

installed("anywidget", "a widget")

from membudget.widgets.accumulation import Accumulation
from membudget.widgets.adapters import Adapters
from membudget.widgets.base import Whole, Widget, format_bytes, format_number
from membudget.widgets.bits import Bits
from membudget.widgets.fits import Fits
from membudget.widgets.ledger import Ledger
from membudget.widgets.lossscale import LossScale
from membudget.widgets.offloading import Offloading
from membudget.widgets.parallelism import Parallelism
from membudget.widgets.planning import Planning
from membudget.widgets.recipes import Recipes
from membudget.widgets.schedules import Schedules
from membudget.widgets.segments import Segments
from membudget.widgets.sharding import Sharding
from membudget.widgets.timeline import Timeline
from membudget.widgets.yours import YourModel

__all__ = [
    "Accumulation",
    "Adapters",
    "Bits",
    "Fits",
    "Ledger",
    "LossScale",
    "Offloading",
    "Parallelism",
    "Planning",
    "Recipes",
    "Schedules",
    "Segments",
    "Sharding",
    "Timeline",
    "Whole",
    "Widget",
    "YourModel",
    "format_bytes",
    "format_number",
]
