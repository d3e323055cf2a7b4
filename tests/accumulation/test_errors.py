"""Wrong use is a clear error, and after an error nothing has happened."""

from contextlib import suppress
from functools import cache
from math import nan

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    everything,
    refused,
    run_window,
    samples,
    slices,
)
from torch import nn

from membudget.accumulation import Accumulator, Window

optim = torch.optim


def sgd(model, lr=0.1):
    return optim.SGD(model.parameters(), lr=lr)


# Making an accumulator ---------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda p: optim.SGD([{"params": []}, {"params": []}], lr=0.1),
            "the optimizer has no parameters: "
            "give it those of the model that are to be trained",
        ),
        (
            optim.LBFGS,
            "LBFGS evaluates the loss again inside its step and cannot use a "
            "gradient that is there already: use another optimizer",
        ),
    ],
)
def test_what_makes_no_accumulator(optimizer, message):
    model = classifier()
    with refused(ValueError, message):
        Accumulator(model, optimizer(model.parameters()))


def test_an_optimizer_that_steps_in_the_backward_pass():
    """As in the tutorial that fuses the two, to hold one gradient at once."""
    model = classifier()
    each = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}

    def fused(p):
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(fused)
    before = [p.clone() for p in model.parameters()]
    message = "SGD steps in the backward pass, from a hook on the gradients"
    with Accumulator(model, sgd(model)).window() as window:
        x, y = samples(4)
        with pytest.raises(RuntimeError, match=message):
            window.backward(F.cross_entropy(model(x), y), count=4)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(model(x), y).backward()  # outside it may
    assert not any(map(torch.equal, model.parameters(), before))


def test_another_models_optimizer_may_step_there():
    model, other = classifier(), torch.nn.Linear(1, 1)
    stepper = optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1)).backward()
    model.register_full_backward_hook(lambda *_: stepper.step())
    x, y = samples(4)
    with Accumulator(model, sgd(model)).window() as window:
        window.backward(F.cross_entropy(model(x), y), count=4)
        assert window.step().stepped


# A model with everything that a failure could leave changed --------------

SIZES = [8, 8, 5]


class Rig:
    """A model with buffers and dropout, its optimizer and its scaler."""

    def __init__(self, scaled=True):
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Tanh(),
            nn.Linear(8, 5),
        )
        self.model.register_buffer("seen", torch.zeros(3))
        self.model.register_buffer("mask", torch.ones(1).expand(4))
        self.model.register_buffer("unset", torch.tensor([nan, 1.0]))
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**8, growth_interval=2, enabled=scaled
        )
        self.accumulator = Accumulator(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            max_norm=0.5,
        )
        self.x, self.y = samples(sum(SIZES), dtype=torch.float32)
        self.parts = slices(SIZES)

    def loss(self, part):
        self.model.seen += 1
        return F.cross_entropy(self.model(self.x[part]), self.y[part])

    def run(self, window, parts):
        for part in window.over(parts):
            window.backward(self.loss(part), len(self.y[part]))

    def good_window(self, total=None):
        with self.accumulator.window(total) as window:
            self.run(window, self.parts)
            return window.step()

    def state(self):
        return everything(self.model, self.optimizer, self.scaler)


@cache
def undisturbed(scaled=True):
    """Two good windows: the total, the report and the state after each."""
    with torch.random.fork_rng():
        rig = Rig(scaled)
        return [(n, rig.good_window(n), rig.state()) for n in (None, 21)]


class Stop(Exception):
    """Raised by a loop of the user's own."""


def stop(*_):
    raise Stop


def ends_with(change):
    """Two good micro-batches, and a last one whose loss is changed."""

    def failure(rig, window):
        rig.run(window, rig.parts[:2])
        window.backward(change(rig.loss(rig.parts[2])), 5)

    return failure


def backward_before(loss):
    loss.backward()  # then its graph is gone
    return loss


def more_than_announced(rig, window):
    rig.run(window, [*rig.parts, rig.parts[0]])


def interrupted(rig, window):
    for i, part in enumerate(window.over(rig.parts)):
        loss = rig.loss(part)
        if i == 2:
            raise KeyboardInterrupt
        window.backward(loss, len(rig.y[part]))


def hook_fails(rig, window):
    """In the middle of a backward pass: some gradients are there."""
    handle = rig.model[0].weight.register_hook(stop)
    try:
        rig.run(window, rig.parts)
    finally:
        handle.remove()


def caught_in_the_body(rig, window):
    """Going on after an error would train on half of the window."""
    with suppress(ValueError):
        ends_with(lambda loss: loss * nan)(rig, window)
    window.step()


def empty(rig, window):
    rig.loss(rig.parts[0])  # buffers and dropout move, nothing is added
    window.step()


def left_without_step(rig, window):
    rig.run(window, rig.parts)


def error_after_finish(rig, window):
    rig.run(window, rig.parts)
    window.finish()
    raise Stop


def backward_after_finish(rig, window):
    rig.run(window, rig.parts[:2])
    window.finish()
    window.backward(rig.loss(rig.parts[2]), 5)


def caught_optimizer_error(rig, window):
    """Before it has changed anything."""
    rig.run(window, rig.parts)
    handle = rig.optimizer.register_step_pre_hook(stop)
    with suppress(Stop):
        window.step()
    handle.remove()
    window.step()


def unscaled_by_the_loop(rig, window):
    """As in a loop without an accumulator."""
    rig.run(window, rig.parts)
    rig.scaler.unscale_(rig.optimizer)
    window.step()


def updated_by_the_loop(rig, window):
    """The scaler has counted a clean step that was never taken."""
    rig.run(window, rig.parts)
    rig.scaler.unscale_(rig.optimizer)
    rig.scaler.update()
    raise Stop


def infinite_gradient(rig, window):
    """The loss is finite, the gradient is not."""
    bad = (0 * rig.model[0].weight).sum().sqrt()  # 0 · ∞
    ends_with(lambda loss: loss + bad)(rig, window)
    window.step()


NOT_OPEN = (
    "the window is not open: use it inside "
    "`with accumulator.window() as window:`, once"
)
FAILURES = {
    "nan loss": (
        ends_with(lambda loss: loss * nan),
        ValueError,
        "the loss is nan: a finite one is needed, and no loss scale makes it "
        "one. Look for an overflow in the forward pass, a too high learning "
        "rate, or a micro-batch of padding only",
    ),
    "vector loss": (
        ends_with(lambda loss: loss.expand(5)),
        ValueError,
        "the loss is [5]: backward needs a tensor with one element",
    ),
    "detached loss": (
        ends_with(torch.Tensor.detach),
        ValueError,
        "the loss has no graph: compute it from the model's output, outside "
        "torch.no_grad() and without detach() or item()",
    ),
    "more than announced": (
        more_than_announced,
        ValueError,
        "29 samples or tokens came, but 21 were announced: pass the "
        "window's total, or None if it is not known",
    ),
    "interrupted": (interrupted, KeyboardInterrupt, ""),
    "backward fails": (ends_with(backward_before), RuntimeError, None),
    "hook fails": (hook_fails, Stop, ""),
    "caught in the body": (caught_in_the_body, RuntimeError, NOT_OPEN),
    "empty": (
        empty,
        RuntimeError,
        "the window is empty: run backward on at least one micro-batch "
        "before the step",
    ),
    "left without step": (
        left_without_step,
        RuntimeError,
        "the window was left with 3 micro-batches that no step used: call "
        "window.step()",
    ),
    "error after finish": (error_after_finish, Stop, ""),
    "backward after finish": (
        backward_after_finish,
        RuntimeError,
        "the window's gradient is finished: run every micro-batch before "
        "window.finish()",
    ),
    "caught optimizer error": (caught_optimizer_error, RuntimeError, NOT_OPEN),
    "unscaled by the loop": (unscaled_by_the_loop, RuntimeError, None),
    "updated by the loop": (updated_by_the_loop, Stop, ""),
}
PLAIN = {
    "interrupted": FAILURES["interrupted"],
    "infinite gradient": (
        infinite_gradient,
        RuntimeError,
        "the window's gradient has norm nan: lower the learning rate, or use "
        "a scaler if this is fp16",
    ),
}
CASES = [
    pytest.param(
        *case, scaled, id=f"{name}, {'scaled' if scaled else 'plain'}"
    )
    for scaled, cases in ((True, FAILURES), (False, PLAIN))
    for name, case in cases.items()
]


def fail(rig, failure, kind, message):
    error = pytest.raises(kind) if message is None else refused(kind, message)
    with error, rig.accumulator.window(21) as window:
        failure(rig, window)
    return window


@pytest.mark.few(6)
@pytest.mark.parametrize(("failure", "kind", "message", "scaled"), CASES)
def test_after_an_error_it_never_happened(failure, kind, message, scaled):
    """Nor after two; in the first window the optimizer has no state yet."""
    rig = Rig(scaled)
    for total, report, state in undisturbed(scaled):
        before, buffers = rig.state(), dict(rig.model.named_buffers())
        for _ in range(2):
            window = fail(rig, failure, kind, message)
            assert differences(before, rig.state()) == []
        assert all(p.grad is None for p in rig.model.parameters())
        assert all(b is buffers[n] for n, b in rig.model.named_buffers())
        assert (window.micro_batches, window.count) == (0, 0)
        assert rig.good_window(total) == report
        assert differences(state, rig.state()) == []


def test_the_rig_would_notice():
    """Every part of the state differs after a window that did happen."""
    (_, _, before), (_, _, after) = undisturbed()
    assert set(differences(before, after)) >= {
        "/model/0.weight",
        "/model/1.running_mean",
        "/model/1.num_batches_tracked",
        "/model/seen",
        "/optimizer/state/0/exp_avg",
        "/scaler/scale",
        "/random",
    }


def test_whatever_happens_to_a_buffer():
    model = nn.BatchNorm1d(6)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    before = [(name, b.to_dense()) for name, b in model.named_buffers()]
    with pytest.raises(Stop), Accumulator(model, sgd(model)).window():
        model.running_mean.data = torch.ones(9)  # another shape
        model.num_batches_tracked = None
        del model.running_var
        model.register_buffer("more", torch.ones(2))
        model.sparse.mul_(2)
        raise Stop
    after = [(name, b.to_dense()) for name, b in model.named_buffers()]
    assert differences(before, after) == []


def test_an_error_after_the_step_undoes_nothing():
    rig = Rig()
    with pytest.raises(Stop), rig.accumulator.window() as window:
        rig.run(window, rig.parts)
        window.step()
        raise Stop
    assert differences(undisturbed()[0][-1], rig.state()) == []


def test_a_skipped_step_keeps_what_the_forward_passes_did():
    """An overflow is no error: the window is over, and the scale halved."""
    rig = Rig()
    before = rig.state()
    with rig.accumulator.window() as window:
        infinite_gradient(rig, window)
    changed = differences(before, rig.state())
    assert "/scaler/scale" in changed and "/random" in changed
    assert not [place for place in changed if "weight" in place]
    assert rig.scaler.get_scale() == 2.0**7


# Windows -----------------------------------------------------------------

USED = "this window was used before: ask the accumulator for a new one"


def good(rig, window):
    rig.run(window, rig.parts)
    window.step()


def unused(rig, window):
    pass


def entered_again(rig, window):
    with refused(RuntimeError, USED), window:
        pass


@pytest.mark.parametrize("use", [good, unused, entered_again, stop])
def test_a_window_is_used_once(use):
    rig = Rig()
    window = rig.accumulator.window()
    with suppress(Stop), window:
        use(rig, window)
    entered_again(rig, window)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "use",
    [
        lambda rig, window: window.backward(rig.loss(rig.parts[0]), 8),
        lambda rig, window: window.over(rig.parts),
        lambda rig, window: window.finish(),
        lambda rig, window: window.step(),
    ],
    ids=["backward", "over", "finish", "step"],
)
def test_a_window_is_used_inside_its_block(use, when):
    rig = Rig()
    window = rig.accumulator.window()
    if when == "after":
        with window:
            pass
    with refused(RuntimeError, NOT_OPEN):
        use(rig, window)
    assert all(p.grad is None for p in rig.model.parameters())


@pytest.mark.parametrize("value", [1.0, nan])
def test_gradients_left_over_from_before(value):
    rig = Rig()
    rig.model[0].weight.grad = torch.full((8, 6), value)
    rig.model[4].bias.grad = torch.ones(5)
    rig.model[1].weight.grad = torch.zeros(8)  # these do no harm
    before = rig.state()
    message = (
        "2 parameters had gradients left over from before this window; they "
        "are cleared now. Call optimizer.zero_grad() after every step outside "
        "it"
    )
    window = rig.accumulator.window()
    with refused(RuntimeError, message), window:
        raise AssertionError("the block must not run")
    assert all(p.grad is None for p in rig.model.parameters())
    assert differences(before, rig.state()) == []
    entered_again(rig, window)
    rig.good_window()


def test_the_optimizer_of_another_model():
    model, other = classifier(), classifier(1)
    message = (
        "no parameter of the optimizer has a gradient: give the optimizer "
        "the parameters of the model that made the loss"
    )
    with refused(RuntimeError, message):
        run_window(Accumulator(model, sgd(other)), *samples(8), [4, 4])
    assert all(p.grad is None for p in model.parameters())
    unchanged = classifier(1).state_dict()
    assert differences(unchanged, other.state_dict()) == []


def test_a_trained_parameter_outside_the_model():
    """A learnt temperature, say: it is trained, and cleared, as well."""
    model = classifier()
    x, y = samples(8)
    extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = optim.SGD([*model.parameters(), extra], lr=0.1)
    accumulator = Accumulator(model, optimizer)
    for end in (lambda window: stop(), Window.step):
        with suppress(Stop), accumulator.window() as window:
            window.backward(F.cross_entropy(model(x) * extra, y), 8)
            assert extra.grad is not None and extra.item() == 1
            end(window)
        assert extra.grad is None
    assert extra.item() != 1
