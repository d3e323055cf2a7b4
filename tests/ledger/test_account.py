"""The ledger of any model, from a dry run, and the batch that fits."""

import random
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ledger_helpers import MAKE, classify, next_token
from torch import nn

from membudget.ledger import (
    States,
    Transformer,
    account,
    largest_batch,
    predict,
    states,
)
from membudget.measuring import (
    PeakTracker,
    format_bytes,
    optimizer_tensors,
    trace_step,
    witness,
)
from membudget.measuring.step import Step
from membudget.models import convnet, mlp
from tests.soak import examples

SHAPE = Transformer(40, 16, 2, 4, context=16)


def text(shape=SHAPE, batch=4, tokens=12, device="cpu"):
    x = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    return shape.build(device), next_token, x, x.clone()


def digits(batch=4):
    y = torch.zeros(batch, dtype=torch.long)
    return mlp(8, 16, 3), classify, torch.rand(batch, 8), y


def pictures(batch=4):
    y = torch.zeros(batch, dtype=torch.long)
    return convnet((4, 8)), classify, torch.rand(batch, 3, 8, 8), y


# The account -------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "optimizer", "micro"),
    [
        (text, None, 2),
        (text, "adam", 3),
        (digits, "sgd", None),
        (pictures, "adam", 3),
    ],
)
def test_the_account_is_that_of_a_real_step(build, optimizer, micro):
    model, loss, *batch = build()
    stepper = MAKE[optimizer](model.parameters(), False)
    options = {"optimizer": stepper, "micro_batch": micro}
    found = account(model, loss, *batch, **options)
    real = trace_step(model, loss, *batch, **options)
    assert (found.peak, found.split) == (real.peak, real.split())
    assert found.tracker.start == real.start
    first = next(i for i, label in real.marks if label == "backward")
    assert found.activations == real.split(first - 1)["activations"]
    assert found.activations == sum(found.by_module.values())
    at = real.operators[real.peak_moment]
    assert found.moment == (at.name, at.module, at.phase)
    buffers = sum(b.nbytes for b in model.buffers())
    held = states(model, "fp32", optimizer or "sgd")
    assert found.states == States(
        held.parameters + buffers, held.gradients, held.optimizer
    )


def kept_by_hand(model, loss, batch, stepper, keep_gradients):
    """A loop that has the loss's outputs in a variable."""

    def step():
        out = loss(model, *batch)
        value = out if torch.is_tensor(out) else out[0]
        value.backward()
        del out, value
        stepper.step()
        stepper.zero_grad(set_to_none=not keep_gradients)

    step()
    with PeakTracker(model, stepper, *batch) as tracker:
        step()
    return tracker


def with_outputs(model, x, y):
    out = model(x)
    return F.cross_entropy(out, y), out


@pytest.mark.parametrize(
    ("build", "loss", "keep"),
    [
        (digits, classify, True),
        (digits, with_outputs, False),
        (pictures, with_outputs, True),
    ],
)
def test_what_the_loop_keeps(build, loss, keep):
    model, _, *batch = build()
    stepper = torch.optim.AdamW(model.parameters(), foreach=True)
    options = {"optimizer": stepper, "keep_gradients": keep}
    found = account(model, loss, *batch, **options)
    real = kept_by_hand(model, loss, batch, stepper, keep)
    assert (found.peak, found.split) == (real.peak, real.split())
    held = sum(p.nbytes for p in model.parameters())
    assert found.tracker.split(-1)["gradients"] == keep * held
    assert found.states.gradients == held
    assert trace_step(model, loss, *batch, **options).split() == real.split()
    assert all(p.grad is None for p in model.parameters())


def test_outputs_live_as_long_in_any_form():
    """Until the backward pass is over; not in the optimizer's step."""
    model, loss, *batch = digits(500)
    alone = account(model, loss, *batch)
    for form in (
        with_outputs,
        lambda *given: list(with_outputs(*given)),
        lambda *given: SimpleNamespace(
            **dict(zip(("loss", "logits"), with_outputs(*given), strict=True))
        ),
    ):
        stepper = torch.optim.SGD(model.parameters(), momentum=0.9)
        found = account(model, form, *batch, optimizer=stepper)
        assert found.activations == alone.activations + 4 * 500 * 10
        (*_, (step, _)) = found.tracker.marks
        assert found.tracker.split(step)["activations"] == 0
        parts = account(model, form, *batch, micro_batch=250)
        assert parts.activations * 2 == found.activations + 8


def test_inference_is_one_call_that_keeps_what_it_returns():
    model, _, *batch = text()
    model.requires_grad_(False)

    def generate(model, x, y):
        return {"logits": model(x), "longest": x.size(1)}

    found = account(model, generate, *batch, inference=True)
    tracker = PeakTracker(model, *batch)
    with tracker, torch.inference_mode():
        out = generate(model, *batch)
    assert (found.peak, found.split) == (tracker.peak, tracker.split())
    assert found.activations == out["logits"].nbytes
    assert found.states == States(tracker.split(-1)["parameters"], 0, 0)
    real = trace_step(model, generate, *batch, inference=True)
    assert real.timeline == tracker.timeline


def test_a_peak_that_is_what_was_there_before():
    model, _, x, _ = digits()
    found = account(model, lambda m, x: x[:1], x, inference=True)
    assert found.peak == found.tracker.start
    assert found.moment == ("", "", "")


def test_the_blocks_of_an_account():
    """Weight, bias, input and output: four blocks of 512 bytes; then 3 MB
    and an output of 3 MB, each in a segment of 20 MiB with its rest."""
    model = nn.Linear(1, 1)
    found = account(model, lambda m, x: m(x), torch.ones(1, 1), inference=True)
    assert found.usage == (4 * 4, 4 * 512, 2 << 20)
    x = torch.ones(3 << 18, 1)
    found = account(model, lambda m, x: m(x), x, inference=True)
    assert found.usage == (8 + (6 << 20), 1024 + (6 << 20), 22 << 20)
    step = account(*text(), optimizer=None)
    assert step.usage.requested == step.peak < step.usage.allocated


def test_activations_by_module():
    """The ReLUs save what they return, and their linear layer's input is
    the batch or the ReLU before; the loss saves the log-probabilities."""
    model, loss, *batch = digits(batch=4)
    found = account(model, loss, *batch)
    assert found.by_module == {
        "1": 4 * 4 * 16,
        "3": 4 * 4 * 16,
        "": 4 * 4 * 10 + 4 + 4,
    }


def test_frozen_parameters_have_no_gradient():
    model, loss, *batch = digits()
    model[0].requires_grad_(False)
    found = account(model, loss, *batch)
    assert found.states == states(model, "fp32", "sgd")


@pytest.mark.parametrize(
    "shape",
    [
        Transformer(40, 16, 2, 4, fused=False, tied=True),
        Transformer(40, 16, 2, 4, kv_heads=2, hidden=40, family="llama"),
    ],
)
def test_a_model_on_meta_is_accounted_as_predicted(shape):
    model, loss, *batch = text(shape, device="meta")
    stepper = torch.optim.AdamW(model.parameters(), foreach=False)
    found = account(model, loss, *batch, optimizer=stepper)
    predicted = predict(shape, 4, 12)
    assert found.peak == predicted.peak
    assert found.split == predicted.at_peak.split
    assert found.activations == predicted.saved
    tensors = [*model.parameters(), *batch]
    assert {t.device.type for t in tensors} == {"meta"}
    assert all(p.grad is None for p in model.parameters())
    assert not stepper.state


# The largest batch -------------------------------------------------------


def test_a_limit_that_is_met_to_the_byte():
    model, loss, *batch = text(device="meta")
    peak = predict(SHAPE, 3, 12, optimizer=None).peak
    for spare, size in ((0, 3), (-1, 2)):
        assert largest_batch(model, loss, *batch, limit=peak + spare) == size


def test_the_example_may_have_any_size():
    model, loss, *_ = digits()
    limit = account(*digits(9)).peak
    for size in (1, 100):
        _, _, *batch = digits(size)
        assert largest_batch(model, loss, *batch, limit=limit) == 9


def contrast(model, x, y):
    """Every sample against every other: n × n."""
    z = model(x)
    return F.cross_entropy(z @ z.T, y)


@pytest.mark.parametrize("size", [1, 2, 11])
def test_bytes_that_are_no_straight_lines(size):
    model, _, *example = digits(2)

    def peak(n):
        return account(model, contrast, *digits(n)[2:]).peak

    limit = peak(size)
    assert limit < peak(size + 1)
    for spare in (0, 3):
        found = largest_batch(model, contrast, *example, limit=limit + spare)
        assert found == size


def test_steps_that_differ_from_size_to_size():
    """A step of another kind at 4 samples and more."""
    model, loss, x, y = digits(2)

    def uneven(model, x, y):
        value = loss(model, x, y)
        return value * 2 if len(x) > 3 else value

    limit = account(model, uneven, *digits(20)[2:]).peak
    assert largest_batch(model, uneven, x, y, limit=limit) == 20


@pytest.mark.parametrize("seed", range(examples(6)))
def test_no_answer_is_above_its_limit(seed):
    """Random networks, losses and limits; and one sample more is too much."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    width, convolution = rng.choice([4, 16]), rng.random() < 0.4
    layers = [nn.Conv2d(1, width, 3) if convolution else nn.Linear(8, width)]
    norms = [nn.Identity, lambda n: nn.GroupNorm(2, n)]
    norms.append(nn.BatchNorm2d if convolution else nn.BatchNorm1d)
    for _ in range(rng.randint(1, 2)):
        layers += [rng.choice(norms)(width), rng.choice([nn.ReLU, nn.GELU])()]
        layer = nn.Conv2d(width, width, 3, padding=1)
        layers.append(layer if convolution else nn.Linear(width, width))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Sigmoid())
    shape = (1, 6, 6) if convolution else (8,)
    distance, autocast = rng.choice(LOSSES), rng.random() < 0.3
    stepper = MAKE[rng.choice([None, "momentum", "adam"])](
        model.parameters(), True
    )

    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        return distance(out.float(), y)

    def step(n):
        x = torch.rand(n, *shape)
        with torch.no_grad():
            y = model.eval()(x)
        return model.train(), loss, x, y

    def peak(n):
        return trace_step(*step(n), optimizer=stepper).peak

    limit = peak(rng.randint(2, 60)) + rng.choice([0, 1, 99])
    found = largest_batch(*step(3), optimizer=stepper, limit=limit)
    assert peak(found) <= limit < peak(found + 1)


LOSSES = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.cross_entropy,
]


def test_an_answer_that_real_steps_check():
    """The dry run does not know all bytes of an LSTM."""
    torch.manual_seed(0)
    parts = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)
    model = nn.ModuleList(parts)
    stepper = torch.optim.Adam(model.parameters())
    options = {"optimizer": stepper, "limit": 10**6}

    def loss(model, x, y):
        out, _ = model[0](x)
        return F.cross_entropy(model[1](out[:, -1]), y)

    def step(n):
        return model, loss, torch.rand(n, 9, 8), torch.full((n,), 3)

    with pytest.raises(ValueError, match="dry run does not know all bytes"):
        largest_batch(*step(2), **options)
    values = [p.clone() for p in model.parameters()]
    found = largest_batch(*step(2), **options, check=True)
    assert all(map(torch.equal, values, model.parameters()))
    assert not stepper.state
    fits, more = (
        by_allocator(*step(n), optimizer=stepper) for n in (found, found + 1)
    )
    assert fits <= 10**6 < more
    least = by_allocator(*step(1))
    with pytest.raises(ValueError, match="one sample needs more in reality"):
        largest_batch(*step(2), limit=least - 1, check=True)


def by_allocator(model, loss, *batch, optimizer=None):
    """The bytes of a step, as the allocator has them."""
    above = witness(Step(model, loss, batch, optimizer))
    held = [*model.parameters(), *batch]
    if optimizer:
        held += optimizer_tensors(optimizer)
    return sum(t.nbytes for t in held) + above


def test_the_fewest_samples_that_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    limit = account(model, classify, *digits(2)[2:]).peak
    assert largest_batch(model, classify, *digits()[2:], limit=limit) == 2
    with pytest.raises(ValueError, match="with 2 samples, the fewest, needs"):
        largest_batch(model, classify, *digits()[2:], limit=limit - 1)


def test_a_mask_that_the_loss_looks_at():
    """In a dry run, too, it keeps its ones."""
    model, _, x, _ = digits()
    mask = torch.ones(4, 3, dtype=torch.bool)

    def loss(model, x, mask):
        scale = 1 if mask.all() else mask.any(1, keepdim=True)
        return (model(x) * scale).sum()

    limit = account(model, loss, x, mask).peak
    assert largest_batch(model, loss, x, mask, limit=limit) == 4


def test_rows_keep_their_values_and_memory_format():
    seen = []

    def looks(model, x, mask):
        if type(x) is torch.Tensor:  # a real step
            seen.append((mask.tolist(), x.stride()))
        return model(x).sum()

    x = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    model, mask = nn.Conv2d(3, 2, 1), torch.tensor([True, False])
    limit = by_allocator(model, looks, x, mask)
    assert largest_batch(model, looks, x, mask, limit=limit, check=True) == 2
    assert ([True, False, True], (48, 1, 12, 3)) in seen
    assert {stride for _, stride in seen} == {(48, 1, 12, 3)}


# What cannot be ----------------------------------------------------------


def test_a_limit_below_one_sample():
    model, loss, *batch = digits()
    least = account(*digits(1)).peak
    assert largest_batch(model, loss, *batch, limit=least) == 1
    message = (
        f"a step with one sample needs {format_bytes(least)}, more than the "
        f"limit of {format_bytes(least - 1)}: use a smaller model or sample, "
        "activation checkpointing, or an optimizer with fewer states"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        largest_batch(model, loss, *batch, limit=least - 1)


@torch.library.custom_op("ledger_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_autograd(lambda ctx, g: g * 2)


class Strange(nn.Linear):
    """Its operator has no rule for tensors without data."""

    def forward(self, x):
        return double(super().forward(x))


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (
            Strange(8, 10),
            classify,
            "Strange does not run without data: .*Use operators that PyTorch "
            "knows on meta, or measure a real step with membudget.measuring."
            "trace_step",
        ),
        (
            mlp(8, 16, 2).requires_grad_(False),
            classify,
            "Sequential has no parameters that are trained",
        ),
        (mlp(8, 16, 2), lambda m, x, y: m(x), "return a scalar"),
    ],
)
def test_models_that_cannot_be_accounted(model, loss, message):
    for call in (account, partial(largest_batch, limit=10**9)):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call(model, loss, *digits()[2:])


def test_inference_with_what_only_a_step_has():
    model, _, *batch = digits()
    stepper = torch.optim.SGD(model.parameters())
    options = {"micro_batch": 2, "keep_gradients": True, "optimizer": stepper}
    for name, value in options.items():
        message = f"^inference has no .*: leave out {name}, or inference$"
        with pytest.raises(ValueError, match=message):
            account(model, classify, *batch, inference=True, **{name: value})


@pytest.mark.parametrize("bad", [{"loss": 1.0}, [], [None]])
def test_what_a_loss_function_must_not_return(bad):
    message = "return the loss, a scalar tensor, alone or first in a tuple"
    with pytest.raises(ValueError, match=message):
        account(mlp(8, 16, 2), lambda m, x, y: bad, *digits()[2:])


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ([], {}, "shapes []: use the same number of samples, at least 1"),
        ([torch.ones(())], {}, "shapes [()]: use the same number"),
        ([torch.ones(0, 8)], {}, "shapes [(0, 8)]: use the same number"),
        ([torch.ones(2), torch.ones(3)], {}, "[(2,), (3,)]: use the same"),
        (
            [torch.ones(2, 8, device="meta")],
            {"check": True},
            "is on meta, and",
        ),
    ],
)
def test_examples_that_cannot_be(batch, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        largest_batch(mlp(8, 16, 2), classify, *batch, limit=10**6, **options)


def test_the_allocator_decides_and_not_the_tracker():
    """What the kernel of a convolution takes for itself counts."""
    model, x = nn.Conv2d(3, 64, 5), torch.rand(3, 3, 16, 16)

    def loss(model, x):
        return model(x).square().mean()

    limit = by_allocator(model, loss, torch.rand(6, 3, 16, 16))
    assert largest_batch(model, loss, x, limit=limit, check=True) == 6
    assert largest_batch(model, loss, x, limit=limit - 1, check=True) == 5
    cut = {"limit": limit, "of": 6, "check": True}
    assert largest_batch(model, loss, x, **cut) == 6


def test_real_steps_stop_where_the_batch_alone_is_too_large():
    def loss(model, x):
        return model(x).mean()

    model, x = nn.Linear(1000, 1, bias=False), torch.rand(1, 1000)
    limit = trace_step(model, loss, torch.rand(5, 1000)).peak + 100
    assert largest_batch(model, loss, x, limit=limit, check=True) == 5
