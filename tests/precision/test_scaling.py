"""What a loss scale saves, how it is found, and what traces it."""

import dataclasses
import math
import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from precision_helpers import classifier, equal, samples, says

from membudget import precision
from membudget.precision import (
    FORMATS,
    DynamicScale,
    Lost,
    ScaleTrace,
    best_scale,
    binades,
    lost,
)
from tests.soak import SOAK
from tests.versions import here

STORED = [name for name, kind in FORMATS.items() if kind.dtype is not None]
SCALES = [1.0, 2.0**-10, 1024.0, 65536.0, 2.0**24]


def gradients_of_all_sizes(seed=0, count=4000):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-40, 20, (count,), generator=generator)
    numbers = torch.randn(count, generator=generator) * 2.0**size
    numbers[::50] = 0
    return numbers


def by_casting(numbers, kind, scale):
    """The shares, from a cast of the scaled numbers."""
    scaled = numbers.double() * scale
    wide = torch.float64 if kind.name == "fp32" else torch.float32
    cast = scaled.to(wide).to(kind.dtype).double().abs()
    there = numbers != 0
    count = max(there.sum().item(), 1)
    top = math.inf if kind.infinite else kind.largest
    if not kind.infinite and here("e4m3 has an overflow"):
        cast = cast.nan_to_num(top)
    above = (cast == top) & (scaled.abs() > kind.largest)
    if not kind.infinite:  # what is rounded down to the largest is not lost
        above &= scaled.abs() >= kind.overflow
    shares = (
        cast == 0,
        (cast > 0) & (cast < kind.smallest_normal),
        above,
    )
    return [(part & there).sum().item() / count for part in shares]


# Lost --------------------------------------------------------------------


def compared(numbers, name, scale):
    """What is lost, and the shares, which are those of a cast."""
    found = lost(numbers, name, scale)
    shares = [found.below, found.subnormal, found.above]
    assert shares == by_casting(numbers, FORMATS[name], scale), (name, scale)
    return found, shares


@pytest.mark.parametrize("name", STORED)
def test_lost_is_what_casting_loses(name):
    numbers = gradients_of_all_sizes()
    for scale in SCALES:
        found, _ = compared(numbers, name, scale)
        assert found.numbers == (numbers != 0).sum().item() < numbers.numel()
        if name == "fp16":  # there is something to lose
            assert found.below + found.above > 0.1 and found.subnormal > 0.05


@pytest.mark.parametrize("name", STORED)
def test_lost_on_the_borders(name):
    kind = FORMATS[name]
    normal = kind.smallest_normal
    edges = [
        *(kind.underflow, kind.smallest, normal, kind.largest, kind.overflow),
        *(normal - kind.smallest / 2, normal - kind.smallest),
    ]
    wide = torch.float64 if name == "fp32" else torch.float32
    edges = torch.tensor(edges, dtype=wide)
    down = torch.nextafter(edges, torch.zeros_like(edges))
    up = torch.nextafter(edges, torch.full_like(edges, math.inf))
    edges = torch.cat([edges, down, up]).double()
    for edge, scale in product(torch.cat([edges, -edges]), (1.0, 2.0**20)):
        found, shares = compared(edge[None] / scale, name, scale)
        assert sum(shares) <= 1 == found.numbers


def test_lost_in_tf32():
    """Its range is that of fp32; only the subnormals are fewer."""
    numbers = torch.tensor([2.0**-138, 2.0**-137, 2.0**-136, 2.0**-126, 3e38])
    found = lost(numbers.double(), "tf32")
    assert (found.numbers, found.below) == (5, 2 / 5)
    assert (found.subnormal, found.above) == (1 / 5, 0)
    found = lost(numbers.double(), "tf32", 2.0)
    assert (found.below, found.subnormal) == (1 / 5, 2 / 5)
    assert found.above == 1 / 5


def test_lost_takes_many_tensors_of_any_shape():
    numbers = gradients_of_all_sizes()
    parts = [numbers[:7], numbers[7:1007].view(10, 100), numbers[1007:]]
    assert lost(parts) == lost(numbers) == lost(iter(parts))
    assert lost(numbers) == lost(numbers, "fp16", 1.0)
    assert best_scale(numbers) == best_scale(numbers, "fp16")
    model = classifier()
    total = sum(p.numel() for p in model.parameters())
    assert lost(model.parameters()).numbers == total


@pytest.mark.parametrize("nothing", [[], torch.zeros(3)])
def test_nothing_cannot_be_lost(nothing):
    assert lost(nothing) == Lost(0, 0, 0, 0)
    assert binades(nothing) == {}


# The best scale ----------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_twice_the_best_scale_overflows(name):
    generator = torch.Generator().manual_seed(2)
    for exponent in range(-60, 60, 7 if SOAK else 40):
        numbers = torch.randn(5, generator=generator) * 2.0**exponent
        scale = best_scale(numbers, name)
        assert math.frexp(scale)[0] == 0.5  # a power of two
        assert lost(numbers, name, scale).above == 0
        assert lost(numbers, name, 2 * scale).above > 0


@pytest.mark.parametrize("name", FORMATS)
def test_the_best_scale_on_a_border(name):
    """The number times the scale is just below the overflow, or on it."""
    for exponent in -40, 40:
        edge = FORMATS[name].overflow * 2.0**-exponent
        edge = torch.tensor(edge, dtype=torch.float64)
        below = torch.nextafter(edge, torch.zeros_like(edge))
        assert best_scale(below, name) == 2.0**exponent
        assert best_scale(edge, name) == 2.0 ** (exponent - 1)
        assert best_scale([-below, 0 * edge, edge / 4], name) == 2.0**exponent


def test_the_best_scale_of_the_smallest_fp64_numbers():
    """No more than fp64 can hold."""
    small, least = torch.tensor([1e-290, 5e-324], dtype=torch.float64)
    exponent = math.floor(math.log2(65519) - math.log2(1e-290))
    assert best_scale(small) == 2.0**exponent
    assert best_scale(least) == 2.0**1023


def test_all_zeros_have_no_best_scale():
    message = (
        "all numbers are zero, so every scale will do: hand over the "
        "gradients of a backward pass"
    )
    for nothing in ([], torch.zeros(4), [torch.zeros(2), torch.zeros(())]):
        with pytest.raises(ValueError, match=says(message)):
            best_scale(nothing)


# Binades -----------------------------------------------------------------


def test_binades_by_hand():
    numbers = [1.0, 1.5, -1.999, 2.0, -4.0, 0.0, -0.0, 0.75, 0.5, 0.49]
    found = binades(torch.tensor(numbers))
    assert found == {-2: 1, -1: 2, 0: 3, 1: 1, 2: 1}
    assert list(found) == sorted(found)


def test_binades_of_subnormals_of_fp32():
    assert binades(torch.tensor([2.0**-149, 2.0**-127])) == {-149: 1, -127: 1}


# Numbers that cannot be --------------------------------------------------

MEASURES = [lost, best_scale, binades]


@pytest.mark.parametrize("measure", MEASURES)
def test_what_is_no_tensor_of_finite_numbers(measure):
    message = (
        "some numbers are infinite or NaN: measure gradients in fp32, "
        "without a loss scale"
    )
    for bad in (-math.inf, math.nan):
        with pytest.raises(ValueError, match=says(message)):
            measure([torch.ones(3), torch.tensor([1.0, bad])])
    message = "is no tensor of numbers with a fraction: hand over gradients"
    for bad, kind in (
        (torch.ones(2, dtype=torch.int64), "torch.int64"),
        ([torch.ones(2), None], "NoneType"),
    ):
        with pytest.raises(TypeError, match=says(f"{kind} {message}")):
            measure(bad)


# The rule of the dynamic scale -------------------------------------------


def driven(rule, overflows):
    """The scales of PyTorch's scaler that meets these overflows."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=rule.start,
        growth_interval=rule.interval,
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    found = [scaler.get_scale()]
    for overflow in overflows:
        scaler.scale(torch.zeros(()))  # makes its tensors the first time
        parameter.grad = torch.tensor([math.inf if overflow else 0.0])
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize(
    "rule",
    [
        DynamicScale(2.0**10, 1),
        DynamicScale(2.0**10, 3),
        # PyTorch multiplies in fp32, and its scale does not grow to infinity.
        DynamicScale(1000.1, 2),
        DynamicScale(2.0**126, 1),
    ],
)
def test_scales_are_the_scalers(rule):
    rng = random.Random(0)
    overflows = [False] * 4 + [rng.random() < 0.3 for _ in range(40)]
    theirs = torch.tensor(driven(rule, overflows))  # in fp32
    assert rule.scales(overflows) == theirs.tolist()


def test_the_defaults_are_pytorchs():
    rule, scaler = DynamicScale(), torch.amp.GradScaler("cpu")
    assert rule.scales([]) == [scaler.get_scale()] == [65536]
    assert rule.interval == scaler.get_growth_interval() == 2000


def test_rules_and_results_cannot_be_changed():
    made = filter(dataclasses.is_dataclass, vars(precision).values())
    frozen = {kind: kind.__dataclass_params__.frozen for kind in made}
    assert frozen[DynamicScale] and frozen[Lost] and all(frozen.values())


# Tracing a loop ----------------------------------------------------------


class Loop:
    """fp16 numbers in fp32: a gradient that overflows above a limit."""

    def __init__(self, start=2.0**18, interval=4):
        self.model = classifier()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=start, growth_interval=interval
        )
        self.x, self.y = samples(8)

    def step(self, new_scale=None):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.model(self.x * 64), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update(new_scale)


def test_a_trace_of_a_loop():
    loop, plain = Loop(), Loop()
    with ScaleTrace(loop.scaler) as trace:
        for _ in range(24):
            loop.step()
    scales = []
    for _ in range(24):
        scales.append(plain.scaler.get_scale())
        plain.step()
    assert trace.scales == scales
    assert 2 <= sum(trace.overflows) < 20
    rule = DynamicScale(2.0**18, interval=4)
    found = rule.scales(trace.overflows)
    assert found == [*trace.scales, loop.scaler.get_scale()]
    assert loop.scaler.state_dict() == plain.scaler.state_dict()
    assert equal(loop.model.state_dict(), plain.model.state_dict())


def test_after_the_trace_the_scaler_is_as_before():
    """And a trace that is entered again goes on."""
    loop = Loop()
    before = dict(vars(loop.scaler))
    with ScaleTrace(loop.scaler) as trace:
        assert vars(loop.scaler).keys() != before.keys()
    assert vars(loop.scaler) == before and trace.scales == []
    loop.step()
    assert trace.scales == []
    with pytest.raises(KeyError), trace:
        loop.step()
        raise KeyError
    assert "update" not in vars(loop.scaler)
    loop.step()
    assert len(trace.scales) == len(trace.overflows) == 1
    with trace:
        loop.step()
    assert len(trace.scales) == len(trace.overflows) == 2


def test_a_scale_that_is_set_is_no_overflow():
    loop = Loop(start=2.0**5)
    with ScaleTrace(loop.scaler) as trace:
        loop.step(4.0)
        loop.step(torch.tensor(2.0))
        loop.step()
    assert trace.scales == [32, 4, 2]
    assert trace.overflows == [False] * 3


def test_an_update_that_fails_is_not_written_down():
    loop = Loop()
    with ScaleTrace(loop.scaler) as trace:
        with pytest.raises((AssertionError, RuntimeError)):
            loop.scaler.update()  # no scaled loss before
        assert trace.scales == trace.overflows == []


def test_two_traces_at_once():
    loop = Loop()
    message = "the scaler is traced already: use one trace at a time"
    with ScaleTrace(loop.scaler) as trace:
        with (
            pytest.raises(ValueError, match=says(message)),
            ScaleTrace(loop.scaler),
        ):
            pytest.fail("entered twice")
        loop.step()
        assert len(trace.scales) == 1  # the first one goes on
    assert "update" not in vars(loop.scaler)


def test_a_scaler_that_is_switched_off():
    message = (
        "the scaler is switched off (enabled=False) and has no scale: trace "
        "one that is enabled, for fp16"
    )
    with pytest.raises(ValueError, match=says(message)):
        ScaleTrace(torch.amp.GradScaler("cpu", enabled=False))
