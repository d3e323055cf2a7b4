"""Numbers, gradients and networks for the tests of the precision widgets."""

import random
from itertools import product
from math import inf, isfinite, log2, nextafter

import torch

from membudget.ledger import RECIPES
from membudget.precision import FORMATS
from membudget.widgets import Bits, LossScale, Recipes
from membudget.widgets.recipes import BATCHES
from tests.soak import SOAK


def text(x):
    """As the trait is written."""
    return repr(x).replace("inf", "Infinity")


def borders(kind):
    """Where a format's rounding decides, and its neighbours in fp64."""
    yield from (kind.underflow, kind.smallest, kind.smallest_normal)
    yield from (kind.largest, kind.overflow, kind.smallest_normal * 1.5)
    fields = range(2**kind.fraction_bits)
    some = fields if len(fields) < 10 else (0, 1, 2, 3, *fields[-3:])
    top = 2**kind.exponent_bits - 1 - kind.infinite
    for exponent in {0, 1, 2, kind.bias, top - 1, top}:
        for fraction in some:
            value = kind.value(0, exponent, fraction)
            if isfinite(value):  # fp8-e4m3 has a NaN there
                yield value
                yield value + kind.spacing(value) / 2  # a tie


def numbers():
    """A grid: borders, ties, subnormals, signs, infinities, any."""
    rng = random.Random(0)
    found = {0.0, 0.1, 1 / 3, 1.0, 65504.0, inf, 5e-324, 1.7e308, 2.0**-1022}
    for kind in FORMATS.values():
        for value in borders(kind):
            found |= {value, nextafter(value, 0), nextafter(value, inf)}
    for low, high in ((-330, 310), (-50, 45), (-10, 6)):
        for _ in range(200 if SOAK else 50):
            found.add(rng.uniform(1, 10) * 10.0 ** rng.uniform(low, high - 2))
    found = sorted(found)
    return [*found, *(-x for x in found)]


def kind_of(x, name):
    """What becomes of a number."""
    kind, value = FORMATS[name], FORMATS[name].round(x)
    if x and not value:
        return "underflow"
    if value != x and abs(x) >= kind.overflow:
        return "overflow"
    few = 0 < abs(value) < kind.smallest_normal
    return "subnormal" if few else "normal"


def error_of(x, name):
    """The relative error of what is stored; None where it is infinite."""
    value = FORMATS[name].round(x)
    if not isfinite(x) or not isfinite(value):
        return None
    return abs(value - x) / abs(x) if x else 0.0


def bits():
    """What Python keeps of each number."""
    grid = [
        {
            "number": text(x),
            "formats": {
                name: {
                    "bits": kind.text(x),
                    "value": text(kind.round(x)),
                    "error": error_of(x, name),
                    "kind": kind_of(x, name),
                }
                for name, kind in FORMATS.items()
            },
        }
        for x in numbers()
    ]
    return {"formats": Bits().formats, "grid": grid}


def gradients(seed=0, size=1e-6, wide=2.0, count=3000):
    """As in a network: many sizes, and a few zeros."""
    torch.manual_seed(seed)
    spread = torch.exp(wide * torch.randn(count))
    values = size * torch.randn(count) * spread
    return [values.reshape(-1, 10), torch.zeros(7)]


GRADIENTS = (
    gradients(),
    gradients(1, 1e-3, 6.0),
    torch.tensor([1e30, 1e-40]),
    gradients(2, 30.0, 1.0),
    torch.tensor([2.0**-14] + 30_000 * [1e-9]),  # shares near 0 and 1
)


def loss_scale(gradients=None, label="a test", **arguments):
    return LossScale(gradients or GRADIENTS[0], label=label, **arguments)


def shares(widget, name):
    """What a format loses at the widget's scale, as Python counted it."""
    histogram = widget.histogram
    row = round(log2(widget.scale)) - histogram["scales"][0]
    lost = histogram["lost"][name][row]
    return [count / histogram["gradients"] for count in lost]


def loss_scales():
    """States, each with the shares of every format."""
    for given in GRADIENTS:
        widget = LossScale(given)
        names = list(widget.histogram["lost"])
        for exponent in range(-12, 25, 3):
            widget.scale = 2.0**exponent
            widget.format = names[exponent % 4]
            found = {name: shares(widget, name) for name in names}
            yield {"state": widget.state(), "shares": found}


def accounts():
    """States of the recipes, each with the peaks."""
    widget = Recipes()
    for place, batch in enumerate(BATCHES):
        for recipe, on, card in product(
            RECIPES, (False, True), ("RTX 4080", "T4", "H100 80 GB")
        ):
            widget.recipe, widget.batch = recipe, batch
            widget.checkpointed, widget.card = on, card
            rows = widget.account["peaks"][int(on)]
            yield {"state": widget.state(), "parts": rows[place]}
