"""A step in 16 bits, against loops by hand; errors after which one goes on."""

import copy
from contextlib import nullcontext
from math import inf, isfinite, isnan, nan

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

from membudget.accumulation import Accumulator
from membudget.checkpointing import Checkpointed
from membudget.ledger import Transformer, predict
from membudget.measuring import PeakTracker
from membudget.models import mlp_blocks
from membudget.precision import (
    MasterWeights,
    MixedPrecision,
    ScaledStep,
    ScaleTrace,
    support,
    training,
)

FORMATS = ("fp32", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NORMS = (None, 0.05, 1e6)


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
        self.x, self.y = samples(sum(sizes))

    def precision(self):
        return MixedPrecision(
            self.optimizer,
            self.format,
            max_norm=self.max_norm,
            scaler=self.scaler,
            emulated=True,
        )

    def loss(self, part, context):
        with context:
            return F.cross_entropy(self.model(self.x[part]), self.y[part])

    def state(self):
        return state(self.model, self.optimizer, self.scaler)


def ours(rig, precision, scale=1.0):
    """A step by the room; the batch's numbers times ``scale``."""
    total = sum(rig.sizes)
    for part in slices(rig.sizes):
        loss = rig.loss(part, precision.autocast()) * scale
        precision.backward(loss, len(rig.y[part]) / total)
    return precision.step()


def by_hand(rig, scale=1.0):
    """The same, as PyTorch's documentation writes it."""
    total, norm, before = sum(rig.sizes), None, 1.0
    context = nullcontext()
    for part in slices(rig.sizes):
        if rig.format != "fp32":
            context = torch.autocast("cpu", DTYPES[rig.format])
        loss = rig.loss(part, context) * scale
        loss = loss * (len(rig.y[part]) / total)
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
    norms = (isnan(one.norm) and isnan(other.norm)) or one.norm == other.norm
    rest = [(r.scale, r.clipped, r.stepped) for r in (one, other)]
    return norms and rest[0] == rest[1]


# Against a loop by hand --------------------------------------------------


@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2), (1, 6, 1)])
@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("format", FORMATS)
def test_steps_are_those_of_a_loop_by_hand(format, max_norm, sizes):
    mine, theirs = (Rig(format, max_norm, sizes) for _ in range(2))
    precision = mine.precision()
    seen = set()
    for number in range(8):
        report = ours(mine, precision)
        assert same_report(report, by_hand(theirs)), number
        assert equal(mine.state(), theirs.state()), number
        seen.add(report.clipped)
    if max_norm == 0.05:
        assert seen == {True}
    else:
        assert seen == {False}


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2)])
def test_steps_with_overflows(max_norm, sizes):
    """The scale falls from 2^20 and grows again; steps are skipped."""
    mine, theirs = (Rig("fp16", max_norm, sizes, 2.0**20) for _ in range(2))
    precision = mine.precision()
    reports = []
    with ScaleTrace(mine.scaler) as trace:
        for number in range(20):
            reports.append(ours(mine, precision))
            assert same_report(reports[-1], by_hand(theirs)), number
            assert equal(mine.state(), theirs.state()), number
    assert [r.scale for r in reports] == trace.scales
    assert [not r.stepped for r in reports] == trace.overflows
    assert {r.stepped for r in reports} == {True, False}
    assert all(isfinite(r.norm) == r.stepped for r in reports)
    assert not any(r.clipped and not r.stepped for r in reports)


@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2)])
@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("format", FORMATS)
def test_steps_are_the_accumulators(format, max_norm, sizes):
    """With its autocast and its scaler, and the total announced."""
    start = 2.0**20
    mine, other = (Rig(format, max_norm, sizes, start) for _ in range(2))
    precision, lent = mine.precision(), other.precision()
    accumulator = Accumulator(
        other.model, other.optimizer, scaler=lent.scaler, max_norm=max_norm
    )
    skipped = 0
    for number in range(9):
        report = ours(mine, precision)
        skipped += not report.stepped
        with accumulator.window(total=sum(sizes)) as window:
            for part in window.over(slices(sizes)):
                loss = other.loss(part, lent.autocast())
                window.backward(loss, count=len(other.y[part]))
            theirs = window.step()
        assert equal(mine.state(), other.state()), number
        assert report.stepped == theirs.stepped
        if report.stepped:
            assert report.norm == theirs.norm
            assert report.clipped == theirs.clipped
    assert (skipped > 0) == (format == "fp16")


@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_is_unscaled_before_it_is_clipped(format):
    """Clipping at the norm's half is the same at every scale."""
    found = []
    for start in (1.0, 2.0**14):
        rig = Rig(format, start=start)
        precision = rig.precision()
        precision.backward(rig.loss(slice(8), precision.autocast()))
        norm = precision.unscale()
        unscaled = gradients(rig.model)
        precision.max_norm = norm / 2
        seen = []
        hook = rig.optimizer.register_step_pre_hook(
            lambda *_, rig=rig, seen=seen: seen.extend(gradients(rig.model))
        )
        report = precision.step()
        hook.remove()
        assert report.clipped and report.norm == norm
        size = nn.utils.get_total_norm(seen).item()
        assert size == pytest.approx(norm / 2, rel=1e-3)
        assert not equal(seen, unscaled)
        found.append(norm)
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_the_defaults():
    rig = Rig("bf16")
    precision = MixedPrecision(rig.optimizer, emulated=True)
    assert (precision.format, precision.max_norm) == ("bf16", None)
    assert precision.scaler is None
    fp16 = MixedPrecision(rig.optimizer, "fp16", emulated=True)
    assert fp16.scaler.get_scale() == 65536
    assert fp16.scaler.get_growth_interval() == 2000
    fp32 = MixedPrecision(rig.optimizer, "fp32")
    assert fp32.scaler is None and fp32.parameters() == [
        *rig.model.parameters()
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_what_autocast_does(format):
    precision = Rig(format).precision()
    x = torch.ones(2, 2)
    with precision.autocast():
        assert (x @ x).dtype == DTYPES.get(format, torch.float32)
        assert torch.is_autocast_enabled("cpu") == (format != "fp32")
    assert (x @ x).dtype == torch.float32


def test_a_parameter_without_gradient_is_left():
    rig = Rig(max_norm=0.1)
    rig.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    (idle,) = rig.optimizer.param_groups[1]["params"]
    precision = rig.precision()
    report = ours(rig, precision)
    assert report.stepped and report.clipped
    assert idle.tolist() == [1, 1] and idle.grad is None
    assert len(precision.parameters()) == 7


# Looking at the gradient first -------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_unscale_leaves_the_gradient_of_the_loss(format):
    plain = Rig(format)
    context = plain.precision().autocast()
    plain.loss(slice(8), context).backward()
    rig = Rig(format, start=2.0**8)
    precision = rig.precision()
    precision.backward(rig.loss(slice(8), precision.autocast()))
    norm = precision.unscale()
    assert norm == nn.utils.get_total_norm(gradients(rig.model)).item()
    for mine, theirs in zip(
        gradients(rig.model), gradients(plain.model), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)
    report = precision.step()
    assert (report.norm, report.stepped) == (norm, True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("max_norm", NORMS)
def test_unscale_and_step_are_one_step(format, max_norm):
    one, two = Rig(format, max_norm), Rig(format, max_norm)
    first, second = one.precision(), two.precision()
    for _ in range(5):
        report = ours(one, first)
        second.backward(two.loss(slice(8), second.autocast()))
        second.unscale()
        assert same_report(second.step(), report)
        assert equal(one.state(), two.state())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_gradient_that_was_changed_is_clipped_by_its_own_norm(
    format, factor
):
    rig = Rig(format)
    precision = rig.precision()
    precision.backward(rig.loss(slice(8), precision.autocast()))
    norm = precision.unscale()
    precision.max_norm = norm
    for p in rig.model.parameters():
        p.grad *= factor
    seen = []
    rig.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(gradients(rig.model))
    )
    report = precision.step()
    assert report.norm == pytest.approx(norm * factor, rel=1e-5)
    assert report.clipped == (factor > 1)
    size = nn.utils.get_total_norm(seen).item()
    assert size == pytest.approx(norm * min(factor, 1), rel=1e-4)


def test_a_finite_gradient_whose_norm_is_beyond_fp32():
    """Clipped as PyTorch clips it, to nothing; no overflow for the scaler."""
    rig = Rig(max_norm=1.0)
    precision = rig.precision()
    precision.backward(rig.loss(slice(8), precision.autocast()))
    precision.unscale()
    for p in rig.model.parameters():
        p.grad.fill_(1e25)
    seen = []
    rig.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(gradients(rig.model))
    )
    assert precision.step() == ScaledStep(inf, 2.0**10, True, True)
    assert len(seen) == 6 and not any(g.any() for g in seen)


# Overflows ---------------------------------------------------------------


def filled(optimizer):
    return {k: copy.deepcopy(v) for k, v in optimizer.state_dict().items()}


@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2)])
def test_after_an_overflow_nothing_moved_but_the_scale(sizes):
    rig = Rig("fp16", 1.0, sizes)
    precision = rig.precision()
    for _ in range(2):
        assert ours(rig, precision).stepped
    before = copy.deepcopy(rig.model.state_dict()), filled(rig.optimizer)
    report = ours(rig, precision, scale=1e5)
    assert (report.stepped, report.clipped) == (False, False)
    assert not isfinite(report.norm) and report.scale == 2.0**10
    after = rig.model.state_dict(), rig.optimizer.state_dict()
    assert equal(after[0], before[0]) and equal(after[1], before[1])
    assert rig.scaler.get_scale() == 2.0**9
    assert all(g is None for g in gradients(rig.model))
    report = ours(rig, precision)
    assert report.stepped and report.scale == 2.0**9
    assert not equal(rig.model.state_dict(), before[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_overflow_in_one_micro_batch_skips_the_window(which):
    rig = Rig(sizes=(3, 3, 2))
    precision = rig.precision()
    before = copy.deepcopy(rig.model.state_dict())
    for number, part in enumerate(slices(rig.sizes)):
        loss = rig.loss(part, precision.autocast())
        precision.backward(loss * (1e6 if number == which else 1), 3 / 8)
        there = [g.isfinite().all() for g in gradients(rig.model)]
        assert all(there) == (number < which)
    report = precision.step()
    assert (report.stepped, report.scale) == (False, 2.0**10)
    assert equal(rig.model.state_dict(), before)
    assert not rig.optimizer.state
    assert ours(rig, precision).stepped


def test_an_overflow_that_is_seen_before_the_step():
    rig = Rig()
    precision = rig.precision()
    precision.backward(rig.loss(slice(8), precision.autocast()) * 1e6)
    assert not isfinite(precision.unscale())
    assert not precision.step().stepped
    assert rig.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("first", [False, True])
def test_a_gradient_that_is_not_finite_without_a_scaler(format, first):
    rig = Rig(format, 1.0)
    precision = rig.precision()
    ours(rig, precision)
    before = rig.state()
    bad = (0 * rig.model[0].weight).sum().sqrt()  # 0 · ∞ in backward
    precision.backward(rig.loss(slice(8), precision.autocast()) + bad)
    if first:
        assert isnan(precision.unscale())
    message = (
        "the gradient has norm nan, and without a scaler no step is skipped "
        "for it: the gradient is cleared, the parameters are as before. "
        "Lower the learning rate, or look for the operator that overflows"
    )
    with pytest.raises(RuntimeError, match=says(message)):
        precision.step()
    assert equal(rig.state(), before)
    assert ours(rig, precision).stepped


def test_a_scale_that_fell_to_zero_takes_no_step():
    rig = Rig(start=2.0**-149)
    precision = rig.precision()
    before = copy.deepcopy(rig.model.state_dict())
    for _ in range(2):
        bad = (0 * rig.model[0].weight).sum().sqrt()  # 0 · ∞ in backward
        precision.backward(rig.loss(slice(8), precision.autocast()) + bad)
        assert not precision.step().stepped
        assert rig.scaler.get_scale() == 0
    assert equal(rig.model.state_dict(), before)


@pytest.mark.parametrize("format", FORMATS)
def test_sparse_gradients(format):
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    precision = MixedPrecision(optimizer, format, max_norm=1, emulated=True)
    before = table.weight.detach().clone()
    precision.backward((3 * table(torch.tensor([1, 1]))[:, 0]).sum())
    report = precision.step()
    assert (report.norm, report.clipped, report.stepped) == (6, True, True)
    moved = (before - table.weight).tolist()
    assert moved[1] == pytest.approx([1, 0, 0], abs=1e-5)


# With checkpointing ------------------------------------------------------


class Reentered(nn.Module):
    def __init__(self, stage, reentrant):
        super().__init__()
        self.stage, self.reentrant = stage, reentrant

    def forward(self, x):
        return checkpoint(self.stage, x, use_reentrant=self.reentrant)


def blocks():
    torch.manual_seed(0)
    return mlp_blocks(6, 3, 5)


WAYS = {
    "checkpoint": lambda net: nn.Sequential(
        *(Reentered(stage, False) for stage in net[:3]), net[3]
    ),
    "reentrant": lambda net: nn.Sequential(
        net[0], *(Reentered(stage, True) for stage in net[1:3]), net[3]
    ),
    "Checkpointed": lambda net: nn.Sequential(
        Checkpointed(*net[:3], segments=((0, 1), (2,))), net[3]
    ),
    "one segment": lambda net: Checkpointed(*net, segments=((0, 1, 2, 3),)),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_runs_under_the_autocast_of_its_forward(way, format):
    found = []
    for wrap in (lambda net: net, WAYS[way]):
        rig = Rig(format, 0.1, (5, 3), model=wrap(blocks()))
        precision = rig.precision()
        seen = []
        rig.optimizer.register_step_pre_hook(
            lambda *_, rig=rig, seen=seen: seen.append(gradients(rig.model))
        )
        reports = [ours(rig, precision) for _ in range(3)]
        values = [p.detach() for p in rig.model.parameters()]
        found.append([seen, values, [r.norm for r in reports]])
    assert equal(*found)
    assert len(found[0][0]) == 3


# Making one --------------------------------------------------------------


def only(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_without_parameters():
    message = (
        "the optimizer has no parameters: give it those of the model that "
        "are to be trained"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(only([{"params": []}]), "fp32")


def test_an_optimizer_that_needs_a_closure():
    message = (
        "LBFGS evaluates the loss again inside its step and cannot use a "
        "gradient that is there already: use another optimizer"
    )
    optimizer = torch.optim.LBFGS(classifier().parameters())
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(optimizer, "fp32")


@pytest.mark.parametrize("bad", ["half", "float16", "amp"])
def test_an_unknown_format(bad):
    rig = Rig()
    message = (
        f"there is no format {bad!r}: use one of fp32, tf32, bf16, fp16, "
        "fp8-e4m3, fp8-e5m2"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(rig.optimizer, bad)


@pytest.mark.parametrize("bad", ["fp8-e4m3", "fp8-e5m2", "tf32"])
def test_a_format_that_cannot_train(bad):
    rig = Rig()
    message = f"autocast does not take {bad}: use one of fp32, bf16, fp16"
    if bad == "tf32":
        message += ". tf32 is switched on with membudget.precision.tf32"
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(rig.optimizer, bad, emulated=True)


@pytest.fixture
def old_cpu(processor):
    """A CPU without units for 16 bits."""
    processor(False, False)


@pytest.fixture
def new_cpu(processor):
    """A CPU with units for 16 bits."""
    processor(True, True)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_a_format_that_is_only_emulated(old_cpu, format):
    rig = Rig()
    message = (
        f"cpu only emulates {format}: the numbers are right, the speed is "
        "not that of 16 bits. Use another format "
        "(membudget.precision.support tells which is native), or say "
        "emulated=True"
    )
    assert support(format, "cpu") == "emulated"
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(rig.optimizer, format)
    assert MixedPrecision(rig.optimizer, format, emulated=True)
    assert MixedPrecision(rig.optimizer, "fp32")


@pytest.mark.parametrize("emulated", [False, True])
def test_a_format_that_is_absent(monkeypatch, emulated):
    monkeypatch.setattr(training, "support", lambda format, device: "absent")
    message = (
        "cpu cannot multiply matrices in bf16: use fp16 on a GPU that has no "
        "bf16, otherwise fp32"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(Rig().optimizer, "bf16", emulated=emulated)


class Lost(Exception):
    """What a device runs out of, say."""


def lose(*arguments):
    raise Lost


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_an_error_of_the_optimizer_leaves_the_loop_usable(format, monkeypatch):
    rig, clean = Rig(format, 0.1, (3, 5)), Rig(format, 0.1, (3, 5))
    precision = rig.precision()
    monkeypatch.setattr(rig.optimizer, "step", lose)
    with pytest.raises(Lost):
        ours(rig, precision)
    monkeypatch.undo()
    assert all(p.grad is None for p in rig.model.parameters())
    assert ours(rig, precision) == ours(clean, clean.precision())
    assert equal(rig.state(), clean.state())


@pytest.mark.parametrize("format", ["fp32", "fp16"])
def test_an_error_of_the_backward_pass_clears_the_step(format):
    rig, clean = Rig(format, 0.1, (3, 5)), Rig(format, 0.1, (3, 5))
    precision = rig.precision()
    precision.backward(rig.loss(slice(0, 3), precision.autocast()), 3 / 8)
    loss = rig.loss(slice(3, 8), precision.autocast())
    rig.model[0].weight.register_hook(lose)
    hooks = rig.model[0].weight._backward_hooks
    with pytest.raises(Lost):
        precision.backward(loss, 5 / 8)
    hooks.clear()
    assert all(p.grad is None for p in rig.model.parameters())
    with pytest.raises(RuntimeError, match=begins("there is no gradient")):
        precision.step()
    assert ours(rig, precision) == ours(clean, clean.precision())
    assert equal(rig.state(), clean.state())


def test_a_format_that_is_native(new_cpu):
    for format in FORMATS:
        assert MixedPrecision(Rig().optimizer, format).format == format


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_a_scaler_without_fp16(format):
    rig = Rig()
    message = (
        f"a scaler is for fp16: {format} has the exponents of fp32, so no "
        "gradient falls below its range. Leave the scaler out"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(rig.optimizer, format, scaler=rig.scaler, emulated=True)


@pytest.mark.parametrize("bad", [0, -1.0, nan, -inf])
def test_a_max_norm_that_is_not_above_zero(bad):
    message = f"max_norm is {bad!r}: use a number above 0"
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(Rig().optimizer, "fp32", max_norm=bad)


def test_an_infinite_max_norm_clips_nothing():
    rig = Rig("fp32", inf)
    assert not ours(rig, rig.precision()).clipped


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64]
)
def test_parameters_that_are_not_in_fp32(dtype):
    model = classifier()
    model[2].to(dtype)
    message = (
        f"some parameters are {dtype}: leave the model in fp32 (no "
        "model.half()); autocast casts what it needs"
    )
    with pytest.raises(ValueError, match=says(message)):
        MixedPrecision(only(model.parameters()), "fp32")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says(message)):
        MasterWeights(model, only)
    assert equal(model.state_dict(), before)


# Wrong use, after which the loop goes on ---------------------------------

SCALAR = ": backward needs a tensor with one element"
UNSCALED = (
    "the gradient is unscaled already, and another scaled one cannot be "
    "added: run every micro-batch before unscale()"
)
TWICE = (
    "the gradient is unscaled already, and would be too small by the loss "
    "scale: call unscale() once, before step()"
)
NOTHING = (
    "there is no gradient: run backward(loss) before, for every micro-batch "
    "of the step"
)
GRAPH = (
    "the loss has no graph: compute it from the model's output, outside "
    "torch.no_grad() and without detach() or item()"
)
FINITE = (
    ": a finite one is needed, and no loss scale makes it one. Look for an "
    "overflow in the forward pass, a too high learning rate, or a "
    "micro-batch of padding only"
)
UNDER = (
    "backward runs under autocast: leave the block after the loss. The "
    "backward pass takes each operator's own format"
)


def sixteen(dtype):
    return (
        f"the loss is {dtype}: it has two or three digits, and in fp16 the "
        "gradient that enters it, a loss scale of 65 536, is infinite. "
        "Compute it in fp32, from output.float()"
    )


def share(value):
    return (
        f"share, n_k / N, is {value}: use a finite number above 0 and up to 1"
    )


BAD_LOSSES = [
    (lambda loss: loss.expand(3), "the loss is [3]" + SCALAR),
    (lambda loss: loss.expand(0), "the loss is [0]" + SCALAR),
    (lambda loss: loss.detach(), GRAPH),
    (lambda loss: loss.half(), sixteen(torch.float16)),
    (lambda loss: loss.bfloat16(), sixteen(torch.bfloat16)),
    (lambda loss: loss * nan, "the loss is nan" + FINITE),
    (lambda loss: loss * inf, "the loss is inf" + FINITE),
    (lambda loss: loss * -inf, "the loss is -inf" + FINITE),
]
BAD_SHARES = [0, 0.0, -0.5, 1.0001, 8, nan, inf]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", range(len(BAD_LOSSES)))
def test_bad_losses(format, case):
    change, message = BAD_LOSSES[case]
    if format == "bf16" and case == 3:
        return  # a loss in fp16 under bf16: the same error, tested twice
    _refused_and_on(
        format,
        ValueError,
        message,
        lambda rig, precision, loss: precision.backward(change(loss)),
    )


@pytest.mark.parametrize("bad", BAD_SHARES)
def test_bad_shares(bad):
    _refused_and_on(
        "fp16",
        ValueError,
        share(bad),
        lambda rig, precision, loss: precision.backward(loss, bad),
    )


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_backward_under_autocast(format):
    def run(rig, precision, loss):
        with precision.autocast():
            precision.backward(loss)

    _refused_and_on(format, RuntimeError, UNDER, run)


def test_under_fp32_there_is_no_autocast_to_leave():
    rig = Rig("fp32")
    precision = rig.precision()
    with precision.autocast():
        precision.backward(rig.loss(slice(8), nullcontext()))
    assert precision.step().stepped


def _refused_and_on(format, kind, message, run):
    """The error comes; the window goes on as if nothing had been."""
    clean, rig = (Rig(format, 0.1, (3, 3, 2)) for _ in range(2))
    first, precision = clean.precision(), rig.precision()
    ours(clean, first)
    ours(rig, precision)
    loss = rig.loss(slice(0, 3), precision.autocast())
    with pytest.raises(kind, match=says(message)):
        run(rig, precision, loss)  # as the first of a window
    assert equal(rig.state(), clean.state())
    total = sum(rig.sizes)
    for number, part in enumerate(slices(rig.sizes)):
        precision.backward(
            rig.loss(part, precision.autocast()), len(rig.y[part]) / total
        )
        if number == 1:  # and in its middle
            before = rig.state()
            loss = rig.loss(part, precision.autocast())
            with pytest.raises(kind, match=says(message)):
                run(rig, precision, loss)
            assert equal(rig.state(), before)
    assert same_report(precision.step(), ours(clean, first))
    assert equal(rig.state(), clean.state())


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_without_backward(format):
    rig, clean = Rig(format), Rig(format)
    precision, other = rig.precision(), clean.precision()
    before = rig.state()
    for call in (precision.step, precision.unscale) * 2:
        with pytest.raises(RuntimeError, match=says(NOTHING)):
            call()
        assert equal(rig.state(), before)
    assert same_report(ours(rig, precision), ours(clean, other))
    with pytest.raises(RuntimeError, match=says(NOTHING)):
        precision.step()  # after a step, too
    assert same_report(ours(rig, precision), ours(clean, other))
    assert equal(rig.state(), clean.state())


@pytest.mark.parametrize("format", FORMATS)
def test_unscaling_twice(format):
    rig, clean = Rig(format, 0.1), Rig(format, 0.1)
    precision, other = rig.precision(), clean.precision()
    precision.backward(rig.loss(slice(8), precision.autocast()))
    precision.unscale()
    before = rig.state()
    with pytest.raises(RuntimeError, match=says(TWICE)):
        precision.unscale()
    loss = rig.loss(slice(8), precision.autocast())
    with pytest.raises(RuntimeError, match=says(UNSCALED)):
        precision.backward(loss)
    assert equal(rig.state(), before)
    assert same_report(precision.step(), ours(clean, other))
    assert equal(rig.state(), clean.state())
    assert same_report(ours(rig, precision), ours(clean, other))


def test_a_scaler_that_was_unscaled_by_hand():
    """PyTorch's own error; the gradient stays."""
    rig = Rig()
    precision = rig.precision()
    precision.backward(rig.loss(slice(8), precision.autocast()))
    rig.scaler.unscale_(rig.optimizer)
    before = rig.state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="already been called"):
            precision.step()
        assert equal(rig.state(), before)


@pytest.mark.parametrize("format", FORMATS)
def test_the_optimizer_of_another_model(format):
    rig, other = Rig(format), Rig(format)
    precision = rig.precision()
    message = (
        "no parameter of the optimizer has a gradient: give the optimizer "
        "the parameters of the model that made the loss"
    )
    precision.backward(other.loss(slice(8), precision.autocast()))
    before = rig.state()
    for call in (precision.step, precision.unscale):
        with pytest.raises(RuntimeError, match=says(message)):
            call()
        assert equal(rig.state(), before)
    assert ours(rig, precision).stepped


def test_a_backward_pass_that_fails():
    """Its graph is gone: PyTorch's error, and nothing was added."""
    rig, clean = Rig(), Rig()
    precision, other = rig.precision(), clean.precision()
    loss = rig.loss(slice(8), precision.autocast())
    torch.autograd.grad(loss, list(rig.model.parameters()))
    with pytest.raises(RuntimeError, match="second time"):
        precision.backward(loss)
    with pytest.raises(RuntimeError, match=says(NOTHING)):
        precision.step()
    assert same_report(ours(rig, precision), ours(clean, other))
    assert equal(rig.model.state_dict(), clean.model.state_dict())


def test_a_loss_of_one_element_is_a_scalar():
    rig, clean = Rig(), Rig()
    precision, other = rig.precision(), clean.precision()
    loss = rig.loss(slice(8), precision.autocast())
    precision.backward(loss.view(1, 1))
    assert same_report(precision.step(), ours(clean, other))


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
    "adam": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def backward(model, x, y):
    dtype = next(model.parameters()).dtype
    output = model(x.to(dtype)).float()
    F.cross_entropy(output, y).backward()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("frozen", [False, True])
def test_master_weights_are_those_of_a_loop_by_hand(make, frozen):
    one, two = classifier(), classifier()
    for model in (one, two):
        model[0].weight.requires_grad_(not frozen)
    master = MasterWeights(one, MAKE[make])
    copies, optimizer, step = masters_by_hand(two, MAKE[make])
    assert len(master.copies) == 6 - frozen
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


def test_the_copies_keep_the_fp32_values():
    model = classifier()
    before = [p.detach().clone() for p in model.parameters()]
    buffers = nn.BatchNorm1d(5)
    model.append(buffers)
    master = MasterWeights(model, torch.optim.AdamW)
    assert equal(master.copies[:6], before)
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.bfloat16} == {buffers.running_mean.dtype}
    assert master.weights == list(model.parameters())
    rounded = [p.float() for p in list(model.parameters())[:6]]
    assert not equal(rounded, before)


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
    plain = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(plain.weight)
    optimizer = torch.optim.SGD(plain.parameters(), lr=2.0**-10)
    for _ in range(6):
        plain.weight.grad = -torch.ones_like(plain.weight)
        optimizer.step()
    assert plain.weight.item() == 1


def test_a_weight_without_gradient_is_left():
    model = classifier()
    master = MasterWeights(model, torch.optim.AdamW)
    before = copy.deepcopy(master.copies)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    master.step()
    assert not torch.equal(master.copies[0], before[0])
    assert equal(master.copies[1:], before[1:])
    assert len(master.optimizer.state) == 1


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("micro", [None, 2, 4])
def test_the_peak_of_a_step_is_the_ledgers(optimizer, foreach, micro):
    make = {
        "adam": lambda p: torch.optim.AdamW(p, foreach=foreach),
        "momentum": lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=0.9, foreach=foreach
        ),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=foreach),
    }
    torch.manual_seed(0)
    shape, batch = Transformer(40, 16, 2, 4, context=16), 6
    model = shape.build("cpu")
    master = MasterWeights(model, make[optimizer])
    x = torch.zeros(batch, 8, dtype=torch.long)
    y = x.clone()

    def step():
        size = micro or batch
        for start in range(0, batch, size):
            part = slice(start, start + size)
            logits = model(x[part]).flatten(0, 1)
            loss = F.cross_entropy(logits, y[part].flatten())
            del logits
            if size < batch:
                loss = loss * (len(x[part]) / batch)
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


def test_the_state_survives():
    """Copies and the optimizer's states, saved and read back."""
    x, y = samples(8)
    one = classifier()
    first = MasterWeights(one, MAKE["adam"])
    for _ in range(3):
        backward(one, x, y)
        first.step()
    kept = copy.deepcopy((first.copies, first.optimizer.state_dict()))
    two = classifier(seed=1)
    for p, c in zip(two.parameters(), kept[0], strict=True):
        p.data.copy_(c)
    second = MasterWeights(two, MAKE["adam"])
    second.optimizer.load_state_dict(kept[1])
    for model, master in ((one, first), (two, second)):
        backward(model, x, y)
        master.step()
    assert equal(first.copies, second.copies)
    assert equal(one.state_dict(), two.state_dict())


def test_a_master_of_nothing():
    message = (
        "has no parameters that are trained (requires_grad): hand over one "
        "that is to be trained"
    )
    for model in (nn.ReLU(), classifier().requires_grad_(False)):
        with pytest.raises(
            ValueError, match=says(f"{type(model).__name__} {message}")
        ):
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
    before = copy.deepcopy([master.copies, model.state_dict()])
    message = "no parameter has a gradient: run a backward pass before"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says(message)):
            master.step()
        assert equal([master.copies, model.state_dict()], before)
    backward(model, *samples(8))
    master.step()
    assert not equal(master.copies, before[0])
    with pytest.raises(RuntimeError, match=says(message)):
        master.step()
