"""Widgets: each subject's numbers, to be moved by hand."""

from membudget.widgets.accumulation import Accumulation
from membudget.widgets.base import Whole, Widget, format_bytes, format_number

__all__ = [
    "Accumulation",
    "Whole",
    "Widget",
    "format_bytes",
    "format_number",
]
