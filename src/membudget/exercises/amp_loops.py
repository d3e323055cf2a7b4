"""Broken AMP loops to repair: one of the chapter, three of the lab."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise
from membudget.exercises.observe import amp_update
from membudget.models import mlp

NO_SCALE = (
    "the loss is not scaled, so the scaler has nothing to unscale: call "
    "`scaler.scale(loss).backward()`."
)
NO_SCALER = (
    "the scaler is not used, and in fp16 small gradients become zero: "
    "`scaler.scale(loss).backward()`, and `scaler.step(optimizer)` and "
    "`scaler.update()` in place of `optimizer.step()`."
)
CLIP = "clip_grad_norm_(model.parameters(), max_norm)"
NO_UPDATE = """
    scaler.update() =>
        the loss scale stays as it was: call `scaler.update()` once, after the
        step.
    """
NOT_FP16 = """
    torch.float16 => enabled=False
    or torch.float16 => torch.bfloat16
        the forward pass does not run in fp16: put it under
        `torch.autocast("cpu", torch.float16)`.
    """
OVERFLOW = (
    "an overflow must skip the step: `scaler.step(optimizer)` does, "
    "`optimizer.step()` does not."
)


def _training(count: int, scale: float) -> tuple:
    """Model, SGD, a scaler that doubles its scale after a step, x and y."""
    model = mlp(inputs=4, width=8, depth=2, outputs=3)
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=1)
    return model, _sgd(model), scaler, *_samples(count)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 4), torch.randint(3, (count,))


# Clipped before it is unscaled


def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def _clipped(max_norm: float, scale: float) -> Case:
    return Case(
        f"max_norm = {max_norm}, loss scale {scale:.0f}",
        lambda: (*_training(8, scale), max_norm),
    )


check_clipped_amp_step = Exercise(
    clipped_amp_step,
    cases=[_clipped(0.1, 1024), _clipped(1000, 1024), _clipped(0.1, 2**40)],
    observe=amp_update,
    mistakes=f"""
        scaler.scale(loss) => loss
        scaler.unscale_(optimizer) =>
        scaler.step(optimizer) => optimizer.step()
        scaler.update() =>
        or scaler.scale(loss) => loss
        scaler.unscale_(optimizer) =>
        {CLIP} =>
        scaler.step(optimizer) => optimizer.step()
        scaler.update() =>
            {NO_SCALER}
        scaler.scale(loss) => loss
        or scaler.scale(loss) => loss
        scaler.unscale_(optimizer) =>
        or scaler.scale(loss) => loss
        scaler.unscale_(optimizer) =>
        scaler.step(optimizer) => optimizer.step()
            {NO_SCALE}
        {CLIP} =>
        or scaler.unscale_(optimizer) =>
        {CLIP} =>
            the step is taken with the unclipped gradient: `clip_grad_norm_`
            comes after the last micro-batch and before the step.
        {CLIP} => torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
            `clip_grad_value_` cuts each number by itself; `clip_grad_norm_`
            keeps the direction.
        {CLIP} => norm = {CLIP.replace("max_norm", "1e9")}; \
        [p.grad.mul_(max_norm / norm) for p in model.parameters()]
            the gradient is brought to the norm max_norm even where it is
            shorter: clipping never lengthens it.
        scaler.unscale_(optimizer) =>
        or scaler.unscale_(optimizer) => {CLIP}
        {CLIP} => scaler.unscale_(optimizer)
            the gradient is clipped while it is still multiplied by the loss
            scale, so nearly every step is cut to a fraction of itself: call
            `scaler.unscale_(optimizer)` before `clip_grad_norm_`.
        {NO_UPDATE}
        scaler.step(optimizer) => optimizer.step()
            {OVERFLOW}
        {NOT_FP16}
        scaler.step(optimizer) => scaler.update()
        scaler.update() => scaler.step(optimizer)
            `scaler.update()` runs before the step: the step divides by the
            new scale. Update last.
        scaler.step(optimizer) => \
        scaler.unscale_(optimizer); scaler.step(optimizer)
            `scaler.unscale_` runs twice, and once is enough: `scaler.step`
            knows that the gradient is unscaled.
        """,
    shown=(
        "max_norm means the true norm here, whatever the loss scale is, and "
        "an overflow skips the step."
    ),
    tolerance=1e-2,
)

# Two losses, two scalers


def two_losses(model, optimizer, scaler, x, y):
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
        main = F.cross_entropy(logits, y)
        auxiliary = logits.float().square().mean()
    scaler.scale(main + auxiliary).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def _two(scale: float) -> Case:
    return Case(
        f"8 samples, loss scale {scale:.0f}", lambda: _training(8, scale)
    )


BOTH = "scaler.scale(main + auxiliary).backward()"
MAIN = "scaler.scale(main).backward(retain_graph=True)"
AUXILIARY = "scaler.scale(auxiliary).backward()"
STEP = "scaler.step(optimizer); scaler.update()"
SECOND = 'second = torch.amp.GradScaler("cpu", 2.0**{})'
APART = f"{SECOND}; {MAIN}; second.scale(auxiliary).backward()"
OWN_SCALER = "\nor ".join(
    f"{BOTH} => {APART.format(power)}" for power in (16, *range(7, 16))
)
"""Gradients whose ratio says how much the second scale is larger."""

check_two_losses = Exercise(
    two_losses,
    cases=[_two(8), _two(2**16), _two(2**40)],
    observe=amp_update,
    mistakes=f"""
        {BOTH} => {MAIN}; scaler.unscale_(optimizer); {AUXILIARY}
            the gradient is unscaled between the two losses, and a scaled one
            is added to it: unscale once, after both.
        {OWN_SCALER}
            the auxiliary loss has a scaler of its own. The gradients of both
            losses are added up at two scales, and the step divides the sum by
            one of them: one scaler for both.
        {BOTH} => {APART.format(16)}; \
        scaler.unscale_(optimizer); second.unscale_(optimizer)
            both scalers divide the sum by their scale, so it is divided
            twice: one scaler for both losses.
        scaler.scale(main + auxiliary) => (scaler.scale(main) + auxiliary)
            the auxiliary loss is not scaled, and its gradient is divided by
            the loss scale with the rest: scale it, too.
        scaler.scale(main + auxiliary) => (main + scaler.scale(auxiliary))
            the main loss is not scaled, and its gradient is divided by the
            loss scale with the rest: scale it, too.
        scaler.scale(main + auxiliary) => (main + auxiliary)
            {NO_SCALE}
        scaler.scale(main + auxiliary) => (main + auxiliary)
        scaler.step(optimizer) => optimizer.step()
        scaler.update() =>
            {NO_SCALER}
        logits.float() => logits
            the auxiliary loss is in fp16, and so is the gradient on its way
            back from it, which begins with the loss scale: 65 536 is an
            overflow there, and the step is skipped. So is the square of a
            logit from 256 on. Square `logits.float()`.
        main + auxiliary => main
            the auxiliary loss is missing.
        main + auxiliary => auxiliary
            the main loss is missing: its gradient must still be there when
            that of the auxiliary one is added.
        {BOTH} => scaler.scale(main).backward(); {AUXILIARY}
            the first backward pass frees the graph that both losses share:
            `retain_graph=True`, or one backward pass for their sum.
        {BOTH} => {MAIN}; scaler.step(optimizer); {AUXILIARY}
        or {BOTH} => {MAIN}; {STEP}; {AUXILIARY}
        or {BOTH} => {MAIN}; {STEP}; model.zero_grad(); {AUXILIARY}
            there is a step for each loss: add their gradients up, and step
            once.
        {BOTH} => {MAIN}; scaler.unscale_(optimizer); {AUXILIARY}; \
        scaler.unscale_(optimizer)
            the gradient is unscaled between the two losses, and again after
            them: once is enough, and `scaler.step` does it.
        {BOTH} => {MAIN}; scaler.update(); {AUXILIARY}
        or {BOTH} => {MAIN}; scaler.unscale_(optimizer); scaler.update(); \
        {AUXILIARY}
            `scaler.update()` comes between the two losses, and changes the
            scale while gradients of both are added up: update once, after
            the step.
        {NO_UPDATE}
        scaler.step(optimizer) => optimizer.step()
        scaler.update() =>
        or {BOTH} => {APART.format(16)}
        scaler.step(optimizer) => optimizer.step()
        scaler.update() =>
            the step is taken with a gradient that still holds the loss scale,
            overflow or not: `scaler.step(optimizer)` divides by it and looks,
            `optimizer.step()` does not.
        {NOT_FP16}
        """,
    shown=(
        "Both losses are added up in `param.grad` at one scale, the one that "
        "the step divides by. A second scale is right only while it equals "
        "the first."
    ),
    tolerance=1e-2,
)

# Autocast around the backward pass


def sensitive_step(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class FullHead(nn.Module):
    """A network whose last layer runs in fp32, under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(features.float())


def _full_head(count: int, width: int) -> Case:
    def make() -> tuple:
        model = FullHead(width)
        return model, _sgd(model), *_samples(count)

    return Case(f"{count} samples, width {width}, head in fp32", make)


check_sensitive_step = Exercise(
    sensitive_step,
    cases=[_full_head(16, 16), _full_head(5, 8)],
    observe=amp_update,
    mistakes="""
        model(x), y) => model(x), y); loss.backward()
        loss.backward() =>
            the backward pass runs under autocast. The model's head was taken
            out of it and is in fp32, but its gradients were computed in bf16;
            and the 16-bit copies of all weights stay alive as long as the
            block does. Leave the block after the loss.
        torch.bfloat16 => enabled=False
        or torch.bfloat16 => torch.float16
            the forward pass does not run in bf16: put it under
            `torch.autocast("cpu", torch.bfloat16)`.
        optimizer.step() =>
            the optimizer does not step.
        optimizer.step() => optimizer.step(); optimizer.step()
            there are two steps: one is asked.
        """,
    shown=(
        "Neither the backward pass nor the step is under autocast. Each "
        "gradient has the precision that its operator had, and no 16-bit "
        "copy that no gradient needs is alive in the backward pass."
    ),
    tolerance=1e-5,
)

# A scaler under bf16


def train_step(model, optimizer, scaler, x, y, dtype):
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(x), y)
    if dtype == torch.float16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def _format(dtype: torch.dtype, power: int, small: bool = False) -> Case:
    """A step in a format, with a loss scale of 2 to a power.

    Without a scale ``small`` gradients underflow in fp16: there are many
    samples, and a last layer that is small, and frozen.
    """

    def make() -> tuple:
        count = 512 if small else 8
        model, optimizer, scaler, x, y = _training(count, 2.0**power)
        if small:
            model[-1].requires_grad_(False).weight.mul_(2.0**-12)
        return model, optimizer, scaler, 16 * x, y, dtype

    told = f"{dtype}, loss scale 2^{power}"
    return Case(f"{told}{', small gradients' * small}", make)


def _with_its_scaler(fn: Callable, args: tuple) -> Seen:
    seen = amp_update(fn, args)
    _, _, scaler, _, _, dtype = args
    used = scaler._scale is not None
    if used and dtype != torch.float16:
        seen.hint = seen.hint or (
            "the scaler is used under bf16: leave out `scale`, `step` and "
            "`update` there."
        )
    return seen


check_train_step = Exercise(
    train_step,
    cases=[
        _format(torch.bfloat16, 127),
        _format(torch.bfloat16, 10),
        _format(torch.float16, 14, small=True),
        _format(torch.float16, 40),
    ],
    observe=_with_its_scaler,
    mistakes=f"""
        dtype == torch.float16 => True
            the scaler works under bf16, too. No gradient of bf16 underflows
            where fp32's would not, so the scale only grows, until the scaled
            gradient overflows and good steps are skipped; and a gradient that
            is infinite by itself is skipped without a word. Use the scaler
            under fp16 alone.
        loss.backward() => scaler.scale(loss).backward()
        optimizer.step() => scaler.step(optimizer)
            the scaler scales and steps under bf16, and only its update is
            left out: here the loss scale makes the gradient overflow, and a
            good step is skipped. Under bf16 leave all three out:
            `loss.backward()` and `optimizer.step()`.
        optimizer.step() => optimizer.step(); scaler.update()
            `scaler.update()` is called and the scaler has scaled no loss. The
            call comes last, under fp16 alone, and without a number: the
            scaler looks for its scale by itself.
        loss.backward() => scaler.scale(loss).backward()
            the loss is scaled under bf16, and the gradient never unscaled:
            leave the scaler out of both.
        optimizer.step() => scaler.step(optimizer)
            the scaler steps under bf16 although the loss is not scaled: leave
            it out of both.
        dtype == torch.float16 => False
            the scaler is left out under fp16, too, and there small gradients
            become zero or lose their digits: scale, step and update.
        scaler.step(optimizer) => optimizer.step()
        scaler.update() =>
            under fp16 the loss is scaled, and the gradient never unscaled:
            `scaler.step(optimizer)` and `scaler.update()`.
        {NO_UPDATE}
        scaler.scale(loss).backward() => loss.backward()
            {NO_SCALE}
        scaler.step(optimizer) => scaler.unscale_(optimizer); optimizer.step()
            under fp16 {OVERFLOW}
        "cpu", dtype => "cpu", torch.float16
        or "cpu", dtype => "cpu", torch.bfloat16
        or "cpu", dtype => "cpu", enabled=False
            the forward pass does not run in `dtype`: hand it to autocast.
        """,
    shown=(
        "The scaler is for fp16, and left alone elsewhere. bf16 has the "
        "exponents of fp32: its gradients need no scale, and what is "
        "infinite there should be seen and not skipped."
    ),
    tolerance=1e-3,
)
