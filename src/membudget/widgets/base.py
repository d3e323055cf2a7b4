"""What every widget shares: live in a notebook, and live in the book."""

import json
import sys
from collections.abc import Callable
from decimal import Decimal
from html import escape
from typing import Any, ClassVar

import anywidget
import traitlets

from membudget.checks import number, whole
from membudget.measuring.units import format_bytes, round_half_up
from membudget.widgets.bundle import module_text, style_text

__all__ = ["Checked", "Whole", "Widget", "format_bytes", "format_number"]


def later(text: str) -> str:
    """A label that the book also shows in Chinese: marks it for the catalogue,
    as gettext's ``N_`` does. The module asks for it with ``t``.
    """
    return text


TEXTS = {
    "fp32": later("everything in fp32"),
    "autocast": later("fp32 parameters, matrix products in 16 bits"),
    "bf16": later("everything in bf16"),
    "master": later("bf16 model, fp32 copy for the optimizer"),
    "master-fp32-gradients": later(
        "bf16 model, fp32 copy, gradients summed in fp32"
    ),
}
"""The recipes in words: those of :data:`membudget.ledger.RECIPES`."""

MOST = 10**24
"""Of a number with two decimals."""


def checked(check: Callable, *arguments: Any) -> Any:
    """What a function of :mod:`membudget.checks` returns; what it refuses is
    a ``traitlets.TraitError``.
    """
    try:
        return check(*arguments)
    except (TypeError, ValueError) as error:
        raise traitlets.TraitError(str(error)) from None


class Checked(traitlets.TraitType):
    """A trait whose value a function checks, from it and the trait's name,
    and returns as it is kept.
    """

    def __init__(self, check: Callable, default: Any = None) -> None:
        super().__init__(default)
        self.check = check

    def validate(self, obj: Any, value: Any) -> Any:
        return checked(self.check, value, self.name)


class Whole(Checked):
    """A trait for a whole number of at least 1."""

    def __init__(self, default: int = 1) -> None:
        super().__init__(whole, default)


class Widget(anywidget.AnyWidget):
    """A widget of the course; a subclass is one subject's.

    A subclass gives ``name`` (its module is ``NAME.mjs``, its style
    ``NAME.css`` where there is one), traits tagged ``sync=True``, and
    :meth:`sentence`. With a kernel it is an ipywidget. Its ``text/html``
    holds the sentence and the traits as JSON, with which the book runs the
    same module without a kernel; the text is the same on every run.

    A trait refuses a value that is not allowed with a
    ``traitlets.TraitError``, and the widget stays as it was.
    """

    name: ClassVar[str]
    positional: ClassVar[tuple[str, ...]] = ()
    named: ClassVar[tuple[str, ...]] = ()
    """The traits in the widget's ``repr``, without and with their names."""
    _ipython_display_ = None  # ipywidgets 7 would show it without the bundle

    def __init__(self, **traits: Any) -> None:
        for name in traits:
            if not self.has_trait(name):
                raise TypeError(f"{type(self).__name__} has no {name!r}")
        super().__init__(**traits)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "name" in cls.__dict__:  # not the class that add_traits makes
            cls._esm = module_text(cls.name)
            cls._css = style_text(cls.name)
        super().__init_subclass__(**kwargs)

    def sentence(self) -> str:
        """What the widget shows, with its key number, in plain text.

        It stands alone where there is no JavaScript.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The subclass's synced traits, as JSON's types."""
        own = set(self.trait_names(sync=True))
        own -= set(anywidget.AnyWidget.class_trait_names())
        return self.get_state([key for key in own if key[0] != "_"])

    def __repr__(self) -> str:
        given = [repr(getattr(self, name)) for name in self.positional]
        given += [f"{name}={getattr(self, name)!r}" for name in self.named]
        return f"{type(self).__name__}({', '.join(given)})"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None or "google.colab" in sys.modules:
            return bundle
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/html": self._html()}, metadata

    def _html(self) -> str:
        state = json.dumps(self.state(), sort_keys=True).replace("</", "<\\/")
        return (
            f'<div class="mb-widget" data-widget="{self.name}">\n'
            f'<p class="mb-fallback">{escape(self.sentence())} (Run '
            "this cell for a picture to play with.)</p>\n"
            f'<script type="application/json" class="mb-state">{state}'
            "</script>\n</div>"
        )


def format_number(value: float) -> str:
    """At most two decimals: ``25.6``; as ``base.mjs``.

    Args:
        value: from −10²⁴ to 10²⁴.
    """
    value = number(value, "the number", -MOST, MOST)
    text = str(round_half_up(Decimal(value), 2))
    return text.rstrip("0").rstrip(".")
