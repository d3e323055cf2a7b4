"""Widgets: each subject's numbers, to be moved by hand."""

from membudget.widgets.accumulation import Accumulation
from membudget.widgets.base import Whole, Widget, format_bytes, format_number
from membudget.widgets.ledger import Ledger
from membudget.widgets.precision import Precision
from membudget.widgets.segments import Segments
from membudget.widgets.sharding import Sharding
from membudget.widgets.timeline import Timeline

__all__ = [
    "Accumulation",
    "Ledger",
    "Precision",
    "Segments",
    "Sharding",
    "Timeline",
    "Whole",
    "Widget",
    "format_bytes",
    "format_number",
]
