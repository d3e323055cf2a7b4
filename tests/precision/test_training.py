"""A step in 16 bits, against loops by hand; errors after which one goes on."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from math import inf, isfinite, isnan, nan
from random import Random

import pytest
import torch
import torch.nn.functional as F
from precision_helpers import (
    begins,
    classifier,
    equal,
    gradients,
    samples,
    says,
    slices,
    state,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.checkpointing import Checkpointed
from membudget.ledger import Transformer, predict
from membudget.measuring import PeakTracker
from membudget.models import mlp_blocks
from membudget.precision import (
    MasterWeights,
    MixedPrecision,
    ScaledStep,
    ScaleTrace,
    training,
)
from tests.soak import part_of

FORMATS = ("fp32", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rig:
    """A model, its optimizer, its scaler, and the loop around them."""

    def __init__(
        self, format="fp16", max_norm=None, sizes=(8,), start=2.0**10, **more
    ):
        self.format, self.max_norm, self.sizes = format, max_norm, sizes
        self.model = more.pop("model", None) or classifier()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scaler = None
        if format == "fp16":
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=start, growth_interval=3
            )
        self.precision = MixedPrecision(
            self.optimizer,
            format,
            max_norm=max_norm,
            scaler=self.scaler,
            emulated=True,
        )
        self.x, self.y = samples(sum(sizes))

    def loss(self, part=slice(None), context=None):
        with context or self.precision.autocast():
            return F.cross_entropy(self.model(self.x[part]), self.y[part])

    def backward(self, part=slice(None), scale=1.0, more=0.0):
        """By the room; the micro-batch's loss times ``scale``."""
        share = len(self.y[part]) / len(self.y)
        self.precision.backward(self.loss(part) * scale + more, share)

    def step(self, scale=1.0):
        """By the room, all micro-batches."""
        for part in slices(self.sizes):
            self.backward(part, scale)
        return self.precision.step()

    def infinite(self):
        """A loss of zero whose gradient is not finite: 0 · ∞ in backward."""
        return (0 * self.model[0].weight).sum().sqrt()

    def state(self):
        return state(self.model, self.optimizer, self.scaler)

    def seen(self):
        """A list that the gradients of each step go to."""
        seen = []
        self.optimizer.register_step_pre_hook(
            lambda *_: seen.extend(gradients(self.model))
        )
        return seen


def by_hand(rig):
    """A step as PyTorch's documentation writes it."""
    before, context = 1.0, nullcontext()
    for part in slices(rig.sizes):
        if rig.format != "fp32":
            context = torch.autocast("cpu", DTYPES[rig.format])
        loss = rig.loss(part, context) * (len(rig.y[part]) / len(rig.y))
        if rig.scaler:
            loss = rig.scaler.scale(loss)
        loss.backward()
    if rig.scaler:
        rig.scaler.unscale_(rig.optimizer)
        before = rig.scaler.get_scale()
    limit = inf if rig.max_norm is None else rig.max_norm
    norm = nn.utils.clip_grad_norm_(rig.model.parameters(), limit)
    if rig.scaler:
        rig.scaler.step(rig.optimizer)
        rig.scaler.update()
    else:
        rig.optimizer.step()
    rig.optimizer.zero_grad()
    stepped = rig.scaler is None or rig.scaler.get_scale() >= before
    clipped = bool(norm.isfinite()) and norm.item() > limit
    return ScaledStep(norm.item(), before, clipped, stepped)


def same_report(one, other):
    """Equal, and a norm that is NaN equals itself."""
    return repr(one) == repr(other)


# Against a loop by hand --------------------------------------------------


@pytest.mark.parametrize(
    ("max_norm", "sizes"), [(0.05, (3, 3, 2)), (1e6, (1, 6, 1)), (None, (8,))]
)
@pytest.mark.parametrize("format", FORMATS)
def test_steps_are_those_of_a_loop_by_hand(format, max_norm, sizes):
    mine, theirs = (Rig(format, max_norm, sizes) for _ in range(2))
    for number in range(4):
        report = mine.step()
        assert same_report(report, by_hand(theirs)), number
        assert equal(mine.state(), theirs.state()), number
        assert report.clipped == (max_norm == 0.05)


def test_steps_with_overflows():
    """The scale falls from 2^20 and grows again; steps are skipped."""
    mine, theirs = (Rig("fp16", 0.05, (3, 3, 2), 2.0**20) for _ in range(2))
    reports = []
    with ScaleTrace(mine.scaler) as trace:
        for number in range(20):
            reports.append(mine.step())
            assert same_report(reports[-1], by_hand(theirs)), number
            assert equal(mine.state(), theirs.state()), number
    assert [r.scale for r in reports] == trace.scales
    assert [not r.stepped for r in reports] == trace.overflows
    assert {r.stepped for r in reports} == {True, False}
    assert all(isfinite(r.norm) == r.stepped for r in reports)
    assert not any(r.clipped and not r.stepped for r in reports)


def test_the_defaults():
    optimizer = Rig().optimizer
    precision = MixedPrecision(optimizer, emulated=True)
    assert (precision.format, precision.max_norm) == ("bf16", None)
    assert precision.scaler is None
    fp16 = MixedPrecision(optimizer, "fp16", emulated=True)
    assert fp16.scaler.get_scale() == 65536
    assert fp16.scaler.get_growth_interval() == 2000
    assert MixedPrecision(optimizer, "fp32").scaler is None


@pytest.mark.parametrize("format", FORMATS)
def test_what_autocast_does(format):
    x = torch.ones(2, 2)
    with Rig(format).precision.autocast():
        assert (x @ x).dtype == DTYPES.get(format, torch.float32)
        assert torch.is_autocast_enabled("cpu") == (format != "fp32")
    assert (x @ x).dtype == torch.float32


def test_a_parameter_without_gradient_is_left():
    rig = Rig(max_norm=0.1)
    idle = nn.Parameter(torch.ones(2))
    rig.optimizer.add_param_group({"params": [idle]})
    report = rig.step()
    assert report.stepped and report.clipped
    assert idle.tolist() == [1, 1] and idle.grad is None
    assert len(rig.precision.parameters()) == 7


# Looking at the gradient first -------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_unscale_and_step_are_one_step(format):
    one, two = Rig(format, 0.05), Rig(format, 0.05)
    for _ in range(3):
        report = one.step()
        two.backward()
        assert two.precision.unscale() == report.norm
        assert same_report(two.precision.step(), report)
        assert equal(one.state(), two.state())


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_gradient_that_was_changed_is_clipped_by_its_own_norm(factor):
    rig = Rig()
    seen = rig.seen()
    rig.backward()
    norm = rig.precision.unscale()
    assert norm == nn.utils.get_total_norm(gradients(rig.model)).item()
    rig.precision.max_norm = norm
    for p in rig.model.parameters():
        p.grad *= factor
    report = rig.precision.step()
    assert report.norm == pytest.approx(norm * factor, rel=1e-5)
    assert report.clipped == (factor > 1)
    size = nn.utils.get_total_norm(seen).item()
    assert size == pytest.approx(norm * min(factor, 1), rel=1e-4)


def test_a_finite_gradient_whose_norm_is_beyond_fp32():
    """Clipped as PyTorch clips it, to nothing; no overflow for the scaler."""
    rig = Rig(max_norm=1.0)
    seen = rig.seen()
    rig.backward()
    rig.precision.unscale()
    for p in rig.model.parameters():
        p.grad.fill_(1e25)
    assert rig.precision.step() == ScaledStep(inf, 2.0**10, True, True)
    assert len(seen) == 6 and not any(g.any() for g in seen)


# Overflows ---------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
def test_after_an_overflow_nothing_moved_but_the_scale(first):
    """Also where it is seen before the step."""
    rig = Rig("fp16", 1.0, (3, 3, 2))
    assert rig.step().stepped
    before = state(rig.model, rig.optimizer)
    for part in slices(rig.sizes):
        rig.backward(part, scale=1e5)
    if first:
        assert not isfinite(rig.precision.unscale())
    report = rig.precision.step()
    assert (report.stepped, report.clipped) == (False, False)
    assert not isfinite(report.norm) and report.scale == 2.0**10
    assert equal(state(rig.model, rig.optimizer), before)
    assert rig.scaler.get_scale() == 2.0**9
    report = rig.step()
    assert report.stepped and report.scale == 2.0**9
    assert not equal(rig.model.state_dict(), before["model"])


@pytest.mark.parametrize("first", [False, True])
def test_a_gradient_that_is_not_finite_without_a_scaler(first):
    rig = Rig("bf16", 1.0)
    rig.step()
    before = rig.state()
    rig.backward(more=rig.infinite())
    if first:
        assert isnan(rig.precision.unscale())
    message = (
        "the gradient has norm nan, and without a scaler no step is skipped "
        "for it: the gradient is cleared, the parameters are as before. "
        "Lower the learning rate, or look for the operator that overflows"
    )
    with pytest.raises(RuntimeError, match=says(message)):
        rig.precision.step()
    assert equal(rig.state(), before)
    assert rig.step().stepped


# With checkpointing ------------------------------------------------------


class Reentered(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        return checkpoint(self.stage, x, use_reentrant=True)


WAYS = {
    "reentrant": lambda net: nn.Sequential(
        net[0], *map(Reentered, net[1:3]), net[3]
    ),
    "Checkpointed": lambda net: nn.Sequential(
        Checkpointed(*net[:3], segments=((0, 1), (2,))), net[3]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_runs_under_the_autocast_of_its_forward(way):
    found = []
    for wrap in (lambda net: net, WAYS[way]):
        torch.manual_seed(0)
        rig = Rig("fp16", 0.1, (5, 3), model=wrap(mlp_blocks(6, 3, 5)))
        seen = rig.seen()
        norms = [rig.step().norm for _ in range(3)]
        values = [p.detach() for p in rig.model.parameters()]
        assert len(seen) == 3 * len(values)
        found.append([seen, values, norms])
    assert equal(*found)


# Making one --------------------------------------------------------------


@pytest.mark.parametrize("bad", ["fp8-e5m2", "tf32"])
def test_a_format_that_cannot_train(bad):
    message = f"autocast does not take {bad}: use one of fp32, bf16, fp16"
    if bad == "tf32":
        message += ". tf32 is switched on with membudget.precision.tf32"
    with pytest.raises(ValueError, match=says(message)):
        Rig(bad)


def test_a_format_that_is_only_emulated(processor):
    optimizer = Rig().optimizer
    processor(False, False)
    message = (
        "cpu only emulates bf16: the numbers are right, the speed is not "
        "that of 16 bits. Use another format (membudget.precision.support "
        "tells which is native), or say emulated=True"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(optimizer, "bf16")
    assert MixedPrecision(optimizer, "bf16", emulated=True)
    processor(True, True)
    for format in FORMATS:
        assert MixedPrecision(optimizer, format).format == format


def test_a_format_that_is_absent(monkeypatch):
    monkeypatch.setattr(training, "support", lambda format, device: "absent")
    message = (
        "cpu cannot multiply matrices in bf16: use fp16 on a GPU that has no "
        "bf16, otherwise fp32"
    )
    with pytest.raises(ValueError, match=says(message)):
        Rig("bf16")


def test_a_scaler_without_fp16():
    rig = Rig()
    message = (
        "a scaler is for fp16: bf16 has the exponents of fp32, so no "
        "gradient falls below its range. Leave the scaler out"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(rig.optimizer, "bf16", scaler=rig.scaler, emulated=True)


def test_parameters_that_are_not_in_fp32():
    model = classifier()
    model[2].double()
    message = (
        "some parameters are torch.float64: leave the model in fp32 (no "
        "model.half()); autocast casts what it needs"
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says(message)):
        Rig("fp32", model=model)
    with pytest.raises(ValueError, match=says(message)):
        MasterWeights(model, torch.optim.AdamW)
    assert equal(model.state_dict(), before)


# After an error the loop goes on -----------------------------------------


class Lost(Exception):
    """What a device runs out of, say."""


def lose(*arguments):
    raise Lost


@pytest.mark.parametrize("format", ["fp32", "fp16"])
def test_an_error_of_the_optimizer_leaves_the_loop_usable(format, monkeypatch):
    rig, clean = (Rig(format, 0.1, (3, 5)) for _ in range(2))
    monkeypatch.setattr(rig.optimizer, "step", lose)
    with pytest.raises(Lost):
        rig.step()
    monkeypatch.undo()
    assert all(p.grad is None for p in rig.model.parameters())
    assert rig.step() == clean.step()
    assert equal(rig.state(), clean.state())


NOTHING = (
    "there is no gradient: run backward(loss) before, for every micro-batch "
    "of the step"
)


def test_an_error_of_the_backward_pass_clears_the_step():
    rig, clean = (Rig("fp16", 0.1, (3, 5)) for _ in range(2))
    rig.backward(slice(0, 3))
    hook = rig.model[0].weight.register_hook(lose)
    with pytest.raises(Lost):
        rig.backward(slice(3, 8))
    hook.remove()
    assert all(p.grad is None for p in rig.model.parameters())
    with pytest.raises(RuntimeError, match=says(NOTHING)):
        rig.precision.step()
    assert rig.step() == clean.step()
    assert equal(rig.state(), clean.state())


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused():
    rig = Rig("bf16", None, (8,))
    weight = rig.model[0].weight
    one = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: one.step())
    before = weight.clone()
    with pytest.raises(RuntimeError, match="SGD steps in the backward pass"):
        rig.backward(slice(0, 8))
    assert torch.equal(weight, before)


def sixteen(dtype):
    return (
        lambda precision, loss: precision.backward(loss.to(dtype)),
        ValueError,
        f"the loss is {dtype}: it has two or three digits, and in fp16 the "
        "gradient that enters it, a loss scale of 65 536, is infinite. "
        "Compute it in fp32, from output.float()",
    )


def under_autocast(precision, loss):
    with precision.autocast():
        precision.backward(loss)


WRONG = {
    "a loss in bf16": sixteen(torch.bfloat16),
    "a loss in fp16": sixteen(torch.float16),
    "no finite loss": (
        lambda precision, loss: precision.backward(loss * nan),
        ValueError,
        "the loss is nan: a finite one is needed, and no loss scale makes it "
        "one. Look for an overflow in the forward pass, a too high learning "
        "rate, or a micro-batch of padding only",
    ),
    "a share above 1": (
        lambda precision, loss: precision.backward(loss, 1.0001),
        ValueError,
        "share, n_k / N, is 1.0001: use a finite number above 0 and up to 1",
    ),
    "under autocast": (
        under_autocast,
        RuntimeError,
        "backward runs under autocast: leave the block after the loss. The "
        "backward pass takes each operator's own format",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_after_wrong_use_the_window_goes_on(case):
    run, kind, message = WRONG[case]
    clean, rig = (Rig("fp16", 0.1, (3, 3, 2)) for _ in range(2))
    assert clean.step() == rig.step()
    for part in slices(rig.sizes):
        before = rig.state()
        with pytest.raises(kind, match=says(message)):
            run(rig.precision, rig.loss(part))
        assert equal(rig.state(), before)
        rig.backward(part)
    assert rig.precision.step() == clean.step()
    assert equal(rig.state(), clean.state())


def test_under_fp32_there_is_no_autocast_to_leave():
    rig = Rig("fp32")
    with rig.precision.autocast():
        rig.backward()
    assert rig.precision.step().stepped


def test_a_step_without_backward():
    rig, clean = Rig(), Rig()
    for _ in range(2):  # after a step, too
        before = rig.state()
        for call in (rig.precision.step, rig.precision.unscale) * 2:
            with pytest.raises(RuntimeError, match=says(NOTHING)):
                call()
            assert equal(rig.state(), before)
        assert rig.step() == clean.step()
    assert equal(rig.state(), clean.state())


def test_unscaling_twice():
    rig, clean = Rig(max_norm=0.1), Rig(max_norm=0.1)
    rig.backward()
    rig.precision.unscale()
    before = rig.state()
    message = (
        "the gradient is unscaled already, and would be too small by the "
        "loss scale: call unscale() once, before step()"
    )
    with pytest.raises(RuntimeError, match=says(message)):
        rig.precision.unscale()
    message = (
        "the gradient is unscaled already, and another scaled one cannot be "
        "added: run every micro-batch before unscale()"
    )
    with pytest.raises(RuntimeError, match=says(message)):
        rig.backward()
    assert equal(rig.state(), before)
    assert rig.precision.step() == clean.step()
    assert equal(rig.state(), clean.state())
    assert rig.step() == clean.step()


def test_a_scaler_that_was_unscaled_by_hand():
    """PyTorch's own error; the gradient stays."""
    rig = Rig()
    rig.backward()
    rig.scaler.unscale_(rig.optimizer)
    before = rig.state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="already been called"):
            rig.precision.step()
        assert equal(rig.state(), before)


def test_the_optimizer_of_another_model():
    rig = Rig()
    rig.precision.backward(Rig().loss())
    before = rig.state()
    message = "no parameter of the optimizer has a gradient: give"
    for call in (rig.precision.step, rig.precision.unscale):
        with pytest.raises(RuntimeError, match=begins(message)):
            call()
        assert equal(rig.state(), before)
    assert rig.step().stepped


# Master weights ----------------------------------------------------------


def masters_by_hand(model, make):
    """The copies, their optimizer, and a function that steps."""
    weights = [p for p in model.parameters() if p.requires_grad]
    copies = [p.detach().clone() for p in weights]
    model.to(torch.bfloat16)
    optimizer = make(copies)

    def step():
        for p, c in zip(weights, copies, strict=True):
            c.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, c in zip(weights, copies, strict=True):
            p.data = c.to(p.dtype)
            p.grad = c.grad = None

    return copies, optimizer, step


MAKE = {
    "adam": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def backward(model, x, y):
    dtype = next(model.parameters()).dtype
    output = model(x.to(dtype)).float()
    F.cross_entropy(output, y).backward()


@pytest.mark.parametrize(
    ("make", "frozen"), [("adam", False), ("momentum", True)]
)
def test_master_weights_are_those_of_a_loop_by_hand(make, frozen):
    one, two = classifier(), classifier()
    for model in (one, two):
        model.append(nn.BatchNorm1d(5))
        model[0].weight.requires_grad_(not frozen)
    master = MasterWeights(one, MAKE[make])
    copies, optimizer, step = masters_by_hand(two, MAKE[make])
    assert len(master.copies) == 8 - frozen
    x, y = samples(8)
    for _ in range(6):
        backward(one, x, y)
        backward(two, x, y)
        master.step()
        step()
        assert equal(master.copies, copies)
        assert equal(one.state_dict(), two.state_dict())
        assert equal(master.optimizer.state_dict(), optimizer.state_dict())
        assert all(p.grad is None for p in [*master.copies, *master.weights])
    for p, c in zip(master.weights, master.copies, strict=True):
        assert c.dtype == torch.float32 and torch.equal(c.to(p.dtype), p)


def test_an_update_that_vanishes_in_bf16_stays_in_the_copy():
    """1 + 2^-10 is 1 in bf16; after 4 steps of it the copy rounds up."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    master = MasterWeights(layer, lambda p: torch.optim.SGD(p, lr=2.0**-10))
    found = []
    for _ in range(6):
        layer.weight.grad = -torch.ones_like(layer.weight)
        master.step()
        found.append(layer.weight.item())
    assert master.copies[0].item() == 1 + 6 * 2.0**-10
    assert found == [1, 1, 1, 1, 1 + 2.0**-7, 1 + 2.0**-7]


def test_a_weight_without_gradient_is_left():
    model = classifier()
    master = MasterWeights(model, torch.optim.AdamW)
    before = copy.deepcopy(master.copies)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    master.step()
    assert not torch.equal(master.copies[0], before[0])
    assert equal(master.copies[1:], before[1:])
    assert len(master.optimizer.state) == 1


RUNS = product(["adam", "momentum", "sgd"], [False, True], [None, 2, 4])


@pytest.mark.parametrize(
    ("optimizer", "foreach", "micro"), part_of(RUNS, Random(0), 5)
)
def test_the_peak_of_a_step_is_the_ledgers(optimizer, foreach, micro):
    torch.manual_seed(0)
    shape, batch = Transformer(40, 16, 2, 4, context=16), 6
    model = shape.build("cpu")
    make = partial(MAKE[optimizer], foreach=foreach)
    master = MasterWeights(model, make)
    x = torch.zeros(batch, 8, dtype=torch.long)
    y = x.clone()

    def step():
        parts = [t.split(micro or batch) for t in (x, y)]
        for x_part, y_part in zip(*parts, strict=True):
            logits = model(x_part).flatten(0, 1)
            loss = F.cross_entropy(logits, y_part.flatten())
            del logits
            if micro:
                loss = loss * (len(x_part) / batch)
            loss.backward()
            del loss
        master.step()

    step()
    held = [model, master.optimizer, *master.copies, x, y]
    with PeakTracker(*held) as tracker:
        step()
    predicted = predict(
        shape,
        batch,
        8,
        recipe="master",
        optimizer=optimizer,
        micro_batch=micro,
        foreach=foreach,
    )
    assert (predicted.start, predicted.peak) == (tracker.start, tracker.peak)


def test_a_master_of_nothing():
    said = (
        "has no parameters that are trained (requires_grad): hand over one "
        "that is to be trained"
    )
    for model in (nn.ReLU(), classifier().requires_grad_(False)):
        message = says(f"{type(model).__name__} {said}")
        with pytest.raises(ValueError, match=message):
            MasterWeights(model, torch.optim.AdamW)


def test_a_master_whose_optimizer_cannot_be_made():
    model = classifier()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=begins("Invalid learning rate")):
        MasterWeights(model, lambda p: torch.optim.AdamW(p, lr=-1.0))
    assert equal(model.state_dict(), before)


def test_a_master_step_without_backward():
    model = classifier()
    master = MasterWeights(model, torch.optim.AdamW)
    message = "no parameter has a gradient: run a backward pass before"
    for _ in range(2):  # after a step, too
        before = copy.deepcopy([master.copies, model.state_dict()])
        with pytest.raises(RuntimeError, match=says(message)):
            master.step()
        assert equal([master.copies, model.state_dict()], before)
        backward(model, *samples(8))
        master.step()
        assert not equal(master.copies, before[0])
