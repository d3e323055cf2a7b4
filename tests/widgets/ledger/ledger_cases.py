"""What the ledger widget shows, by the package's own functions."""

import random
from functools import lru_cache
from itertools import product

from membudget.ledger import PLANNED, RECIPES, predict, rules
from membudget.widgets import Ledger
from membudget.widgets.ledger_rows import BARS as PASSES
from membudget.widgets.ledger_rows import MIXES
from tests.soak import SOAK

BARS = PASSES | {"update": ("optimizer",)}
"""The bars, and the phases of a step that each of them is the worst of."""

BATCHES = (1, 2, 3, 5, 8, 13, 31, 64, 200, 900)


def prediction(widget, batch=None, steps=None):
    batch = batch or widget.batch
    return _predict(
        widget.shape,
        batch,
        widget.tokens,
        recipe=widget.recipe,
        optimizer=widget.optimizer,
        micro_batch=-(-batch // (steps or widget.steps)),
        checkpointed=widget.checkpointed,
        **rules(widget.shape, "cuda") | {"foreach": widget.at_once},
    )


_predict = lru_cache(maxsize=256)(predict)


def largest(widget):
    """The most sequences that fit with as many steps, by trying."""
    steps = min(widget.steps, widget.batch)

    def fits(batch):
        return prediction(widget, batch, steps).peak <= widget.budget

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _moment(moments):
    at = max(moments, key=lambda moment: moment.live)
    return {"split": at.split, "bytes": at.live}


def numbers(widget):
    """``describe`` of the module gives the same, and the rows' names."""
    run = prediction(widget)
    count, kept = widget.shape.parameters, run.at_peak.split
    gradients = RECIPES[widget.recipe].gradients * count
    return {
        "parameters": count,
        "states": kept["parameters"] + gradients + kept["optimizer"],
        **{
            bar: _moment([m for m in run.moments if m.phase in phases])
            for bar, phases in BARS.items()
        },
        "peak": _moment([run.at_peak]),
        "budget": widget.budget,
        "over": max(run.peak - widget.budget, 0) if widget.budget else 0,
        "largest": largest(widget) if widget.budget else None,
    }


def settings(rng, widget, count):
    """Puts the widget into random settings."""
    for index in range(count):
        stops = widget.tables["models"][widget.model]["tokens"]
        widget.tokens = rng.choice(stops)
        widget.batch = rng.choice(BATCHES)
        widget.steps = rng.choice((1, 1, 2, 3, 7, 64))
        widget.checkpointed = rng.random() < 0.5
        widget.foreach = rng.random() < 0.5
        widget.recipe = MIXES[index % len(MIXES)]
        widget.optimizer = rng.choice(("adam", *PLANNED))
        yield widget


def case(widget):
    state = widget.state()
    del state["tables"]
    return {"state": state, "numbers": numbers(widget)}


def presets():
    """Each preset in random settings, and GPT-2 on cards."""
    rng, widget = random.Random(1), Ledger(card="none")
    counts = {"GPT-2 124M": 20, "Llama 3.2 1B": 6, "GPT-2 XL 1.5B": 3}
    for widget.model, count in (counts | {"Llama 3 8B": 2}).items():
        for _ in settings(rng, widget, (4 if SOAK else 1) * count):
            yield case(widget)
    widget.model, widget.steps, widget.checkpointed = "GPT-2 124M", 1, False
    for card, recipe, steps in product(
        ("T4", "A100 80 GB"), ("fp32", "autocast"), (1, 2, 3)
    ):
        with widget.hold_trait_notifications():
            widget.card, widget.recipe, widget.steps = card, recipe, steps
        yield case(widget)


def cases():
    """The tables, and states with Python's numbers."""
    return {"tables": Ledger().tables, "cases": list(presets())}
