"""What the tests of all widgets have to know of each."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import precision_cases
import pytest
import sharding_cases
import timeline_cases
import widget_pages as pages

from membudget import widgets
from membudget.accumulation import NORMALISATIONS
from membudget.checkpointing import Stage
from membudget.ledger import OPTIMIZERS, RECIPES
from membudget.widgets.ledger import BARS, SHAPE
from membudget.widgets.precision import SCALED
from membudget.widgets.sharding import CARDS, MODELS, STAGE_NAMES
from membudget.widgets.timeline import SHOWN, Step, example_steps

GIB = 2**30
CHAIN = [Stage(output=2**20, inner=3 * 2**20, backward_workspace=2**20)] * 12
SPLITS = {
    "balanced": "balanced, longer first",
    "pytorch": "PyTorch’s checkpoint_sequential",
}
LONG = {
    "model": 2**40 - 1,
    "ranks": 1024,
    "stage": "zero-3",
    "recipe": "master-fp32-gradients",
    "accumulation_steps": 16,
    "synchronise_last": True,
    "card": "141 GB",
}
"""A long sentence of the sharding widget."""


@dataclass(frozen=True)
class Kind:
    """A widget, for the tests that are the same for all."""

    name: str
    make: Callable
    """Gives the widget that has these arguments."""
    title: str
    """What stands above the first picture."""
    controls: Callable
    """What each control holds for a widget, in an order to enter it."""
    printed: Callable
    """The numbers that the page prints for a widget, by their keys."""
    states: list
    """Arguments that the controls can give to the first widget, in turn."""
    given: list
    """Arguments of widgets that begin elsewhere."""
    tabs: tuple
    """Keys of the controls in the order of the tabulator."""
    rest: tuple
    """A slider's key, and the arguments after five steps of it."""
    spoken: dict
    """What is read out for a slider's place, at first."""
    columns: tuple
    """The headings of the table's columns."""
    moves: list
    """Arguments, and changes of sliders while nothing may jump."""
    parts: int
    """How many parts of the memory have a colour and a pattern."""
    crossed: bool = False
    """Whether no dashed line goes through a text."""


def set_to(widget, traits):
    """Set those that differ, in their order."""
    for name, value in traits.items():
        if getattr(widget, name) != value:
            setattr(widget, name, value)


def sentences(widget):
    """One for each part that is read out."""
    several = getattr(widget, "sentences", None)
    return list(several()) if several else [widget.sentence()]


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
    """The numbers and the pictures' labels that were seen are Python's."""
    printed = kind.printed(widget)
    assert set(seen["numbers"]) == set(printed)
    for key, wanted in printed.items():
        value = seen["numbers"][key]
        if value and not isinstance(wanted, str):
            value = json.loads(value)
        assert near(value, wanted), key
    words = sentences(widget)
    assert seen["labels"][: len(words)] == words
    assert all(seen["labels"])


def shows(kind, widget, seen):
    """What was seen is what Python has."""
    prints(kind, widget, seen)
    assert set(sentences(widget)) <= set(seen["said"])
    controls = kind.controls(widget)
    assert set(seen["controls"]) == set(controls)
    for key, wanted in controls.items():
        held = seen["controls"][key]
        assert held in (wanted, str(wanted)) or float(held) == float(wanted)


def agree(kind, page, widget, place=0):
    """The page shows what Python has."""
    (seen,) = pages.walk(page, [[]], widget=place)
    shows(kind, widget, seen)


# Accumulation --------------------------------------------------------------


def accumulation_controls(widget):
    first = ["micro_batch", "locked", "steps", "global_batch"]
    if widget.locked:
        first = ["locked", "micro_batch", "global_batch", "steps"]
    return {key: getattr(widget, key) for key in (*first, "normalisation")}


def accumulation_printed(widget):
    n = widget.numbers()
    hidden = {"micro_batch", "last_micro_batch", "weight", "last_weight"}
    return flat(n, *(key for key in n if key not in hidden))


ACCUMULATION = Kind(
    "accumulation",
    widgets.Accumulation,
    "Memory during one window: an MLP on handwritten digits, with Adam",
    accumulation_controls,
    accumulation_printed,
    states=[
        {"micro_batch": size, "steps": steps}
        for size, steps in product((1, 16, 512), (1, 3, 32))
    ]
    + [
        {"normalisation": n, "locked": True, "global_batch": whole}
        | {"micro_batch": size}
        for n, whole in ((NORMALISATIONS[1], 512), (NORMALISATIONS[2], 500))
        for size in (1, 3, 40, 100, 130, 255, 256, 400, 511, 512)
    ]
    + [{"locked": False, "normalisation": NORMALISATIONS[0]}],
    given=[
        {
            **{"micro_batch": 700, "steps": 40, "samples": 5, "budget": 10},
            "normalisation": "no division",
        },
        {
            **{"micro_batch": 96, "global_batch": 500},
            "normalisation": "mean of means",
        },
    ],
    tabs=("micro_batch", "steps", "global_batch", "locked", "normalisation"),
    rest=("micro_batch", {"micro_batch": 133}),
    spoken={"micro_batch": "128 samples", "steps": "4"},
    columns=("bytes at the peak", "window", "whole batch"),
    parts=5,
    moves=[],
)


# Ledger --------------------------------------------------------------------

PLACES = {
    "batch": [*range(1, 17)]
    + [2**i + 2**i // 8 * j for i in range(4, 10) for j in range(1, 9)],
    "tokens": [2**i for i in range(4, 16)],
    "steps": [*range(1, 17)]
    + [2**i + 2**i // 4 * j for i in (4, 5) for j in range(1, 5)],
}
"""The values of the ledger's sliders; one from elsewhere is added."""


def ledger_controls(widget):
    """The shape follows from the preset."""
    unused = {"gpt": ("kv_heads", "hidden"), "llama": ("context",)}
    keys = ("preset", *SHAPE, "recipe", "optimizer")
    found = {
        key: getattr(widget, key)
        for key in keys
        if key not in unused[widget.family]
    }
    for key, places in PLACES.items():
        value = getattr(widget, key)
        found[key] = sorted({*places, value}).index(value)
    for key in ("checkpointed", "fused", "foreach"):
        found[key] = getattr(widget, key)
    return found | {"budget": widget.budget}


def ledger_printed(widget):
    n = widget.numbers()
    found = flat(n, "parameters", "states") | {"peak": n["peak"]["bytes"]}
    if widget.budget:
        found["largest"] = n["largest"]
    for bar in BARS:
        found[f"{bar}.bytes"] = n[bar]["bytes"]
        found |= {f"{bar}.{c}": v for c, v in n[bar]["split"].items()}
    return found


LEDGER = Kind(
    "ledger",
    widgets.Ledger,
    "Memory at the worst moment",
    ledger_controls,
    ledger_printed,
    states=[
        {"preset": preset, "budget": budget, "batch": batch}
        | {"checkpointed": checkpointed}
        for preset, budget, batch, checkpointed in product(
            ("Llama 3 70B", "GPT-2 124M"),
            (0, 15 * GIB, 140 * GIB),
            (1, 10, 288),
            (True, False),
        )
    ]
    + [{"recipe": recipe} for recipe in RECIPES]
    + [{"optimizer": optimizer} for optimizer in OPTIMIZERS]
    + [{"fused": False}, {"foreach": True}, {"steps": 20}, {"tokens": 16}]
    + [{"preset": "Mistral 7B"}, {"tokens": 2048}],
    given=[
        {
            **{"preset": "Llama 3 8B", "batch": 5, "tokens": 3000, "steps": 2},
            **{"checkpointed": True, "fused": False, "foreach": True},
            **{"recipe": "master", "budget": 137 * GIB},
        },
        {"preset": "Llama 2 7B", "batch": 3},
    ],
    tabs=(
        *("preset", "batch", "tokens", "steps", "recipe", "optimizer"),
        *("budget", "checkpointed", "fused", "foreach"),
    ),
    rest=("batch", {"batch": 13}),
    spoken={"batch": "8 sequences", "tokens": "1024 tokens"},
    columns=("worst moment of", *BARS),
    parts=6,
    moves=[
        (
            {"preset": "Llama 3 70B", "budget": 15 * GIB},
            [
                {"batch": batch, "steps": steps, "checkpointed": on}
                for batch, steps, on in product(
                    (1, 288), (1, 16), (True, False)
                )
            ],
        )
    ],
)


# Precision -----------------------------------------------------------------


def precision_controls(widget):
    budget = widget.budget
    return {
        "number": repr(widget.number),
        "format": widget.format,
        "scale": widget.scale.bit_length() - 1,
        "batch": widget.account["batches"].index(widget.batch),
        "checkpointed": widget.checkpointed,
        "budget": "" if budget is None else repr(budget / GIB),
    }


def precision_printed(widget):
    n = widget.numbers()
    found = flat(n, "gradients", "below", "subnormal", "above", "best")
    for name, of in n["formats"].items():
        found[name] = of["bits"]
        found[f"{name}.value"] = of["value"]
        found[f"{name}.error"] = of["error"]
    for recipe, of in n["recipes"].items():
        found[f"{recipe}.bytes"] = of["bytes"]
    return found


def precision_states():
    numbers = (
        *(0.1, 1.0, -3.5, 0.0, 65519.9, 65520.0, 460.0, -1e-5, 6e-8, 1e39),
        *(1.2345678901234567e-7, -1.2345678901234567e-40, 5e-324),
        *(2049.0, -1.2345678901234567e-39, -1.2345678901234567e38),
        *(float("inf"), -float("inf")),
    )
    yield from ({"number": x} for x in numbers)
    for name, exponent in product(SCALED, (0, 1, 13, 24)):
        yield {"format": name, "scale": 2**exponent}
    recipes = precision_cases.widget().numbers()["recipes"]
    peaks = [of["bytes"] for of in recipes.values()]
    budgets = [None, 1024, *peaks, peaks[0] - 1, 9 * GIB, 2**50]
    budgets += [max(peaks) * share // 20 for share in range(1, 26, 3)]
    for batch, on in product((1, 8, 20), (False, True)):
        yield {"batch": batch, "checkpointed": on, "budget": None}
    yield from ({"budget": budget} for budget in budgets)


PRECISION = Kind(
    "precision",
    precision_cases.widget,
    "One number in six formats",
    precision_controls,
    precision_printed,
    states=list(precision_states()),
    given=[
        {
            **{"number": -1e-8, "format": "fp8-e5m2", "scale": 2**7},
            **{"batch": 20, "checkpointed": True, "budget": 3 * 2**19},
            "label": "mine <&>",
        },
        precision_cases.SETTINGS[2],
        precision_cases.SETTINGS[1] | {"number": -1.2345e-39},
    ],
    tabs=("number", "scale", "format", "best", "batch", "budget"),
    rest=("scale", {"scale": 2**5}),
    spoken={"scale": "2 to the power of 0", "batch": "batch 8"},
    columns=("recipe", "bytes per parameter", "peak", "of fp32’s", "moment"),
    parts=6,
    moves=[
        (
            precision_cases.SETTINGS[1],
            [
                {"number": 1.2345678901234567e-7},
                {"number": 1.0, "format": "fp8-e5m2", "scale": 2**24},
                {"number": 1e-5, "format": "bf16", "budget": 100 * GIB},
                {"format": "fp16", "scale": 2**20, "budget": 1_610_000},
                {"checkpointed": True, "budget": 1024},
            ],
        )
    ],
    crossed=True,
)


# Segments ------------------------------------------------------------------


def segments_controls(widget):
    found = {}
    if widget.chain is None:
        place = round(20 * widget.checkpoint)
        found = {"layers": widget.layers, "checkpoint": place}
    return found | {
        "segments": widget.segments,
        "split": SPLITS[widget.split],
    }


def segments_printed(widget):
    n = widget.numbers()
    keys = ("peak", "plain_peak", "best_peak", "sizes", "extra_runs", "best")
    found = flat(n, *keys, "parts", "plain_parts")
    if n["measured"] is not None:
        found["measured"] = n["measured"]
    return found


SEGMENTS = Kind(
    "segments",
    widgets.Segments,
    "Memory during one step",
    segments_controls,
    segments_printed,
    states=[
        {"layers": layers, "checkpoint": share / 20, "segments": k}
        for layers, share in product((1, 2, 9, 16, 47, 100), (1, 7, 20))
        for k in sorted({0, 1, layers // 9, layers // 2, layers})
    ]
    + [{"split": split, "segments": 7} for split in reversed(SPLITS)],
    given=[
        {
            **{"layers": 23, "segments": 5, "checkpoint": 0.25},
            **{"split": "pytorch", "measured": {5: 9.2, 23: 8}},
            "label": "mine <&>",
        },
        {"chain": CHAIN, "segments": 3, "measured": {3: 9 * 2**20}},
        {"segments": 0},
    ],
    tabs=("layers", "segments", "checkpoint", "split"),
    rest=("segments", {"segments": 9}),
    spoken={"segments": "4 segments: peak 8 units"},
    columns=("units at the peak", "k = 4", "k = 0"),
    parts=6,
    moves=[
        (
            {"layers": 97, "checkpoint": 0.35},
            [
                {"split": split, "segments": k}
                for split, k in product(SPLITS, (0, 1, 9, 45, 97))
            ],
        )
    ],
)


# Sharding ------------------------------------------------------------------


def sharding_controls(widget):
    return {
        "model": widget.model if widget.model in MODELS else "own",
        "parameters": widget.parameters,
        "ranks": widget.ranks.bit_length() - 1,
        "stage": widget.stage,
        "recipe": widget.recipe,
        "card": widget.card,
        "accumulation_steps": widget.accumulation_steps.bit_length() - 1,
        "synchronise_last": widget.synchronise_last,
    }


def sharding_printed(widget):
    found = {}
    for stage, of in widget.numbers()["stages"].items():
        split = of["split"]
        found[f"{stage}.parameters"] = split["parameters"]
        found[f"{stage}.gradients"] = split["gradients"] + split["waiting"]
        found[f"{stage}.optimizer"] = split["optimizer"]
        found[f"{stage}.sent"] = of["sent"]
    return found


def sharding_states():
    for state in list(sharding_cases.settings(sharding_cases.GRID))[::1889]:
        if state["accumulation_steps"] == 1:  # the box cannot be changed
            del state["synchronise_last"]
        yield state


SHARDING = Kind(
    "sharding",
    widgets.Sharding,
    "Model states per rank: 7.5 B parameters, master, 64 ranks",
    sharding_controls,
    sharding_printed,
    states=[
        *sharding_states(),
        *({"card": card, "model": m} for m, card in product(MODELS, CARDS)),
        *({"stage": stage} for stage in STAGE_NAMES),
    ],
    given=[LONG, {"ranks": 1, "card": "24 GB"}],
    tabs=(
        *("model", "parameters", "ranks", "stage", "recipe", "card"),
        "accumulation_steps",
    ),
    rest=("ranks", {"ranks": 1024}),
    spoken={"ranks": "64 ranks", "accumulation_steps": "1 accumulation step"},
    columns=("stage", "parameters", "gradients", "optimizer states", "sent"),
    parts=4,
    moves=[
        (
            chosen,
            [
                {"ranks": ranks, "accumulation_steps": steps}
                | ({"synchronise_last": last} if steps > 1 else {})
                for ranks, steps, last in product(
                    (1, 4, 64, 1024), (1, 2, 16), (False, True)
                )
            ],
        )
        for chosen in (
            {"stage": "zero-2", "card": "24 GB"},
            {"stage": "ddp", "card": "80 GB", "model": "Llama 3 8B"},
            LONG,
        )
    ],
    crossed=True,
)


# Timeline ------------------------------------------------------------------


def timeline_printed(widget):
    n = widget.numbers()
    memory = Step(widget.steps[widget.step]).memory
    drawn = [c for c in SHOWN if any(held[c] for held in memory)]
    return {
        f"{moment}.{category}": n[moment][category]
        for moment in ("now", "forward_end", "peak")
        for category in ("total", *drawn)
    }


def timeline_states():
    for step, tracker in example_steps().items():
        last = len(tracker.operators)
        for slot in sorted({0, 1, last, *range(5, last, 67)}):
            yield {"step": step, "moment": slot - 1}


TIMELINE = Kind(
    "timeline",
    widgets.Timeline,
    "Memory during one training step: an MLP on handwritten digits",
    lambda widget: {"step": widget.step, "moment": widget.moment + 1},
    timeline_printed,
    states=list(timeline_states()),
    given=[
        {"step": "accumulated", "moment": 500, "label": "mine <&>"},
        {"step": "checkpointed"},
        {"steps": timeline_cases.odd_steps(), "step": "two steps"},
    ],
    tabs=("step", "forward_end", "peak", "moment"),
    rest=("moment", {"moment": 53}),
    spoken={
        "moment": "operator 49 of 275: threshold_backward of module 13, in "
        "the backward pass: 14.0 MiB"
    },
    columns=("bytes alive", "now", "end of forward", "peak"),
    parts=6,
    moves=[
        (
            {"step": step},
            [
                {"moment": slot - 1}
                for slot in (0, last // 9, last // 3, last - 1)
            ],
        )
        for step, tracker in example_steps().items()
        for last in [len(tracker.operators)]
    ],
)

KINDS = (ACCUMULATION, LEDGER, PRECISION, SEGMENTS, SHARDING, TIMELINE)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
