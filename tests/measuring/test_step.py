"""One step with its memory and without: the same bytes, nothing touched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring_helpers import check_both, classify, hooked, mean_square, told
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from membudget.measuring import CATEGORIES, dry_run, trace_step
from membudget.models import GPT, mlp
from tests.soak import examples
from tests.versions import DIFFERENT, here


def next_token(model, tokens):
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def digits(samples=8, width=16, depth=3):
    batch = torch.randn(samples, 8), torch.randint(10, (samples,))
    return mlp(8, width, depth), classify, *batch


def text(samples=4, width=8, depth=2):
    model = GPT(vocabulary=13, context=8, width=width, depth=depth, heads=2)
    return model, next_token, torch.randint(13, (samples, 9))


def images(samples=4, width=4, depth=2):
    layers, channels = [], 1
    for _ in range(depth):
        layers += [nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), nn.Dropout(0.1)]
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))
    x = torch.randn(samples, 1, 8, 8)
    with torch.no_grad():
        model.eval()(x)
    return model.train(), classify, x, torch.randint(10, (samples,))


def no_optimizer(parameters):
    return None


OPTIMIZERS = [
    no_optimizer,
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: torch.optim.Adam(p, foreach=False),
    lambda p: torch.optim.AdamW(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.Adagrad(p),
]


# dry_run against trace_step ------------------------------------------------


@settings(max_examples=examples(12))
@given(
    st.sampled_from([digits, text, images]),
    st.integers(1, 5),
    st.sampled_from([2, 8]),
    st.integers(2, 3),
    st.sampled_from(OPTIMIZERS),
    st.sampled_from([None, 1, 2, 3, 100]),
)
def test_a_dry_run_tells_the_same(build, samples, width, depth, make, micro):
    if build is images and (samples == 1 or micro):
        samples, micro = samples + 1, None  # BatchNorm wants two values
    torch.manual_seed(0)
    model, loss, *batch = build(samples, width, depth)
    optimizer = make(model.parameters())
    check_both(model, loss, *batch, optimizer=optimizer, micro_batch=micro)


def everything(model, optimizer, batch):
    """All that a step can change, with the identity of each tensor."""
    states = optimizer.state_dict()["state"]
    tensors = [*model.parameters(), *model.buffers(), *batch]
    tensors += [p.grad for p in model.parameters()]
    tensors += [t for s in states.values() for t in s.values()]
    return (
        [(id(t), t._version) for t in tensors],
        [t.clone() for t in tensors],
        torch.get_rng_state(),
    )


def same(before, after):
    (names, values, state), (others, ends, later) = before, after
    return (
        names == others
        and all(map(torch.equal, values, ends))
        and torch.equal(state, later)
    )


def test_a_dry_run_leaves_everything_as_it_is():
    model, loss, *batch = images()
    optimizer = torch.optim.Adam(model.parameters())
    trace_step(model, loss, *batch, optimizer=optimizer)  # makes the states
    loss(model, *batch).backward()
    before = everything(model, optimizer, batch)
    dry_run(model, loss, *batch, optimizer=optimizer, micro_batch=2)
    assert same(before, everything(model, optimizer, batch))
    loss(model, *batch).backward()
    optimizer.step()
    assert not same(before, everything(model, optimizer, batch))


def test_tied_weights_and_plain_tensors():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.tensor(2.0))  # without dimension
            self.shift = torch.ones(11)  # neither parameter nor buffer

        def forward(self, x):
            return self.head(self.embed(x)) * self.scale + self.shift

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randint(11, (6, 5))
    found = check_both(model, mean_square, x, optimizer=optimizer)
    assert found["start"] == 3 * (4 * 11 * 8 + 4) + 2 * 4 + 8 * 6 * 5


def test_a_view_of_the_model_in_a_buffer():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.register_buffer("top", self.weight.detach()[:2])

        def forward(self, x):
            return x @ self.weight + self.top.sum()

    found = check_both(Views(), mean_square, torch.ones(3, 8))
    assert found["start"] == 4 * 8 * 8 + 4 * 3 * 8


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[::2],
        lambda x: x[:1].expand(4, 8),
        lambda x: x.t().contiguous().t(),
        lambda x: x.clone().requires_grad_(),
    ],
)
def test_batches_that_are_views(cut):
    """A view keeps the whole storage behind it."""
    model, x = mlp(8, 4, 2), cut(torch.randn(16, 8))
    found = check_both(model, mean_square, x)
    weights = sum(p.nbytes for p in model.parameters())
    assert found["start"] == weights + x.untyped_storage().nbytes()


def distance(model, x, y):
    return (model(x) - y).square().mean()


def test_two_parts_of_the_batch_in_one_storage():
    pair = torch.randn(2, 6, 8)
    found = check_both(mlp(8, 8, 2, 8), distance, *pair)
    weights = 2 * 4 * (8 * 8 + 8)
    assert found["start"] == weights + pair.nbytes


def test_a_batch_that_was_never_anywhere():
    """A batch on meta keeps its strides."""
    model, loss, *batch = digits()
    expected = told(trace_step(model, loss, *batch))
    empty = [t.to("meta") for t in batch]
    assert told(dry_run(model, loss, *empty)) == expected
    x = torch.empty_strided((4, 8), (0, 1), device="meta")
    dry = dry_run(model, mean_square, x)
    real = trace_step(model, mean_square, torch.ones(8).expand(4, 8))
    assert told(dry) == told(real)


# On another device than meta -----------------------------------------------


def causal(model, x, y):
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten())


@pytest.mark.parametrize("make", OPTIMIZERS[1:3])
def test_a_model_on_meta_run_on_a_cpu(make):
    """The same bytes as on the CPU, where attention is fused."""

    def build(device):
        with torch.device(device):
            model = GPT(13, 8, 8, 2, 2, tied=True)
            x = torch.zeros(3, 8, dtype=torch.long)
        return model, causal, x, x.clone()

    model, loss, *batch = build("meta")
    optimizer = make(model.parameters())
    dry = dry_run(model, loss, *batch, optimizer=optimizer, on="cpu")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert optimizer is None or not optimizer.state
    model, loss, *batch = build("cpu")
    real = trace_step(model, loss, *batch, optimizer=make(model.parameters()))
    assert told(dry) == told(real)


def test_on_meta_itself_attention_is_not_fused():
    with torch.device("meta"):
        model = GPT(13, 64, 8, 2, 2)
        x = torch.zeros(3, 64, dtype=torch.long)
    on = dry_run(model, causal, x, x.clone(), on="cpu")
    off = dry_run(model, causal, x, x.clone())
    names = [{o.name for o in t.operators} for t in (on, off)]
    fused = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert fused in names[0] and fused not in names[1]
    assert on.peak < off.peak
    assert on.start == off.start


def test_the_device_counts_what_stands_for_it():
    """A model that is somewhere stays there."""
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.empty(4, 8)
    whole = dry_run(model, mean_square, x, on="cpu")
    mine = dry_run(model, mean_square, x, on="cpu", device="cpu")
    none = dry_run(model, mean_square, x, on="cpu", device="meta")
    assert mine.peak == whole.peak > none.peak == 0
    model, loss, *batch = digits()
    expected = told(dry_run(model, loss, *batch))
    for on in ("cpu", "meta"):
        assert told(dry_run(model, loss, *batch, on=on)) == expected


def test_frozen_parameters_and_buffers_on_meta():
    def build():
        model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        )
        model[2].requires_grad_(False)
        return model, mean_square, torch.zeros(4, 8)

    with torch.device("meta"):
        dry = dry_run(*build(), on="cpu")
    assert told(dry) == told(trace_step(*build()))


def test_a_learning_rate_that_is_a_tensor():
    model, loss, *batch = digits()
    for kind in (torch.optim.SGD, torch.optim.Adam):
        optimizer = kind(model.parameters(), torch.tensor(0.1), foreach=False)
        check_both(model, loss, *batch, optimizer=optimizer)


def test_numbers_that_a_fake_model_does_not_know():
    """They are needed only if the step asks for them."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("scale", torch.rand(()))

        def forward(self, x):
            return super().forward(x) * self.scale

    with FakeTensorMode():
        fake = Scaled()
    x = torch.ones(4, 8)
    real = trace_step(Scaled(), mean_square, x)
    assert told(dry_run(fake, mean_square, x.to("meta"))) == told(real)
    with pytest.raises(ValueError, match="needs the values of a tensor"):
        dry_run(fake, lambda m, x: m(x).sum() * m.scale.item(), x.to("meta"))


def test_mean_over_all_batches_in_batch_norm():
    """``momentum=None`` needs the number of batches, not only its bytes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    check_both(model, mean_square, torch.randn(4, 8))


@pytest.mark.parametrize(
    ("kind", "stepped"), [("fake", True), ("meta", False), ("meta", True)]
)
def test_a_model_too_large_for_any_machine(kind, stepped):
    width, depth, samples = 1 << 19, 4, 16
    with FakeTensorMode() if kind == "fake" else torch.device(kind):
        layers = [nn.Linear(width, width) for _ in range(depth)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(width))
        x = torch.empty(samples, width)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        if stepped:
            if kind == "meta" and here("Adam cannot step on meta"):
                pytest.skip(DIFFERENT["Adam cannot step on meta"].what)
            mean_square(model, x).backward()
            optimizer.step()
    tracker = dry_run(model, mean_square, x, optimizer=optimizer)
    count = depth * (width + 1) * width + 2 * width
    numbers = 2 * depth + 2
    unit = 4 * samples * width
    norm = 2 * 4 * width + 8
    assert 4 * count > 4 << 40  # 4 TiB
    assert tracker.split(-1) == dict.fromkeys(CATEGORIES, 0) | {
        "parameters": 4 * count + norm,
        "optimizer": 2 * 4 * count + 4 * numbers,
        "inputs": unit,
    }
    assert tracker.split()["gradients"] == 4 * count


class Structured(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.shifts = [torch.ones(4)]

    def forward(self, x):
        return super().forward(x) + self.shifts[0]


OUTSIDE = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (
            nn.Linear(4, 4),
            lambda m, x: m(x).sum() * m(x).sum().item(),
            r"_local_scalar_dense.* needs the values of a tensor, which a dry "
            r"run has not.*; use no .item\(\) and no index by cond",
        ),
        (
            nn.Linear(4, 4),
            lambda m, x: m(x)[x > 0].sum(),
            "aten.nonzero.* or measure a real step with trace_step",
        ),
        (
            nn.Linear(4, 4),
            lambda m, x: distance(m, x, OUTSIDE),
            "neither the model's nor the batch's: make it a buffer, or hand",
        ),
        (Structured(), mean_square, "neither the model's nor the batch's"),
    ],
)
def test_steps_that_a_dry_run_cannot_take(model, loss, message):
    x = torch.rand(3, 4)
    before = hooked()
    with pytest.raises(ValueError, match=message):
        dry_run(model, loss, x)
    assert hooked() == before
    trace_step(model, loss, x)  # and trace_step can


# trace_step ----------------------------------------------------------------


def test_marks_and_categories_of_a_step():
    model, loss, *batch = digits()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tracker = trace_step(model, loss, *batch, optimizer=optimizer)
    labels = [label for _, label in tracker.marks]
    assert labels == ["forward", "backward", "step"]
    weights = [p.nbytes for p in model.parameters()]
    held = dict.fromkeys(CATEGORIES, 0) | {
        "parameters": sum(weights),
        "optimizer": 2 * sum(weights) + 4 * len(weights),
        "inputs": sum(t.nbytes for t in batch),
    }
    assert tracker.split(-1) == held
    assert tracker.start == sum(held.values())
    *_, (step, _) = tracker.marks
    split = tracker.split(step - 1)
    assert split["gradients"] == sum(weights)
    assert split["optimizer"] == held["optimizer"]
    phases = [o.phase for o in tracker.operators]
    marks = [*(i for i, _ in tracker.marks), len(phases)]
    assert phases[marks[0]] == "forward"
    assert "backward" not in phases[: marks[1]]
    assert "optimizer" not in phases[: marks[2]]
    assert "optimizer" in phases[marks[2] :]
    end = tracker.split(len(phases) - 1)  # the gradients go after it
    assert end == held | {"gradients": sum(weights)}
    assert tracker.live == tracker.start


def test_it_takes_two_steps():
    model, loss, *batch = digits()
    twin = copy.deepcopy(model)
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, twin)
    ]
    model[0].weight.grad = torch.full_like(model[0].weight, 1e6)
    tracker = trace_step(model, loss, *batch, optimizer=optimizers[0])
    for _ in range(2):
        loss(twin, *batch).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(p.grad is None for p in model.parameters())
    assert tracker.operators


@pytest.mark.parametrize(
    ("micro", "parts"),
    [(None, 1), (3, 3), (4, 2), (9, 1)],
)
def test_micro_batches(micro, parts):
    model, loss, *batch = digits(samples=8)
    model, batch[0] = model.double(), batch[0].double()
    sizes, gradients = [], []

    def noted(model, x, y):
        sizes.append(len(x))
        return loss(model, x, y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad for p in model.parameters()])
    )
    tracker = trace_step(
        model, noted, *batch, optimizer=optimizer, micro_batch=micro
    )
    assert sizes == 2 * sizes[:parts]
    assert sum(sizes[:parts]) == 8
    assert max(sizes) == min(micro or 8, 8)
    labels = [label for _, label in tracker.marks]
    assert labels == ["forward", "backward"] * parts + ["step"]
    loss(model, *batch).backward()
    for found in gradients:
        for gradient, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)


def test_a_batch_of_nothing_or_of_odd_tensors():
    model = nn.Linear(4, 4)
    weight = torch.tensor(2.0)
    tracker = trace_step(model, lambda m, c: m.weight.sum() * c, weight)
    assert tracker.start == 4 * (4 * 4 + 4) + 4
    tracker = trace_step(model, lambda m: m.weight.sum())
    assert tracker.start == 4 * (4 * 4 + 4)
    assert tracker.peak > tracker.start


@pytest.mark.parametrize("step", [trace_step, dry_run])
def test_only_the_device_asked_for(step):
    model, loss, *batch = digits()
    whole = step(model, loss, *batch)
    assert [label for _, label in whole.marks] == ["forward", "backward"]
    assert step(model, loss, *batch, device="cpu").peak == whole.peak
    assert step(model, loss, *batch, device="meta").peak == 0


def test_a_budget_that_suffices_and_one_that_does_not():
    model, loss, *batch = digits()
    before = hooked(model), [p.clone() for p in model.parameters()]
    peak = trace_step(model, loss, *batch).peak
    assert trace_step(model, loss, *batch, budget=peak).peak == peak
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trace_step(model, loss, *batch, budget=peak - 1)
    assert all(p.grad is None for p in model.parameters())
    assert hooked(model) == before[0]
    assert all(map(torch.equal, before[1], model.parameters()))
    assert trace_step(model, loss, *batch).peak == peak


X = torch.ones(3, 4)
RETURNED = "the loss function returned"
UNEVEN = "the same number of samples, at least 1, along the first"


@pytest.mark.parametrize("step", [trace_step, dry_run])
@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        (lambda m, x: None, [X], f"{RETURNED} None: return the loss, a sc"),
        (lambda m, x: 1.5, [X], f"{RETURNED} 1.5"),
        (
            lambda m, x: m(x),
            [X],
            r"the shape \(3, 4\) and requires_grad=True: return a scalar",
        ),
        (
            lambda m, x: m(x).sum().detach(),
            [X],
            r"the shape \(\) and requires_grad=False: return a scalar",
        ),
        (mean_square, [], UNEVEN),
        (mean_square, [X, X[:2]], UNEVEN),
        (mean_square, [X, torch.ones(())], UNEVEN),
        (mean_square, [torch.ones(0, 4)], UNEVEN),
    ],
)
def test_bad_input(step, loss, batch, message):
    micro = 2 if message is UNEVEN else None
    with pytest.raises(ValueError, match=message):
        step(nn.Linear(4, 4), loss, *batch, micro_batch=micro)


@pytest.mark.parametrize("step", [trace_step, dry_run])
def test_models_and_batches_of_other_things(step):
    message = (
        r"the batch holds list: hand over tensors \(unpack lists with \*\)"
    )
    with pytest.raises(TypeError, match=message):
        step(nn.Linear(4, 4), mean_square, [[1.0, 2.0, 3.0, 4.0]])
    for model in (nn.ReLU(), nn.Linear(4, 4).requires_grad_(False)):
        with pytest.raises(ValueError, match="has no parameters that are"):
            step(model, mean_square, X)


def test_the_first_step_keeps_to_the_budget():
    """It makes the optimizer's states, and nobody measures it."""
    reached = []

    def loss(model, x):
        y = model(x).sum()
        reached.append(y.item())
        return y

    model, x = nn.Linear(16, 16), torch.ones(1000, 16)
    with pytest.raises(torch.OutOfMemoryError):
        trace_step(model, loss, x, budget=x.nbytes + 2000)
    assert reached == []


def test_a_step_with_a_closure_is_refused():
    model = nn.Linear(8, 2)
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS evaluates the loss again"):
        trace_step(model, mean_square, torch.ones(5, 8), optimizer=lbfgs)


def test_a_nested_batch_is_not_cut():
    rows = [torch.ones(2, 8), torch.ones(3, 8)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensor cannot be cut"):
        trace_step(nn.Linear(8, 2), mean_square, batch, micro_batch=1)
