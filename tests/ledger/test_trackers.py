"""The reference itself: the peak tracker beside two other counts."""

import pytest
import torch
from ledger_helpers import MAKE, next_token
from torch import nn
from torch.profiler import ProfilerActivity, profile

from membudget.ledger import Transformer, predict
from membudget.measuring import trace_step

SHAPES = {
    "gpt": Transformer(40, 16, 2, 4),
    "gpt, not fused": Transformer(13, 16, 1, 4, fused=False, tied=True),
    "llama": Transformer(40, 16, 2, 4, kv_heads=2, family="llama"),
    "llama, not fused": Transformer(
        13, 16, 1, 4, family="llama", fused=False, tied=True
    ),
}
BATCH, TOKENS = 3, 24


def step_of(name, optimizer):
    """A model after its first step, which made the optimizer's states."""
    torch.manual_seed(0)
    model = SHAPES[name].build("cpu")
    stepper = MAKE[optimizer](model.parameters(), False)
    x = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    y = x.clone()

    def step():
        next_token(model, x, y).backward()
        if stepper is not None:
            stepper.step()
        model.zero_grad()

    step()
    return model, stepper, (x, y), step


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("optimizer", [None, "sgd", "momentum", "adam"])
def test_pytorchs_tracker_finds_what_was_predicted(name, optimizer):
    """MemTracker, which PyTorch's own estimates are made with."""
    path = "torch.distributed._tools.mem_tracker"
    theirs = pytest.importorskip(path, reason=f"no {path} here").MemTracker()
    model, stepper, batch, step = step_of(name, optimizer)
    theirs.track_external(model, *batch)
    if stepper is not None:
        theirs.track_external(stepper)
    with theirs:
        step()
    found = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    predicted = predict(SHAPES[name], BATCH, TOKENS, optimizer=optimizer)
    assert predicted.peak == found


def profiled(step):
    """Peak and end of every allocation of the CPU's allocator."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most, live


@pytest.mark.parametrize("name", SHAPES)
def test_the_profiler_finds_what_was_predicted(name):
    """Every allocation, those inside of operators too.

    Without fused attention it sees 8 bytes more: the number that
    ``masked_fill`` writes becomes a tensor.
    """
    shape = SHAPES[name]
    model, _, batch, step = step_of(name, None)
    most, live = profiled(step)
    predicted = predict(shape, BATCH, TOKENS, optimizer=None)
    assert live == 0
    assert most - (predicted.peak - predicted.start) in (
        (0,) if shape.fused else (0, 8)
    )
    assert predicted.peak == trace_step(model, next_token, *batch).peak


@pytest.mark.parametrize("tied", [False, True])
def test_the_profiler_where_gradients_are_added_up(tied):
    """With one short sequence and a large vocabulary the peak is the sum of
    the table's two gradients, if it is tied."""
    shape = Transformer(2000, 32, 1, 4, tied=tied)
    predicted = predict(shape, 1, 8, optimizer=None)
    assert ("sum of gradients" in predicted.at_peak.row) == tied
    model = shape.build("cpu")
    x = torch.zeros(1, 8, dtype=torch.long)

    def step():
        next_token(model, x, x).backward()
        model.zero_grad()

    step()
    most, _ = profiled(step)
    assert most == predicted.peak - predicted.start


class Branches(nn.Module):
    """What a layer makes, read several times."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.scale = nn.Parameter(torch.ones(64))
        self.layers = nn.ModuleList(
            nn.Linear(64, 4, bias=False) for _ in range(8)
        )

    def forward(self, x):
        return self.read(self, x * self.scale) * 1


def total(model, x):
    return model(x).sum()


READS = {
    "eight heads": lambda m, x: sum(f(x).square().sum() for f in m.layers),
    "slices": lambda m, x: torch.cat([x[:, :32], x[:, 32:]], 1) + x[:, :1],
    "twice the same": lambda m, x: x * x + x,
    "held elsewhere": lambda m, x: x + x.relu() + x,
    "a view first": lambda m, x: x.t().tanh().t() + x.sin(),
    "sums of its own": lambda m, x: (
        sum(torch.std_mean(x, 1, keepdim=True)) * x
    ),
    "its gradient more": lambda m, x: _GradientMore.apply(x) * x,
}


class _GradientMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + ctx.saved_tensors[0]


@pytest.mark.parametrize("name", READS)
def test_gradients_are_added_up_in_place(name):
    """As the profiler finds it, where no dispatch mode is on."""
    model, x = Branches(READS[name]), torch.rand(512, 64)

    def step():
        total(model, x).backward()
        model.zero_grad()

    step()
    most, _ = profiled(step)
    tracker = trace_step(model, total, x)
    assert tracker.peak - tracker.start == most
    budget = tracker.peak
    assert trace_step(model, total, x, budget=budget).peak == budget
    with pytest.raises(torch.OutOfMemoryError, match=r"^Tried to allocate"):
        trace_step(model, total, x, budget=budget - 1)


def test_a_sparse_gradient_is_kept_without_a_copy():
    bag = nn.EmbeddingBag(1000, 64, sparse=True)
    x = torch.randint(0, 1000, (256, 8))
    tracker = trace_step(bag, total, x)
    values, places = 256 * 8 * 64 * 4, 256 * 8 * 8
    rest = places + 2048 + 4096 + 8  # of the bag itself, and the loss
    assert values < tracker.peak - tracker.start <= values + places + rest
