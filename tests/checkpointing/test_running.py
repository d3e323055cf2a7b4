"""Checkpointing of real models: the same numbers, with less memory."""

import copy
import pickle
import random
from functools import partial

import pytest
import torch
from checkpointing_helpers import (
    Counts,
    Returns,
    encoder,
    measure,
    random_segments,
    same,
    step,
)
from torch import nn

from membudget.checkpointing import (
    ATTENTION,
    MATMULS,
    Checkpointed,
    equal_segments,
    no_segments,
    pytorch_segments,
)
from membudget.models import Block, chain
from tests.soak import SOAK, examples, part_of


def dense():
    return chain(8, 6), torch.rand(5, 8)


def convolutional():
    stages = []
    for inputs, outputs in ((3, 4), (4, 6), (6, 4)):
        stages += [
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            )
        ]
    stages += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)]
    return nn.Sequential(*stages), torch.rand(4, 3, 8, 8)


def blocks():
    net = nn.Sequential(*[Block(8, 2) for _ in range(6)])
    return net, torch.rand(2, 5, 8)


def encoders():
    stages = [encoder(8), encoder(8, norm_first=True), nn.Dropout(0.3)]
    return nn.Sequential(*stages, *copy.deepcopy(stages)), torch.rand(2, 5, 8)


def dropouts():
    stages = []
    for _ in range(3):
        stages += [nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Dropout(0.4))]
    return nn.Sequential(*stages), torch.rand(5, 8)


NETS = [dense, convolutional, blocks, encoders, dropouts]

SEGMENTS = [
    *(equal_segments(6, k) for k in range(1, 7)),
    *(pytorch_segments(6, k) for k in (2, 3, 4)),
    no_segments(6),
    [0, [1], 2, [3, 4], 5],
    [[0, [1, 2]], [[3], 4], 5],
    [[[[0], 1], [2, [3, [4, 5]]]]],
    [range(3), (3, 4, 5)],
]


def build(make, seed=0):
    """The net, and its copy that is to be checkpointed."""
    torch.manual_seed(seed)
    net, x = make()
    return net, copy.deepcopy(net), x


def buffers(net):
    return [b.clone() for b in net.buffers()]


# The same numbers --------------------------------------------------------


@pytest.mark.parametrize("make", NETS)
def test_output_gradients_and_buffers_are_the_same(make):
    rng = random.Random(make.__name__)
    own = [random_segments(rng, 6) for _ in range(examples(2))]
    for segments in [*part_of(SEGMENTS, rng, 3), *own]:
        plain, other, x = build(make)
        ours = Checkpointed(other, segments=segments)
        for seed in (1, 2):
            y, grads = step(plain, x, seed)
            z, found = step(ours, x, seed)
            assert torch.equal(y, z), segments
            assert same(grads, found), segments
            assert all(g is not None and g.any() for g in grads)
            assert same(buffers(plain), buffers(other)), segments


@pytest.mark.parametrize(
    ("make", "keep"),
    [
        (convolutional, MATMULS),
        (encoders, ATTENTION),
        (blocks, MATMULS + ATTENTION),
    ],
)
def test_what_is_kept_changes_no_number(make, keep):
    for segments in (equal_segments(6, 2), [0, [1, 2], 3, [4], 5]):
        plain, other, x = build(make)
        y, grads = step(plain, x)
        z, found = step(Checkpointed(other, segments=segments, keep=keep), x)
        assert torch.equal(y, z)
        assert same(grads, found)
        assert same(buffers(plain), buffers(other))


def test_the_generator_stands_where_it_would():
    """Whatever is drawn after the step is the same, too."""
    plain, other, x = build(dropouts)
    step(plain, x)
    expected = torch.rand(3)
    step(Checkpointed(other, segments=[[0, 1], [[2, 3], 4], 5]), x)
    assert torch.equal(torch.rand(3), expected)


def test_without_the_generators_states_dropout_changes_the_gradients():
    plain, other, x = build(dropouts)
    y, grads = step(plain, x)
    segments = [[0, 1, 2], [3, 4, 5]]
    ours = Checkpointed(other, segments=segments, preserve_rng_state=False)
    z, found = step(ours, x)
    assert torch.equal(y, z)
    assert not same(grads, found)


# Nets and runs of other kinds


def slopes():
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*stages), torch.rand(3, 6)


def frozen(*stages):
    def make():
        net, x = dense()
        for index in stages:
            net[index].requires_grad_(False)
        return net, x

    return make


def in_place():
    stages = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
    return nn.Sequential(*stages), torch.randn(5, 4)


def counting():
    return normalised(nn.BatchNorm1d(6, momentum=None)), torch.rand(5, 6, 4)


def noisy():
    """RReLU saves its noise before it is drawn: where it is the last to save,
    a recomputation has to go on."""
    stages = nn.Linear(8, 8), nn.RReLU(), Returns(lambda x: 2 * x)
    return nn.Sequential(*stages), torch.randn(4, 8)


class Forces(nn.Module):
    """Returns an energy's gradient, which it computes in its forward pass."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def forward(self, x):
        energy = self.energy(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def forces():
    return nn.Sequential(Forces(), Forces()), torch.ones(3, 4)


def of_the_input(net, x):
    leaf = x.clone().requires_grad_()
    net(leaf).square().sum().backward()
    (again,) = torch.autograd.grad(net(leaf).square().sum(), leaf)
    return [leaf.grad, again]


def of_gradients(net, x):
    leaf = x.clone().requires_grad_()
    y = net(leaf).square().sum()
    (slope,) = torch.autograd.grad(y, leaf, create_graph=True)
    (y + slope.square().sum()).backward()
    return [leaf.grad]


def under_autocast(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
        assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()  # outside of autocast
    return [y.detach()]


def backward_twice(net, x):
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def one_step(net, x):
    return [step(net, x)[0]]


@pytest.mark.parametrize(
    ("make", "run", "segments"),
    [
        (blocks, of_the_input, [[0, 1, 2], [3, [4, 5]]]),
        (slopes, of_gradients, [[0, [1]], [2, 3]]),
        (dense, under_autocast, [[0, 1, 2], [3, [4], 5]]),
        (counting, backward_twice, [[0, 1], [[2, 3], 4]]),
        *(
            (frozen(*stages), one_step, segments)
            for stages in ([0, 1, 2], [1, 4])
            for segments in ([[0, 1, 2], [3, 4, 5]], SEGMENTS[-2])
        ),
        (in_place, one_step, [[0, 1, 2]]),
        (in_place, one_step, [[0], 1, 2]),
        (noisy, one_step, [(0, 1), 2]),
        (noisy, one_step, [((0, 1), 2)]),
        (forces, of_the_input, [(0,), (1,)]),
        (forces, of_the_input, [(0, 1)]),
        (forces, of_the_input, [((0,), 1)]),
    ],
)
def test_other_nets_and_runs_give_the_same(make, run, segments):
    plain, other, x = build(make)
    found = []
    for net in (plain, Checkpointed(other, segments=segments)):
        torch.manual_seed(1)
        found.append([*run(net, x), *(p.grad for p in net.parameters())])
        assert any(g is not None and g.any() for g in found[-1])
    assert same(*found)
    assert same(buffers(plain), buffers(other))


def test_the_recomputation_under_autocast_is_in_16_bits():
    net, _, x = build(dense)
    _, full = step(net, x)
    net.zero_grad()
    under_autocast(Checkpointed(net, segments=[[0, 1, 2], [3, 4, 5]]), x)
    assert not same(full, [p.grad for p in net.parameters()])


@pytest.mark.parametrize("make", [convolutional, dropouts])
def test_without_gradients_nothing_differs(make):
    plain, other, x = build(make)
    ours = Checkpointed(other, segments=[[0, 1], [[2, 3], 4], 5])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(0)
            y = plain(x)
            torch.manual_seed(0)
            z = ours(x)
        assert torch.equal(y, z)
        assert not z.requires_grad
        assert same(buffers(plain), buffers(other))


@pytest.mark.parametrize("make", [convolutional, dropouts])
def test_eval_is_the_same_with_and_without_gradients(make):
    plain, other, x = build(make)
    step(plain, x)
    other.load_state_dict(plain.state_dict())
    ours = Checkpointed(other, segments=[[0, 1], [[2, 3], 4], 5])
    plain.eval(), ours.eval()
    before = buffers(plain)
    y, grads = step(plain, x)
    z, found = step(ours, x)
    assert torch.equal(y, z)
    assert same(grads, found)
    assert same(before, buffers(other))
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))


# Batch norm --------------------------------------------------------------

NORMS = {
    "momentum 0.1": partial(nn.BatchNorm1d, 6),
    "momentum 0.7": partial(nn.BatchNorm1d, 6, momentum=0.7),
    "momentum 0": partial(nn.BatchNorm1d, 6, momentum=0.0),
    "momentum None": partial(nn.BatchNorm1d, 6, momentum=None),
    "no statistics": partial(
        nn.BatchNorm1d, 6, track_running_stats=False, momentum=None
    ),
    "not affine": partial(nn.BatchNorm1d, 6, affine=False),
    "instance": partial(nn.InstanceNorm1d, 6, track_running_stats=True),
}


class Twice(nn.Module):
    """One norm that is used twice."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(self.norm(x).tanh())


def normalised(norm, twice=False):
    def linear():
        return nn.Linear(4, 4)

    stages = [linear(), norm, nn.Sequential(nn.Tanh(), linear())]
    stages += [Twice(copy.deepcopy(norm)) if twice else copy.deepcopy(norm)]
    return nn.Sequential(*stages, linear())


DEEP = [[0, [1, [2, [3]]], 4]]
FLAT = [[[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [0, [1], 2, [3], 4]]
PLACES = [DEEP, *FLAT] if SOAK else [DEEP]


@pytest.mark.few(7)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("segments", PLACES, ids=str)
@pytest.mark.parametrize("twice", [False, True])
def test_running_statistics_are_updated_once(norm, segments, twice):
    torch.manual_seed(0)
    plain = normalised(NORMS[norm](), twice)
    other = copy.deepcopy(plain)
    ours = Checkpointed(other, segments=segments)
    momenta = [getattr(m, "momentum", None) for m in other.modules()]
    for seed in range(3):
        x = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(seed))
        y, grads = step(plain, x)
        z, found = step(ours, x)
        assert torch.equal(y, z)
        assert same(grads, found)
        assert same(buffers(plain), buffers(other))
    after = [getattr(m, "momentum", None) for m in other.modules()]
    assert after == momenta
    assert [m.training for m in other.modules()] == [True] * len(after)


def test_a_norm_that_is_two_stages_counts_each_of_them():
    norm = nn.BatchNorm1d(4, momentum=None)
    plain, other = norm, copy.deepcopy(norm)
    x = torch.rand(5, 4)
    step(nn.Sequential(nn.Linear(4, 4), plain, nn.Tanh(), plain), x)
    for segments in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [[1], 2, [3]]]):
        other.reset_running_stats()
        ours = nn.Linear(4, 4), other, nn.Tanh(), other
        step(Checkpointed(*ours, segments=segments), x)
        assert other.num_batches_tracked == plain.num_batches_tracked == 2


def test_a_step_that_fails_leaves_the_momentum_as_it_was():
    """An error inside the recomputation."""
    calls = []

    def fails(x):
        calls.append(x)
        if len(calls) == 2:
            raise FloatingPointError("on purpose")
        return x.tanh()

    norm = nn.BatchNorm1d(4)
    ours = Checkpointed(norm, Returns(fails), segments=[[0, 1]])
    with pytest.raises(FloatingPointError):
        step(ours, torch.rand(5, 4))
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked == 1


# A module ----------------------------------------------------------------


def test_it_has_the_keys_of_a_sequential():
    plain, other, _ = build(convolutional)
    ours = Checkpointed(other, segments=[[0, 1, 2], 3, [4, 5]])
    assert list(ours.state_dict()) == list(plain.state_dict())
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    ours.load_state_dict(plain.state_dict())
    assert list(ours.children()) == list(other)  # not copies


def test_segments_may_be_set_anew():
    plain, other, x = build(encoders)
    ours = Checkpointed(other, segments=no_segments(6))
    _, grads = step(plain, x)
    peaks = []
    for segments in ([0, 1, 2, 3, 4, 5], [[0, 1, 2], [3, 4, 5]]):
        ours.segments = segments
        assert ours.segments == segments
        assert same(step(ours, x)[1], grads)
        peaks.append(measure(ours, x)[0])
    assert peaks[1] < peaks[0]
    with pytest.raises(ValueError, match="use 0 to 5, each once"):
        ours.segments = [0, 1]
    assert ours.segments == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_a_copy_does_the_same(copied):
    plain, other, x = build(convolutional)
    ours = Checkpointed(other, segments=[[0, [1, 2]], 3, [4, 5]])
    again = copied(ours)
    assert again.segments == ours.segments
    assert same(step(again, x)[1], step(plain, x)[1])
    assert same(buffers(plain), buffers(again))
    step(ours, x)
    again = copied(ours)  # after a step, too
    assert same(step(again, x)[1], step(plain, x)[1])


def test_a_copy_keeps_what_is_kept():
    _, other, x = build(blocks)
    ours = Checkpointed(other, segments=[[0, 1, 2], [3, 4, 5]], keep=MATMULS)
    again = copy.deepcopy(ours)
    assert again.keep == MATMULS
    assert measure(again, x)[:2] == measure(ours, x)[:2]


# Selective ---------------------------------------------------------------


def test_what_is_kept_is_between_all_and_nothing():
    """With the products kept, none of them runs again."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(16, 2) for _ in range(4)])
    x = torch.rand(4, 32, 16)
    segments = equal_segments(4, 4)
    peaks, flops = {}, {}
    for name, ours in {
        "none": net,
        "products and attention": Checkpointed(
            net, segments=segments, keep=MATMULS + ATTENTION
        ),
        "products": Checkpointed(net, segments=segments, keep=MATMULS),
        "attention": Checkpointed(net, segments=segments, keep=ATTENTION),
        "full": Checkpointed(net, segments=segments),
    }.items():
        peaks[name], flops[name], tracker = measure(ours, x)
        again = {
            o.name for o in tracker.operators if o.phase == "recomputation"
        }
        products = {"aten.addmm", "aten.mm", "aten.bmm"} & again
        fused = {name for name in again if "attention" in name}
        assert bool(products) == (name in ("attention", "full"))
        assert bool(fused) == (name in ("products", "full"))
    assert flops["products and attention"] == flops["none"]
    assert flops["none"] < flops["products"] < flops["full"]
    assert flops["none"] < flops["attention"] < flops["full"]
    assert peaks["full"] < peaks["attention"] < peaks["none"]
    assert peaks["full"] < peaks["products"] < peaks["none"]
    kept = peaks["products and attention"]
    assert peaks["products"] < kept < peaks["none"]
    assert peaks["attention"] < kept


# Refused -----------------------------------------------------------------


@pytest.mark.parametrize("segments", [[0, 1, 2], [0, [[1], 2]]])
def test_a_stage_that_returns_no_tensor_is_refused(segments):
    ours = Checkpointed(
        nn.Linear(4, 4), Returns(lambda x: (x,)), nn.Tanh(), segments=segments
    )
    sentence = r"^stage 1 \(Returns\) returned a tuple: a stage takes one"
    with pytest.raises(TypeError, match=sentence):
        ours(torch.rand(5, 4))
    with torch.no_grad(), pytest.raises(TypeError, match=sentence):
        ours(torch.rand(5, 4))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("segments", [[[0, 1, 2]], [[0, [1]], 2]])
def test_a_stage_that_changes_a_buffer_is_refused(in_place, segments):
    inside = nn.Sequential(nn.Tanh(), nn.Sequential(Counts(in_place)))
    ours = Checkpointed(nn.Linear(4, 4), inside, nn.Tanh(), segments=segments)
    with pytest.raises(
        RuntimeError,
        match=r"^stage 1, Counts.runs changes whenever the stage runs, and in "
        "a segment it runs twice for each step: leave this stage out",
    ):
        ours(torch.rand(5, 4))


def test_after_an_error_that_somebody_keeps_the_next_step_is_right():
    """torch 2.11 left the checkpoint open."""
    stages = nn.Linear(4, 4), Counts(), nn.Tanh()
    with pytest.raises(RuntimeError, match="changes whenever") as kept:
        Checkpointed(*stages, segments=[[0, [1]], 2])(torch.rand(5, 4))
    counts = Counts()
    step(Checkpointed(stages[0], counts, segments=[[0], 1]), torch.rand(5, 4))
    assert counts.runs == 1
    assert kept


def test_outside_of_segments_a_stage_may_change_a_buffer():
    counts = Counts()
    ours = Checkpointed(
        nn.Linear(4, 4), counts, nn.Tanh(), segments=[[0], 1, [2]]
    )
    step(ours, torch.rand(5, 4))
    assert counts.runs == 1
    ours.segments = [[0, 1, 2]]
    with torch.no_grad():
        ours(torch.rand(5, 4))
    assert counts.runs == 2


@pytest.mark.parametrize("segments", [[0, [1, 2]], [[0, [1, 2]]]])
def test_an_in_place_stage_first_in_a_segment_is_refused(segments):
    ours = Checkpointed(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Tanh(), segments=segments
    )
    with pytest.raises(
        RuntimeError,
        match=r"^the segment that begins with stage 1 changes its input in "
        r"place, .* let its first stage make a new tensor \(inplac",
    ):
        step(ours, torch.rand(5, 4))


# What an operator fills while it runs ------------------------------------


def test_paths_that_part_and_meet_are_looked_at_once():
    """2⁶⁰ paths lead through a stage of 60 additions."""

    def halves(x):
        for _ in range(60):
            x = x / 2 + x / 2
        return x

    x = torch.ones(2, requires_grad=True)
    net = Checkpointed(Returns(halves), segments=[[0]])
    net(x).sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_an_error_of_a_stage_that_differentiates_is_its_own():
    class Fails(Forces):
        def forward(self, x):
            super().forward(x)
            raise ArithmeticError("of the stage")

    net = Checkpointed(Fails(), segments=[(0,)])
    with pytest.raises(ArithmeticError, match="of the stage"):
        net(torch.ones(3, 4).requires_grad_())


@pytest.mark.parametrize("before", ["a stage", "a pass without gradients"])
def test_what_autocast_has_cast_before_a_segment_that_keeps(before):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    stages = [layer, nn.Tanh(), layer, nn.Tanh()]
    segments = [0, (1, 2, 3)] if before == "a stage" else [(0, 1, 2, 3)]
    net = Checkpointed(*stages, segments=segments, keep=MATMULS)
    found = []
    for run in nn.Sequential(*stages), net:
        with torch.autocast("cpu", torch.bfloat16):
            if before != "a stage":
                with torch.no_grad():
                    run(x)
                if run is not net:  # else PyTorch's own gradient is None
                    torch.clear_autocast_cache()
            value = run(x).float().square().sum()
        value.backward()
        found.append([p.grad for p in layer.parameters()])
        layer.zero_grad()
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
