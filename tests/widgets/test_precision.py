"""The precision widget's traits, numbers and words."""

import json
import math
from itertools import product
from math import inf

import precision_cases as cases
import pytest
import torch
from traitlets import TraitError

from membudget import ledger, models
from membudget.measuring import format_bytes
from membudget.precision import FORMATS, best_scale, binades, lost
from membudget.widgets import Precision
from membudget.widgets.precision import (
    MOMENTS,
    MOST_BINADES,
    SCALED,
    SHOWN,
)

GRADIENTS = cases.gradients()


@pytest.fixture(scope="module")
def plain():
    return cases.widget()


@pytest.fixture
def widget(plain):
    """One that is as it was made, without the time to make it."""
    plain.set_trait("number", 0.1)
    plain.format, plain.scale, plain.batch = "fp16", 1, 8
    plain.checkpointed, plain.budget, plain.label = False, None, "a test"
    plain.show(GRADIENTS)
    return plain


# Traits --------------------------------------------------------------------


def test_defaults():
    made = Precision(GRADIENTS)
    assert (made.number, made.format, made.scale) == (0.1, "fp16", 1)
    assert (made.batch, made.checkpointed, made.budget) == (8, False, None)
    assert made.account["batches"] == [1, 2, 4, 8, 16, 32]
    assert made.account["name"] == "GPT-2 124M, 1024 tokens"
    peak = ledger.predict(ledger.GPT2, 8, 1024).peak
    assert made.numbers()["recipes"]["fp32"]["bytes"] == peak


@pytest.mark.parametrize(
    "bad, kind, why",
    [
        ({"gradients": []}, ValueError, "all numbers are zero"),
        ({"gradients": [torch.tensor([inf])]}, ValueError, "infinite or NaN"),
        ({"gradients": [torch.ones(2).half()]}, TypeError, "torch.float16"),
        ({"gradients": [None]}, TypeError, "NoneType: use tensors in fp32"),
        ({"network": "GPT-2"}, TypeError, "Transformer or a Chain"),
        ({"tokens": 65}, ValueError, "65 tokens"),
        ({"lists": "tpu"}, ValueError, "tpu"),
        ({"batches": ()}, ValueError, "use 1 to 12 ascending"),
        ({"batches": (1, 1)}, ValueError, "ascending"),
        ({"batches": (0, 1)}, ValueError, "ascending"),
        ({"batches": (1.5,)}, ValueError, "ascending"),
        ({"batches": range(1, 14)}, ValueError, "1 to 12"),
        ({"scales": 3}, TypeError, "scales"),
    ],
)
def test_bad_arguments(bad, kind, why):
    with pytest.raises(kind, match=why):
        cases.widget(**bad)


def test_a_scale_may_be_what_best_scale_gives(widget):
    widget.scale = best_scale(GRADIENTS, "fp8-e5m2")
    assert type(widget.scale) is int
    assert widget.scale == best_scale(GRADIENTS, "fp8-e5m2")


@pytest.mark.parametrize("x", [0.1, -0.0, inf, -inf, 5e-324, 1e22, 65520])
def test_a_number_goes_to_the_browser_and_back(widget, x):
    widget.number = x
    text = widget.state()["number"]
    json.loads(json.dumps(widget.state(), allow_nan=False))
    widget.number = 3
    widget.set_state({"number": text})
    assert widget.number == x
    assert math.copysign(1, widget.number) == math.copysign(1, x)


def test_what_the_browser_sends(widget):
    widget.set_state({"number": "-0", "scale": 4096, "budget": 2**20})
    assert math.copysign(1, widget.number) == -1
    assert (widget.scale, widget.budget) == (4096, 2**20)
    widget.set_state({"batch": 20, "checkpointed": True, "budget": None})
    assert (widget.batch, widget.budget) == (20, None)
    with pytest.raises(TraitError, match="use one of 1, 8 and 20"):
        widget.set_state({"batch": 2})


# The loss scale ------------------------------------------------------------


def jumps():
    """Where a format's shares jump, and beside it."""
    for kind in FORMATS.values():
        tie = kind.smallest_normal - kind.smallest / 2
        edges = kind.underflow, kind.smallest_normal, tie, kind.overflow
        for x, k in product(edges, (0, 3, 24)):
            at = x * 2.0**-k
            yield from (at, math.nextafter(at, 0), math.nextafter(at, inf))


@pytest.mark.parametrize(
    "gradients",
    [
        GRADIENTS,
        torch.tensor([1e30, -1e-40]),
        torch.tensor(list(jumps()), dtype=torch.float64),
    ],
    ids=["usual", "extreme", "borders"],
)
def test_what_is_lost_is_the_rooms(widget, gradients):
    """For every format and every place of the slider."""
    widget.show(gradients)
    for widget.format in SCALED:
        for exponent in range(25):
            widget.scale = 2**exponent
            n = widget.numbers()
            room = lost(gradients, widget.format, widget.scale)
            shown = [n[k] for k in ("below", "subnormal", "above")]
            assert shown == [room.below, room.subnormal, room.above]
            assert n["gradients"] == room.numbers
        assert 2.0 ** n["best"] == best_scale(gradients, widget.format)


def test_bars_are_the_binades(widget):
    bars = widget.histogram
    assert bars["zeros"] == 7
    assert not bars["merged"]
    shown = {bars["start"] + i: n for i, n in enumerate(bars["counts"]) if n}
    assert shown == binades(GRADIENTS)


def test_far_smaller_gradients_share_a_bar(widget):
    widget.show(torch.tensor([1.0, 2.0**-55, 2.0**-56, 1e-40]))
    bars = widget.histogram
    assert (bars["start"], bars["merged"]) == (-55, True)
    assert len(bars["counts"]) == MOST_BINADES
    assert (bars["counts"][0], bars["counts"][-1]) == (3, 1)


def test_other_gradients(widget):
    before = widget.histogram
    with pytest.raises(ValueError, match="all numbers are zero"):
        widget.show(torch.zeros(2))
    assert widget.histogram is before
    widget.show(iter([torch.ones(2), torch.ones(2, 1)]))
    assert widget.numbers()["gradients"] == 4


# Recipes -------------------------------------------------------------------


@pytest.mark.parametrize("lists", ["cpu", "cuda"])
def test_bars_are_the_ledgers(lists):
    shown = cases.widget(lists=lists, budget=2**21)
    for shown.batch in (1, 8, 20):
        for shown.checkpointed in (False, True):
            picture = shown.picture()
            for recipe, of in shown.numbers()["recipes"].items():
                words = f"{format_bytes(of['bytes'])}, {MOMENTS[of['phase']]}"
                assert f">{recipe}: {words}</text>" in picture
                step = ledger.predict(
                    cases.SMALL,
                    shown.batch,
                    64,
                    recipe=recipe,
                    lists=lists,
                    checkpointed=shown.checkpointed,
                )
                assert of["bytes"] == step.peak
                assert of["split"] == step.at_peak.split
                assert of["phase"] == step.at_peak.phase
                assert list(of["split"]) == list(SHOWN)
                assert of["fits"] == (step.peak <= 2**21)
                each = ledger.bytes_per_parameter(recipe)
                assert sum(of["states"]) == each.total
                assert of["states"][1] == each.gradients


def test_a_chain():
    model = models.mlp_blocks(16, 3, 10)
    chain = ledger.Chain(model, (16,), ((0,), (1,)))
    shown = cases.widget(network=chain, batches=[4, 64])
    assert shown.batch == 4
    assert shown.account["name"].startswith("A chain of ")
    for shown.checkpointed in (False, True):
        peak = ledger.predict(chain, 4, checkpointed=shown.checkpointed).peak
        assert shown.numbers()["recipes"]["fp32"]["bytes"] == peak


# What is left behind -------------------------------------------------------


def test_a_budget_in_the_picture(widget):
    peak = widget.numbers()["recipes"]["fp32"]["bytes"]
    for widget.budget, words, lines in (
        (peak // 2, "dashed: the budget, ", True),
        (9 * peak, "budget: ", False),
    ):
        assert words in widget.picture()
        assert ("6 4" in widget.picture()) == lines
