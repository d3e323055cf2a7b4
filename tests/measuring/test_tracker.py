"""The peak tracker, against hand counts and PyTorch's own tracker."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.measuring import PeakTracker
from membudget.models import GPT, mlp

torch.set_num_threads(1)


def chain(depth, width, bias=True):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers)


def gradients_of(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


# Hand counts -------------------------------------------------------------


def test_every_moment_of_a_short_program():
    with PeakTracker() as tracker:
        a = torch.ones(8)
        b = a + 1
        view = b.view(2, 4)[0]
        b.add_(1)
        del a
        tracker.mark("later")
        c = torch.zeros(3, dtype=torch.float64)
        del b
        d = c.half()
        del view
        e = d.clone()
    assert tracker.timeline == [
        32,  # a
        64,  # a, b
        64,  # the first view
        64,  # the second
        64,  # in place
        32 + 24,  # b, c
        32 + 24 + 6,  # the view keeps all of b
        24 + 6 + 6,
    ]
    assert tracker.peak == 64
    assert tracker.live == 36
    assert tracker.marks == [(5, "later")]
    assert [x.nbytes for x in (c, d, e)] == [24, 6, 6]


def test_marks_point_at_the_next_operator():
    with PeakTracker() as tracker:
        tracker.mark("one")
        tracker.mark("one again")
        a = torch.ones(2)
        tracker.mark("two")
        a + 1
        tracker.mark("end")
    assert tracker.marks == [
        (0, "one"),
        (0, "one again"),
        (1, "two"),
        (2, "end"),
    ]


def test_existing_storages_count_once():
    base = torch.zeros(100)
    tracker = PeakTracker(base, base[:10], base.view(10, 10), base)
    assert tracker.start == tracker.live == tracker.peak == 400
    with tracker:
        base[5:].add_(1)
        base.t()
    assert tracker.timeline == [400] * len(tracker.timeline)
    assert tracker.peak == 400


def test_existing_tensors_leave_the_account_when_they_are_freed():
    base = torch.zeros(100)
    with PeakTracker(base) as tracker:
        del base
        torch.ones(1)
    assert tracker.start == 400
    assert tracker.timeline == [4]
    assert tracker.peak == 400


def test_tensors_from_outside_are_not_counted():
    outside, moved = torch.zeros(1000), torch.zeros(4)
    with PeakTracker() as tracker:
        part = outside[10:20]
        outside.add_(1)
        part.mul_(2)
        torch.add(moved, 1, out=moved)
        both = part + 1
    assert tracker.peak == both.nbytes == 40
    assert tracker.timeline == [0] * (len(tracker.timeline) - 1) + [40]


def test_outputs_of_one_operator_count_together():
    x = torch.randn(6)
    with PeakTracker() as tracker:
        values, indices = x.sort()
    assert tracker.timeline == [24 + 48]
    assert values.nbytes + indices.nbytes == 72


def test_results_in_lists_are_found():
    x = [torch.randn(3), torch.randn(5)]
    with PeakTracker() as tracker:
        y = torch._foreach_add(x, 1)
    assert tracker.timeline == [32]
    assert len(y) == 2


def test_tensors_made_of_python_numbers_are_counted():
    makers = [
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.as_tensor([1.0, 2.0]),
        lambda: torch.zeros(1).new_tensor([1.0, 2.0]),
        lambda: torch.Tensor([1.0, 2.0]),
        lambda: torch.scalar_tensor(1.0).expand(2).clone(),
    ]
    for make in makers:
        with PeakTracker() as tracker:
            x = make()
        assert tracker.live == 8
        del x
        assert tracker.live == 0


def test_bytes_count_by_storage_and_dtype():
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        with PeakTracker() as tracker:
            x = torch.zeros(10, dtype=dtype)
            x.expand(7, 10)
        assert tracker.peak == 10 * dtype.itemsize


def test_a_freed_address_is_counted_again():
    with PeakTracker() as tracker:
        for _ in range(50):
            x = torch.ones(16)
            del x
    assert tracker.timeline == [64] * 50
    assert tracker.live == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4, 9, 16])
def test_a_layer_chain_holds_one_unit_more_than_its_depth(depth, bias):
    """Setting S: inputs, parameters and gradients are not counted.

    The peak is in the backward of the last Linear: the outputs of the other
    layers, its own output's and its input's gradient, the new gradient of
    its parameters, the loss and the loss's gradient. With one layer no
    input gradient is needed, and the peak is a moment earlier.
    """
    batch, width = 64, 16
    model, x = chain(depth, width, bias), torch.randn(batch, width)
    model(x).sum().backward()
    existing = [x, *model.parameters(), *gradients_of(model)]
    with PeakTracker(*existing) as tracker:
        model(x).sum().backward()
    unit = 4 * batch * width
    new = 4 * width * (width + bias) if depth > 1 else 0
    assert tracker.peak - tracker.start == (depth + 1) * unit + new + 8
    assert tracker.live == tracker.start


def test_gradients_appear_in_the_first_backward_and_stay():
    model, x = chain(3, 8), torch.randn(2, 8)
    size = sum(p.nbytes for p in model.parameters())
    with PeakTracker(x, *model.parameters()) as tracker:
        model(x).sum().backward()
        once = tracker.live
        model(x).sum().backward()
        twice = tracker.live
        model.zero_grad()
    assert once - tracker.start == twice - tracker.start == size
    assert tracker.live == tracker.start


def test_adam_holds_two_moments_and_a_step_for_each_parameter():
    model = chain(3, 8)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    weights = [p.nbytes for p in model.parameters()]
    with PeakTracker(*model.parameters(), *gradients_of(model)) as tracker:
        optimizer.step()
    held = 2 * sum(weights) + 4 * len(weights)
    assert tracker.live - tracker.start == held
    assert tracker.peak > tracker.live
    optimizer.state.clear()
    assert tracker.live == tracker.start


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(8, 8, False), nn.Linear(8, 8, False))
    model[1].weight = model[0].weight
    tracker = PeakTracker(model[0].weight, model[1].weight)
    assert tracker.start == 8 * 8 * 4


def test_peak_is_the_highest_moment_and_everything_returns():
    model, x = mlp(8, 16, 3), torch.randn(32, 8)
    model(x).sum().backward()
    existing = [x, *model.parameters(), *gradients_of(model)]
    with PeakTracker(*existing) as tracker:
        tracker.mark("forward")
        loss = model(x).square().mean()
        tracker.mark("backward")
        loss.backward()
        del loss
    assert tracker.peak == max(tracker.timeline)
    assert min(tracker.timeline) >= tracker.start
    assert tracker.live == tracker.start
    (forward, _), (backward, _) = tracker.marks
    assert forward == 0 < backward < len(tracker.timeline)
    assert tracker.timeline.index(tracker.peak) >= backward


def test_a_graph_that_is_dropped_frees_what_it_saved():
    model, x = chain(4, 8), torch.randn(16, 8)
    with PeakTracker(x, *model.parameters()) as tracker:
        loss = model(x).sum()
        held = tracker.live - tracker.start
        del loss
    assert held == 4 * (16 * 8 * 4) + 4
    assert tracker.live == tracker.start


def test_what_is_freed_after_the_block_is_still_subtracted():
    with PeakTracker() as tracker:
        x = torch.ones(8)
    assert tracker.live == 32
    del x
    assert tracker.live == 0


def test_the_same_on_meta_tensors():
    def run(device):
        with torch.device(device):
            model, x = chain(3, 8), torch.zeros(4, 8)
        with PeakTracker(x, *model.parameters()) as tracker:
            model(x).sum().backward()
        return tracker.timeline

    assert run("cpu") == run("meta")


# PyTorch's own tracker ---------------------------------------------------

BATCH = 6


def plain():
    model = mlp(8, 16, 4)
    x = torch.randn(BATCH, 8)
    return model, None, [x], lambda _: model(x).sum().backward()


def classified():
    model = mlp(8, 16, 4)
    x, y = torch.randn(BATCH, 8), torch.randint(10, (BATCH,))

    def run(after_pass):
        F.cross_entropy(model(x), y).backward()

    return model, None, [x, y], run


def views():
    model = nn.Linear(8, 24)
    x = torch.randn(BATCH, 4, 8)

    def run(after_pass):
        a, b, c = model(x).chunk(3, dim=-1)
        mixed = a.transpose(1, 2) @ b.reshape(BATCH, 4, 8)
        mixed = mixed[:, 1:].unsqueeze(0).expand(2, -1, -1, -1)
        (mixed.sum() + c.narrow(1, 0, 2).square().sum()).backward()

    return model, None, [x], run


def in_place():
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)
    )
    x = torch.randn(BATCH, 8)

    def run(after_pass):
        y = model(x)
        y.mul_(2).add_(1)
        y[0].zero_()
        y.sum().backward()

    return model, None, [x], run


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model = Tied()
    x = torch.randint(11, (BATCH, 5))
    return model, None, [x], lambda _: model(x).logsumexp(-1).sum().backward()


def accumulated():
    model = mlp(8, 16, 3)
    x = torch.randn(BATCH, 8)

    def run(after_pass):
        for part in x.split(4):
            (model(part).square().mean() / 2).backward()
            after_pass()

    return model, None, [x], run


def adam():
    model = mlp(8, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    x = torch.randn(BATCH, 8)

    def run(after_pass):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_pass()

    return model, optimizer, [x], run


def momentum():
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, foreach=True
    )
    x = torch.randn(BATCH, 8)

    def run(after_pass):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_pass()

    return model, optimizer, [x], run


def autocast():
    model = mlp(8, 16, 3)
    x = torch.randn(BATCH, 8)

    def run(after_pass):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    return model, None, [x], run


def convolution():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )
    x = torch.randn(BATCH, 1, 8, 8)
    return model, None, [x], lambda _: model(x).square().sum().backward()


def gpt():
    model = GPT(vocabulary=13, context=8, width=8, depth=2, heads=2)
    x = torch.randint(13, (BATCH, 8))

    def run(after_pass):
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    return model, None, [x], run


def accumulated_gpt_with_adam():
    model = GPT(vocabulary=13, context=8, width=8, depth=1, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randint(13, (BATCH, 8))

    def run(after_pass):
        for part in x.split(2):
            logits = model(part).flatten(0, 1)
            F.cross_entropy(logits, part.flatten()).backward()
            after_pass()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, [x], run


@pytest.mark.parametrize(
    "setting",
    [
        plain,
        classified,
        views,
        in_place,
        tied,
        accumulated,
        adam,
        momentum,
        autocast,
        convolution,
        gpt,
        accumulated_gpt_with_adam,
    ],
)
def test_the_same_bytes_as_pytorchs_tracker(setting):
    name = "torch.distributed._tools.mem_tracker"
    theirs = pytest.importorskip(name, reason=f"no {name} here").MemTracker()

    torch.manual_seed(0)
    model, optimizer, batch, run = setting()
    existing = [*batch, *model.parameters(), *model.buffers()]
    with PeakTracker(*existing) as ours:
        run(lambda: None)
    peak, after = ours.peak, ours.live
    start = ours.start

    torch.manual_seed(0)
    model, optimizer, batch, run = setting()
    theirs.track_external(model, *batch)
    if optimizer is not None:
        theirs.track_external(optimizer)
    device = torch.device("cpu")
    assert theirs.get_tracker_snapshot("current")[device]["Total"] == start
    with theirs:
        run(theirs.reset_mod_stats)  # it wants that between two passes
    assert theirs.get_tracker_snapshot("peak")[device]["Total"] == peak
    assert theirs.get_tracker_snapshot("current")[device]["Total"] == after
    assert start < after or optimizer is not None
    assert after < peak
