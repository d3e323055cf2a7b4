"""What the programme finds, run by PyTorch."""

import pytest
import torch
from checkpointing_helpers import (
    LOSS_AND_GRADIENT,
    Residual,
    measure,
    same,
    step,
)
from torch import nn

from membudget.checkpointing import (
    Checkpointed,
    equal_segments,
    profile,
    pytorch_segments,
    simulate,
)
from membudget.models import Block, chain
from membudget.schedules import (
    binomial_segments,
    every_first,
    frontier,
)


def depth(segments):
    """Lists within lists."""
    return 1 + max(
        (depth(item) for item in segments if not isinstance(item, int)),
        default=0,
    )


NETS = {
    "layers": lambda: (chain(16, 8), torch.rand(64, 16)),
    "blocks": lambda: (
        nn.Sequential(*[Block(16, 2) for _ in range(4)]),
        torch.rand(2, 32, 16),
    ),
    "of all kinds": lambda: (
        nn.Sequential(
            *chain(16, 2),
            Residual(16),
            nn.LayerNorm(16),
            nn.Linear(16, 24),
            nn.GELU(),
            nn.Linear(24, 16),
        ),
        torch.rand(64, 16),
    ),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_the_whole_frontier_is_what_pytorch_does(make):
    """Peak and FLOPs to the byte, and the same gradients."""
    torch.manual_seed(0)
    net, x = make()
    stages = profile(net, x=x)
    plain = measure(net, x)
    output, gradients = step(net, x)
    points, deepest = frontier(stages), 0
    for count in range(1, len(net) + 1):  # simpler ones are never better
        for split in (equal_segments, pytorch_segments, every_first):
            run = simulate(stages, split(len(net), count))
            best = min(p.extra_time for p in points if p.peak <= run.peak)
            assert best <= run.extra_time
    for peak, extra, segments in points:
        ours = Checkpointed(net, segments=segments)
        found, flops, _ = measure(ours, x)
        assert found == peak + LOSS_AND_GRADIENT
        assert flops == plain[1] + extra
        again, others = step(ours, x)
        assert torch.equal(output, again)
        assert same(gradients, others)
        deepest = max(deepest, depth(segments))
    assert deepest >= 3  # segments in segments were among them
    assert extra == 0  # a norm's run counts no FLOPs


def test_the_law_on_real_layers():
    """Units of a layer's output, and its own gradient's bytes."""
    torch.manual_seed(0)
    net, x = chain(16, 12), torch.rand(64, 16)
    layer = (16 * 16 + 16) * 4
    for runs, units in ((1, 13), (2, 7), (3, 6), (4, 5)):
        ours = Checkpointed(net, segments=binomial_segments(12, runs))
        peak = measure(ours, x)[0] - LOSS_AND_GRADIENT
        assert units * x.nbytes <= peak <= units * x.nbytes + layer
