"""The peak tracker, against hand counts, MemTracker and the profiler."""

import gc
import weakref
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring_helpers import KEPT, REENTRANT, WIDTH, chain, hooked
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from membudget.measuring import (
    CATEGORIES,
    OUTSIDE,
    PHASES,
    Operator,
    PeakTracker,
    SavedBytes,
    dry_run,
    trace_step,
)
from membudget.models import GPT, mlp
from tests.soak import examples
from tests.versions import DIFFERENT, here


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


def test_existing_storages_count_once_and_until_they_are_freed():
    base = torch.zeros(100)
    tracker = PeakTracker(base, base[:10], base.view(10, 10), base)
    assert tracker.start == tracker.live == tracker.peak == 400
    with tracker:
        base[5:].add_(1)
        base.t()
        assert set(tracker.timeline) == {400}
        del base
        torch.ones(1)
    assert tracker.timeline[-1] == 4
    assert (tracker.start, tracker.peak) == (400, 400)


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


@pytest.mark.parametrize(
    "make",
    [torch.tensor, torch.Tensor, lambda x: torch.zeros(1).new_tensor(x)],
)
def test_tensors_made_of_python_numbers_are_counted(make):
    with PeakTracker() as tracker:
        x = make([1.0, 2.0])
    assert tracker.live == 8
    del x
    assert tracker.live == 0


# The account adds up -----------------------------------------------------


def check_account(tracker):
    """Everything the tracker says is one account, told in several ways."""
    timeline, allocations = tracker.timeline, tracker.allocations
    assert len(tracker.operators) == len(timeline)
    assert {o.phase for o in tracker.operators} <= set(PHASES)
    assert {a.category for a in allocations} <= set(CATEGORIES)
    for a in allocations:
        refused = a.birth == len(timeline) or a.birth == a.death
        if a.birth >= 0 and not refused:
            assert a.operator == tracker.operators[a.birth]

    timelines = tracker.timelines()
    for moment in range(-1, len(timeline)):
        alive = [
            a
            for a in allocations
            if a.birth <= moment and (a.death is None or a.death > moment)
        ]
        found = tracker.at(moment)
        assert sorted(map(id, found)) == sorted(map(id, alive))
        sizes = [a.bytes for a in found]
        assert sizes == sorted(sizes, reverse=True)
        split = tracker.split(moment)
        if moment >= 0:
            assert sum(sizes) == sum(split.values()) == timeline[moment]
            assert split == {c: v[moment] for c, v in timelines.items()}

    assert tracker.peak == max([tracker.start, *timeline])
    peak = tracker.peak_moment
    assert tracker.peak == ([*timeline, tracker.start][peak])
    assert max([-1, *timeline[: max(peak, 0)]]) < tracker.peak
    assert tracker.at_peak() == tracker.at(peak)
    assert tracker.split() == tracker.split(peak)
    if peak >= 0:
        assert sum(tracker.split().values()) == tracker.peak

    alive, ends, last = {}, {}, -1
    for kind, number, size in tracker.events:
        a = allocations[number]
        moment = {"allocate": a.birth, "free": a.death}[kind]
        assert size == a.bytes
        assert last <= moment
        if kind == "allocate":
            assert number not in alive
            alive[number] = size
        else:
            del alive[number]
        last, ends[moment] = moment, sum(alive.values())
    live = ends.get(-1, 0)
    assert live == tracker.start
    for moment, then in enumerate(timeline):
        live = ends.get(moment, live)
        assert live == then
    live = ends.get(len(timeline), live)
    assert live == tracker.live
    assert alive == {
        i: a.bytes for i, a in enumerate(allocations) if a.death is None
    }


def test_the_account_of_an_empty_block():
    for existing in ([], [mlp(4, 4, 2)]):
        with PeakTracker(*existing) as tracker:
            pass
        check_account(tracker)
        assert tracker.peak_moment == -1
        assert tracker.timelines() == {c: [] for c in CATEGORIES}
        assert sum(tracker.split().values()) == tracker.start
        for moment in (-2, 0):
            message = f"no operator {moment}: use -1 … -1$"
            with pytest.raises(IndexError, match=message):
                tracker.at(moment)


def do(step, held, i, weight):
    """One step of a program on the tensors held."""
    t = held[i % len(held)] if held else torch.ones(6, 6)
    if step == "new":
        held.append(torch.ones(6, 6))
    elif step == "drop" and held:
        held.pop(i % len(held))
    elif step == "copy":
        held.append(t * 2)
    elif step == "view":
        held.append(t[:3])
    elif step == "write" and not t.requires_grad:
        t.add_(1)
    elif step == "train" and t.numel() == 36:
        held.append(t.detach().reshape(6, 6) @ weight)
    elif step == "backward" and t.requires_grad:
        t.sum().backward(retain_graph=True)
    elif step == "clear":
        weight.grad = None
    elif step == "resize":
        held.append(torch.ones(i).resize_(2 * i))
    elif step == "storage":
        held.append(torch.ones(i + 1))
        held[-1].untyped_storage().resize_(0)
        held[-1].untyped_storage().resize_(4 * i + 4)
    elif step == "set":
        held.append(torch.ones(2).set_(t.detach()))


STEPS = "new drop copy view write train backward clear resize storage set"
PROGRAM = st.lists(
    st.tuples(st.sampled_from(STEPS.split()), st.integers(0, 7)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=examples(60))
@given(PROGRAM)
def test_any_program_adds_up(program):
    weight, held = nn.Parameter(torch.ones(6, 6)), [torch.ones(6, 6)]
    with PeakTracker(weight, *held) as tracker:
        for step, i in program:
            do(step, held, i, weight)
    check_account(tracker)
    tensors = [*held, weight, *gradients_of(nn.ParameterList([weight]))]
    storages = {t.untyped_storage() for t in tensors}
    reachable = sum(s.nbytes() for s in storages)
    graphs = any(t.requires_grad for t in held)
    assert tracker.live >= reachable if graphs else tracker.live == reachable
    del tensors, storages
    held.clear()
    assert tracker.live == sum(
        t.nbytes for t in (weight, weight.grad) if t is not None
    )


# PyTorch's own tracker and the profiler ----------------------------------

BATCH = 6

# A setting yields what exists before it, and then between two passes.


def begun(setting):
    """What exists before it, and what is left to run."""
    torch.manual_seed(0)
    passes = setting()
    return next(passes), passes


def run(passes, between=lambda: None):
    for _ in passes:
        between()


def views():
    model = nn.Linear(8, 24)
    x = torch.randn(BATCH, 4, 8)
    yield model, x
    a, b, c = model(x).chunk(3, dim=-1)
    mixed = a.transpose(1, 2) @ b.reshape(BATCH, 4, 8)
    mixed = mixed[:, 1:].unsqueeze(0).expand(2, -1, -1, -1)
    (mixed.sum() + c.narrow(1, 0, 2).square().sum()).backward()


def in_place():
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8))
    x = torch.randn(BATCH, 8)
    yield model, x
    y = model(x)
    y.mul_(2).add_(1)
    y[0].zero_()
    y.sum().backward()


def accumulated_gpt_with_adam():
    model = GPT(vocabulary=13, context=8, width=8, depth=1, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randint(13, (BATCH, 8))
    yield model, optimizer, x
    for part in x.split(2):
        logits = model(part).flatten(0, 1)
        F.cross_entropy(logits, part.flatten()).backward()
        yield
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def three_segments():
    layers = chain(8, width=16)
    return nn.Sequential(layers[:4], layers[4:10], layers[10:])


def checkpointed(segments, x, options):
    for segment in segments:
        x = checkpoint(segment, x, **options)
    return x


def checkpointed_segments():
    model, x = three_segments(), torch.randn(BATCH, 16)
    yield model, x
    checkpointed(model, x, KEPT).sum().backward()


def checkpointed_reentrant():
    model, x = three_segments(), torch.randn(BATCH, 16, requires_grad=True)
    yield model, x
    checkpointed(model, x, REENTRANT).sum().backward()


def checkpointed_autocast():
    model, x = three_segments(), torch.randn(BATCH, 16)
    yield model, x
    with torch.autocast("cpu", torch.bfloat16):
        loss = checkpointed(model, x, KEPT).float().square().mean()
    loss.backward()


def images():
    """The convolution's own scratch is smaller than the classifier."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(64, 4096),
        nn.Tanh(),
        nn.Tanh(),
        nn.Linear(4096, 10),
    )
    x = torch.randn(BATCH, 1, 8, 8)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    yield model, x
    model(x).square().sum().backward()


def storages_resized():
    """Buffers emptied, filled when they are needed, and emptied again."""
    model, x = nn.Linear(16, 16), torch.randn(BATCH, 16)
    yield model, x
    h, shards = model(x), []
    for size in (256, 512, 1024):
        shards.append(torch.empty(size))
        shards[-1].untyped_storage().resize_(0)
    for shard in shards:
        shard.untyped_storage().resize_(shard.nbytes)
        h = h + shard.fill_(2)[:16]  # saves nothing for backward
        shard.untyped_storage().resize_(0)
    h.square().mean().backward()


def tensors_resized():
    model, x = nn.Linear(16, 16), torch.randn(BATCH, 16)
    yield model, x
    a, b, c = torch.ones(100), torch.empty(0), torch.empty(0)
    b.resize_(700).fill_(3)
    a.set_(b)
    del b
    torch.mul(a, 2, out=c)
    c.resize_(3)
    (model(x) * c.sum()).square().mean().backward()


def two_steps(kind, **options):
    def setting():
        model = mlp(8, 16, 3)
        optimizer = kind(model.parameters(), **options)
        x = torch.randn(BATCH, 8)
        yield model, optimizer, x
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    setting.__name__ = kind.__name__
    return setting


ADAM = two_steps(torch.optim.Adam, foreach=False)
SETTINGS = [
    views,
    in_place,
    images,
    accumulated_gpt_with_adam,
    checkpointed_segments,
    checkpointed_reentrant,
    checkpointed_autocast,
    storages_resized,
    tensors_resized,
    ADAM,
    two_steps(torch.optim.SGD, momentum=0.9, foreach=True),
    two_steps(torch.optim.AdamW, fused=True),
    two_steps(torch.optim.Adagrad, foreach=False),
]
# What an operator allocates and frees within itself, which the profiler sees:
# a number that a kernel of these optimizers gets becomes a tensor (8 bytes)
# and is cast (4).
SCRATCH = dict.fromkeys(
    ("accumulated_gpt_with_adam", "Adam", "Adagrad"), 8 + 4
)


def by_name(setting):
    return setting.__name__


@pytest.mark.few(5)
@pytest.mark.parametrize("setting", SETTINGS, ids=by_name)
def test_the_same_bytes_as_pytorchs_tracker(setting):
    name = "torch.distributed._tools.mem_tracker"
    theirs = pytest.importorskip(name, reason=f"no {name} here").MemTracker()
    existing, passes = begun(setting)
    with PeakTracker(*existing) as ours:
        run(passes)
    start, peak, after = ours.start, ours.peak, ours.live
    end = ours.split(len(ours.timeline) - 1)
    check_account(ours)

    existing, passes = begun(setting)
    theirs.track_external(*existing)
    device = torch.device("cpu")
    assert theirs.get_tracker_snapshot("current")[device]["Total"] == start
    with theirs:
        run(passes, theirs.reset_mod_stats)  # it wants that
    assert theirs.get_tracker_snapshot("peak")[device]["Total"] == peak
    found = theirs.get_tracker_snapshot("current")[device]
    assert found["Total"] == after
    assert start <= after < peak
    found = {key: value for key, value in found.items() if value}
    held = found.get("Parameter", 0) + found.get("Buffer", 0)
    assert end["parameters"] == held
    assert end["gradients"] == found.get("Gradient", 0)
    assert end["optimizer"] == found.get("Optstate", 0)


@pytest.mark.few(5)
@pytest.mark.parametrize("setting", SETTINGS, ids=by_name)
def test_the_same_bytes_as_the_profiler(setting):
    existing, passes = begun(setting)
    with PeakTracker(*existing) as ours:
        run(passes)
    peak, after = ours.peak - ours.start, ours.live - ours.start

    existing, passes = begun(setting)
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True) as profiler:
        run(passes)
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    assert live == after
    assert 0 <= most - peak <= SCRATCH.get(setting.__name__, 0)


# Categories --------------------------------------------------------------

ROWS = 5
UNIT = 4 * ROWS * WIDTH
WEIGHT, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH
LAYER = WEIGHT + BIAS  # Tanh has none: autograd saves what it returns


def rows(**options):
    return torch.randn(ROWS, WIDTH, **options)


def split_at(tracker, label):
    """What was alive when the marked part began, without the zeros."""
    (moment,) = (i for i, name in tracker.marks if name == label)
    return nonzero(tracker.split(moment - 1))


def nonzero(split):
    return {category: size for category, size in split.items() if size}


def at_end(tracker):
    return nonzero(tracker.split(len(tracker.timeline) - 1))


def test_a_training_step_category_by_category():
    model, x = chain(3, nn.Tanh), rows()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with PeakTracker(model, optimizer, x) as tracker:
        tracker.mark("forward")
        loss = model(x).sum()
        tracker.mark("backward")
        loss.backward()
        del loss
        tracker.mark("step")
        optimizer.step()
        tracker.mark("zero")
        optimizer.zero_grad()
        tracker.mark("end")
    existing = {"parameters": 3 * LAYER, "inputs": UNIT}
    trained = existing | {"gradients": 3 * LAYER}
    states = {"optimizer": 2 * 3 * LAYER + 6 * 4}
    assert nonzero(tracker.split(-1)) == existing
    held = existing | {"activations": 3 * UNIT + 4}
    assert split_at(tracker, "backward") == held
    # The last operator still holds the loss and its gradient.
    assert split_at(tracker, "step") == trained | {"activations": 8}
    assert split_at(tracker, "zero") == trained | states
    # ``zero_grad`` ends with an operator of its own.
    assert at_end(tracker) == existing | states
    assert tracker.live == tracker.start + states["optimizer"]
    check_account(tracker)


def test_a_second_gradient_is_temporary_until_it_is_added():
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), rows()
    with PeakTracker(model, x) as tracker:
        model(x).sum().backward()
        tracker.mark("again")
        model(x).sum().backward()
    added = [o.name for o in tracker.operators].index("aten.add_")
    split = tracker.split(added)
    assert split["gradients"] == split["temporaries"] == WEIGHT
    assert split_at(tracker, "again")["gradients"] == WEIGHT
    assert at_end(tracker)["gradients"] == WEIGHT
    assert tracker.live == tracker.start + WEIGHT


def test_gradients_assigned_by_hand():
    """No hook sees them; the tracker looks at marks, steps and the end."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with PeakTracker(model) as tracker:
        for look in (lambda: tracker.mark("look"), optimizer.step):
            model.weight.grad = torch.ones(WIDTH, WIDTH)
            look()
            model.weight.grad = None
        model.weight.grad = torch.ones(WIDTH, WIDTH)
    made = [a for a in tracker.allocations if a.bytes == WEIGHT]
    assert [a.category for a in made] == ["parameters"] + 3 * ["gradients"]
    existing = PeakTracker(model.weight.grad, model.weight)
    assert nonzero(existing.split()) == {
        "parameters": WEIGHT,
        "gradients": WEIGHT,
    }


def test_a_gradient_that_a_hook_uses_up_is_a_gradient():
    """A step for each parameter inside the backward pass."""
    model, x = chain(2, nn.Tanh), rows()
    steps = {}

    def use(p):
        steps[p].step()
        p.grad = None

    for p in model.parameters():
        steps[p] = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        p.register_post_accumulate_grad_hook(use)
    before = [dict(p._post_accumulate_grad_hooks) for p in steps]
    with PeakTracker(model, x) as tracker:
        model(x).sum().backward()
    after = [dict(p._post_accumulate_grad_hooks) for p in steps]
    assert before == after
    made = [a for a in tracker.allocations if a.category == "gradients"]
    assert sum(a.bytes for a in made) == 2 * LAYER
    assert all(a.death is not None for a in made)
    assert max(tracker.timelines()["gradients"]) <= LAYER
    assert at_end(tracker)["optimizer"] == 2 * LAYER
    phases = {o.phase for o in tracker.operators}
    assert phases == {"forward", "backward", "optimizer"}
    states = [a for a in tracker.allocations if a.category == "optimizer"]
    assert {a.operator.phase for a in states} == {"optimizer"}
    check_account(tracker)


class Inside(torch.optim.Optimizer):
    """Another optimizer's step, and then its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.other = torch.optim.SGD(self.param_groups[0]["params"], 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        self.other.step()
        for p in self.param_groups[0]["params"]:
            p.clamp_(-1, 1)


def test_a_step_goes_on_after_one_inside_it():
    p = nn.Parameter(torch.ones(4))
    optimizer = Inside([p])
    p.grad = torch.ones(4)
    with PeakTracker(p) as tracker:
        optimizer.step()
        p.detach().add(1)
    phases = [o.phase for o in tracker.operators if o.name in PLAIN]
    assert phases == ["optimizer", "optimizer", "forward"]


PLAIN = {"aten.add_", "aten.clamp_", "aten.add"}


def test_optimizer_states_from_before_the_block():
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model.weight.grad = torch.ones(WIDTH, WIDTH)
    optimizer.step()
    states = 2 * WEIGHT + 4
    for existing, known in (([model, optimizer], states), ([model], 0)):
        with PeakTracker(*existing) as tracker:
            optimizer.step()
        assert tracker.start == 2 * WEIGHT + known
        assert at_end(tracker).get("optimizer", 0) == known


def test_lbfgs_calls_the_model_inside_its_step():
    model, x = chain(1, nn.Tanh), rows()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with PeakTracker(model, x) as tracker:
        optimizer.step(closure)
    by_phase = {o.phase: o.module for o in tracker.operators if o.module}
    assert by_phase == {"forward": "1", "backward": "0"}
    assert at_end(tracker)["gradients"] == LAYER
    held = {
        t.untyped_storage()
        for state in optimizer.state.values()
        for value in state.values()
        for t in (value if isinstance(value, list) else [value])
        if torch.is_tensor(t)
    }
    assert at_end(tracker)["optimizer"] == sum(s.nbytes() for s in held) > 0


def test_inputs_drawn_in_the_block():
    """What the outermost module is called with, until it is computed on."""
    model = chain(2, nn.Tanh)
    with PeakTracker(model) as tracker:
        x = rows()
        y = rows()
        tracker.mark("forward")
        loss = (model(x) - y).square().sum()
        tracker.mark("backward")
        loss.backward()
    held = split_at(tracker, "backward")
    # Two outputs of Tanh, the difference, y and the loss.
    assert held["activations"] == 4 * UNIT + 4
    assert held["inputs"] == UNIT
    assert split_at(tracker, "forward")["inputs"] == UNIT
    assert [a.operator.name for a in tracker.allocations].count("aten.randn")
    del loss
    check_account(tracker)


def test_an_output_of_a_model_is_no_input_of_the_next():
    first, second, x = chain(1, nn.Tanh), chain(1, nn.Tanh), rows()
    with PeakTracker(first, second, x) as tracker:
        loss = second(first(x)).sum()
        tracker.mark("backward")
        loss.backward()
    assert split_at(tracker, "backward") == {
        "parameters": 2 * LAYER,
        "inputs": UNIT,
        "activations": 2 * UNIT + 4,
    }


def test_losses_kept_in_a_list_keep_their_graphs():
    model, x = chain(3, nn.Tanh), rows()
    with PeakTracker(model, x) as tracker:
        kept = [model(x).sum() for _ in range(4)]
    assert at_end(tracker)["activations"] == 4 * (3 * UNIT + 4)
    assert len({*tracker.allocations}) == 7 + 4 * 7  # none equals another
    kept[:] = [loss.item() for loss in kept]
    assert tracker.live == tracker.start


def test_without_a_graph_only_what_is_held_stays():
    model, x = chain(4, nn.Tanh), rows()
    with PeakTracker(model, x) as tracker, torch.no_grad():
        y = model(x) + x
    # One layer's input and output are there at a time.
    assert tracker.peak == tracker.start + 2 * UNIT
    assert at_end(tracker)["activations"] == y.nbytes == UNIT
    assert tracker.split()["temporaries"] == 2 * UNIT


def test_a_graph_of_the_backward_pass_is_kept_for_the_next():
    """With ``create_graph``: no forward pass runs again."""
    model, x = chain(2, nn.Tanh), rows(requires_grad=True)
    with PeakTracker(model, x) as tracker:
        loss = model(x).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
    assert {o.phase for o in tracker.operators} == {"forward", "backward"}
    check_account(tracker)


class Own(torch.autograd.Function):
    """Checkpointing as a reader would write it."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


CHECKPOINTS = {
    "reentrant": lambda run, x: checkpoint(run, x, **REENTRANT),
    "not reentrant": lambda run, x: checkpoint(run, x, **KEPT),
    "own": Own.apply,
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_what_is_recomputed_are_activations(kind):
    depth = 4
    model, x = chain(2 * depth, nn.Tanh), rows(requires_grad=True)
    with PeakTracker(model, x) as tracker:
        h = x
        for half in (model[: 2 * depth], model[2 * depth :]):
            h = CHECKPOINTS[kind](half, h)
        loss = h.sum()
        del h
        tracker.mark("backward")
        loss.backward()
        del loss
    # Between the halves.
    assert split_at(tracker, "backward")["activations"] == UNIT + 4
    again = [
        (a.operator.name, a.category)
        for a in tracker.allocations
        if a.operator.phase == "recomputation"
    ]
    # A checkpoint that is not reentrant stops early: after the last tensor
    # that backward needs, which is the last Tanh's result.
    assert again.count(("aten.tanh", "activations")) == 2 * depth
    assert again.count(("aten.addmm", "temporaries")) == 2 * depth
    names = [name for name, _ in again]
    assert names.count("aten.tanh") == names.count("aten.addmm") == 2 * depth
    most = max(tracker.timelines()["activations"])
    assert most == UNIT + depth * UNIT + 8
    check_account(tracker)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_inside_checkpoints():
    """Reentrant ones recompute without a graph, too: still a recomputation."""
    model, x = chain(4, nn.Tanh), rows(requires_grad=True)

    def half(i, x):
        for layer in (model[i : i + 2], model[i + 2 : i + 4]):
            x = checkpoint(layer, x, **REENTRANT)
        return x

    with PeakTracker(model, x) as tracker:
        h = x
        for i in (0, 4):
            h = checkpoint(half, i, h, **REENTRANT)
        h.sum().backward()
    forward = [o for o in tracker.operators if o.name == "aten.addmm"]
    assert [o.phase for o in forward[:4]] == ["forward"] * 4
    assert [o.phase for o in forward[4:]] == ["recomputation"] * 8
    stay = [
        a
        for a in tracker.allocations
        if a.operator == Operator("aten.tanh", "1", "recomputation")
    ]
    # Once as the second layer's input, once for its own backward.
    assert [a.category for a in stay] == ["activations"] * 2
    check_account(tracker)


def test_without_a_graph_inside_a_checkpoint():
    """A mask that is drawn without a graph, and stays for backward."""
    model, x = nn.Linear(WIDTH, WIDTH), rows(requires_grad=True)

    def masked(x):
        with torch.no_grad():
            mask = torch.rand_like(x).round()
        return model(x) * mask

    with PeakTracker(model, x) as tracker:
        checkpoint(masked, x, **KEPT).sum().backward()
    draws = [o for o in tracker.operators if o.name == "aten.rand_like"]
    assert [o.phase for o in draws] == ["forward", "recomputation"]
    kept = [a for a in tracker.allocations if a.operator.name == "aten.round"]
    categories = [a.category for a in kept]
    assert categories == ["temporaries", "activations"]


@pytest.mark.parametrize(
    "hooks", [SavedBytes, torch.autograd.graph.save_on_cpu]
)
def test_other_hooks_on_saved_tensors_are_no_recomputation(hooks):
    model, x = chain(2, nn.Tanh), rows()
    with PeakTracker(model, x) as tracker, hooks():
        model(x).sum().backward()
    assert {o.phase for o in tracker.operators} == {"forward", "backward"}


def test_a_resized_storage_keeps_its_category():
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), rows()
    with PeakTracker(model, x) as tracker:
        storage = model.weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(WEIGHT // 2)
        x.untyped_storage().resize_(2 * UNIT)
    sizes = [
        (s["parameters"], s["inputs"])
        for s in map(tracker.split, range(-1, 3))
    ]
    assert sizes == [
        (WEIGHT, UNIT),
        (0, UNIT),
        (WEIGHT // 2, UNIT),
        (WEIGHT // 2, 2 * UNIT),
    ]
    resize = Operator("storage.resize_", OUTSIDE, "forward")
    assert tracker.operators == [resize] * 3
    check_account(tracker)


# Resized storages --------------------------------------------------------


def test_a_storage_from_outside_counts_once_it_grows():
    """Emptied before the block, filled in it: FSDP's in a second step."""
    outside, shrinks = torch.ones(100), torch.ones(100)
    outside.untyped_storage().resize_(0)
    with PeakTracker() as tracker:
        outside.untyped_storage().resize_(400)
        outside.fill_(1)
        shrinks.untyped_storage().resize_(40)
        outside.untyped_storage().resize_(0)
    assert tracker.timeline == [400, 400, 400, 0]
    assert tracker.live == 0


def test_a_tensor_from_outside_counts_once_it_grows():
    a, out, same = torch.ones(50), torch.empty(0), torch.ones(50)
    with PeakTracker() as tracker:
        torch.add(a, 1, out=out)
        torch.add(a, 1, out=same)
        out.resize_(10)
        a.resize_(100)
    assert tracker.timeline == [200, 200, 200, 600]
    del a
    assert tracker.live == 200


# What the block leaves behind --------------------------------------------


class Breaks(nn.Module):
    """Passes its input on, and raises in the backward pass if it is to."""

    breaks = False

    def forward(self, x):
        if self.breaks:
            x = x * 1
            x.register_hook(fail)
        return x


def fail(*_):
    raise ValueError("planned")


@pytest.mark.parametrize("where", ["backward", "step"])
def test_an_exception_leaves_nothing_behind(where):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Breaks(), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows()

    def step():
        with PeakTracker(model, x) as tracker:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return tracker

    good = step()
    assert good._made_in == {}
    model[1].breaks = where == "backward"
    with ExitStack() as broken:
        if where == "step":
            handle = optimizer.register_step_pre_hook(fail)
            broken.callback(handle.remove)
        before = hooked(model)
        with pytest.raises(ValueError, match="planned"):
            step()
        assert hooked(model) == before
    model[1].breaks = False
    model.zero_grad()
    again = step()  # as if nothing had happened
    assert again.timeline == good.timeline
    assert again.operators == good.operators
    check_account(again)


def test_an_entry_that_fails_leaves_nothing_behind(monkeypatch):
    model = chain(1, nn.Tanh)
    before = hooked(model)
    tracker = PeakTracker(model)

    name = "register_post_accumulate_grad_hook"
    monkeypatch.setattr(torch.Tensor, name, fail)
    with pytest.raises(ValueError, match="planned"), tracker:
        pass
    assert hooked(model) == before
    monkeypatch.undo()
    with tracker:
        torch.ones(2)
    assert tracker.timeline == [LAYER + 8]
    assert hooked(model) == before


def test_hooks_of_others_stay_where_they_were():
    model, x = nn.Linear(WIDTH, WIDTH), rows()
    order = []
    for i in range(3):
        model.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: order.append(i)
        )
    keys = list(model.weight._post_accumulate_grad_hooks)
    with PeakTracker(model, x):
        model(x).sum().backward()
        late = model.weight.register_post_accumulate_grad_hook(
            lambda p: order.append("late")
        )
        model(x).sum().backward()
    late.remove()
    assert order == [0, 1, 2, 0, 1, 2, "late"]
    assert list(model.weight._post_accumulate_grad_hooks) == keys


def test_entered_again_it_goes_on():
    model, x = chain(2, nn.Tanh), rows()
    tracker = PeakTracker(model, x)
    with tracker:
        model(x).sum().backward()
    once, live = list(tracker.timeline), tracker.live
    held = rows()  # between the blocks nothing is counted, but
    model.zero_grad()  # what is freed is subtracted
    assert live - tracker.live == 2 * LAYER
    with tracker:
        model(held).sum().backward()
    assert tracker.timeline[: len(once)] == once
    assert tracker.timeline[len(once) :] == once
    assert at_end(tracker)["gradients"] == 2 * LAYER
    check_account(tracker)


def test_one_tracker_inside_another():
    x = torch.ones(10)
    with PeakTracker(x) as outer:
        a = torch.ones(2)
        with PeakTracker(a, x) as inner:
            b = a + 1
            x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(40)
        c = b * 2
    assert inner.timeline == [56, 16]
    assert outer.timeline == [48, 56, 16, 56, 64]
    assert c.sum() == 8


def test_it_keeps_nothing_alive():
    model, x = chain(2, nn.Tanh), rows()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with PeakTracker(model, optimizer, x) as tracker:
        h = model(x)
        h.sum().backward()
        optimizer.step()
        things = [*model.parameters(), *gradients_of(model), h, x, model]
        things += [s["exp_avg"] for s in optimizer.state.values()]
        refs = [weakref.ref(thing) for thing in things]
        del model, optimizer, h, x, things
        gc.collect()
        assert not any(ref() is not None for ref in refs)
        assert tracker.live == 0
    assert tracker.live == 0
    check_account(tracker)


# Kinds of tensors --------------------------------------------------------


def test_sparse_gradients():
    model = nn.Embedding(11, 4, sparse=True)
    x = torch.tensor([1, 5, 5])
    with PeakTracker(model, x) as tracker:
        for _ in range(2):
            model(x).sum().backward()
    gradient = model.weight.grad
    size = gradient._indices().nbytes + gradient._values().nbytes
    assert size == 6 * (8 + 4 * 4)
    assert at_end(tracker)["gradients"] == size
    assert tracker.live == tracker.start + size
    # Looking at the gradient is none of the step's operators.
    names = [o.name for o in tracker.operators]
    views = [i for i, n in enumerate(names) if n == "aten._indices"]
    made = [i for i, n in enumerate(names) if n.startswith("aten._sparse_coo")]
    assert len(views) == 1 and len(made) == 2
    check_account(tracker)


CSR = torch.arange(5), torch.arange(4), torch.ones(4)


@pytest.mark.filterwarnings("ignore:Sparse C.. tensor support")
@pytest.mark.parametrize(
    ("make", "places"),
    [
        (lambda: torch.eye(4).to_sparse(), 2 * 4 * 8),
        (lambda: torch.sparse_csr_tensor(*CSR), 5 * 8 + 4 * 8),
        (lambda: torch.sparse_csc_tensor(*CSR), 5 * 8 + 4 * 8),
    ],
)
def test_sparse_layouts_count_by_their_parts(make, places):
    x = make()
    with PeakTracker(x) as tracker:
        y = x.clone()
    assert tracker.start == places + 4 * 4
    assert tracker.live == 2 * tracker.start
    del y
    assert tracker.live == tracker.start


def test_the_recent_peak_begins_anew_with_each_call():
    with PeakTracker() as tracker:
        assert tracker.recent_peak() == 0
        x = torch.ones(8)
        y = x + 1
        del y
        assert tracker.recent_peak() == 64
        assert tracker.recent_peak() == tracker.live == 32
        z = torch.ones(2)
        assert tracker.recent_peak() == 40
        del x, z
        assert tracker.recent_peak() == 0
    assert tracker.peak == 64


def test_layouts_without_countable_storages_are_refused():
    make = torch.Tensor.to_mkldnn
    try:
        x = make(torch.eye(4))
    except RuntimeError:
        pytest.skip("this PyTorch cannot make it")
    message = r"layout torch\.\w+: use strided \(to_dense\) or sparse"
    before = hooked()
    with pytest.raises(NotImplementedError, match=message):
        PeakTracker(x)
    with pytest.raises(NotImplementedError, match=message), PeakTracker():
        x.to_dense()
    with pytest.raises(NotImplementedError, match=message), PeakTracker():
        make(torch.eye(4))
    assert hooked() == before


@pytest.mark.parametrize("device", ["cpu:0", None])
def test_the_device_that_is_counted(device):
    x, y = torch.ones(5), torch.ones(7, device="meta")
    tracker = PeakTracker(x, y, device=device)
    other = 0 if device else 28
    assert tracker.start == 20 + other
    with tracker:
        a = x + 1
        b = y + 1
        c = torch.cat([a, a])
    assert tracker.timeline == [
        40 + other,
        40 + 2 * other,
        80 + 2 * other,
    ]
    assert b.device.type == "meta" and c.device.type == "cpu"


def test_only_the_other_device_is_counted():
    x, y = torch.ones(5), torch.ones(7, device="meta")
    with PeakTracker(x, y, device="meta") as tracker:
        x.add_(1)
        a = y + 1
        x.untyped_storage().resize_(400)
        x.resize_(200)
    assert tracker.start == 28
    assert set(tracker.timeline) == {28, 56}
    assert a.device.type == "meta"


# Without data ------------------------------------------------------------


def bytes_of(setting):
    existing, passes = begun(setting)
    with PeakTracker(*existing) as tracker:
        run(passes)
    end = tracker.timeline[-1]
    return tracker.start, tracker.peak, tracker.split(), end, at_end(tracker)


WITHOUT_DATA = [views, in_place, images, ADAM, checkpointed_segments]


@pytest.mark.parametrize(
    ("setting", "kind"),
    [(setting, torch.device) for setting in WITHOUT_DATA]
    + [
        (setting, FakeTensorMode)
        for setting in (ADAM, accumulated_gpt_with_adam)
    ],
)
def test_without_data_it_takes_the_same_bytes(setting, kind):
    """On meta there is no fused attention."""
    meta = kind is torch.device
    if meta and setting is ADAM and here("Adam cannot step on meta"):
        pytest.skip(DIFFERENT["Adam cannot step on meta"].what)
    expected = bytes_of(setting)
    with kind("meta") if meta else kind():
        assert bytes_of(setting) == expected


def test_an_empty_tensor_is_no_operator():
    """Some versions' checkpoints make one in each call, and others none."""
    with PeakTracker() as tracker:
        torch.empty(0).new_zeros(2)
        torch.zeros(3, 0)
    assert [o.name for o in tracker.operators] == [
        "aten.new_zeros",
        "aten.zeros",
    ]
    assert tracker.timeline == [8, 0]


# The budget --------------------------------------------------------------


def test_out_of_memory():
    model, x = chain(3, nn.Tanh), rows()
    start = 3 * LAYER + UNIT
    before = hooked(model)
    # The third Tanh finds the two others' results and its own input.
    tracker = PeakTracker(model, x, budget=start + 4 * UNIT - 1)
    with pytest.raises(torch.OutOfMemoryError) as caught, tracker:
        tracker.mark("forward")
        model(x).sum().backward()
    assert str(caught.value) == (
        "Tried to allocate 160 B (160 bytes) in aten.tanh; "
        f"{(start + 3 * UNIT) / 1024:.2f} KiB of the budget of "
        f"{(start + 4 * UNIT - 1) / 1024:.2f} KiB were in use."
    )
    assert tracker.current == Operator("aten.tanh", "5", "forward")
    assert tracker.live == start + 4 * UNIT  # the error still holds it
    assert max(tracker.timeline) == tracker.peak == start + 3 * UNIT
    assert tracker.timeline[-1] == start + 3 * UNIT
    assert at_end(tracker) == {
        "parameters": 3 * LAYER,
        "inputs": UNIT,
        "activations": 3 * UNIT,
    }
    check_account(tracker)
    assert hooked(model) == before
    del caught
    gc.collect()
    assert tracker.live == start
    check_account(tracker)


def test_after_out_of_memory_the_block_can_go_on():
    with PeakTracker(budget=100) as tracker:
        a = torch.ones(10)
        with suppress(torch.OutOfMemoryError):
            torch.ones(20)
        b = torch.ones(15)
        tracker.mark("late")
        b.add_(1)
    assert tracker.timeline == [40, 100, 100]
    assert tracker.peak == 100
    assert (a + 1).sum() == 20
    assert [a.bytes for a in tracker.allocations] == [40, 80, 60]
    check_account(tracker)


def test_a_storage_that_grows_over_the_budget():
    a = torch.ones(10)
    with PeakTracker(a, budget=100) as tracker:
        with pytest.raises(torch.OutOfMemoryError, match=r"storage\.resize_"):
            a.untyped_storage().resize_(120)
        a.untyped_storage().resize_(80)
    assert tracker.timeline == [80]
    assert tracker.peak == 80


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        others = [None] * (len(ctx.needs_input_grad) - 1)
        return g * 2 + g, *others


def test_a_sum_within_a_node_is_its_own():
    """Inputs without gradient are no reason to think that autograd adds."""
    peaks = []
    for others in ((), (torch.ones(1), torch.ones(1))):
        x = torch.ones(1000, requires_grad=True)
        with PeakTracker(x) as tracker:
            Triple.apply(x, *others).backward(torch.ones(1000))
        peaks.append(tracker.peak - x.nbytes)
    # The result, its gradient, the product and the sum.
    assert peaks == [4 * x.nbytes] * 2


def test_out_of_memory_in_the_last_operator_leaves_nothing_behind():
    """The sum of two gradients that somebody holds."""
    kept = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            kept.append(g * 2)
            return kept[-1]

    before = hooked()
    x, g = torch.ones(1000, requires_grad=True), torch.ones(1000)
    tracker = PeakTracker(x, g, budget=24_000)
    with pytest.raises(torch.OutOfMemoryError, match=r"aten\.add"), tracker:
        torch.autograd.grad([Keeps.apply(x), Keeps.apply(x)], x, [g, g])
    assert hooked() == before
    with tracker:
        pass


def test_a_budget_below_what_exists():
    x = torch.ones(1024)
    assert PeakTracker(x, budget=4096).budget == 4096
    message = "budget is 4.00 KiB, and what exists already takes 4.00 KiB"
    with pytest.raises(ValueError, match=message):
        PeakTracker(x, budget=4095)


def test_inference_mode_hides_no_temporaries():
    """There a softmax that casts first comes as one operator."""
    x = torch.rand(4, 256, dtype=torch.bfloat16)
    peaks = []
    for off in (torch.no_grad, torch.inference_mode):
        with PeakTracker(x) as tracker, off():
            torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)
        peaks.append((tracker.peak, tracker.recent_peak(), tracker.start))
    assert peaks == [(5 * x.nbytes, 5 * x.nbytes, x.nbytes)] * 2


# Compiled, or transformed ------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "measure"), [(compiled, trace_step), (compiled_in_place, dry_run)]
)
def test_a_compiled_model_is_refused(make, measure):
    """PyTorch would run it eagerly, and never compile it again."""
    model, x = make(mlp(4, 4, 2)), torch.rand(2, 4)
    with pytest.raises(RuntimeError, match=r"^something compiled"):
        measure(model, lambda model, x: model(x).sum(), x)


def test_a_compiled_loss_is_refused_and_runs_afterwards():
    loss = torch.compile(lambda y: y.sum(), backend="eager")
    model, x = mlp(4, 4, 2), torch.rand(2, 4)
    refused = pytest.raises(RuntimeError, match=r"^something compiled")
    with refused, PeakTracker(model, x):
        loss(model(x))
    assert loss(model(x)) == model(x).sum()


def test_what_is_not_compiled_now_is_no_harm():
    loss = torch.compile(lambda model, x: model(x).sum(), backend="eager")
    model, x = mlp(4, 4, 2), torch.rand(2, 4)
    with torch.compiler.set_stance("force_eager"):
        tracker = trace_step(model, loss, x)
    assert tracker.peak > tracker.start


@pytest.mark.parametrize(
    "transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())]
)
def test_transforms_of_functions_are_counted(transform):
    model, x = nn.Tanh(), torch.rand(2, 4)
    with PeakTracker(x) as tracker:
        y = transform(model)(x)
    assert tracker.live - tracker.start == y.nbytes == 32
    assert tracker.peak - tracker.start >= y.nbytes
