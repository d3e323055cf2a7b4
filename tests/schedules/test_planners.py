"""What well-known tools choose, against the search, measured."""

import json
from functools import cache

import pytest
import torch
import torch._functorch.config as settings
from checkpointing_helpers import measure
from membudget_experiments.workload import peak_bytes
from torch import nn
from torch.profiler import ProfilerActivity, profile

from membudget import checkpointing as ck
from membudget.models import Block
from membudget.schedules import every_first, frontier

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = "aten::mm", "aten::addmm", "aten::bmm"


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


def profiled(net, x):
    """Bytes at the peak, and FLOPs of products and of fused attention."""

    def step():
        net(x).sum().backward()

    step()  # compiles
    peak = peak_bytes(step, x.device)["requested"]
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, record_shapes=True, with_flops=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    fused = sum(event.name() == FUSED for event in events)
    products = sum(e.flops() for e in events if e.name() in PRODUCTS)
    return peak, products + fused * 4 * x.numel() * x.shape[1]


def compiled(net, x, budget):
    """The same, run operator by operator as ours are."""
    torch._dynamo.reset()
    with settings.patch(activation_memory_budget=budget):
        backend = "aot_eager_decomp_partition"
        return profiled(torch.compile(net, backend=backend), x)


@pytest.mark.few(0)  # page 5a compiles the same
@pytest.mark.filterwarnings("ignore")
def test_a_budget_of_kept_bytes_is_none_of_the_peak():
    net, x = blocks(3)
    plain, work = profiled(net, x)
    points = frontier(ck.profile(net, x=x))
    peaks = {}
    for budget in (0.9, 0.5, 0.1, 0):
        theirs, flops = compiled(net, x, budget)
        segments = best(points, flops - work)
        ours, _ = profiled(ck.Checkpointed(net, segments=segments), x)
        peaks[budget] = ours, theirs
        assert (ours < theirs) == (budget < 0.9)
        assert (flops == work) == (budget == 0.9)
    assert peaks[0][1] > plain > peaks[0.1][1]
    # Operators are a finer choice than blocks, for us as well.
    keep = [*ck.MATMULS, *ck.ATTENTION]
    lean = ck.Checkpointed(net, segments=[[0], [1], [2]], keep=keep)
    assert profiled(lean, x)[0] < peaks[0.9][1]
    assert measure(lean, x)[1] == measure(net, x)[1]
