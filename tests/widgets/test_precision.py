"""The precision widget's traits, numbers and words."""

import json
import math
import re
from math import inf

import precision_cases as cases
import pytest
import torch
from traitlets import TraitError

from membudget import ledger, models
from membudget.measuring import PHASES, format_bytes
from membudget.precision import FORMATS, best_scale, binades, lost
from membudget.widgets import Precision
from membudget.widgets.precision import (
    MOMENTS,
    MOST_BINADES,
    SCALED,
    SHOWN,
    _number,
    _percent,
    _stored,
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


# Bits ----------------------------------------------------------------------


def test_bits_of_every_format(widget):
    for widget.number in (0.1, -3.0, 0.0, 1e-7, 70000.0, -inf, 2.0**-24):
        for name, of in widget.numbers()["formats"].items():
            kind = FORMATS[name]
            assert of["bits"] == kind.text(widget.number)
            assert of["value"] == kind.round(widget.number)


@pytest.mark.parametrize(
    "x, name, kind, error",
    [
        (0.1, "fp16", "normal", (0.1 - 0.0999755859375) / 0.1),
        (0.0, "fp16", "normal", 0.0),
        (2.0**-24, "fp16", "subnormal", 0.0),
        (2.0**-25, "fp16", "underflow", 1.0),
        (2.0**-14, "fp16", "normal", 0.0),
        (65519.0, "fp16", "normal", 15 / 65519),
        (65520.0, "fp16", "overflow", None),
        (inf, "fp16", "normal", None),
        (-inf, "fp8-e4m3", "overflow", None),
        (500.0, "fp8-e4m3", "overflow", 52 / 500),
        (-1e-45, "fp32", "subnormal", (2.0**-149 - 1e-45) / 1e-45),
    ],
)
def test_kinds(x, name, kind, error):
    of = _stored(x, name)
    assert (of["kind"], of["error"]) == (kind, error)


@pytest.mark.parametrize(
    "value, digits, text",
    [
        (0.0999755859375, 9, "0.0999755859"),
        (2.0**-13, 9, "0.000122070313"),  # a half goes up
        (2.0**-24, 9, "5.96046448·10⁻⁸"),
        (65504.0, 9, "65504"),
        (1e9, 9, "1·10⁹"),
        (-0.0, 9, "−0"),
        (-inf, 9, "−∞"),
        (9.96e-5, 2, "0.0001"),
    ],
)
def test_numbers_in_words(value, digits, text):
    assert _number(value, digits) == text


def test_the_sentence_on_bits(widget):
    assert widget.sentences()[0] == (
        "0.1 is exact in no format; the relative error is at most 0.063, in "
        "fp8-e5m2."
    )
    widget.number = 1
    assert widget.sentences()[0] == "1 is exact in every format."
    widget.number = -1e-5  # what is named is not elsewhere
    assert widget.sentences()[0] == (
        "−1·10⁻⁵ is exact in no format; subnormal in fp16 and fp8-e5m2; "
        "underflow to 0 in fp8-e4m3; elsewhere the relative error is at most "
        "0.0014, in bf16."
    )
    widget.number = 2.0**-149
    assert widget.sentences()[0] == (
        "1.401298464324817·10⁻⁴⁵ is exact in no format; subnormal in fp32; "
        "underflow to 0 in tf32, bf16, fp16, fp8-e4m3 and fp8-e5m2."
    )
    widget.number = 5.0625
    assert widget.sentences()[0] == (
        "5.0625 is exact in fp32, tf32, bf16 and fp16; elsewhere the relative "
        "error is at most 0.012, in fp8-e4m3."
    )
    widget.number = inf
    assert widget.sentences()[0] == (
        "∞ is exact in fp32, tf32, bf16, fp16 and fp8-e5m2; overflow in "
        "fp8-e4m3."
    )


@pytest.mark.parametrize("x", [3e-8, 3e-5, -2e-38, 500.0, 7e4, 2049.0])
def test_elsewhere_is_what_is_not_named(widget, x):
    """The worst of the formats that the sentence has not named."""
    widget.number = x
    *named, rest = widget.sentences()[0].split("; ")
    formats = widget.numbers()["formats"]
    others = [
        (of["error"], name)
        for name, of in formats.items()
        if of["kind"] == "normal" and of["value"] != x
    ]
    names = re.findall(r"[a-z]+\d+(?:-e\dm\d)?", " ".join(named))
    assert sorted([*names, *(name for _, name in others)]) == sorted(formats)
    error, name = max(others)
    assert rest == (
        f"elsewhere the relative error is at most {_number(error, 2)}, in "
        f"{name}."
    )


# The loss scale ------------------------------------------------------------


@pytest.mark.parametrize(
    "gradients",
    [
        GRADIENTS,
        torch.tensor([1e30, -1e-40]),
        # where a format's shares jump, and beside it
        [
            torch.tensor(
                [
                    f(x * 2.0**-k)
                    for kind in FORMATS.values()
                    for x in (
                        kind.underflow,
                        kind.smallest_normal,
                        kind.smallest_normal - kind.smallest / 2,
                        kind.overflow,
                    )
                    for k in (0, 3, 24)
                    for f in (
                        float,
                        lambda x: math.nextafter(x, 0),
                        lambda x: math.nextafter(x, inf),
                    )
                ],
                dtype=torch.float64,
            )
        ],
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


def test_the_sentence_on_the_scale(widget):
    widget.show(torch.tensor([1.0, 2.0**-20, 2.0**-30, 0.0]))
    assert widget.sentences()[1] == (
        "With a loss scale of 1, fp16 loses 33.33 % of the 3 gradients to "
        "underflow; 33.33 % are subnormal, and 0 % overflow. The largest "
        "scale without overflow is 2¹⁵."
    )
    widget.scale = 2**16
    assert "2¹⁶ = 65\u202f536" in widget.sentences()[1]
    skipped = "33.33 % overflow, so a scaler would skip the step."
    assert skipped in widget.sentences()[1]
    widget.format = "fp8-e4m3"
    assert "33.33 % overflow. The" in widget.sentences()[1]
    widget.format = "bf16"
    end = "is 2¹²⁷, which is beyond the slider"
    assert widget.sentences()[1].endswith(f"{end}.")
    widget.scale = 2**24
    assert widget.sentences()[1].endswith(f"{end}: this is its end.")
    widget.format = "fp16"
    assert widget.sentences()[1].endswith("overflow is 2¹⁵.")
    widget.show(torch.tensor([2.0**20]))
    assert widget.sentences()[1].endswith(
        "is 2⁻⁵, which is beyond the slider."
    )
    widget.scale = 1
    assert widget.sentences()[1].endswith("the slider: this is its end.")


@pytest.mark.parametrize(
    "count, text",
    [(999, "999"), (1000, "1 000"), (851496, "851 496"), (10**6, "1 000 000")],
)
def test_numbers_of_gradients_are_grouped(widget, count, text):
    """By a narrow no-break space, as everywhere in the course."""
    widget.show(torch.ones(count))
    words = f" of the {text.replace(' ', chr(0x202F))} gradients to "
    assert words in widget.sentences()[1]


@pytest.mark.parametrize(
    "share, text",
    [
        (0.0, "0 %"),
        (1.0, "100 %"),
        (1e-9, "< 0.01 %"),
        (0.99999, "> 99.99 %"),
        (0.12345, "12.35 %"),
    ],
)
def test_shares_in_words(share, text):
    assert _percent(share) == text


# Recipes -------------------------------------------------------------------


@pytest.mark.parametrize("lists", ["cpu", "cuda"])
def test_bars_are_the_ledgers(lists):
    shown = cases.widget(lists=lists, budget=2**21)
    for shown.batch in (1, 8, 20):
        for shown.checkpointed in (False, True):
            for recipe, of in shown.numbers()["recipes"].items():
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


def test_the_moment_of_a_peak():
    """Without gradients in the backward pass, with them in the step."""
    shown = Precision(GRADIENTS, batches=(1, 8))
    seen = set()
    for shown.batch in (1, 8):
        picture = shown.picture()
        for recipe, of in shown.numbers()["recipes"].items():
            words = MOMENTS[of["phase"]]
            label = f"{recipe}: {format_bytes(of['bytes'])}, {words}</text>"
            assert label in picture
            seen.add((recipe, words, bool(of["split"]["gradients"])))
    assert ("fp32", "backward", False) in seen
    assert ("master", "backward", False) in seen
    assert ("master", "optimizer step", True) in seen
    assert set(MOMENTS) == set(PHASES)


def test_a_chain():
    model = models.mlp_blocks(16, 3, 10)
    chain = ledger.Chain(model, (16,), ((0,), (1,)))
    shown = cases.widget(network=chain, batches=[4, 64])
    assert shown.batch == 4
    assert shown.account["name"].startswith("A chain of ")
    for shown.checkpointed in (False, True):
        peak = ledger.predict(chain, 4, checkpointed=shown.checkpointed).peak
        assert shown.numbers()["recipes"]["fp32"]["bytes"] == peak


def test_the_sentence_on_recipes(widget):
    n = widget.numbers()["recipes"]
    least = min(n, key=lambda recipe: n[recipe]["bytes"])
    text = widget.sentences()[2]
    count = f"{cases.SMALL.parameters:,}".replace(",", "\u202f")
    name = f"A transformer of {count} parameters, 64 tokens"
    assert text.startswith(f"{name}, batch 8, not checkpointed: the peak is ")
    assert f"; the least is {least}’s, " in text
    assert text.endswith("% of fp32’s).")
    widget.checkpointed = True
    assert ", batch 8, checkpointed: " in widget.sentences()[2]
    widget.budget = 1
    end = " Within the budget of 1 B: none."
    assert widget.sentences()[2].endswith(end)
    assert set(of["fits"] for of in widget.numbers()["recipes"].values()) == {
        False
    }
    widget.budget = n["fp32"]["bytes"] * 9
    assert "fp32, autocast, bf16, master and " in widget.sentences()[2]


# What is left behind -------------------------------------------------------


def test_a_budget_in_the_picture(widget):
    peak = widget.numbers()["recipes"]["fp32"]["bytes"]
    for widget.budget, words, lines in (
        (peak // 2, "dashed: the budget, ", True),
        (9 * peak, "budget: ", False),
    ):
        assert words in widget.picture()
        assert ("6 4" in widget.picture()) == lines
