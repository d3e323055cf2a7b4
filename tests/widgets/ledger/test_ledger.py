"""The ledger widget's traits, and the rows that it sends to the page."""

import pytest
from traitlets import TraitError

from membudget.cards import CARDS
from membudget.ledger import GPT2, OPTIMIZERS, PLANNED, PRESETS
from membudget.widgets import Ledger, ledger, ledger_rows
from tests.soak import SOAK


def test_defaults():
    widget = Ledger()
    assert (widget.model, widget.shape) == ("GPT-2 124M", GPT2)
    assert (widget.batch, widget.tokens, widget.steps) == (8, 1024, 1)
    assert (widget.recipe, widget.optimizer) == ("fp32", "adam")
    assert (widget.card, widget.budget) == ("T4", CARDS["T4"].usable)
    assert widget.sentence() == (
        "GPT-2 124M, 8 × 1024 tokens: the peak of a training step is 10.5 "
        "GiB, which fits the 14.1 GiB of the T4."
    )
    assert repr(widget) == (
        "Ledger('GPT-2 124M', batch=8, tokens=1024, recipe='fp32', "
        "optimizer='adam', card='T4')"
    )


def test_a_gpu_works_on_all_parameters_at_once():
    """GPT-2 XL in fp32 does not fit an RTX 4090 with one sequence."""
    sizes = {"batch": 1, "tokens": 256}
    widget = Ledger("GPT-2 XL 1.5B", **sizes, card="RTX 4090")
    assert widget.at_once
    assert widget.prediction.at_peak.phase == "optimizer"
    assert "is 29.0 GiB, which does not fit the 23.1" in widget.sentence()
    widget.card = "none"
    assert not widget.at_once
    assert widget.sentence().endswith(" is 23.8 GiB.")
    widget.foreach = True
    assert widget.at_once
    widget.optimizer = "adam-8bit"
    assert not widget.at_once


def test_names_are_the_rooms():
    names = {name: OPTIMIZERS[name].text for name in PLANNED}
    assert names == ledger.NAMES


@pytest.mark.parametrize("name", ledger_rows.SHOWN)
def test_presets(name):
    widget = Ledger(name, tokens=512)
    assert widget.shape == PRESETS[name]
    table = widget.tables["models"][name]
    assert table["parameters"] == PRESETS[name].parameters
    assert table["tokens"][-1] == (1024 if name[:3] == "GPT" else 32768)


def test_fewer_positions_take_the_tokens_along():
    widget = Ledger("Llama 3 8B", tokens=8192)
    widget.model = "GPT-2 124M"
    assert widget.tokens == 1024
    widget.model = "Llama 3 8B"
    assert widget.tokens == 1024
    widget.set_state({"model": "GPT-2 XL 1.5B", "tokens": 512})
    assert (widget.model, widget.tokens) == ("GPT-2 XL 1.5B", 512)
    with pytest.raises(TraitError, match="from 16 to 1024"):
        widget.set_state({"tokens": 2048})
    assert widget.tokens == 512


@pytest.mark.parametrize("name", ledger_rows.SHOWN[: 5 if SOAK else 1])
def test_the_file_is_what_the_rows_say(name):
    """``python -m membudget.widgets.ledger_rows`` writes it."""
    assert ledger_rows.table(PRESETS[name]) == ledger_rows.known()[name]
