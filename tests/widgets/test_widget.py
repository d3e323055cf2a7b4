"""What every widget shares: traits, the HTML beside the live view."""

import json
import re
import sys
import types

import pytest
import traitlets
from IPython.core.formatters import DisplayFormatter

from membudget.widgets import (
    Whole,
    Widget,
    format_number,
)


class Toy(Widget):
    """A widget as small as can be."""

    name = "accumulation"
    text = traitlets.Unicode("a</script><b>").tag(sync=True)
    count = Whole(3).tag(sync=True)
    hidden = Whole(4)

    def sentence(self):
        return "1 < 2 & more"


def html(widget):
    data, _ = widget._repr_mimebundle_()
    return data["text/html"]


def state(text):
    pattern = r'<script type="application/json" class="mb-state">(.*?)</scr'
    return json.loads(re.search(pattern, text, re.S)[1])


def test_html_beside_the_live_view():
    data, metadata = Toy()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"] == "Toy()"
    assert isinstance(metadata, dict)
    assert data["text/html"].startswith(
        '<div class="mb-widget" data-widget="accumulation">\n'
        '<p class="mb-fallback">1 &lt; 2'
    )
    assert data["text/html"].count("<div") == 1
    assert data["text/html"].count("</div>") == 1


def test_a_notebook_shows_the_bundle(monkeypatch):
    """ipywidgets 7 shows its widgets itself, and ours has to stop it."""
    monkeypatch.setattr(
        Widget.__mro__[1], "_ipython_display_", print, raising=False
    )
    widget = Toy()
    data, metadata = DisplayFormatter().format(widget)
    assert (data, metadata) == widget._repr_mimebundle_()


def test_state_is_the_synced_traits_and_no_more():
    assert state(html(Toy())) == {"text": "a</script><b>", "count": 3}


def test_state_and_sentence_are_escaped():
    text = html(Toy())
    assert text.count("</script") == 1
    assert r"a<\/script>" in text
    assert "1 &lt; 2 &amp; more (Run this cell" in text


def test_html_follows_the_traits():
    widget = Toy()
    widget.count = 9
    assert state(html(widget))["count"] == 9


def test_colab_gets_the_live_view_only(monkeypatch):
    widget = Toy()
    colab = types.ModuleType("google.colab")
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    data, _ = widget._repr_mimebundle_()
    assert "text/html" not in data
    assert "application/vnd.jupyter.widget-view+json" in data


@pytest.mark.parametrize("bundle", [{"text/plain": "x"}, None])
def test_older_and_hidden_bundles(monkeypatch, bundle):
    widget = Toy()
    base = Widget.__mro__[1]
    monkeypatch.setattr(base, "_repr_mimebundle_", lambda self, **kw: bundle)
    result = widget._repr_mimebundle_()
    if bundle is None:
        assert result is None
    else:
        data, metadata = result
        assert set(data) == {"text/plain", "text/html"}
        assert metadata == {}


def test_module_and_style_are_the_bundles():
    widget = Toy()
    assert "export default widget({" in widget._esm
    assert ".mb-root" in widget._css
    assert widget.get_state(["_esm"])["_esm"] == widget._esm


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", None, True, float("nan")])
def test_whole_says_what_is_allowed(bad):
    widget = Toy()
    with pytest.raises(traitlets.TraitError) as error:
        widget.count = bad
    assert str(error.value) == (
        f"count is {bad!r}: use a whole number of at least 1"
    )
    assert widget.count == 3


@pytest.mark.parametrize(
    "value, text",
    [(1.0, "1"), (25.6, "25.6"), (1.125, "1.13"), (100, "100"), (0.0, "0")],
)
def test_format_number(value, text):
    assert format_number(value) == text
