"""What well-known tools choose, against the search, measured."""

import json
from functools import cache

import pytest
import torch
from checkpointing_helpers import measure
from torch import nn

from membudget import checkpointing as ck
from membudget.models import Block
from membudget.schedules import every_first, frontier


def every(length, n):
    """The choice of ``every_n_layers`` in Hugging Face's transformers."""
    return [[i] if i % n == 0 else i for i in range(length)]


TOOLS = {
    "equal segments": ck.equal_segments,
    "checkpoint_sequential": ck.pytorch_segments,
    "every_n_layers": every,
    "first blocks": every_first,
}


def blocks(count, width=64, tokens=128):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(width, 4) for _ in range(count)))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    return net, torch.rand(4, tokens, width)


def best(points, extra_time):
    """The segments of least peak that take no more extra time."""
    return min(p for p in points if p.extra_time <= extra_time).segments


@pytest.fixture(scope="module")
def twelve():
    """The stages, their frontier, and what the tracker sees of segments."""
    net, x = blocks(12, 16, 32)
    stages = ck.profile(net, x=x)

    @cache
    def seen(segments):
        ours = ck.Checkpointed(net, segments=json.loads(segments))
        return measure(ours, x)[:2]

    return stages, frontier(stages), lambda found: seen(json.dumps(found))


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_no_choice_of_whole_blocks_is_better(tool, twelve):
    stages, points, seen = twelve
    for setting in range(1, 13):
        theirs = tool(12, setting)
        ours = best(points, ck.simulate(stages, theirs).extra_time)
        for mine, other in zip(seen(ours), seen(theirs), strict=True):
            assert mine <= other  # bytes at the peak, and FLOPs
