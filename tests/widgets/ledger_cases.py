"""Settings for the tests of the ledger widget."""

import random
from itertools import product

from traitlets import TraitError

from membudget.ledger import OPTIMIZERS, PRESETS, RECIPES
from membudget.widgets import Ledger
from membudget.widgets.ledger import MOST, SHAPE
from tests.soak import SOAK

BUDGETS = (1, 10**5, 2**22, 15 * 2**30, 140 * 2**30)


def random_shape(rng, family):
    """A small shape, every fifth of up to 12 blocks."""
    heads = rng.choice((1, 2, 4, 6))
    deep = rng.random() < 0.2
    return {
        "family": family,
        "vocabulary": rng.randrange(1, 400),
        "width": heads * 2 * rng.randrange(1, 12),
        "depth": rng.randrange(6, 13) if deep else rng.randrange(1, 7),
        "heads": heads,
        "kv_heads": rng.choice([n for n in (1, 2, 3, 6) if not heads % n]),
        "hidden": rng.randrange(1, 200),
        "context": rng.randrange(40, 90),
    }


def settings(count=520 if SOAK else 80):
    """Arguments: own shapes, then presets."""
    rng = random.Random(0)
    choices = list(
        product(("gpt", "llama"), RECIPES, OPTIMIZERS, (True, False))
    )
    rng.shuffle(choices)
    for index in range(count):
        family, recipe, optimizer, fused = choices[index % len(choices)]
        yield {
            "preset": "",
            **random_shape(rng, family),
            "recipe": recipe,
            "optimizer": optimizer,
            "fused": fused,
            "tied": rng.random() < 0.5,
            "checkpointed": rng.random() < 0.5,
            "foreach": rng.random() < 0.3,
            "batch": rng.randrange(1, 14),
            "tokens": rng.randrange(1, 41),
            "steps": 1 + index % 4,
            "budget": rng.choice(BUDGETS) if index % 6 == 0 else 0,
        }
    for index, preset in enumerate([*PRESETS] * 2):
        yield {
            "preset": preset,
            "recipe": rng.choice(list(RECIPES)),
            "optimizer": rng.choice(list(OPTIMIZERS)),
            "fused": rng.random() < 0.7,
            "checkpointed": rng.random() < 0.5,
            "foreach": rng.random() < 0.5,
            "batch": rng.randrange(1, 600),
            "tokens": rng.choice((512, 1000, 1024)),
            "steps": rng.randrange(1, 5),
            "budget": BUDGETS[-1] if index in (0, 5, 9) else 0,
        }


def moments(widget):
    """Every moment of a step that is small; without the optimizer's."""
    if widget.depth > 2 or -(-widget.batch // widget.steps) < widget.batch:
        return None
    return [
        [moment.row, moment.phase, list(moment.bytes)]
        for moment in widget.prediction.moments
        if moment.phase != "optimizer"
    ]


def cases():
    """Each with the numbers and the words that Python gives."""
    for arguments in settings():
        widget = Ledger(**arguments)
        yield {
            "state": widget.state(),
            "numbers": widget.numbers(),
            "sentence": widget.sentence(),
            "moments": moments(widget),
        }
        widget.close()


BAD = (
    {"width": -3},
    {"depth": 0},
    {"batch": 2.5},
    {"vocabulary": 2**20 + 1},
    {"steps": 0},
    {"tokens": 2**20 + 1},
    {"heads": 7},
    {"width": 1000},
    {"context": 1023},
    {"tokens": 1025},
    {"depth": 256, "width": 2**16, "heads": 64, "batch": 2**16},
    {
        **{"heads": 768, "context": 2**14, "tokens": 2**14},
        **{"batch": 2**8, "fused": False},
    },
    {"family": "llama", "kv_heads": 5},
    {"family": "llama", "heads": 768, "kv_heads": 768},
    {"family": "llama", "hidden": 0},
)
"""Changes of the default that no step can have."""


def said(changes):
    """What Python says to changes of the default that cannot be."""
    try:
        Ledger(**changes)
    except TraitError as error:
        return str(error)
    raise AssertionError(f"{changes} were taken")


def tables():
    """What the module has to know as Python does."""
    state = Ledger().state()
    shapes = {}
    for preset in PRESETS:
        widget = Ledger(preset)
        names = SHAPE if widget.family == "gpt" else SHAPE[:-1]
        shapes[preset] = [getattr(widget, name) for name in names]
        widget.close()
    return {
        "state": state,
        "presets": shapes,
        "recipes": {
            name: [
                *(r.parameters, r.gradients, r.master),
                *(r.autocast or 0, r.text),
            ]
            for name, r in RECIPES.items()
        },
        "optimizers": {
            name: [o.numbers, o.itemsize or 0, o.block, 4 * o.counts, o.text]
            for name, o in OPTIMIZERS.items()
        },
        "most": MOST,
        "bad": [[state | bad, said(bad)] for bad in BAD],
    }
