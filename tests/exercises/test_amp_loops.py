"""Four AMP loops: what the broken ones cost, and other answers."""

import pytest
import torch

from membudget.exercises import amp_loops
from membudget.measuring import PeakTracker

from .judging import accepts, checker, edits, mistaken, rejects

UPDATE = "update of the parameters"
OFF = 'torch.autocast("cpu", enabled=False)'
BF16 = 'torch.autocast("cpu", torch.bfloat16)'
NESTED = f"""
    model(x), y) => model(x), y); {OFF}(loss.backward)(); \
    {OFF}(optimizer.step)(); optimizer.zero_grad()
    loss.backward() =>
    optimizer.step() =>
    optimizer.zero_grad() =>
        but a block is still open
    """

# What the broken loops cost

inside = mistaken("sensitive_step", "runs under autocast")
((_, nested, _),) = edits({"sensitive_step": NESTED})


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


def test_a_scaler_under_bf16_changes_nothing_until_it_overflows():
    check = checker("train_step")
    broken = mistaken("train_step", "works under bf16, too")
    top, usual = check.cases[:2]
    right = check.see(check.solution, usual).parts[UPDATE]
    assert torch.equal(check.see(broken, usual).parts[UPDATE], right)
    assert not check.see(broken, top).parts[UPDATE].any()
    assert check.see(check.solution, top).parts[UPDATE].any()


# Other answers, as edits of the solutions

BOTH = "scaler.scale(main + auxiliary).backward()"
MAIN = "scaler.scale(main).backward(retain_graph=True)"
RIGHT = {
    "clipped_amp_step": """
        scaler.unscale_(optimizer) =>
        parameters(), max_norm => parameters(), max_norm * scaler.get_scale()
            the norm is scaled, too
        """,
    "two_losses": f"""
        {BOTH} => scaler.scale(auxiliary).backward(retain_graph=True); \
        scaler.scale(main).backward(); scaler.unscale_(optimizer)
            one after the other
        {BOTH} => second = torch.amp.GradScaler("cpu", scaler.get_scale()); \
        {MAIN}; second.scale(auxiliary).backward()
            two scalers of one scale
        """,
    "sensitive_step": f"""
        loss = F.cross_entropy(model(x), y) => logits = model(x)
        loss.backward() => F.cross_entropy(logits, y).backward()
            the loss is outside
        torch.bfloat16 => torch.bfloat16, cache_enabled=False
        model(x), y) => model(x), y); {OFF}(loss.backward)(); \
        {OFF}(optimizer.step)()
        loss.backward() =>
        optimizer.step() =>
            no copies that could be kept
        """,
    "train_step": """
        model(x), y) => model(x), y); \
        off = torch.amp.GradScaler("cpu", enabled=False); \
        scaler = scaler if dtype == torch.float16 else off
        if dtype == torch.float16: => if True:
            a scaler that does nothing
        """,
}


@pytest.mark.parametrize(("name", "answer", "why"), edits(RIGHT))
def test_other_right_answers(name, answer, why):
    accepts(name, answer)


WRONG = {
    "two_losses": f"""
        {BOTH} => second = torch.amp.GradScaler("cpu"); {MAIN}; \
        scaler.step(optimizer); second.scale(auxiliary).backward()
        scaler.step(optimizer) => second.step(optimizer)
            the optimizer steps 2 times
        """,
    "sensitive_step": f"""
        {NESTED}
        loss.backward() => {BF16}(loss.backward)()
            pass runs under autocast
        F.cross_entropy(model(x), y) => {BF16}(F.cross_entropy)(model(x), y); \
        loss = {BF16}(lambda: F.cross_entropy(model(x), y))(); \
        {OFF}(loss.backward)()
        loss.backward() =>
            but a block is still open
        optimizer.step() => {BF16}(optimizer.step)()
            the optimizer steps under autocast
        optimizer.zero_grad() =>
            gradients are still there at the end
        """,
    "train_step": """
        dtype == torch.float16 => True
        scaler.update() => \
        scaler.update(None if dtype == torch.float16 else 65536.0)
            the scaler is used under bf16
        loss.backward() => scaler.update(65536.0); loss.backward()
            the scaler has scaled no loss
        """,
}


@pytest.mark.parametrize(("name", "answer", "words"), edits(WRONG))
def test_what_else_is_wrong(name, answer, words):
    rejects(name, answer, words)
