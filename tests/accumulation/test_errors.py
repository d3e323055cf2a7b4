"""Wrong use is a clear error, and after an error nothing has happened."""

import re
from contextlib import suppress
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    everything,
    run_window,
    samples,
    slices,
)
from torch import nn

from membudget.accumulation import Accumulator

optim = torch.optim


def says(text):
    """The whole message, literally."""
    return f"^{re.escape(text)}$"


def sgd(model, lr=0.1):
    return optim.SGD(model.parameters(), lr=lr)


# Making an accumulator ---------------------------------------------------


def test_an_optimizer_without_parameters():
    model = classifier()
    empty = optim.SGD([{"params": []}, {"params": []}], lr=0.1)
    message = (
        "the optimizer has no parameters: "
        "give it those of the model that are to be trained"
    )
    with pytest.raises(ValueError, match=says(message)):
        Accumulator(model, empty)


def test_an_optimizer_that_needs_a_closure():
    model = classifier()
    message = (
        "LBFGS evaluates the loss again inside its step and cannot use a "
        "gradient that is there already: use another optimizer"
    )
    with pytest.raises(ValueError, match=says(message)):
        Accumulator(model, optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("bad", [0, -1.0, nan, -inf])
def test_a_max_norm_that_is_not_above_zero(bad):
    model = classifier()
    message = f"max_norm is {bad!r}: use a number above 0"
    with pytest.raises(ValueError, match=says(message)):
        Accumulator(model, sgd(model), max_norm=bad)


@pytest.mark.parametrize("bad", ["none", "Mean"])
def test_an_unknown_reduction(bad):
    model = classifier()
    message = f"there is no reduction {bad!r}: use one of mean, sum"
    with pytest.raises(ValueError, match=says(message)):
        Accumulator(model, sgd(model), reduction=bad)


@pytest.mark.parametrize("bad", [0, -4, nan, inf])
def test_a_total_that_is_not_above_zero(bad):
    model = classifier()
    message = (
        f"total is {bad!r}: use the number of samples, or of non-padding "
        "tokens, in the window, above zero (leave out a micro-batch that "
        "holds padding only)"
    )
    with pytest.raises(ValueError, match=says(message)):
        Accumulator(model, sgd(model)).window(bad)


# A model with everything that a failure could leave changed --------------

SIZES = [8, 8, 5]


class Rig:
    """A model with buffers and dropout, its optimizer and its scaler."""

    def __init__(self, scaled, reduction="mean"):
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
            reduction=reduction,
        )
        self.x, self.y = samples(sum(SIZES), dtype=torch.float32)
        self.parts = slices(SIZES)

    def loss(self, part):
        self.model.seen += 1
        return F.cross_entropy(
            self.model(self.x[part]),
            self.y[part],
            reduction=self.accumulator.reduction,
        )

    def run(self, window, parts):
        for part in window.over(parts):
            window.backward(self.loss(part), len(self.y[part]))

    def good_window(self, total=None):
        with self.accumulator.window(total) as window:
            self.run(window, self.parts)
            return window.step()

    def state(self):
        return everything(self.model, self.optimizer, self.scaler)


class Stop(Exception):
    """Raised by a loop of the user's own."""


def nan_loss(rig, window):
    rig.run(window, rig.parts[:2])
    window.backward(rig.loss(rig.parts[2]) * nan, 5)


def infinite_loss(rig, window):
    rig.run(window, rig.parts[:2])
    window.backward(rig.loss(rig.parts[2]) * inf, 5)


def vector_loss(rig, window):
    rig.run(window, rig.parts[:2])
    output = rig.model(rig.x[rig.parts[2]])
    loss = F.cross_entropy(output, rig.y[rig.parts[2]], reduction="none")
    window.backward(loss, 5)


def float_loss(rig, window):
    rig.run(window, rig.parts[:2])
    window.backward(rig.loss(rig.parts[2]).item(), 5)


def detached_loss(rig, window):
    rig.run(window, rig.parts[:2])
    window.backward(rig.loss(rig.parts[2]).detach(), 5)


def count_of_zero(rig, window):
    rig.run(window, rig.parts[:2])
    window.backward(rig.loss(rig.parts[2]), 0)


def count_below_zero(rig, window):
    rig.run(window, rig.parts[:2])
    window.backward(rig.loss(rig.parts[2]), -5)


def more_than_announced(rig, window):
    rig.run(window, [*rig.parts, rig.parts[0]])


def own_error(rig, window):
    for i, part in enumerate(window.over(rig.parts)):
        window.backward(rig.loss(part), len(rig.y[part]))
        if i == 1:
            raise Stop("from the loop")


def interrupted(rig, window):
    for i, part in enumerate(window.over(rig.parts)):
        loss = rig.loss(part)
        if i == 2:
            raise KeyboardInterrupt
        window.backward(loss, len(rig.y[part]))


def loader_fails(rig, window):
    def loader():
        yield from rig.parts[:2]
        raise Stop("from the loader")

    rig.run(window, loader())


def backward_fails(rig, window):
    rig.run(window, rig.parts[:2])
    loss = rig.loss(rig.parts[2])
    loss.backward()  # then its graph is gone
    window.backward(loss, 5)


def hook_fails(rig, window):
    """In the middle of a backward pass: some gradients are there."""

    def hook(gradient):
        raise Stop("from the hook")

    rig.run(window, rig.parts[:2])
    handle = rig.model[0].weight.register_hook(hook)
    try:
        window.backward(rig.loss(rig.parts[2]), 5)
    finally:
        handle.remove()


def caught_in_the_body(rig, window):
    """Going on after an error would train on half of the window."""
    with suppress(RuntimeError):
        backward_fails(rig, window)
    window.step()


def caught_value_error(rig, window):
    rig.run(window, rig.parts[:2])
    with suppress(ValueError):
        window.backward(rig.loss(rig.parts[2]) * nan, 5)
    window.step()


def empty(rig, window):
    rig.loss(rig.parts[0])  # buffers and dropout move, nothing is added
    window.step()


def left_without_step(rig, window):
    rig.run(window, rig.parts)


def error_after_finish(rig, window):
    rig.run(window, rig.parts)
    window.finish()
    raise Stop("before the step")


def backward_after_finish(rig, window):
    rig.run(window, rig.parts[:2])
    window.finish()
    window.backward(rig.loss(rig.parts[2]), 5)


def replaced_buffer(rig, window):
    rig.run(window, rig.parts[:2])
    rig.model.seen = torch.full((3,), 9.0)
    raise Stop("after a new buffer")


def cleared_gradients(rig, window):
    rig.run(window, rig.parts)
    rig.optimizer.zero_grad()
    window.step()


def optimizer_fails(rig, window):
    """Before it has changed anything."""

    def hook(*_):
        raise Stop("from the optimizer")

    rig.run(window, rig.parts)
    handle = rig.optimizer.register_step_pre_hook(hook)
    try:
        window.step()
    finally:
        handle.remove()


def caught_optimizer_error(rig, window):
    with suppress(Stop):
        optimizer_fails(rig, window)
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
    raise Stop("after an update")


def infinite_gradient(rig, window):
    """The loss is finite, the gradient is not."""
    rig.run(window, rig.parts[:2])
    loss = rig.loss(rig.parts[2])
    bad = (0 * rig.model[0].weight).sum().sqrt()  # 0 · ∞
    window.backward(loss + bad, 5)
    window.step()


WEIGHT_ADVICE = (
    ": use the number of samples, or of non-padding tokens, in the "
    "micro-batch, above zero (leave out a micro-batch that holds padding "
    "only)"
)
FINITE = (
    ": a finite one is needed, and no loss scale makes it one. Look for an "
    "overflow in the forward pass, a too high learning rate, or a "
    "micro-batch of padding only"
)
SCALAR = ": backward needs a tensor with one element"
NOT_OPEN = (
    "the window is not open: use it inside "
    "`with accumulator.window() as window:`, once"
)
FAILURES = [
    (nan_loss, ValueError, "the loss is nan" + FINITE),
    (infinite_loss, ValueError, "the loss is inf" + FINITE),
    (vector_loss, ValueError, "the loss is [5]" + SCALAR),
    (float_loss, TypeError, "the loss is a float" + SCALAR),
    (
        detached_loss,
        ValueError,
        "the loss has no graph: compute it from the model's output, outside "
        "torch.no_grad() and without detach() or item()",
    ),
    (count_of_zero, ValueError, "count is 0" + WEIGHT_ADVICE),
    (count_below_zero, ValueError, "count is -5" + WEIGHT_ADVICE),
    (
        more_than_announced,
        ValueError,
        "29 samples or tokens came, but 21 were announced: pass the "
        "window's total, or None if it is not known",
    ),
    (own_error, Stop, "from the loop"),
    (interrupted, KeyboardInterrupt, None),
    (loader_fails, Stop, "from the loader"),
    (backward_fails, RuntimeError, None),
    (hook_fails, Stop, "from the hook"),
    (caught_in_the_body, RuntimeError, NOT_OPEN),
    (caught_value_error, RuntimeError, NOT_OPEN),
    (
        empty,
        RuntimeError,
        "the window is empty: run backward on at least one micro-batch "
        "before the step",
    ),
    (
        left_without_step,
        RuntimeError,
        "the window was left with 3 micro-batches that no step used: call "
        "window.step()",
    ),
    (error_after_finish, Stop, "before the step"),
    (
        backward_after_finish,
        RuntimeError,
        "the window's gradient is finished: run every micro-batch before "
        "window.finish()",
    ),
    (replaced_buffer, Stop, "after a new buffer"),
    (
        cleared_gradients,
        RuntimeError,
        "no parameter of the optimizer has a gradient: give the optimizer "
        "the parameters of the model that made the loss",
    ),
    (optimizer_fails, Stop, "from the optimizer"),
    (caught_optimizer_error, RuntimeError, NOT_OPEN),
]
UNSCALED_ONLY = [
    (
        infinite_gradient,
        RuntimeError,
        "the window's gradient has norm nan: lower the learning rate, or use "
        "a scaler if this is fp16",
    ),
]
SCALED_ONLY = [
    (unscaled_by_the_loop, RuntimeError, None),
    (updated_by_the_loop, Stop, "after an update"),
]
CASES = [
    pytest.param(*case, scaled, id=f"{case[0].__name__}-{kind}")
    for kind, scaled, cases in (
        ("plain", False, FAILURES + UNSCALED_ONLY),
        ("scaled", True, FAILURES + SCALED_ONLY),
    )
    for case in cases
]


def fail(rig, failure, kind, message):
    with (
        pytest.raises(kind, match=message and says(message)),
        rig.accumulator.window(21) as window,
    ):
        failure(rig, window)
    return window


@pytest.mark.parametrize(("failure", "kind", "message", "scaled"), CASES)
def test_after_an_error_it_never_happened(failure, kind, message, scaled):
    never = Rig(scaled)
    reports = [never.good_window(), never.good_window(21)]
    expected = never.state()

    failing = Rig(scaled)
    assert failing.good_window() == reports[0]
    before, buffers = failing.state(), dict(failing.model.named_buffers())
    window = fail(failing, failure, kind, message)
    assert differences(before, failing.state()) == []
    assert all(p.grad is None for p in failing.model.parameters())
    assert all(
        buffer is buffers[name]
        for name, buffer in failing.model.named_buffers()
    )
    assert (window.micro_batches, window.count) == (0, 0)

    assert failing.good_window(21) == reports[1]
    assert differences(expected, failing.state()) == []


@pytest.mark.parametrize(("failure", "kind", "message", "scaled"), CASES)
def test_in_the_very_first_window(failure, kind, message, scaled):
    """The optimizer has no state yet, and the scaler no tensor."""
    never = Rig(scaled)
    never.good_window()
    expected = never.state()
    failing = Rig(scaled)
    before = failing.state()
    fail(failing, failure, kind, message)
    assert differences(before, failing.state()) == []
    assert failing.optimizer.state_dict()["state"] == {}
    failing.good_window()
    assert differences(expected, failing.state()) == []


def test_the_rig_would_notice():
    """Every part of the state differs after a window that did happen."""
    rig = Rig(scaled=True)
    rig.good_window()
    before = rig.state()
    rig.good_window()
    changed = differences(before, rig.state())
    for place in (
        "/model/0.weight",
        "/model/1.running_mean",
        "/model/1.num_batches_tracked",
        "/model/seen",
        "/optimizer/state/0/exp_avg",
        "/scaler/scale",
        "/random",
    ):
        assert place in changed


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


def test_two_failures_in_a_row():
    never = Rig(True)
    never.good_window()
    expected = never.state()
    failing = Rig(True)
    for failure, kind, message in FAILURES[:10]:
        fail(failing, failure, kind, message)
    failing.good_window()
    assert differences(expected, failing.state()) == []


def test_an_error_after_the_step_undoes_nothing():
    other = Rig(True)
    other.good_window()
    expected = other.state()
    rig = Rig(True)
    with pytest.raises(Stop), rig.accumulator.window() as window:
        rig.run(window, rig.parts)
        window.step()
        raise Stop
    assert differences(expected, rig.state()) == []


def test_a_skipped_step_keeps_what_the_forward_passes_did():
    """An overflow is no error: the window is over, and the scale halved."""
    rig = Rig(True)
    before = rig.state()
    with rig.accumulator.window() as window:
        rig.run(window, rig.parts[:2])
        loss = rig.loss(rig.parts[2])
        bad = (0 * rig.model[0].weight).sum().sqrt()
        window.backward(loss + bad, 5)
        assert window.step().stepped is False
    changed = differences(before, rig.state())
    assert "/scaler/scale" in changed and "/random" in changed
    assert not [place for place in changed if "weight" in place]
    assert rig.scaler.get_scale() == 2.0**7


# Windows -----------------------------------------------------------------

USED = "this window was used before: ask the accumulator for a new one"


def test_a_window_cannot_be_used_twice():
    rig = Rig(False)
    with rig.accumulator.window() as window:
        rig.run(window, rig.parts)
        window.step()
    with pytest.raises(RuntimeError, match=says(USED)), window:
        pass


@pytest.mark.parametrize("failure", [nan_loss, own_error, error_after_finish])
def test_not_even_after_an_error(failure):
    rig = Rig(False)
    window = rig.accumulator.window(21)
    with pytest.raises((ValueError, Stop)), window:
        failure(rig, window)
    with pytest.raises(RuntimeError, match=says(USED)), window:
        pass


def test_not_even_if_nothing_was_run_in_it():
    rig = Rig(False)
    window = rig.accumulator.window()
    with window:
        pass
    with pytest.raises(RuntimeError, match=says(USED)), window:
        pass


def test_a_window_cannot_be_entered_inside_itself():
    rig = Rig(False)
    before = rig.state()
    with (
        pytest.raises(RuntimeError, match=says(USED)),
        rig.accumulator.window() as window,
    ):
        rig.run(window, rig.parts[:1])
        with window:
            pass
    assert differences(before, rig.state()) == []


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
    rig = Rig(False)
    window = rig.accumulator.window()
    if when == "after":
        with window:
            rig.run(window, rig.parts)
            window.step()
    with pytest.raises(RuntimeError, match=says(NOT_OPEN)):
        use(rig, window)
    assert all(p.grad is None for p in rig.model.parameters())


def test_a_second_step_in_the_same_window():
    other = Rig(False)
    other.good_window()
    expected = other.state()
    rig = Rig(False)
    with (
        pytest.raises(RuntimeError, match=says(NOT_OPEN)),
        rig.accumulator.window() as window,
    ):
        rig.run(window, rig.parts)
        window.step()
        window.step()
    assert differences(expected, rig.state()) == []


@pytest.mark.parametrize("value", [1.0, nan])
def test_gradients_left_over_from_before(value):
    rig = Rig(True)
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
    with pytest.raises(RuntimeError, match=says(message)), window:
        raise AssertionError("the block must not run")
    assert all(p.grad is None for p in rig.model.parameters())
    assert differences(before, rig.state()) == []
    with pytest.raises(RuntimeError, match=says(USED)), window:
        pass
    rig.good_window()


def test_a_window_inside_another_of_the_same_accumulator():
    """The gradient of the outer one is found, and both are undone."""
    rig = Rig(False)
    before = rig.state()
    with (
        pytest.raises(RuntimeError, match="gradients left over"),
        rig.accumulator.window() as window,
    ):
        rig.run(window, rig.parts[:1])
        rig.good_window()
    assert differences(before, rig.state()) == []


def test_the_optimizer_of_another_model():
    model, other = classifier(), classifier(1)
    x, y = samples(8)
    before = other.state_dict()
    with pytest.raises(RuntimeError, match="no parameter of the optimizer"):
        run_window(Accumulator(model, sgd(other)), x, y, [4, 4])
    assert all(p.grad is None for p in model.parameters())
    assert differences(before, other.state_dict()) == []


def test_a_trained_parameter_outside_the_model():
    """A learnt temperature, say: it is trained, and cleared, as well."""
    model = classifier()
    x, y = samples(8)
    extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = optim.SGD([*model.parameters(), extra], lr=0.1)
    accumulator = Accumulator(model, optimizer)
    with pytest.raises(Stop), accumulator.window() as window:
        window.backward(F.cross_entropy(model(x) * extra, y), 8)
        assert extra.grad is not None
        raise Stop
    assert extra.grad is None
    with accumulator.window() as window:
        window.backward(F.cross_entropy(model(x) * extra, y), 8)
        window.step()
    assert extra.item() != 1


def test_reports_of_the_sum_reduction():
    """The second window of a failed run, in the other reduction."""
    never = Rig(True, "sum")
    reports = [never.good_window(), never.good_window()]
    expected = never.state()
    failing = Rig(True, "sum")
    assert failing.good_window() == reports[0]
    fail(failing, nan_loss, ValueError, None)
    assert failing.good_window() == reports[1]
    assert differences(expected, failing.state()) == []


def test_a_fully_shard_that_is_another_one_inside():
    """An error before anything runs, and no gradient that is overlooked."""
    model = nn.Linear(2, 2)
    model._get_fsdp_state = object
    window = Accumulator(model, sgd(model)).window()
    with pytest.raises(RuntimeError, match=r"another way .* 2\.11 to"):
        window.__enter__()
