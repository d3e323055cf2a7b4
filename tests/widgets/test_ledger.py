"""The ledger widget's traits and numbers."""

from functools import cache
from itertools import product
from xml.etree import ElementTree

import ledger_cases as cases
import pytest
from traitlets import TraitError

from membudget.ledger import (
    GPT2,
    LLAMA3_8B,
    OPTIMIZERS,
    PRESETS,
    RECIPES,
    predict,
    states,
)
from membudget.widgets import Ledger
from membudget.widgets.ledger import BARS, SHOWN

GIB = 2**30
TINY = {
    "preset": "",
    "vocabulary": 40,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "kv_heads": 2,
    "context": 32,
    "batch": 4,
    "tokens": 8,
}


# Traits --------------------------------------------------------------------


def test_defaults():
    widget = Ledger()
    assert widget.preset == "GPT-2 124M"
    assert widget.shape == GPT2
    assert (widget.batch, widget.tokens, widget.steps) == (8, 1024, 1)
    assert (widget.recipe, widget.optimizer) == ("fp32", "adam")
    assert widget.fused and not widget.checkpointed and not widget.foreach
    assert widget.numbers()["parameters"] == 124_439_808


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_shape(preset):
    assert Ledger(preset).shape == PRESETS[preset]
    widget = Ledger(tokens=512)
    widget.preset = preset
    assert widget.shape == PRESETS[preset]
    assert widget.preset == preset
    assert widget.tokens == 512


@pytest.mark.parametrize(
    "change",
    [{"depth": 24}, {"tied": False}, {"context": 2048}, {"family": "llama"}],
)
def test_another_shape_leaves_the_preset(change):
    (name,) = change
    widget = Ledger()
    setattr(widget, name, change[name])
    assert widget.preset == ""
    assert getattr(widget, name) == change[name]
    assert widget.width == 768  # the rest stays
    given = Ledger("GPT-2 124M", **change)
    assert given.state() == widget.state()
    widget.preset = "GPT-2 124M"
    assert widget.shape == GPT2


def test_what_is_no_shape_keeps_the_preset():
    widget = Ledger(fused=False, batch=3, tokens=9, checkpointed=True)
    assert widget.preset == "GPT-2 124M"
    widget.recipe = "bf16"
    widget.hidden = 5  # which the family gpt does not use
    assert widget.preset == "GPT-2 124M"
    assert Ledger("GPT-2 124M", depth=12).preset == "GPT-2 124M"


def test_several_at_once():
    """As the browser sends them."""
    widget = Ledger()
    widget.set_state({"width": 1000, "heads": 10, "preset": ""})
    assert (widget.width, widget.heads, widget.preset) == (1000, 10, "")
    with pytest.raises(TraitError, match="width 1000 is not a multiple"):
        widget.set_state({"heads": 7})
    assert widget.heads == 10
    widget.set_state(Ledger("Llama 3 8B", tokens=8192).state())
    assert widget.shape == LLAMA3_8B
    assert (widget.preset, widget.tokens) == ("Llama 3 8B", 8192)
    with pytest.raises(TraitError, match="8192 tokens are more than the"):
        widget.preset = "GPT-2 124M"
    assert (widget.preset, widget.shape) == ("Llama 3 8B", LLAMA3_8B)


def test_a_preset_and_its_tokens_at_once():
    widget = Ledger()
    with widget.hold_trait_notifications():
        widget.preset = "Llama 2 7B"
        widget.tokens = 4096
    assert widget.shape == PRESETS["Llama 2 7B"]
    assert widget.tokens == 4096


def test_an_argument_that_is_none():
    with pytest.raises(TypeError, match="no argument 'layers': use one of"):
        Ledger(layers=3)


# Numbers -------------------------------------------------------------------


def test_numbers_are_the_predictions():
    for arguments in list(cases.settings())[:500:17]:
        widget = Ledger(**arguments)
        n = widget.numbers()
        run = predict(
            widget.shape,
            widget.batch,
            widget.tokens,
            recipe=widget.recipe,
            optimizer=widget.optimizer,
            micro_batch=-(-widget.batch // widget.steps),
            checkpointed=widget.checkpointed,
            foreach=widget.foreach,
        )
        assert n["peak"] == {
            "row": run.at_peak.row,
            "phase": run.at_peak.phase,
            "split": run.at_peak.split,
            "bytes": run.peak,
        }
        assert sum(n["peak"]["split"].values()) == n["peak"]["bytes"]
        assert list(n["peak"]["split"]) == list(SHOWN)
        for bar, phases in BARS.items():
            assert n[bar]["bytes"] == max(map(run.peak_in, phases))
            assert n[bar]["phase"] in phases
        widget.close()


@pytest.mark.parametrize(
    "family, recipe, optimizer",
    [
        *product(["gpt"], RECIPES, ["adam"]),
        *product(["llama"], ["master"], OPTIMIZERS),
    ],
)
def test_states_are_those_of_the_model(family, recipe, optimizer):
    widget = Ledger(
        **TINY, family=family, recipe=recipe, optimizer=optimizer, tied=True
    )
    model = widget.shape.build()
    n = widget.numbers()
    assert n["states"] == states(model, recipe, optimizer).total
    assert n["parameters"] == sum(p.numel() for p in model.parameters())


@cache
def tried(steps, fused):
    """The peak of every batch."""
    widget = Ledger(**TINY, steps=steps, fused=fused)
    peaks = {}
    for widget.batch in range(1, 50):
        peaks[widget.batch] = widget.prediction.peak
    return peaks


@pytest.mark.parametrize("steps, fused", [(1, True), (2, False)])
@pytest.mark.parametrize("share", [0.2, 1.0, 1.3])
def test_the_largest_batch_by_trying(steps, fused, share):
    widget = Ledger(**TINY, steps=steps, fused=fused)
    budget = round(share * widget.numbers()["peak"]["bytes"])
    widget.budget = budget
    n = widget.numbers()
    assert n["fits"] == (share >= 1)
    fit = [b for b, peak in tried(steps, fused).items() if peak <= budget]
    largest = max(fit, default=0)
    assert largest < 49
    assert n["largest"] == largest


# Words ---------------------------------------------------------------------


def test_repr():
    assert repr(Ledger(batch=2)) == (
        "Ledger('GPT-2 124M', batch=2, tokens=1024, recipe='fp32', "
        "optimizer='adam')"
    )
    assert repr(Ledger(**TINY)).startswith("Ledger('gpt', batch=4, tokens=8,")


# The static picture --------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, share",
    [({}, 0), ({"checkpointed": True}, 0.3), (TINY, 1.5), ({}, 9)],
)
def test_picture_is_drawn_to_scale(arguments, share):
    widget = Ledger(**arguments)
    n = widget.numbers()
    peak = n["peak"]["bytes"]
    widget.budget = round(share * peak)
    svg = ElementTree.fromstring(widget.picture())
    scale = 396 / (1.04 * peak * (1.5 if share == 1.5 else 1))
    for index, bar in enumerate(BARS):
        drawn = [
            float(box.get("width"))
            for box in svg.iter("rect")
            if box.get("y") == str(20 + 48 * index)
            and box.get("fill") != "none"
        ]
        sizes = [size for size in n[bar]["split"].values() if size]
        assert drawn == pytest.approx([s * scale for s in sizes], abs=0.06)
    frames = [r for r in svg.iter("rect") if r.get("fill") == "none"]
    assert len(frames) == 1
    assert float(frames[0].get("width")) == pytest.approx(
        peak * scale, abs=0.06
    )
    dashed = [p for p in svg.iter("path") if p.get("stroke-dasharray")]
    assert len(dashed) == (share in (0.3, 1.5))
    for path in dashed:
        x = float(path.get("d")[1:].split(" ")[0])
        assert x == pytest.approx(2 + widget.budget * scale, abs=0.06)
    texts = [text.text for text in svg.iter("text")]
    assert any(t.startswith("budget: ") for t in texts) == (share == 9)


def test_picture_says_what_is_where():
    svg = ElementTree.fromstring(Ledger(budget=15 * GIB).picture())
    texts = [text.text for text in svg.iter("text")]
    assert {
        "forward: 9.01 GiB, at nll_loss",
        "backward: peak 10.5 GiB, at log_softmax",
        "update: 2.14 GiB",
        "dashed: the budget, 15.0 GiB",
        *SHOWN.values(),
    } <= set(texts)
