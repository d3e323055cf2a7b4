"""A widget, as the tests that are the same for all see it."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import widget_pages as pages

GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """A widget, for the tests that are the same for all."""

    name: str
    make: Callable
    """Gives the widget that has these arguments."""
    title: str
    """How the title begins, at first."""
    controls: Callable
    """What each control holds for a widget, in an order to enter it."""
    printed: Callable
    """The numbers that the page prints for a widget, by their keys: what the
    package's own functions say."""
    said: Callable
    """Words that the sentence of a widget holds."""
    states: list
    """Arguments that the controls can give to the first widget, in turn."""
    given: list
    """Arguments of widgets that begin elsewhere."""
    tabs: tuple
    """Keys of the controls at first, in the order of the tabulator."""
    rest: tuple | None
    """A slider's key, and the arguments after five steps of it; None for a
    widget without a slider."""
    spoken: dict
    """What is read out for a slider's place, at first."""
    columns: tuple
    """The headings of the table's columns."""
    moves: list
    """Arguments, and changes of sliders while nothing may jump."""
    parts: int
    """How many parts of the memory have a colour and a pattern."""
    state: int = 30_000
    """Bytes that the state has at most, of a page's 300 kB."""
    crossed: bool = False
    """Whether no dashed line goes through a text."""


def set_to(widget, traits):
    """Set those that differ, in their order."""
    for name, value in traits.items():
        if getattr(widget, name) != value:
            setattr(widget, name, value)


def flat(numbers, *keys):
    """The numbers of these keys; those within one of them as key.inner."""
    found = {}
    for key in keys:
        of = numbers[key]
        inner = of if isinstance(of, dict) else None
        found |= (
            {f"{key}.{k}": v for k, v in inner.items()} if inner else {key: of}
        )
    return found


def near(value, wanted):
    """Floats may differ in their last digits."""
    if isinstance(wanted, float) and value is not None:
        return value == pytest.approx(wanted, rel=1e-12, abs=0)
    return value == wanted


def prints(kind, widget, seen):
    """The numbers that were seen are the package's, the words hold them."""
    printed = kind.printed(widget)
    assert set(printed) <= set(seen["numbers"])
    for key, wanted in printed.items():
        value = seen["numbers"][key]
        if value and not isinstance(wanted, str):
            value = json.loads(value)
        assert near(value, wanted), key
    assert all(seen["labels"])


def shows(kind, widget, seen):
    """What was seen is what Python has."""
    prints(kind, widget, seen)
    words = " ".join(seen["said"])
    assert [word for word in kind.said(widget) if word not in words] == []
    controls = kind.controls(widget)
    assert set(seen["controls"]) == set(controls)
    for key, wanted in controls.items():
        held = seen["controls"][key]
        assert held in (wanted, str(wanted)) or float(held) == float(wanted)


def agree(kind, page, widget, place=0):
    """The page shows what Python has."""
    (seen,) = pages.walk(page, [[]], widget=place)
    shows(kind, widget, seen)
