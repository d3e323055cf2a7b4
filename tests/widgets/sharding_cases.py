"""Settings for the tests of the sharding widget."""

from itertools import islice, product

from membudget.ledger import RECIPES
from membudget.widgets import Sharding
from membudget.widgets.sharding import CARDS, MODELS, STAGE_NAMES
from tests.soak import SOAK

RANKS = tuple(2**i for i in range(11))
STEPS = (1, 2, 4, 8, 16)
OWN = (1, 7, 1001, 2**40 - 1)
"""Numbers of parameters that few ranks divide."""

GRID = {
    "model": tuple(MODELS),
    "ranks": RANKS,
    "recipe": tuple(RECIPES),
    "accumulation_steps": STEPS,
    "synchronise_last": (False, True),
    "card": tuple(CARDS),
    "stage": tuple(STAGE_NAMES),
}
"""Every place of every control, in the order of ``grid``."""


def settings(grid):
    """Every state of the grid; the last control changes fastest."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def values(widget):
    """The widget's numbers, in the order of the module's."""
    return [
        [*of.pop("split").values(), *of.values()]
        for of in widget.numbers()["stages"].values()
    ]


def set_to(widget, traits):
    for name, value in traits.items():
        if getattr(widget, name) != value:
            setattr(widget, name, value)


def answers_on(grid, every, of):
    """What ``of`` says of each so-manieth state of a grid."""
    widget, found = Sharding(), []
    for traits in islice(settings(grid), 0, None, every):
        set_to(widget, traits)
        found.append(of(widget))
    return {"grid": grid, "every": every, "answers": found}


def numbers(grid):
    """Python's numbers of each seventh state of a grid."""
    return answers_on(grid, 1 if SOAK else 7, values)


def sentences(grid, every):
    """Sentence and titles of each so-manieth state of a grid."""
    return answers_on(grid, every, lambda w: [w.sentence(), *w.titles()])


def answers():
    """What the JavaScript test compares with.

    The numbers are of all stages, and a card is compared with the states,
    which know of accumulation only whether gradients wait: so every place of
    every control is in the two grids.
    """
    all_stages = GRID | {"stage": ("ddp",)}
    own = {"model": OWN, "ranks": (1, 2, 64, 1024), "card": ("24 GB",)}
    return {
        "tables": Sharding().tables,
        "numbers": [
            numbers(all_stages | {"card": ("none",)}),
            numbers(all_stages | {"accumulation_steps": (2,)}),
            numbers(all_stages | own),
        ],
        "sentences": [
            sentences(GRID, 31),  # in turn every place of every control
            sentences(GRID | own, 3),
        ],
    }
