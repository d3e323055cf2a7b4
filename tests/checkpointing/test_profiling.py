"""The machine's prediction from a profile, against real runs, to the byte."""

import copy
import random
from functools import partial
from itertools import cycle

import pytest
import torch
from checkpointing_helpers import (
    INPUTS,
    LOSS_AND_GRADIENT,
    Counts,
    Residual,
    Returns,
    measure,
    random_chain,
    random_segments,
    untrained,
)
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from membudget.checkpointing import (
    Checkpointed,
    Stage,
    equal_segments,
    no_segments,
    peak_of_segments,
    profile,
    pytorch_segments,
    simulate,
)
from membudget.models import GPT, Block, chain
from tests.soak import SOAK

# The grid of the chapter: equal layers -----------------------------------

WIDTH, BATCH = 16, 64
UNIT = BATCH * WIDTH * 4
"""Bytes of a boundary."""

LAYER = (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of a layer's parameter gradients, on their way to ``param.grad``."""

PRODUCT = 2 * BATCH * WIDTH * WIDTH
"""FLOPs of a layer."""

COUNTS = {4: range(1, 5), 9: (1, 2, 3, 5, 9), 16: (3, 4, 16)}
if SOAK:
    COUNTS |= {length: range(1, length + 1, 3) for length in (25, 64, 100)}
"""Segment counts of the real runs."""


class Sequential(nn.Module):
    """PyTorch's own, as a peer."""

    def __init__(self, net, count):
        super().__init__()
        self.net, self.count = net, count

    def forward(self, x):
        return checkpoint_sequential(
            self.net, self.count, x, use_reentrant=False
        )


@pytest.fixture(scope="module", params=COUNTS)
def layers(request):
    """Number of layers, the net, its input and its profile."""
    length = request.param
    torch.manual_seed(0)
    net, x = chain(WIDTH, length), torch.rand(BATCH, WIDTH)
    return length, net, x, profile(net, x=x)


def test_a_layer_is_a_unit_of_the_theory(layers):
    """Linear and ReLU: the tape is input and output, and inside is nothing.

    The first layer computes no gradient of its input.
    """
    length, *_, stages = layers
    for index, stage in enumerate(stages):
        assert stage == Stage(
            output=UNIT,
            forward_workspace=UNIT,
            record_workspace=UNIT,
            recompute_workspace=UNIT,
            backward_workspace=UNIT + LAYER * (index == length - 1),
            time=PRODUCT,
            backward_time=PRODUCT * (1 if index == 0 else 2),
            name=f"stage {index} (Sequential)",
        )


def test_equal_segments_cost_what_the_theory_says(layers):
    length, net, x, stages = layers
    plain = measure(net, x)
    assert plain[0] == (length + 1) * UNIT + LAYER + LOSS_AND_GRADIENT
    assert plain[0] == simulate(stages, no_segments(length)).peak + 8
    assert plain[1] == (3 * length - 1) * PRODUCT
    for count in COUNTS[length]:
        segments = equal_segments(length, count)
        peak, flops, _ = measure(Checkpointed(net, segments=segments), x)
        run, units = simulate(stages, segments), simulate(length, segments)
        assert peak == run.peak + LOSS_AND_GRADIENT
        assert flops == run.time == (4 * length - 1) * PRODUCT
        # The theory knows no gradients of parameters. They add to the peak
        # where it is in the last layer, whose own gradient is a number.
        rest = peak - LOSS_AND_GRADIENT - units.peak * UNIT
        assert rest in ((LAYER,) if length % count == 0 else (0, LAYER))
        if length % count == 0:
            assert units.peak == peak_of_segments(length, count)


def test_pytorch_split_is_checkpoint_sequential(layers):
    """Equal to the peer to the byte and to the operation."""
    length, net, x, stages = layers
    for count in COUNTS[length]:
        segments = pytorch_segments(length, count)
        peak, flops, _ = measure(Checkpointed(net, segments=segments), x)
        assert (peak, flops) == measure(Sequential(net, count), x)[:2]
        run, units = simulate(stages, segments), simulate(length, segments)
        assert peak == run.peak + LOSS_AND_GRADIENT
        assert peak == units.peak * UNIT + LAYER + LOSS_AND_GRADIENT
        last = length - (count - 1) * (length // count)
        assert flops == run.time == (4 * length - 1 - last) * PRODUCT


# Random chains -----------------------------------------------------------


def ends_without_tape(segments, stages, top=True):
    """Whether a segment ends with a stage whose tape is empty (a view)."""
    end = segments[-1]
    if not top and isinstance(end, int):
        stage = stages[end]
        if not (stage.inner or stage.holds_input or stage.holds_output):
            return True
    return any(
        ends_without_tape(item, stages, top=False)
        for item in segments
        if not isinstance(item, int)
    )


def is_untrained(segments, count):
    """Whether a segment lies within the first ``count`` stages."""

    def last(item):
        return item if isinstance(item, int) else last(item[-1])

    return any(
        last(item) < count or is_untrained(item, count)
        for item in segments
        if not isinstance(item, int)
    )


def compare(net, x, stages, segments, gradients):
    """Measured minus predicted peak.

    Asserts what is common to all: the FLOPs, and the bounds. Where the peak
    lies before the backward pass, the loss (or its gradient) is not there
    yet. And PyTorch lets go of a recomputed tensor when the operator returns,
    before the bias gradient is summed up; a tape that was never forgotten
    is let go of after that. A peak in the sum is then one in the product
    before it, lower by a bias gradient at most.
    """
    loss = next(net.parameters()).element_size()
    ours = Checkpointed(net, segments=segments)
    peak, flops, tracker = measure(ours, x, gradients)
    run = simulate(stages, segments)
    assert flops == run.time
    rest = peak - run.peak
    at = tracker.operators[tracker.peak_moment]
    if at.phase == "forward":
        made = at.name in ("aten.sum", "aten.ones_like") and at.module == ""
        assert rest == (loss if made else 0)
    elif rest != 2 * loss:
        bias = max(
            m.bias.nbytes for m in net.modules() if isinstance(m, nn.Linear)
        )
        assert 2 * loss - bias <= rest < 2 * loss
        assert run.moments[run.peak_moment].action.kind == "backward"
        assert run.extra_runs
    return rest


def test_random_chains_cost_what_the_machine_says():
    """Most of them with four or five segmentations."""
    found, seeds = [], range(60 if SOAK else 12)
    for seed, kind in zip(seeds, cycle(INPUTS), strict=False):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        net, x = random_chain(rng, kind)
        length, frozen = len(net), untrained(net)
        gradients = rng.random() < 0.5
        stages = profile(net, x=x, gradients=gradients)
        for segments in (
            no_segments(length),
            equal_segments(length, rng.randint(1, length)),
            random_segments(rng, length),
            random_segments(rng, length),
            random_segments(rng, length),
        ):
            if ends_without_tape(segments, stages):
                continue
            if is_untrained(segments, frozen):
                continue
            rest = compare(net, x, stages, segments, gradients)
            found.append(rest)
    assert len(found) >= 3 * len(seeds)
    assert found.count(LOSS_AND_GRADIENT) > 0.7 * len(found)


def test_the_bias_gradient_that_is_summed_after_the_tape_is_gone():
    """The smallest chain whose peak is lower by all of it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.rand(3, 12, 16)
    stages, bias = profile(net, x=x), net[2].bias.nbytes
    assert compare(net, x, stages, [0, 1, 2], True) == LOSS_AND_GRADIENT
    rest = compare(net, x, stages, [[0, 1, 2]], True)
    assert rest == LOSS_AND_GRADIENT - bias


def test_an_inner_checkpoint_is_dropped_when_its_stage_returned_nothing():
    """Its recomputation ends early: the last output never was."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Residual(16) for _ in range(2)])
    net += nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.rand(3, 12, 16)
    stages = profile(net, x=x)
    for segments in ([0, [1, [2, 3]]], [[0, [1, [2, 3]]]]):
        compare(net, x, stages, segments, True)


CHAINS = {
    "views one after the other": lambda: (
        nn.Sequential(
            nn.Linear(12, 12),
            nn.Identity(),
            nn.Unflatten(1, (3, 4)),
            nn.Flatten(),
            nn.Linear(12, 12),
            nn.ReLU(),
            nn.Linear(12, 12),
        ),
        torch.rand(9, 12),
    ),
    "nothing trained first": lambda: (
        nn.Sequential(
            nn.ReLU(),
            nn.Tanh(),
            nn.Linear(16, 16).requires_grad_(False),
            nn.Linear(16, 16),
            nn.Linear(16, 16).requires_grad_(False),
            nn.GELU(),
            nn.Linear(16, 16),
        ),
        torch.rand(8, 16),
    ),
    "double precision": lambda: (
        chain(12, 7).double(),
        torch.rand(8, 12, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_chains_of_other_kinds(make, gradients):
    torch.manual_seed(0)
    net, x = make()
    stages = profile(net, x=x, gradients=gradients)
    assert len(stages) == 7
    for segments in (
        no_segments(7),
        [0, 1, 2, [3, 4], 5, 6],
        [[0, 1, 2, 3, 4], [5, 6]],
        [[0, 1, 2, [3, 4]], [5, [6]]],
    ):
        compare(net, x, stages, segments, gradients)


def test_the_blocks_of_a_gpt():
    """Most of a block is inside: one per segment is best."""
    torch.manual_seed(0)
    gpt = GPT(width=16, depth=6, heads=2)
    x = torch.rand(2, 32, 16)
    stages = profile(gpt.blocks, x=x)
    for stage in stages:
        assert stage.output == stage.gradient == x.nbytes
        assert stage.inner > 12 * x.nbytes
        assert stage.holds_input
        assert not stage.holds_output
        assert stage.recompute_time < stage.time  # ends at the last product
    peaks = {}
    for count in range(1, 7):
        segments = equal_segments(6, count)
        rest = compare(gpt.blocks, x, stages, segments, True)
        assert rest == LOSS_AND_GRADIENT
        peaks[count] = simulate(stages, segments).peak
    assert min(peaks, key=peaks.get) == 6


# What it leaves behind ---------------------------------------------------


def everything(net):
    return copy.deepcopy(
        (
            net.state_dict(),
            [p.grad for p in net.parameters()],
            [p.requires_grad for p in net.parameters()],
            [m.training for m in net.modules()],
            torch.get_rng_state(),
        )
    )


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def normalised():
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Sequential(nn.Dropout(0.3), Counts(in_place=False)),
        Counts(),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 6).requires_grad_(False),
    )


@pytest.mark.parametrize("gradients", [True, False])
def test_it_leaves_everything_as_it_was(gradients):
    torch.manual_seed(3)
    net = normalised()
    for p in [*net.parameters()][1:4]:
        p.grad = torch.rand_like(p)
    grads = [p.grad for p in net.parameters()]
    buffers = list(net.buffers())
    x = torch.rand(5, 6)
    expected, x_before = everything(net), x.clone()
    profile(net, x=x, gradients=gradients)
    assert_equal(everything(net), expected)
    # the very same tensors
    assert all(
        p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True)
    )
    assert all(
        b is buffer for b, buffer in zip(net.buffers(), buffers, strict=True)
    )
    assert torch.equal(x, x_before)
    assert x.grad is None


def test_it_leaves_everything_as_it_was_when_it_fails():
    torch.manual_seed(3)
    net = nn.Sequential(*normalised(), Returns(lambda x: (x,)))
    x = torch.rand(5, 6)
    expected = everything(net)
    with pytest.raises(TypeError, match="returned a tuple"):
        profile(net, x=x)
    assert_equal(everything(net), expected)


def test_it_may_be_called_where_nothing_is_recorded():
    torch.manual_seed(0)
    net, x = chain(8, 3), torch.rand(5, 8)
    expected = profile(net, x=x)
    with torch.no_grad():
        assert profile(net, x=x) == expected
    assert profile(*net, x=x) == expected
    assert [stage.name for stage in profile(nn.Tanh(), *net, x=x)] == [
        "stage 0 (Tanh)",
        *(f"stage {i} (Sequential)" for i in (1, 2, 3)),
    ]


def test_gradients_that_are_not_there_are_left_behind():
    net, x = chain(8, 3), torch.rand(5, 8)
    net[1][0].bias.requires_grad_(False)
    stages = profile(net, x=x, gradients=False)
    layer = 4 * (8 * 8 + 8)
    assert [s.gradients for s in stages] == [layer, layer - 4 * 8, layer]
    assert [s.gradients for s in profile(net, x=x)] == [0, 0, 0]


def test_a_frozen_beginning_has_no_gradient():
    net, x = chain(8, 3), torch.rand(5, 8)
    net[0].requires_grad_(False)
    stages = profile(net, x=x)
    assert [s.gradient for s in stages] == [0, x.nbytes, x.nbytes]
    assert stages[0].backward_time == 0
    assert not stages[0].holds_output
    assert stages[1].backward_time == stages[1].time  # of the weight only


def test_a_view_holds_no_output():
    """Its output has no bytes of its own."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Flatten(), nn.Linear(6, 6))
    stage = profile(net, x=torch.rand(5, 6))[1]
    assert (stage.output, stage.inner, stage.time) == (0, 0, 0)
    assert not stage.holds_input
    assert not stage.holds_output


# Refused -----------------------------------------------------------------


class Draws(nn.Module):
    """A stage that is not the same again."""

    def __init__(self, how):
        super().__init__()
        self.how, self.count = how, 0

    def forward(self, x):
        self.count += 1
        return x * self.how(self)


tied = nn.Linear(4, 4)
REFUSED = {
    "another number": (
        [nn.Linear(4, 4), Draws(lambda stage: stage.count)],
        ValueError,
        r"^stage 1 \(Draws\) computes something else when it runs again on "
        "the same input with the same random numbers",
    ),
    "another shape": (
        [Draws(lambda stage: torch.ones(stage.count, 1, 1)), nn.Linear(4, 4)],
        ValueError,
        r"^stage 0 \(Draws\) computes something else",
    ),
    "in place": (
        [nn.ReLU(inplace=True), nn.Linear(4, 4)],
        RuntimeError,
        r"^stage 0 \(ReLU\) changes its input in place",
    ),
    "nothing trained": (
        [chain(4, 2).requires_grad_(False), nn.ReLU()],
        ValueError,
        r"^nothing in the chain is trained \(requires_grad\)",
    ),
    "a shared parameter": (
        [tied, nn.ReLU(), tied],
        ValueError,
        "^stages 0 and 2 share the parameter weight",
    ),
    "on meta, what depends on the processor": (
        [
            nn.Sequential(nn.LSTM(4, 4), Returns(lambda y: y[0])).to("meta"),
            nn.Tanh(),
        ],
        ValueError,
        r"^stage 0 \(Sequential\) .* oneDNN .*: profile it on a real dev",
    ),
}


@pytest.mark.parametrize(
    ("stages", "error", "message"), REFUSED.values(), ids=REFUSED
)
def test_a_chain_without_a_profile_is_refused(stages, error, message):
    device = next(nn.ModuleList(stages).parameters()).device
    x = torch.rand(5, 4).to(device) - 0.5
    before = x.clone()
    with pytest.raises(error, match=message):
        profile(*stages, x=x)
    assert x.is_meta or torch.equal(x, before)


def test_random_numbers_of_pytorch_and_nan_are_accepted():
    net = nn.Sequential(
        Draws(lambda _: torch.rand(())),
        Returns(lambda x: x / 0 * 0),
        nn.Linear(4, 4),
    )
    assert len(profile(net, x=torch.zeros(5, 4))) == 3


def test_a_profile_on_meta_is_the_same():
    """Nothing is allocated; sizes and FLOPs are a CPU's, attention fused."""
    real = [*chain(16, 1), Block(16, 2), nn.Dropout(0.1)]
    meta = [copy.deepcopy(stage).to("meta") for stage in real]
    x = torch.rand(4, 12, 16)
    found = profile(*meta, x=x.to("meta"), gradients=False)
    assert found == profile(*real, x=x, gradients=False)
    assert all(p.is_meta for stage in meta for p in stage.parameters())


class Lower(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_a_profile_on_meta_knows_a_kernel_of_16_bits():
    real = [Lower(nn.Linear(8, 8), nn.LayerNorm(8)), Lower(nn.Linear(8, 1))]
    meta = [copy.deepcopy(stage).to("meta") for stage in real]
    x = torch.rand(6, 8)
    assert profile(*meta, x=x.to("meta")) == profile(*real, x=x)


@pytest.mark.parametrize("segments", [[0, 1, 2], [(0,), (1, 2)]])
def test_a_chain_behind_an_embedding(segments):
    """The first stage has no parameters, and its input requires a gradient."""
    stages = [nn.GELU(), nn.Tanh(), nn.Linear(16, 16)]
    x = torch.rand(64, 16, requires_grad=True)
    predicted = simulate(profile(*stages, x=x), segments).peak
    peak, *_ = measure(Checkpointed(*stages, segments=segments), x)
    assert peak == predicted + LOSS_AND_GRADIENT
