"""The exercises on precision of the chapter: formats, copies, scales."""

import math
from collections.abc import Callable

import torch

from membudget.exercises.compare import EXACT, Seen, shape
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import (
    answer,
    calls,
    doubles,
    found,
    several,
    verdict,
)

# Rounding to a format


def round_to(x, exponent_bits, fraction_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = max(math.frexp(x)[1] - 1, 1 - bias)
    step = 2.0 ** (exponent - fraction_bits)
    rounded = round(x / step) * step  # ties to even
    largest = (2 - 2.0**-fraction_bits) * 2.0**bias
    return rounded if abs(rounded) <= largest else math.copysign(math.inf, x)


def _formats(*rows: tuple[int, int, list[float]]) -> Case:
    """Exponent bits, fraction bits and numbers."""
    told = [
        f"x = {', '.join(map(str, some))} with {e} exponent and {f} fraction "
        "bits"
        for e, f, some in rows
    ]
    calls = tuple((x, e, f) for e, f, some in rows for x in some)
    return Case("; ".join(told), lambda: calls)


HALVES = [3.3, -3.3, 2051.0, 2049.0, -2049.0, 1.99999]  # and ties
HALVES += [1.1e-6, 4e-8, 2.0**-25]  # subnormal
HALVES += [1e6, 65520.0, 65519.0, -7e4]  # near the largest
IS_FINITE = "abs(rounded) <= largest"
INFINITY = "math.copysign(math.inf, x)"

check_round_to = Exercise(
    round_to,
    cases=[
        _formats((5, 10, HALVES)),
        _formats(
            (8, 7, [7e4, 1.0 + 2.0**-8 + 2.0**-20]),
            (3, 2, [0.1, 15.0]),
            (5, 2, [2.0**-16]),
            (4, 3, [-449.0]),
        ),
        _formats((5, 10, [0.0])),
    ],
    observe=calls(
        lambda x, exponents, fractions: (
            f"number nearest to {x} with {exponents} and {fractions} bits"
        )
    ),
    mistakes=f"""
        bias = 2 => return x; bias = 2
            x comes back as it is: round it to a multiple of the step between
            neighbouring numbers.
        math.frexp(x)[1] - 1 => 0
            the step is that between 1 and 2, everywhere: it doubles with
            every power of two, so it is 2^(exponent of x − fraction_bits).
        (exponent - fraction_bits) => (exponent - fraction_bits - 1)
            the step is half as large as it should be: fraction_bits are the
            bits behind the leading 1.
        (exponent - fraction_bits) => (exponent - fraction_bits + 1)
            the step is twice as large as it should be: fraction_bits does not
            count the leading 1.
        round(x / step) => math.trunc(x / step)
            the bits that do not fit are cut off, which rounds towards zero:
            take the nearest number.
        round(x / step) => math.floor(x / step)
            this always rounds down: take the nearest number.
        round(x / step) => math.ceil(x / step)
            this always rounds up: take the nearest number.
        round(x / step) => math.copysign(math.ceil(abs(x / step) - 0.5), x)
        or round(x / step) => math.floor(x / step + 0.5)
        or round(x / step) => math.copysign(math.floor(abs(x / step) + 0.5), x)
            half-way between two numbers this rounds up, towards zero or away
            from it: a tie goes to the even one, as Python's `round` does it.
        * step  # => * step * (abs(x) >= 2.0 ** (1 - bias))  #
            what lies below the smallest normal number becomes zero: the
            subnormal numbers are missing, multiples of 2^(1 − bias −
            fraction_bits).
        max(math.frexp(x)[1] - 1, 1 - bias) => math.frexp(x)[1] - 1
            the exponent has no lower end here: below 2^(1 − bias) the step
            stays as it is, which makes the subnormal numbers.
        1 - bias => -bias
            the smallest exponent is 1 − bias, not −bias: subnormal numbers
            have the step of the lowest normal ones.
        (exponent_bits - 1) - 1 => (exponent_bits - 1)
            the bias is 2^(exponent_bits − 1) − 1.
        * step  # => * step * (abs(x) >= step)  #
            what is smaller than the smallest number becomes zero, although it
            may be nearer to that number: only half of it and less does.
        if {IS_FINITE} else {INFINITY} =>
            there is no upper end here: what is rounded beyond the largest
            number is infinite.
        math.inf, x => largest, x
            what is too large becomes the largest number; in these formats it
            becomes infinite.
        <= largest => <= 2 * largest
            the largest exponent field stands for infinity and NaN, so the
            largest number has the one below it.
        {IS_FINITE} else {INFINITY} => {IS_FINITE} else math.copysign( \
            math.inf if abs(x) > largest + step / 2 else largest, x)
            half a step above the largest number is a tie, and the even
            neighbour is infinity: what overflows starts there.
        abs(rounded) => abs(x)
            what lies between the largest number and half a step more is
            rounded to the largest number: only beyond is it infinite.
        {INFINITY} => math.inf
        or {IS_FINITE} => rounded <= largest
        {INFINITY} => math.inf
            a negative number that is too large becomes −inf.
        """,
    shown=(
        "These are the numbers that a cast to the format gives, normal and "
        "subnormal, and from half a step above the largest one on infinity."
    ),
    tolerance=EXACT,
)

# What autograd keeps under autocast


def autocast_saved(batch, widths):
    inputs = batch * sum(widths[:-1])  # of all layers; ReLU keeps the same
    later = range(1, len(widths) - 1)  # all weights but the first
    return 2 * (inputs + sum(widths[i] * widths[i + 1] for i in later))


WEIGHTS = "sum(widths[i] * widths[i + 1] for i in later)"
FIRST_WEIGHT = (
    "the 16-bit copy of the first weight is not kept. A backward pass needs a "
    "layer's weight for one thing, the gradient of the layer's input; the "
    "first layer's input is the data, and they need no gradient."
)

check_autocast_saved = Exercise(
    autocast_saved,
    cases=[
        given(batch=5, widths=[3, 7, 11, 4]),
        given(batch=1, widths=[64, 32, 8, 16, 10]),
        given(batch=64, widths=[8, 16, 2]),
        given(batch=6, widths=[9, 5]),
    ],
    observe=answer,
    mistakes=f"""
        [:-1] => [1:-1]
        + {WEIGHTS} =>
            this is half of what fp32 keeps. Autocast also makes copies, which
            fp32 does not need: of the input, and of the weights.
        [:-1] => [1:-1]
        + {WEIGHTS} =>
        return 2 => return 4
            this is what fp32 keeps: under autocast linear layers and ReLU
            make numbers of 2 bytes, and copies are kept besides.
        return 2 => return 4
            every number counts 4 bytes here: all that autograd keeps of this
            network is in 16 bits.
        return 2 => return 1
            these are numbers, not bytes: each takes 2.
        + {WEIGHTS} =>
            the 16-bit copies of the weights are missing: the gradient of a
            layer's input needs its weight, and what the layer read was the
            copy.
        range(1, => range(
            {FIRST_WEIGHT}
        range(1, len(widths) - 1) => range(len(widths) - 2)
            {FIRST_WEIGHT} That of the last weight is.
        len(widths) - 1 => len(widths) - 2
            the 16-bit copy of the last weight is kept, too: the gradient of
            its layer's input needs it. Only the first is not needed.
        [:-1] => [1:-1]
            the first layer reads a 16-bit copy of the input, and its weight's
            gradient needs it: the batch is not counted, but this copy is.
        batch * sum( => batch * sum([widths[0]]) + batch * sum(
            the input counts 2 bytes for each number: what is kept is its
            16-bit copy.
        batch * sum( => batch * sum(widths[1:-1]) + batch * sum(
            each hidden layer counts twice. ReLU keeps its output, the next
            layer reads the same tensor, and nothing needs what ReLU read.
        [:-1] => [:]
            the output of the last layer is not kept: no gradient needs it.
        (inputs => (sum(widths[1:]) + inputs
            the copies of the biases are not kept: no gradient needs a bias.
        sum(widths[i] => 2 * sum(widths[i]
        or sum(widths[i] => 3 * sum(widths[i]
            the copies of the weights are in 16 bits: 2 bytes for each number.
            The fp32 weights are alive anyway, and not counted.
        """,
    shown=(
        "That is what autograd saves in a real forward pass under autocast, "
        "to the byte. The copies of the weights do not shrink with the "
        "batch: at a small one they outweigh what 16 bits save."
    ),
    tolerance=EXACT,
)

# The loss scale


def loss_scale(gradients, largest, smallest):
    sizes = gradients[gradients != 0].double().abs()
    scale = 2.0 ** math.floor(math.log2(largest / sizes.max()))
    lost = sizes * scale <= smallest / 2
    return scale, lost.double().mean().item()


def _gradients(
    *numbers: float, told: str = "", largest: float = 65504.0, power: int = -24
) -> Case:
    """Gradients; the smallest number of their format is 2 to a power."""
    told = told or f"gradients {list(numbers)}"
    return Case(
        f"{told}, largest {largest:.0f}, smallest 2^{power}",
        lambda: (torch.tensor(numbers), largest, 2.0**power),
    )


def _many() -> torch.Tensor:
    """Gradients over many powers of two, zeros among them."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(-22 + 8 * torch.randn(1000, generator=generator))
    size[::7] = 0
    return size * (1 - 2 * torch.randint(2, (1000,), generator=generator))


check_loss_scale = Exercise(
    loss_scale,
    cases=[
        _gradients(-0.3, 0.02, 0, 5e-12, -2e-13, 3e-13, 0, 3e-8),
        _gradients(
            *[65504 * 2.0**-20, -(2.0**-45), 2.0**-44, 0],
            told="gradients [65504 · 2^-20, -2^-45, 2^-44, 0]",
        ),
        _gradients(*_many().tolist(), told="1000 gradients around 2^-22"),
        _gradients(3e5, 0.25, -0.01, 1e-6, largest=57344.0, power=-16),
    ],
    observe=several("loss scale", "share of lost gradients"),
    mistakes="""
        sizes.max() => gradients.double().abs().mean()
        or sizes.max() => sizes.mean()
            the scale follows from the mean gradient, and the largest one
            overflows: take the maximum of the sizes.
        sizes.max() => gradients.double().max()
            the scale follows from the largest positive gradient: take the
            largest size, |gradient|.
        math.floor( => (
            the scale must be a power of two: with another factor the scaled
            gradients are rounded anew.
        math.floor => math.ceil
        or math.floor => round
            with this scale the largest gradient overflows: round the exponent
            down.
        math.floor( => math.ceil(-1 + 
            a scale twice as large would do: a gradient of exactly `largest`
            is not too large.
        [gradients != 0] =>
            zeros are counted among the lost: they were zero before, and no
            scale would save them.
        .mean().item() => .sum().item() / len(gradients)
            this is the share of all numbers, zeros among them: divide by the
            number of those that are not zero.
        smallest / 2 => smallest
            the numbers below `smallest` are counted as lost: what is larger
            than half of it rounds to `smallest`.
        <= => <
            half of `smallest` is a tie, and its even neighbour is zero: `<=`,
            not `<`.
        sizes * scale => sizes
            this is the share that is lost without a scale: multiply the
            gradients by it first.
        scale, lost => scale, 100 * lost
            the share is a number from 0 to 1.
        scale, lost => scale, (~lost)
            this is the share that survives: that of the numbers which become
            zero is asked.
        """,
    shown=(
        "No gradient overflows at this scale, one would at twice as much, "
        "and what still becomes zero is beyond the reach of one scale for "
        "all."
    ),
)

# An update that vanishes


def survives(weight, update, fraction_bits):
    exact = weight - update
    step = 2.0 ** (math.frexp(exact)[1] - 1 - fraction_bits)
    return round(exact / step) * step != weight


def _difference(weight: float, update: float) -> str:
    return f"{weight} {'+' if update < 0 else '-'} {abs(update)}"


def _updates(bits: int, *rows: tuple[float, list[float]]) -> Case:
    """Weights and their updates, in one format."""
    pairs = [(weight, update) for weight, some in rows for update in some]
    told = ", ".join(_difference(*pair) for pair in pairs)
    return Case(
        f"{told}; fraction_bits = {bits}",
        lambda: tuple((weight, update, bits) for weight, update in pairs),
    )


ANSWER = "round(exact / step) * step != weight"

check_survives = Exercise(
    survives,
    cases=[
        _updates(
            7,
            (1.5, [0.02, 0.006, 0.005, 0.003, 2.0**-8]),
            (100.0, [0.2]),
            (0.125, [0.0006]),
            (1.0, [0.003, 0.001, -0.003, 2.0**-9]),
            (1.0078125, [2.0**-8]),
            (-3.0, [0.005]),
        ),
        _updates(
            10,
            (1000.0, [0.3, 0.2]),
            (1024.0, [0.3]),
            (-1024.0, [-0.3, 0.3]),
            (1001.0, [0.25]),
            (1000.5, [0.25]),
        ),
        _updates(
            7,
            (2.0**-20, [1e-9, 3e-9]),
            (0.01171875, [1e-4]),
            (0.5, [0.0]),
            (2.0, [3.0]),
        ),
        _updates(7, (0.5, [0.5])),
        _updates(7, (0.0, [1e-30])),
    ],
    observe=calls(
        lambda weight, update, bits: (
            f"answer for {_difference(weight, update)}"
        ),
        verdict,
    ),
    mistakes=f"""
        {ANSWER} => update != 0
            every update that is not zero survives here: the difference is
            rounded to the format's numbers.
        {ANSWER} => abs(update) >= step
        or frexp(exact) => frexp(weight)
        {ANSWER} => abs(update) >= step
            the update is compared with the whole step between two numbers:
            more than half of it is enough.
        {ANSWER} => abs(update) > 2.0 ** (-fraction_bits - 1)
            the update is compared with the step at 1: it grows with the
            weight, by a power of two.
        frexp(exact) => frexp(weight)
        {ANSWER} => abs(update) > step / 2
        or frexp(exact) => frexp(weight)
        {ANSWER} => abs(update) >= step / 2
            below a power of two the numbers lie twice as dense: the step is
            that of the difference, not of the weight. And a tie goes to the
            even number: round the difference itself.
        {ANSWER} => abs(update) > abs(weight) * 2.0 ** (-fraction_bits - 1)
            the relative size of the update decides only roughly: the step is
            the same from one power of two to the next.
        != weight => != weight and exact / step % 1 != 0.5
            a tie goes to the even number, and that may be the other one: half
            a step can be enough.
        != weight => != weight or exact / step % 1 == 0.5
            a tie goes to the even number, and that may be the weight itself:
            half a step is not always enough.
        round(exact / step) => math.trunc(exact / step)
        or round(exact / step) => math.floor(exact / step)
            the difference is cut off: round it to the nearest number.
        != weight => == weight
            this is the other way round: True where the weight changes.
        weight - update => weight + update
            the weight and the update are added: the update is taken off.
        """,
    shown=(
        "Half a step decides, and below a power of two the step is half as "
        "large: a smaller update leaves no trace, however often it comes."
    ),
)

# Stochastic rounding


def stochastic_round(x, noise):
    bits = x.view(torch.int32) + noise
    return (bits & -65536).view(torch.float32)  # the upper 16 bits


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
    result = found(fn, fn(*args), torch.Tensor, "a tensor")
    rounded = doubles(result)
    if rounded.shape != x.shape:
        raise Problem(f"the result is {shape(rounded)}; x is {shape(x)}.")
    lower = x.view(torch.int32) & -65536
    below, above = (
        bits.view(torch.float32) for bits in (lower, lower + 65536)
    )

    def count(neighbour: torch.Tensor) -> torch.Tensor:
        return (rounded == neighbour).double().sum(0)

    seen = Seen(
        {
            "number of noises that round away from zero": count(above),
            "number of noises that round towards zero": count(below),
            "mean over all noises, less x,": (rounded - x.double()).mean(0),
        }
    )
    if result.dtype != torch.float32:
        seen.hint = (
            f"the result is of {result.dtype}; torch.float32 is asked, "
            "whatever the bits in it."
        )
    return seen


LOWER = "(x.view(torch.int32) & 65535)"
RESULT = "(bits & -65536).view(torch.float32)"

check_stochastic_round = Exercise(
    stochastic_round,
    cases=[
        _every_noise(1.001, -1.005, 3.14159, 1.0, 0.3, 1.00390625),
        _every_noise(0.0, -0.75, 100.1, 1e-30, -1e30),
    ],
    observe=_roundings,
    mistakes=f"""
        {RESULT} => x
            x comes back as it is: clear the lower 16 bits of the sum.
        + noise => + 32768
        or {RESULT} => x.bfloat16().float()
            the noise is not used: this rounds to the nearest number, as a
            cast does, and always the same.
        + noise =>
            the noise has no effect, and clearing the lower 16 bits alone
            rounds towards zero: add the noise to the bits of x first, then
            clear. Behind that it cannot carry.
        + noise => & -65536
        bits & -65536 => bits + noise
            the noise comes after the bits were cleared, so nothing is
            rounded: add it to the bits of x first, then clear.
        bits & -65536 => bits
            the sum is not rounded: clear its lower 16 bits.
        + noise => - noise
            the noise is taken off: it rounds down too far. Add it.
        + noise => + noise + 32768
        or {RESULT} => bits.view(torch.float32).bfloat16().float()
            the noise is added to half a step: it rounds up too often. Add the
            noise alone.
        x.view(torch.int32) => x.int()
        .view(torch.float32) => .float()
            `x.int()` is the whole part of the number; its bits are
            `x.view(torch.int32)`.
        .view(torch.float32) => .float()
            `.float()` makes a number of the bits; `.view(torch.float32)`
            reads them.
        + noise => + (noise >= 32768).int() * 65536
            the noise is compared with half a step: that rounds up or down
            with the same chance wherever x lies. Compare it with the lower
            bits of x, or add it to the bits.
        + noise => + ({LOWER} <= noise).int() * 65536
        or + noise => + ({LOWER} < noise).int() * 65536
            the lower bits are compared the wrong way round: the larger they
            are, the more often x is rounded up.
        + noise => + ({LOWER} >= noise).int() * 65536
        or + noise => + noise + 1
            one noise too many rounds up: with lower bits of n it must be n of
            the 65 536 noises, and none where they are zero.
        """,
    shown=(
        "Up or down by chance, and on average right: an update of a "
        "thousandth of a step moves the weight once in a thousand times."
    ),
    tolerance=EXACT,
    two=False,  # each takes a tenth of a second
)
