"""The exercises on precision of the chapter: formats, copies, scales."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import cache, partial
from itertools import groupby, pairwise
from operator import mul

import torch
from torch import nn

from membudget.exercises.compare import Seen, shape
from membudget.exercises.core_old import Case, Exercise, variants
from membudget.exercises.observe import (
    answer,
    calls,
    several,
    tensor,
    verdict,
)
from membudget.measuring import SavedBytes
from membudget.precision import Format

EXACT = 1e-12
"""Relative tolerance of what is computed exactly."""


def _given(told: str = "", **arguments: object) -> Case:
    """Arguments by name; ``told`` stands for them where they are long."""
    words = [f"{name} = {value}" for name, value in arguments.items()]
    return Case(
        told or ", ".join(words),
        lambda: tuple(deepcopy(list(arguments.values()))),
    )


# Rounding to a format


def _format(exponent_bits: int, fraction_bits: int) -> Format:
    return Format("", exponent_bits, fraction_bits, 0, None)


def _truth(x: float, exponent_bits: int, fraction_bits: int) -> float:
    return _format(exponent_bits, fraction_bits).round(x)


def _away(steps: float) -> float:
    return math.copysign(math.floor(abs(steps) + 0.5), steps)


def _down(steps: float) -> float:
    return math.copysign(math.ceil(abs(steps) - 0.5), steps)


def _round_to(
    x: float,
    e: int,
    f: int,
    nearest: Callable[[float], float] = round,
    bias: Callable[[int], int] = lambda e: 2 ** (e - 1) - 1,
    smallest: Callable[[Format], float] = lambda kind: 0,
    lowest: float = 1,
    binade: Callable[[float], int] = lambda x: math.frexp(x)[1] - 1,
    bits: int = 0,
    over: Callable[[float, float, Format], float] | None = None,
) -> float:
    """Round, with one thing or another wrong.

    Args:
        x, e, f: of the exercise.
        nearest: rounds a number of steps.
        bias: of the exponent field, from its width.
        smallest: what is smaller becomes zero.
        lowest: the smallest exponent is this less the bias.
        binade: the exponent of x.
        bits: more, or fewer, fraction bits.
        over: makes the result, of x, what was rounded, and the format.
    """
    kind = _format(e, f)
    if abs(x) < smallest(kind):
        return 0.0
    exponent = max(binade(x), lowest - bias(e))
    step = 2.0 ** (exponent - f - bits)
    rounded = nearest(x / step) * step
    if over:
        return over(x, rounded, kind)
    largest = (2 - 2.0**-f) * 2.0 ** bias(e)
    if abs(rounded) > largest:
        return math.copysign(math.inf, x)
    return rounded


def _infinite(x: float, where: bool, rounded: float) -> float:
    return math.copysign(math.inf, x) if where else rounded


def _formats(*rows: tuple[int, int, float]) -> Case:
    """Exponent bits, fraction bits and a number."""
    told = [
        f"x = {', '.join(str(x) for *_, x in some)} with {e} exponent and "
        f"{f} fraction bits"
        for (e, f), some in groupby(rows, key=lambda row: row[:2])
    ]
    return Case("; ".join(told), lambda: tuple((x, e, f) for e, f, x in rows))


check_round_to = Exercise(
    signature="round_to(x, exponent_bits, fraction_bits)",
    cases=[
        _formats(
            (5, 10, 3.3),
            (5, 10, -3.3),
            (5, 10, 2051.0),
            (5, 10, 2049.0),
            (5, 10, -2049.0),
            (5, 10, 1.99999),
            (5, 10, 1.1e-6),
            (5, 10, 4e-8),
            (5, 10, 2.0**-25),
            (5, 10, 1e6),
            (5, 10, 65520.0),
            (5, 10, 65519.0),
            (5, 10, -7e4),
        ),
        _formats(
            (8, 7, 7e4),
            (8, 7, 1.0 + 2.0**-8 + 2.0**-20),
            (3, 2, 0.1),
            (3, 2, 15.0),
            (5, 2, 2.0**-16),
            (4, 3, -449.0),
        ),
        _formats((5, 10, 0.0)),
    ],
    observe=calls(
        lambda x, exponents, fractions: (
            f"number nearest to {x} with {exponents} and {fractions} bits"
        )
    ),
    solution=_truth,
    mistakes=[
        (
            "x comes back as it is: round it to a multiple of the step "
            "between neighbouring numbers.",
            lambda x, e, f: x,
        ),
        (
            "the step is that between 1 and 2, everywhere: it doubles with "
            "every power of two, so it is 2^(exponent of x − fraction_bits).",
            partial(_round_to, binade=lambda x: 0),
        ),
        (
            "the step is half as large as it should be: fraction_bits are "
            "the bits behind the leading 1.",
            partial(_round_to, bits=1),
        ),
        (
            "the step is twice as large as it should be: fraction_bits does "
            "not count the leading 1.",
            partial(_round_to, bits=-1),
        ),
        (
            "the bits that do not fit are cut off, which rounds towards "
            "zero: take the nearest number.",
            partial(_round_to, nearest=math.trunc),
        ),
        (
            "this always rounds down: take the nearest number.",
            partial(_round_to, nearest=math.floor),
        ),
        (
            "this always rounds up: take the nearest number.",
            partial(_round_to, nearest=math.ceil),
        ),
        (
            "half-way between two numbers this rounds towards zero: a tie "
            "goes to the even one, as Python's `round` does it.",
            partial(_round_to, nearest=_down),
        ),
        (
            "half-way between two numbers this rounds up: a tie goes to the "
            "even one, as Python's `round` does it.",
            partial(_round_to, nearest=lambda n: math.floor(n + 0.5)),
        ),
        (
            "half-way between two numbers this rounds away from zero: a tie "
            "goes to the even one, as Python's `round` does it.",
            partial(_round_to, nearest=_away),
        ),
        (
            "what lies below the smallest normal number becomes zero: the "
            "subnormal numbers are missing, multiples of 2^(1 − bias − "
            "fraction_bits).",
            partial(_round_to, smallest=lambda kind: kind.smallest_normal),
        ),
        (
            "the exponent has no lower end here: below 2^(1 − bias) the step "
            "stays as it is, which makes the subnormal numbers.",
            partial(_round_to, lowest=-math.inf),
        ),
        (
            "the smallest exponent is 1 − bias, not −bias: subnormal numbers "
            "have the step of the lowest normal ones.",
            partial(_round_to, lowest=0),
        ),
        (
            "the bias is 2^(exponent_bits − 1) − 1.",
            partial(_round_to, bias=lambda e: 2 ** (e - 1)),
        ),
        (
            "what is smaller than the smallest number becomes zero, although "
            "it may be nearer to that number: only half of it and less does.",
            partial(_round_to, smallest=lambda kind: kind.smallest),
        ),
        (
            "there is no upper end here: what is rounded beyond the largest "
            "number is infinite.",
            partial(_round_to, over=lambda x, rounded, kind: rounded),
        ),
        (
            "what is too large becomes the largest number; in these formats "
            "it becomes infinite.",
            partial(
                _round_to,
                over=lambda x, rounded, kind: max(
                    min(rounded, kind.largest), -kind.largest
                ),
            ),
        ),
        (
            "the largest exponent field stands for infinity and NaN, so the "
            "largest number has the one below it.",
            partial(
                _round_to,
                over=lambda x, rounded, kind: _infinite(
                    x, abs(rounded) > 2 * kind.largest, rounded
                ),
            ),
        ),
        (
            "half a step above the largest number is a tie, and the even "
            "neighbour is infinity: what overflows starts there.",
            partial(
                _round_to,
                over=lambda x, rounded, kind: _infinite(
                    x,
                    abs(x) > kind.overflow,
                    math.copysign(min(abs(rounded), kind.largest), x),
                ),
            ),
        ),
        (
            "what lies between the largest number and half a step more is "
            "rounded to the largest number: only beyond is it infinite.",
            partial(
                _round_to,
                over=lambda x, rounded, kind: _infinite(
                    x, abs(x) > kind.largest, rounded
                ),
            ),
        ),
        (
            "a negative number that is too large becomes −inf.",
            partial(
                _round_to,
                over=lambda x, rounded, kind: _infinite(
                    1.0, abs(rounded) > kind.largest, rounded
                ),
            ),
        ),
        (
            "a negative number that is too large becomes −inf.",
            partial(
                _round_to,
                over=lambda x, rounded, kind: _infinite(
                    1.0, rounded > kind.largest, rounded
                ),
            ),
        ),
    ],
    shown=(
        "These are the numbers that a cast to the format gives, normal and "
        "subnormal, and from half a step above the largest one on infinity."
    ),
    tolerance=EXACT,
)


# What autograd keeps under autocast


@cache
def _kept(batch: int, widths: tuple[int, ...]) -> int:
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    model, x = nn.Sequential(*layers[:-1]), torch.zeros(batch, widths[0])
    with SavedBytes(model, x) as saved, torch.autocast("cpu", torch.bfloat16):
        model(x)
    return saved.total


def _measured(batch: int, widths: Sequence[int]) -> int:
    """Bytes that autograd saves in a real forward pass."""
    return _kept(batch, tuple(widths))


def _autocast_saved(
    batch: int,
    widths: Sequence[int],
    input: float = 2,
    relu: float = 2,
    output: float = 0,
    first: float = 0,
    later: float = 2,
    last: float | None = None,
    biases: float = 0,
) -> float:
    """The bytes by formula.

    Args:
        batch, widths: of the exercise.
        input, relu, output: bytes for a number of the input, of a ReLU, of
            the model's output.
        first, later: bytes for a number of a weight.
        last: of the last one, if others.
        biases: bytes for a number of a bias.
    """
    sizes = [a * b for a, b in pairwise(widths)]
    kept = input * widths[0] + relu * sum(widths[1:-1]) + output * widths[-1]
    each = [first, *[later] * (len(sizes) - 1)]
    if last is not None:
        each[-1] = last
    return batch * kept + sum(map(mul, each, sizes)) + biases * sum(widths[1:])


FIRST_WEIGHT = (
    "the 16-bit copy of the first weight is not kept. A backward pass needs a "
    "layer's weight for one thing, the gradient of the layer's input; the "
    "first layer's input is the data, and they need no gradient."
)

check_autocast_saved = Exercise(
    signature="autocast_saved(batch, widths)",
    cases=[
        _given(batch=5, widths=[3, 7, 11, 4]),
        _given(batch=1, widths=[64, 32, 8, 16, 10]),
        _given(batch=64, widths=[8, 16, 2]),
        _given(batch=6, widths=[9, 5]),
    ],
    observe=answer,
    solution=_measured,
    mistakes=variants(
        _autocast_saved,
        [
            (
                "this is half of what fp32 keeps. Autocast also makes copies, "
                "which fp32 does not need: of the input, and of the weights.",
                {"input": 0, "later": 0},
            ),
            (
                "this is what fp32 keeps: under autocast linear layers and "
                "ReLU make numbers of 2 bytes, and copies are kept besides.",
                {"input": 0, "relu": 4, "later": 0},
            ),
            (
                "every number counts 4 bytes here: all that autograd keeps "
                "of this network is in 16 bits.",
                {"input": 4, "relu": 4, "later": 4},
            ),
            (
                "these are numbers, not bytes: each takes 2.",
                {"input": 1, "relu": 1, "later": 1},
            ),
            (
                "the 16-bit copies of the weights are missing: the gradient "
                "of a layer's input needs its weight, and what the layer "
                "read was the copy.",
                {"later": 0},
            ),
            (
                FIRST_WEIGHT,
                {"first": 2},
            ),
            (
                f"{FIRST_WEIGHT} That of the last weight is.",
                {"first": 2, "last": 0},
            ),
            (
                "the 16-bit copy of the last weight is kept, too: the "
                "gradient of its layer's input needs it. Only the first is "
                "not needed.",
                {"last": 0},
            ),
            (
                "the first layer reads a 16-bit copy of the input, and its "
                "weight's gradient needs it: the batch is not counted, but "
                "this copy is.",
                {"input": 0},
            ),
            (
                "the input counts 2 bytes for each number: what is kept is "
                "its 16-bit copy.",
                {"input": 4},
            ),
            (
                "each hidden layer counts twice. ReLU keeps its output, the "
                "next layer reads the same tensor, and nobody needs what "
                "ReLU read.",
                {"relu": 4},
            ),
            (
                "the output of the last layer is not kept: no gradient needs "
                "it.",
                {"output": 2},
            ),
            (
                "the copies of the biases are not kept: no gradient needs a "
                "bias.",
                {"biases": 2},
            ),
            (
                "the copies of the weights are in 16 bits: 2 bytes for each "
                "number, and the fp32 weights are not counted.",
                {"later": 4},
            ),
            (
                "the copies of the weights count 2 bytes for each number; "
                "the fp32 weights are alive anyway and not counted.",
                {"later": 6},
            ),
        ],
    ),
    shown=(
        "That is what autograd saves in a real forward pass under autocast, "
        "to the byte. The copies of the weights do not shrink with the "
        "batch: at a small one they outweigh what 16 bits save."
    ),
    tolerance=EXACT,
)


# The loss scale


def _numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def _many() -> torch.Tensor:
    """Gradients over many powers of two, zeros among them."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(-22 + 8 * torch.randn(1000, generator=generator))
    size[::7] = 0
    return size * (1 - 2 * torch.randint(2, (1000,), generator=generator))


def _loss_scale(
    gradients: torch.Tensor,
    largest: float,
    smallest: float,
    of: Callable[[torch.Tensor], torch.Tensor] = torch.amax,
    power: Callable[[float], float] = math.floor,
    size: Callable[[torch.Tensor], torch.Tensor] = torch.abs,
    limit: float = 0.5,
    becomes_zero: Callable[..., torch.Tensor] = torch.le,
    scaled: bool = True,
    keep: Callable[[torch.Tensor], torch.Tensor] = lambda x: x[x != 0],
    all: bool = False,
    factor: float = 1,
    kept: bool = False,
) -> tuple[float, float]:
    """The scale, and what it loses.

    Args:
        gradients, largest, smallest: of the exercise.
        of: the number that must not exceed ``largest``.
        power: makes the exponent whole.
        size: of the numbers whose ``of`` is taken.
        limit: what becomes zero, relative to ``smallest``.
        becomes_zero: compares with it.
        scaled: whether the numbers are scaled first.
        keep: those that may be lost.
        all: whether the share is one of all numbers, zeros too.
        factor: 100 for percent.
        kept: the share that is not lost.
    """
    numbers = gradients.double()
    exponent = power(math.log2(largest / float(of(size(numbers)))))
    scale = 2.0**exponent
    left = keep(numbers).abs()
    small = becomes_zero(left * (scale if scaled else 1), limit * smallest)
    share = small.sum().item() / (len(numbers) if all else len(left))
    return scale, factor * ((1 - share) if kept else share)


FP16 = {"largest": 65504.0, "smallest": 2.0**-24}
WHOLE = (
    "the scale must be a power of two: with another factor the scaled "
    "gradients are rounded anew."
)

check_loss_scale = Exercise(
    signature="loss_scale(gradients, largest, smallest)",
    cases=[
        Case(
            "gradients [-0.3, 0.02, 0, 5e-12, -2e-13, 3e-13, 0, 3e-8], "
            "largest 65504, smallest 2^-24",
            lambda: (
                _numbers(-0.3, 0.02, 0, 5e-12, -2e-13, 3e-13, 0, 3e-8),
                *FP16.values(),
            ),
        ),
        Case(
            "gradients [65504 · 2^-20, -2^-45, 2^-44, 0], largest 65504, "
            "smallest 2^-24",
            lambda: (
                _numbers(65504 * 2.0**-20, -(2.0**-45), 2.0**-44, 0),
                *FP16.values(),
            ),
        ),
        Case(
            "1000 gradients around 2^-22, largest 65504, smallest 2^-24",
            lambda: (_many(), *FP16.values()),
        ),
        Case(
            "gradients [300000, 0.25, -0.01, 1e-6], largest 57344, smallest "
            "2^-16",
            lambda: (_numbers(3e5, 0.25, -0.01, 1e-6), 57344.0, 2.0**-16),
        ),
    ],
    observe=several("loss scale", "share of lost gradients"),
    solution=_loss_scale,
    mistakes=variants(
        _loss_scale,
        [
            (
                "the scale follows from the mean gradient, and the largest "
                "one overflows: take the maximum of the sizes.",
                {"of": torch.mean},
            ),
            (
                "the scale follows from the largest positive gradient: take "
                "the largest size, |gradient|.",
                {"size": lambda x: x},
            ),
            (WHOLE, {"power": lambda exponent: exponent}),
            (
                "with this scale the largest gradient overflows: round the "
                "exponent down.",
                {"power": math.ceil},
            ),
            (
                "with this scale the largest gradient overflows: round the "
                "exponent down.",
                {"power": round},
            ),
            (
                "a scale twice as large would do: a gradient of exactly "
                "`largest` is not too large.",
                {"power": lambda exponent: math.ceil(exponent) - 1},
            ),
            (
                "zeros are counted among the lost: they were zero before, "
                "and no scale would save them.",
                {"keep": lambda x: x},
            ),
            (
                "this is the share of all numbers, zeros among them: divide "
                "by the number of those that are not zero.",
                {"all": True},
            ),
            (
                "the numbers below `smallest` are counted as lost: what is "
                "larger than half of it rounds to `smallest`.",
                {"limit": 1},
            ),
            (
                "half of `smallest` is a tie, and its even neighbour is "
                "zero: `<=`, not `<`.",
                {"becomes_zero": torch.lt},
            ),
            (
                "this is the share that is lost without a scale: multiply "
                "the gradients by it first.",
                {"scaled": False},
            ),
            ("the share is a number from 0 to 1.", {"factor": 100}),
            (
                "this is the share that survives: that of the numbers which "
                "become zero is asked.",
                {"kept": True},
            ),
        ],
    ),
    shown=(
        "No gradient overflows at this scale, one would at twice as much, "
        "and what still becomes zero is beyond the reach of one scale for "
        "all."
    ),
)


def _real_scaler(
    overflows: Sequence[bool], start: float, interval: int
) -> list[float]:
    """The scales of a real GradScaler, step by step."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu", start, growth_interval=interval)
    scales = []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        scaler.scale(weight.sum())  # makes the scale's tensor
        weight.grad = torch.full((1,), math.inf if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
    return scales


def _scale_history(
    overflows: Sequence[bool],
    start: float,
    interval: int,
    growth: float = 2,
    backoff: float = 0.5,
    more: int = 0,
    after_growth: bool = True,
    after_overflow: bool = True,
    after: bool = False,
    last: bool = False,
) -> list[float]:
    """The scale of each step.

    Args:
        overflows, start, interval: of the exercise.
        growth, backoff: factors.
        more: clean steps beyond the interval.
        after_growth, after_overflow: whether the counter is set to 0.
        after: whether the scale after the step is listed.
        last: whether that of the step to come is listed, too.
    """
    scales, scale, clean = [], start, 0
    for overflow in overflows:
        before = scale
        if overflow:
            scale *= backoff
            clean = 0 if after_overflow else clean
        else:
            clean += 1
            if clean >= interval + more:
                scale *= growth
                clean = 0 if after_growth else clean
        scales.append(scale if after else before)
    return [*scales, scale] if last else scales


def _history(text: str, start: float, interval: int) -> Case:
    """Steps as letters: ``o`` for an overflow."""
    overflows = [letter == "o" for letter in text]
    return _given(overflows=overflows, start=start, interval=interval)


check_scale_history = Exercise(
    signature="scale_history(overflows, start, interval)",
    cases=[
        _history("o.o...o...", 65536.0, 2),
        _history("........", 1024.0, 3),
        _history("..o..o...o", 1024.0, 3),
        _history("ooo....", 65536.0, 2000),
        _history("..o.", 8.0, 1),
    ],
    observe=answer,
    solution=_real_scaler,
    mistakes=variants(
        _scale_history,
        [
            (
                "after a growth the counter goes on: it starts again at 0, "
                "so the next growth takes `interval` steps more.",
                {"after_growth": False},
            ),
            (
                "after an overflow the counter goes on: it starts again at "
                "0, because the clean steps must come in a row.",
                {"after_overflow": False},
            ),
            (
                "the scale grows one clean step too late: when `interval` of "
                "them are complete.",
                {"more": 1},
            ),
            (
                "the scale grows one clean step too early: when `interval` "
                "of them are complete.",
                {"more": -1},
            ),
            (
                "these are the scales after the steps: list the one that a "
                "step ran with, so `start` comes first.",
                {"after": True},
            ),
            (
                "the scale of the step to come is listed, too: one for each "
                "step of `overflows`.",
                {"last": True},
            ),
            (
                "an overflow halves the scale, and here it stays.",
                {"backoff": 1},
            ),
            (
                "the scale doubles after `interval` clean steps, and here it "
                "never grows.",
                {"growth": 1},
            ),
            ("an overflow halves the scale.", {"backoff": 0.25}),
            ("clean steps double the scale.", {"growth": 4}),
        ],
    ),
    shown=(
        "A real GradScaler takes the same scales: it falls at once and "
        "grows slowly, so few steps are lost."
    ),
    tolerance=EXACT,
)


# An update that vanishes


def _exactly(weight: float, update: float, fraction_bits: int) -> bool:
    exact = Fraction(weight) - Fraction(update)
    if not exact:
        return weight != 0
    step = Fraction(2) ** _binade(exact) / 2**fraction_bits
    return round(exact / step) * step != Fraction(weight)


def _binade(x: Fraction) -> int:
    """The exponent of the power of two at or below |x|."""
    size, exponent = abs(x), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    return exponent


def _step(x: float, fraction_bits: int) -> float:
    return 2.0 ** (math.frexp(x)[1] - 1 - fraction_bits)


def _nearest(
    weight: float,
    update: float,
    bits: int,
    rounds: Callable[[float], float],
) -> bool:
    step = _step(weight - update, bits)
    return rounds((weight - update) / step) * step != weight


def _tied(weight: float, update: float, bits: int, stays: bool) -> bool:
    """Right, but all ties stay, or all move."""
    exact = weight - update
    steps = exact / _step(exact, bits)
    if steps % 1 == 0.5:
        return not stays
    return _exactly(weight, update, bits)


def _difference(weight: float, update: float) -> str:
    return f"{weight} {'+' if update < 0 else '-'} {abs(update)}"


def _updates(bits: int, *pairs: tuple[float, float]) -> Case:
    """Weights and their updates, in one format."""
    told = ", ".join(_difference(*pair) for pair in pairs)
    return Case(
        f"{told}; fraction_bits = {bits}",
        lambda: tuple((weight, update, bits) for weight, update in pairs),
    )


check_survives = Exercise(
    signature="survives(weight, update, fraction_bits)",
    cases=[
        _updates(
            7,
            (1.5, 0.02),
            (1.5, 0.006),
            (1.5, 0.005),
            (1.5, 0.003),
            (100.0, 0.2),
            (0.125, 0.0006),
            (1.0, 0.003),
            (1.0, 0.001),
            (1.0, -0.003),
            (1.0078125, 2.0**-8),
            (1.5, 2.0**-8),
            (1.0, 2.0**-9),
            (-3.0, 0.005),
        ),
        _updates(
            10,
            (1000.0, 0.3),
            (1000.0, 0.2),
            (1024.0, 0.3),
            (-1024.0, -0.3),
            (-1024.0, 0.3),
            (1001.0, 0.25),
            (1000.5, 0.25),
        ),
        _updates(
            7,
            (2.0**-20, 1e-9),
            (2.0**-20, 3e-9),
            (0.01171875, 1e-4),
            (0.5, 0.0),
            (2.0, 3.0),
        ),
        _updates(7, (0.5, 0.5)),
        _updates(7, (0.0, 1e-30)),
    ],
    observe=calls(
        lambda weight, update, bits: (
            f"answer for {_difference(weight, update)}"
        ),
        verdict,
    ),
    solution=_exactly,
    mistakes=[
        (
            "every update that is not zero survives here: the difference is "
            "rounded to the format's numbers.",
            lambda w, u, bits: u != 0,
        ),
        (
            "the update is compared with the whole step between two "
            "numbers: more than half of it is enough.",
            lambda w, u, bits: abs(u) >= _step(w, bits),
        ),
        (
            "the update is compared with the whole step between two "
            "numbers: more than half of it is enough.",
            lambda w, u, bits: abs(u) >= _step(w - u, bits),
        ),
        (
            "the update is compared with the step at 1: it grows with the "
            "weight, by a power of two.",
            lambda w, u, bits: abs(u) > 2.0 ** (-bits - 1),
        ),
        (
            "below a power of two the numbers lie twice as dense: the step "
            "is that of the difference, not of the weight.",
            lambda w, u, bits: abs(u) > _step(w, bits) / 2,
        ),
        (
            "below a power of two the numbers lie twice as dense, and a tie "
            "goes to the even number: round the difference itself.",
            lambda w, u, bits: abs(u) >= _step(w, bits) / 2,
        ),
        (
            "the step at a power of two is halved on both sides: it is only "
            "towards zero.",
            lambda w, u, bits: (
                abs(u)
                > _step(w, bits) / (4 if abs(math.frexp(w)[0]) == 0.5 else 2)
            ),
        ),
        (
            "the relative size of the update decides only roughly: the step "
            "is the same from one power of two to the next.",
            lambda w, u, bits: abs(u) > abs(w) * 2.0 ** (-bits - 1),
        ),
        (
            "a tie goes to the even number, and that may be the other one: "
            "half a step can be enough.",
            partial(_tied, stays=True),
        ),
        (
            "a tie goes to the even number, and that may be the weight "
            "itself: half a step is not always enough.",
            partial(_tied, stays=False),
        ),
        (
            "the difference is cut off instead of rounded to the nearest "
            "number.",
            partial(_nearest, rounds=math.trunc),
        ),
        (
            "the difference is rounded down instead of to the nearest number.",
            partial(_nearest, rounds=math.floor),
        ),
        (
            "this is the other way round: True where the weight changes.",
            lambda w, u, bits: not _exactly(w, u, bits),
        ),
        (
            "the weight and the update are added: the update is taken off.",
            lambda w, u, bits: _exactly(w, -u, bits),
        ),
    ],
    shown=(
        "Half a step decides, and below a power of two a quarter: an update "
        "that is smaller leaves no trace, however often it comes."
    ),
)


# Stochastic rounding


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def _values(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def _stochastic_round(
    x: torch.Tensor,
    noise: torch.Tensor,
    shift: Callable[[torch.Tensor], torch.Tensor] = lambda noise: noise,
    before: int = -1,
    after: int = -65536,
) -> torch.Tensor:
    """Add noise to the bits and clear some.

    Args:
        x, noise: of the exercise.
        shift: what is added, of the noise.
        before, after: bits that are left, before and after.
    """
    return _values((_bits(x) & before) + shift(noise) & after)


def _compared(
    x: torch.Tensor,
    noise: torch.Tensor,
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Round up where ``of(lower bits, noise)``: right with ``torch.gt``."""
    up = of(_bits(x) & 65535, noise)
    return _values((_bits(x) & -65536) + up.int() * 65536)


def _every_noise(*numbers: float) -> Case:
    """Each number with each noise once: a column of the table."""

    def make() -> tuple:
        x = torch.tensor(numbers).repeat(65536, 1)
        noise = torch.arange(65536, dtype=torch.int32)
        return x, noise[:, None].repeat(1, len(numbers))

    return Case(f"x = {list(numbers)}, each with all 65 536 noises", make)


def _roundings(fn: Callable, args: tuple) -> Seen:
    """How many noises take each number to each of its two neighbours.

    Which noises these are is free: how many makes the mean.
    """
    x = args[0].clone()
    seen = tensor(torch.float32)(fn, args)
    if "result" not in seen.parts:
        return seen
    found = seen.parts["result"]
    if found.shape != x.shape:
        return Seen(hint=f"the result is {shape(found)}; x is {shape(x)}.")
    below = _values(_bits(x) & -65536)
    above = _values(_bits(below) + 65536)

    def count(neighbour: torch.Tensor) -> torch.Tensor:
        return (found == neighbour).double().sum(0)

    seen.parts = {
        "number of noises that round away from zero": count(above),
        "number of noises that round towards zero": count(below),
        "mean over all noises, less x,": (found - x.double()).mean(0),
    }
    return seen


check_stochastic_round = Exercise(
    signature="stochastic_round(x, noise)",
    cases=[
        _every_noise(1.001, -1.005, 3.14159, 1.0, 0.3, 1.00390625),
        _every_noise(0.0, -0.75, 100.1, 1e-30, -1e30),
    ],
    observe=_roundings,
    solution=_stochastic_round,
    mistakes=[
        (
            "x comes back as it is: clear the lower 16 bits of the sum.",
            lambda x, noise: x,
        ),
        (
            "the noise is not used: half a step (32 768) added to the bits "
            "rounds to the nearest number, always the same.",
            partial(
                _stochastic_round,
                shift=lambda noise: torch.full_like(noise, 32768),
            ),
        ),
        (
            "the noise is not used: this is the rounding of a cast, to the "
            "nearest number.",
            lambda x, noise: x.bfloat16().float(),
        ),
        (
            "the noise has no effect, and clearing the lower 16 bits alone "
            "rounds towards zero: add the noise to the bits of x first, then "
            "clear. Behind that it cannot carry.",
            partial(_stochastic_round, shift=torch.zeros_like),
        ),
        (
            "the noise comes after the bits were cleared, so nothing is "
            "rounded: add it to the bits of x first, then clear.",
            partial(_stochastic_round, before=-65536, after=-1),
        ),
        (
            "the sum is not rounded: clear its lower 16 bits.",
            partial(_stochastic_round, after=-1),
        ),
        (
            "the noise is taken off: it rounds down too far. Add it.",
            partial(_stochastic_round, shift=torch.neg),
        ),
        (
            "the noise is added to half a step: it rounds up too often. Add "
            "the noise alone.",
            partial(_stochastic_round, shift=lambda noise: noise + 32768),
        ),
        (
            "the noise is added to half a step: it rounds up too often. Add "
            "the noise alone.",
            lambda x, noise: _values(_bits(x) + noise).bfloat16().float(),
        ),
        (
            "`x.int()` is the whole part of the number; its bits are "
            "`x.view(torch.int32)`.",
            lambda x, noise: (x.int() + noise & -65536).float(),
        ),
        (
            "`.float()` makes a number of the bits; `.view(torch.float32)` "
            "reads them.",
            lambda x, noise: (_bits(x) + noise & -65536).float(),
        ),
        (
            "the noise is compared with half a step: that rounds up or down "
            "with the same chance wherever x lies. Compare it with the lower "
            "bits of x, or add it to the bits.",
            partial(_compared, of=lambda lower, noise: noise >= 32768),
        ),
        (
            "the lower bits are compared the wrong way round: the larger they "
            "are, the more often x is rounded up.",
            partial(_compared, of=torch.le),
        ),
        (
            "the lower bits are compared the wrong way round: the larger they "
            "are, the more often x is rounded up.",
            partial(_compared, of=torch.lt),
        ),
        (
            "one noise too many rounds up: with lower bits of n it must be n "
            "of the 65 536 noises, and none where they are zero.",
            partial(_compared, of=torch.ge),
        ),
        (
            "one noise too many rounds up: with lower bits of n it must be n "
            "of the 65 536 noises, and none where they are zero.",
            partial(_stochastic_round, shift=lambda noise: noise + 1),
        ),
    ],
    shown=(
        "Up or down by chance, and on average right: an update of a "
        "thousandth of a step moves the weight once in a thousand times."
    ),
    tolerance=EXACT,
)
