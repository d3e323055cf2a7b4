"""FLOPs against hand counts and PyTorch's own counter."""

from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from measuring_helpers import KEPT, chain
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from membudget.measuring import PeakTracker
from membudget.measuring.flops import MISSING, FlopCounter
from membudget.models import GPT, Block

FUSED = "_scaled_dot_product_flash_attention_for_cpu"


def both_counters(function):
    """Ours and PyTorch's, in two runs, by the operators' names."""
    with FlopCounter() as ours:
        function()
    with FlopCounterMode(display=False) as theirs:
        function()
    expected = {
        packet.__name__: count
        for packet, count in theirs.get_flop_counts().get("Global", {}).items()
    }
    assert ours.total == sum(ours.by_operator.values())
    return ours, expected


# Hand counts -------------------------------------------------------------


def test_a_matrix_product_is_two_operations_a_multiplication():
    with FlopCounter() as flops:
        torch.ones(2, 3) @ torch.ones(3, 5)
        torch.ones(4, 2, 3) @ torch.ones(4, 3, 5)
        torch.ones(2, 3) + 1
    assert flops.by_operator == {"mm": 2 * 2 * 3 * 5, "bmm": 8 * 2 * 3 * 5}
    assert flops.total == 5 * 60


@pytest.mark.parametrize("depth", [1, 5])
def test_a_step_is_three_forward_passes_less_one_input_gradient(depth):
    """Setting S: the first layer needs no gradient of its input."""
    batch, width = 4, 8
    layer = 2 * batch * width**2
    model, x = chain(depth, width=width), torch.randn(batch, width)
    with FlopCounter() as flops:
        loss = model(x).sum()
        assert flops.total == depth * layer
        loss.backward()
    assert flops.total == (3 * depth - 1) * layer
    assert flops.by_operator == {
        "addmm": depth * layer,
        "mm": (2 * depth - 1) * layer,
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_the_recomputation(reentrant):
    """(4L - 1) / (3L - 1) of a plain step, whatever the segments."""
    batch, width, depth, segments = 4, 8, 4, 2
    model = chain(depth, width=width)
    x = torch.randn(batch, width, requires_grad=reentrant)
    size = 2 * depth // segments
    with FlopCounter() as flops:
        y = x
        for i in range(0, 2 * depth, size):
            y = checkpoint(model[i : i + size], y, use_reentrant=reentrant)
        y.sum().backward()
    layer = 2 * batch * width**2
    assert flops.total == (4 * depth - (not reentrant)) * layer


# PyTorch's counter -------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
        ((1, 1, 2, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ],
)
def test_the_formulas_added_are_those_of_the_other_fused_kernels(shapes):
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    gradient = torch.empty(*q.shape[:-1], v.shape[-1], device="meta")
    name = "_scaled_dot_product_flash_attention"
    packet = torch.ops.aten
    for ending, tensors in (
        ("", (q, k, v)),
        ("_backward", (gradient, q, k, v)),
    ):
        theirs = flop_registry[getattr(packet, name + ending)]
        ours = MISSING[getattr(packet, f"{FUSED}{ending}")]
        assert ours(*tensors, 0.0, out_val=None) == theirs(*tensors)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    x = torch.randn(2, 3, 12, 12)
    model(x)
    return lambda: model(x).square().mean().backward()


def plain_attention():
    model = Block(16, 2)
    x = torch.randn(2, 5, 16, requires_grad=True)

    def run():
        with sdpa_kernel(SDPBackend.MATH):
            model(x).sum().backward()

    return run


def einsum_and_friends():
    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 5)
    c = torch.randn(2, 3, 5)

    def run():
        y = torch.einsum("bij,jk->bik", a, b)
        y = torch.baddbmm(y, c, torch.ones(2, 5, 5))
        F.linear(y, torch.ones(7, 5)).sum().backward()

    return run


@pytest.mark.parametrize(
    "setting",
    [convolutions, plain_attention, einsum_and_friends],
)
def test_the_same_operations_as_pytorchs_counter(setting):
    torch.manual_seed(0)
    ours, expected = both_counters(setting())
    assert ours.by_operator == expected
    assert ours.total > 0


def test_a_gpt_counts_more_than_pytorchs_counter_by_its_attention():
    batch, context, width, depth, heads = 2, 6, 8, 3, 2
    model = GPT(11, context, width, depth, heads)
    x = torch.randint(11, (batch, context))
    ours, expected = both_counters(lambda: model(x).sum().backward())
    product = 2 * batch * context**2 * width
    assert ours.by_operator == expected | {
        FUSED: 2 * depth * product,
        f"{FUSED}_backward": 5 * depth * product,
    }


def test_inference_mode_hides_nothing():
    model = GPT(11, 6, 8, 2, 2)
    x = torch.randint(11, (2, 6))
    totals = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with FlopCounter() as flops, mode():
            model(x)
        totals.append(flops.total)
        assert FUSED in flops.by_operator
    assert totals[0] == totals[1] == totals[2]
    with torch.inference_mode():
        x, weight = torch.ones(2, 3), torch.ones(5, 3)
    with FlopCounter() as flops:  # these tensors are so outside as well
        F.linear(x, weight)
    assert flops.by_operator == {"mm": 2 * 2 * 3 * 5}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_fake_tensors_count_as_real_ones(mode):
    counts = []
    for tensors in (nullcontext(), FakeTensorMode()):
        with tensors:
            model = GPT(11, 6, 8, 2, 2)
            x = torch.zeros(2, 6, dtype=torch.int64)
            with FlopCounter() as flops, mode():
                y = model(x)
                if mode is torch.enable_grad:
                    y.sum().backward()
        counts.append(flops.by_operator)
    assert counts[0] == counts[1]
    assert FUSED in counts[1]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_nested_tensors_work_as_they_do_without(mode):
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    weight = torch.ones(3, 5)
    with FlopCounter() as flops, mode():
        products = (nested @ weight).unbind()
        assert len(products) == nested.size(0)
    for part, product in zip(parts, products, strict=True):
        assert torch.equal(part @ weight, product)
    assert flops.total == 0


def test_formulas_that_are_registered_are_used(monkeypatch):
    monkeypatch.setitem(
        flop_registry, torch.ops.aten.exp, lambda x, out_val=None: x.numel()
    )
    with FlopCounter() as flops:
        torch.ones(7).exp()
    assert flops.by_operator == {"exp": 7}


# With a tracker ------------------------------------------------------------


def a_gpt():
    torch.manual_seed(0)
    model = GPT(11, 6, 8, 2, 2)
    x = torch.randint(11, (4, 6))
    return model, x, lambda: model(x).square().mean().backward()


def segments():
    """4 of 4 layers, checkpointed."""
    model, x = chain(16), torch.randn(64, 8)

    def forward():
        y = x
        for i in range(0, 32, 8):
            y = checkpoint(model[i : i + 8], y, **KEPT)
        return y

    return model, x, lambda: forward().sum().backward()


@pytest.mark.parametrize("build", [segments, a_gpt])
def test_the_peak_trackers_account_is_the_same_in_either_order(build):
    """That of checkpointing, too, which PyTorch's counter makes larger."""
    readings, totals = [], []
    for order in ("tracker", "flops tracker", "tracker flops"):
        model, x, run = build()
        run()
        tracker, flops = PeakTracker(x, model), FlopCounter()
        with ExitStack() as stack:
            for name in order.split():
                stack.enter_context({"tracker": tracker, "flops": flops}[name])
            run()
        readings.append((tracker.peak, tracker.live, tracker.timeline))
        totals.append(flops.total)
    assert readings[0] == readings[1] == readings[2]
    with FlopCounter() as flops:
        run()
    assert totals == [0, flops.total, flops.total]
    assert flops.total > 0
    if build is segments:
        new = model[0].weight.nbytes + model[0].bias.nbytes
        assert tracker.peak - tracker.start == 8 * x.nbytes + new + 8
