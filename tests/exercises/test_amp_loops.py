"""Four AMP loops: what the broken ones cost, and other answers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from membudget.exercises import amp_loops
from membudget.measuring import PeakTracker

from .judging import accepts, checker, mistaken, rejects

UPDATE = "update of the parameters"


def under(dtype):
    return partial(torch.autocast, "cpu", dtype)


FP16, BF16 = under(torch.float16), under(torch.bfloat16)


def loss_in(block, model, x, y):
    with block():
        return F.cross_entropy(model(x), y)


# What the broken loops cost

inside = mistaken("sensitive_step", "runs under autocast")


def nested(model, optimizer, x, y):
    with BF16():
        loss = F.cross_entropy(model(x), y)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def peak_of(step):
    """Bytes above the start, and whether its backward pass saw autocast."""
    model, optimizer, x, y = checker("sensitive_step").cases[0].make()
    seen = []

    def watch(module, args, output):
        output.register_hook(
            lambda grad: seen.append(torch.is_autocast_enabled("cpu"))
        )

    model.register_forward_hook(watch)
    with PeakTracker(model, optimizer, x, y) as tracker:
        step(model, optimizer, x, y)
    return tracker.peak - tracker.start, seen


def test_backward_in_a_block_keeps_the_copies():
    mended, outside = peak_of(amp_loops.sensitive_step)
    assert outside == [False]
    for step, cast in [(inside, True), (nested, False)]:
        peak, seen = peak_of(step)
        assert seen == [cast]
        assert peak > mended


def losses(model, x, y):
    with FP16():
        logits = model(x)
        return F.cross_entropy(logits, y), logits.float().square().mean()


def test_a_scaler_under_bf16_changes_nothing_until_it_overflows():
    check = checker("train_step")
    broken = mistaken("train_step", "works under bf16, too")
    top, usual = check.cases[:2]
    right = check.see(check.solution, usual).parts[UPDATE]
    assert torch.equal(check.see(broken, usual).parts[UPDATE], right)
    assert not check.see(broken, top).parts[UPDATE].any()
    assert check.see(check.solution, top).parts[UPDATE].any()


# Other right answers


def scaled_norm(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(loss_in(FP16, model, x, y)).backward()
    clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
    finish(optimizer, scaler)


def apart(model, optimizer, scaler, x, y):
    main, auxiliary = losses(model, x, y)
    scaler.scale(auxiliary).backward(retain_graph=True)
    scaler.scale(main).backward()
    scaler.unscale_(optimizer)
    finish(optimizer, scaler)


def of_one_scale(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu", scaler.get_scale())
    main, auxiliary = losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    second.scale(auxiliary).backward()
    finish(optimizer, scaler)


def finish(optimizer, scaler):
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def around_the_model(model, optimizer, x, y):
    with BF16():
        logits = model(x)
    F.cross_entropy(logits, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def uncached(model, optimizer, x, y):
    with BF16(cache_enabled=False):
        loss = F.cross_entropy(model(x), y)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
            optimizer.step()
    optimizer.zero_grad()


def disabled(model, optimizer, scaler, x, y, dtype):
    if dtype == torch.bfloat16:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_in(under(dtype), model, x, y)).backward()
    finish(optimizer, scaler)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("clipped_amp_step", scaled_norm),
        ("two_losses", apart),
        ("two_losses", of_one_scale),
        ("sensitive_step", around_the_model),
        ("sensitive_step", uncached),
        ("train_step", disabled),
    ],
)
def test_other_right_answers(name, answer):
    accepts(name, answer)


# What the observer says


def two_steps(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu")
    main, auxiliary = losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    scaler.step(optimizer)
    second.scale(auxiliary).backward()  # the update is right, under SGD
    second.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def another_block(model, optimizer, x, y):
    loss = loss_in(BF16, model, x, y)
    with BF16():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def two_blocks(model, optimizer, x, y):
    with BF16():
        loss_in(BF16, model, x, y)
        loss = loss_in(BF16, model, x, y)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step_inside(model, optimizer, x, y):
    loss_in(BF16, model, x, y).backward()
    with BF16():
        optimizer.step()
    optimizer.zero_grad()


def not_wiped(model, optimizer, x, y):
    loss_in(BF16, model, x, y).backward()
    optimizer.step()


def fixed_scale(model, optimizer, scaler, x, y, dtype):
    scaler.scale(loss_in(under(dtype), model, x, y)).backward()
    scaler.step(optimizer)
    scaler.update(None if dtype == torch.float16 else 65536.0)
    optimizer.zero_grad()


def fixed_before(model, optimizer, scaler, x, y, dtype):
    if dtype == torch.bfloat16:
        scaler.update(65536.0)
    amp_loops.train_step(model, optimizer, scaler, x, y, dtype)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("two_losses", two_steps, "the optimizer steps 2 times"),
        ("sensitive_step", another_block, "pass runs under autocast"),
        ("sensitive_step", nested, "but a block is still open"),
        ("sensitive_step", two_blocks, "but a block is still open"),
        ("sensitive_step", step_inside, "the optimizer steps under autoca"),
        ("sensitive_step", not_wiped, "gradients are still there at the e"),
        ("train_step", fixed_scale, "the scaler is used under bf16"),
        ("train_step", fixed_before, "the scaler has scaled no loss"),
    ],
)
def test_what_else_is_wrong(name, answer, words):
    rejects(name, answer, words)
