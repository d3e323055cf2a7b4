"""Numbers, gradients and settings for the tests of the precision widget."""

import random
from itertools import product
from math import inf, isfinite, nextafter

import torch

from membudget import ledger
from membudget.precision import FORMATS
from membudget.widgets import Precision
from membudget.widgets.precision import SCALED, _number, _stored
from tests.soak import SOAK

SMALL = ledger.Transformer(257, 32, 2, 4, context=64)


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


def grid():
    """Each number with what Python keeps of it, and its texts."""
    for x in numbers():
        kept = {name: _stored(x, name) for name in FORMATS}
        for of in kept.values():
            of["text"] = _number(of["value"], 9)
            of["value"] = text(of["value"])
        yield {
            "number": text(x),
            "formats": kept,
            "texts": [_number(x), _number(x, 2)],
        }


def limits():
    """Where each format ends."""
    return {
        name: {
            "largest": kind.largest,
            "normal": kind.smallest_normal,
            "underflow": kind.underflow,
            "overflow": kind.overflow,
        }
        for name, kind in FORMATS.items()
    }


def gradients(seed=0, size=1e-6, wide=2.0, count=3000):
    """As in a network: many sizes, and a few zeros."""
    torch.manual_seed(seed)
    spread = torch.exp(wide * torch.randn(count))
    values = size * torch.randn(count) * spread
    return [values.reshape(-1, 10), torch.zeros(7)]


NEARLY_ALL = torch.tensor([2.0**-14] + 30_000 * [1e-9])
"""Gradients of which one is far from the rest: shares near 0 and 1."""

SETTINGS = (
    {},
    {"gradients": gradients(1, 1e-3, 6.0), "batches": (8,), "budget": 2**20},
    {"gradients": torch.tensor([1e30, 1e-40]), "lists": "cuda"},
    {"gradients": gradients(2, 30.0, 1.0), "tokens": 16, "budget": 2**21},
    {"gradients": NEARLY_ALL, "network": ledger.GPT2},
)


def widget(**changes):
    """A small one."""
    settings = {
        "gradients": gradients(),
        "network": SMALL,
        "tokens": 64,
        "batches": (1, 8, 20),
        "label": "a test",
    }
    return Precision(**(settings | changes))


def cases():
    """States, each with Python's numbers and sentences."""
    numbers = (0.1, 1.0, -0.0, 1e-8, -(2.0**-24), 460.0, 7e4, inf, 1e39, 1e-5)
    for settings in SETTINGS:
        shown = widget(**settings)
        sweep = product(SCALED, range(25))
        for index, (shown.format, exponent) in enumerate(sweep):
            shown.scale = 2**exponent
            shown.number = numbers[index % len(numbers)]
            batches = shown.account["batches"]
            shown.batch = batches[index % len(batches)]
            shown.checkpointed = index % 7 < 3
            n = shown.numbers()
            for of in n["formats"].values():
                of["value"] = text(of["value"])
            yield {
                "state": shown.state(),
                "numbers": n,
                "sentences": shown.sentences(),
            }
