"""The exercises on precision of the lab: five broken AMP loops to repair."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from membudget.exercises import loops_old as loops
from membudget.exercises.compare import Seen
from membudget.exercises.core_old import Case, Exercise, variants
from membudget.exercises.loops_old import NO_CLIP, mean_loss
from membudget.exercises.observe import amp_update, answer
from membudget.models import mlp

NO_STEP = "the optimizer does not step: the parameters stay as they are."
NO_UPDATE = (
    "the loss scale stays as it was: call `scaler.update()` once, after the "
    "step."
)
PLAIN_STEP = (
    "the step is taken with a gradient that still holds the loss scale, "
    "overflow or not: `scaler.step(optimizer)` divides by it and looks, "
    "`optimizer.step()` does not."
)
NO_SCALE = (
    "the loss is not scaled, so the scaler has nothing to unscale: call "
    "`scaler.scale(loss).backward()`."
)
NO_SCALER = (
    "the scaler is not used, and in fp16 small gradients become zero: "
    "`scaler.scale(loss).backward()`, and `scaler.step(optimizer)` and "
    "`scaler.update()` in place of `optimizer.step()`."
)


def _model() -> nn.Module:
    return mlp(inputs=4, width=8, depth=2, outputs=3)


def _samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 4), torch.randint(3, (count,))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _scaler(scale: float) -> torch.amp.GradScaler:
    """One that doubles its scale after every step without an overflow."""
    return torch.amp.GradScaler("cpu", scale, growth_interval=1)


def _finish(
    names: str,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """What comes after a backward pass, by names."""
    actions: dict[str, Callable] = {
        "plain": optimizer.step,
        "wipe": optimizer.zero_grad,
    }
    if scaler:
        actions |= {
            "unscale": lambda: scaler.unscale_(optimizer),
            "step": lambda: scaler.step(optimizer),
            "update": scaler.update,
        }
    for name in names.split():
        actions[name]()


# Clipped before it is unscaled


def _clip_case(max_norm: float, scale: float) -> Case:
    def make() -> tuple:
        model = _model()
        x, y = _samples(8)
        return model, _sgd(model), _scaler(scale), x, y, max_norm

    return Case(f"max_norm = {max_norm}, loss scale {scale:.0f}", make)


def _clipped(model, optimizer, scaler, x, y, max_norm, **change) -> None:
    loops.step(model, optimizer, scaler, [(x, y)], max_norm, **change)


SCALED_CLIP = (
    "the gradient is clipped while it is still multiplied by the loss scale, "
    "so nearly every step is cut to a fraction of itself: call "
    "`scaler.unscale_(optimizer)` before `clip_grad_norm_`."
)
NOT_FP16 = (
    "the forward pass does not run in fp16: put it under "
    '`torch.autocast("cpu", torch.float16)`.'
)

check_clipped_amp_step = Exercise(
    signature="clipped_amp_step(model, optimizer, scaler, x, y, max_norm)",
    cases=[
        _clip_case(0.1, 1024.0),
        _clip_case(1000, 1024.0),
        _clip_case(0.1, 2.0**40),
    ],
    observe=amp_update,
    solution=_clipped,
    mistakes=variants(
        _clipped,
        [
            (NO_SCALER, {"scaled": False, "end": "clip plain wipe"}),
            (NO_SCALER, {"scaled": False, "end": "plain wipe"}),
            (NO_SCALE, {"scaled": False, "end": "clip plain update wipe"}),
            (NO_SCALE, {"scaled": False, "end": "clip step update wipe"}),
            (NO_SCALE, {"scaled": False}),
            (SCALED_CLIP, {"end": "clip step update wipe"}),
            (SCALED_CLIP, {"end": "clip unscale step update wipe"}),
            (NO_CLIP, {"end": "unscale step update wipe"}),
            (
                "`clip_grad_value_` cuts each number by itself; "
                "`clip_grad_norm_` keeps the direction.",
                {"end": "unscale cut step update wipe"},
            ),
            (
                "the gradient is brought to the norm max_norm even where it "
                "is shorter: clipping never lengthens it.",
                {"end": "unscale normalise step update wipe"},
            ),
            (NO_UPDATE, {"end": "unscale clip step wipe"}),
            (
                "an overflow must skip the step: `scaler.step(optimizer)` "
                "does, `optimizer.step()` does not.",
                {"end": "unscale clip plain update wipe"},
            ),
            (
                "`scaler.update()` runs before the step: the step divides by "
                "the new scale. Update last.",
                {"end": "unscale clip update step wipe"},
            ),
            (
                "`scaler.unscale_` runs twice, and once is enough: "
                "`scaler.step` knows that the gradient is unscaled.",
                {"end": "unscale clip unscale step update wipe"},
            ),
            (NOT_FP16, {"dtype": torch.bfloat16}),
            (NOT_FP16, {"dtype": None}),
        ],
    ),
    shown=(
        "max_norm means the true norm here, whatever the loss scale is, and "
        "an overflow skips the step."
    ),
    tolerance=1e-2,
)


# Two losses, two scalers


def _loss_case(scale: float) -> Case:
    def make() -> tuple:
        model = _model()
        return model, _sgd(model), _scaler(scale), *_samples(8)

    return Case(f"8 samples, loss scale {scale:.0f}", make)


def _two_losses(
    model,
    optimizer,
    scaler,
    x,
    y,
    own: float = 0,
    scaled: Sequence[str] = ("main", "auxiliary"),
    used: Sequence[str] = ("main", "auxiliary"),
    retain: bool = True,
    between: str = "",
    end: str = "step update wipe",
    dtype: torch.dtype | None = torch.float16,
    full: bool = True,
) -> None:
    """A step on the sum of two losses: the second is the mean square logit.

    Args:
        model, optimizer, scaler, x, y: of the exercise.
        own: scale of a second scaler, for the auxiliary loss.
        scaled: the losses that are multiplied by a scale.
        used: the losses that have a backward pass.
        retain: whether the graph is kept for the second backward pass.
        between: actions after the first backward pass.
        end: actions after the last one; ``other`` divides by ``own``.
        dtype: of autocast.
        full: whether the logits are squared in fp32.
    """
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(x)
        losses = {
            "main": F.cross_entropy(logits, y),
            "auxiliary": (logits.float() if full else logits).square().mean(),
        }
    scales = {"main": scaler, "auxiliary": _scaler(own) if own else scaler}
    for name in used:
        loss = losses[name]
        if name in scaled:
            loss = scales[name].scale(loss)
        loss.backward(retain_graph=retain and name == "main")
        if name == "main":
            _finish(between, optimizer, scaler)
    if "other" in end:
        _finish("unscale", optimizer, scales["auxiliary"])
        end = end.replace("other", "")
    _finish(end, optimizer, scaler)


OWN_SCALER = (
    "the auxiliary loss has a scaler of its own. The gradients of both "
    "losses are added up at two scales, and the step divides the sum by one "
    "of them: one scaler for both."
)
UPDATE_BETWEEN = (
    "`scaler.update()` comes between the two losses, and changes the scale "
    "while gradients of both are added up: update once, after the step."
)

check_two_losses = Exercise(
    signature="two_losses(model, optimizer, scaler, x, y)",
    cases=[_loss_case(8.0), _loss_case(65536.0), _loss_case(2.0**40)],
    observe=amp_update,
    solution=_two_losses,
    mistakes=[
        (
            "the gradient is unscaled between the two losses, and a scaled "
            "one is added to it: unscale once, after both.",
            partial(_two_losses, between="unscale"),
        ),
        *[
            (OWN_SCALER, partial(_two_losses, own=2.0**power))
            for power in (16, *range(7, 16))
        ],
        (
            "both scalers divide the sum by their scale, so it is divided "
            "twice: one scaler for both losses.",
            partial(
                _two_losses, own=2.0**16, end="unscale other step update wipe"
            ),
        ),
        (
            "the auxiliary loss is not scaled, and its gradient is divided "
            "by the loss scale with the rest: scale it, too.",
            partial(_two_losses, scaled=["main"]),
        ),
        (
            "the main loss is not scaled, and its gradient is divided by the "
            "loss scale with the rest: scale it, too.",
            partial(_two_losses, scaled=["auxiliary"]),
        ),
        (NO_SCALE, partial(_two_losses, scaled=[])),
        (NO_SCALER, partial(_two_losses, scaled=[], end="plain wipe")),
        (
            "the auxiliary loss is in fp16, and so is the gradient on its "
            "way back from it, which begins with the loss scale: 65 536 is "
            "an overflow there, and the step is skipped. So is the square of "
            "a logit from 256 on. Square `logits.float()`.",
            partial(_two_losses, full=False),
        ),
        (
            "the auxiliary loss is missing.",
            partial(_two_losses, used=["main"]),
        ),
        (
            "the main loss is missing: its gradient must still be there when "
            "that of the auxiliary one is added.",
            partial(_two_losses, used=["auxiliary"]),
        ),
        (
            "the first backward pass frees the graph that both losses share: "
            "`retain_graph=True`, or one backward pass for their sum.",
            partial(_two_losses, retain=False),
        ),
        (
            "there is a step for each loss: add their gradients up, and step "
            "once.",
            partial(_two_losses, between="step"),
        ),
        (
            "there is a step for each loss: add their gradients up, and step "
            "once.",
            partial(_two_losses, between="step update"),
        ),
        (
            "there is a step for each loss: add their gradients up, and step "
            "once.",
            partial(_two_losses, between="step update wipe"),
        ),
        (
            "the gradient is unscaled between the two losses, and again "
            "after them: once is enough, and `scaler.step` does it.",
            partial(
                _two_losses, between="unscale", end="unscale step update wipe"
            ),
        ),
        (UPDATE_BETWEEN, partial(_two_losses, between="update")),
        (UPDATE_BETWEEN, partial(_two_losses, between="unscale update")),
        (NO_UPDATE, partial(_two_losses, end="step wipe")),
        (PLAIN_STEP, partial(_two_losses, end="plain wipe")),
        (PLAIN_STEP, partial(_two_losses, own=2.0**16, end="plain wipe")),
        (NOT_FP16, partial(_two_losses, dtype=None)),
    ],
    shown=(
        "Both losses are added up in `param.grad` at one scale, the one that "
        "the step divides by. A second scale is right only while it equals "
        "the first."
    ),
    tolerance=1e-2,
)


# Autocast around the backward pass


class FullHead(nn.Module):
    """A network whose last layer runs in fp32, under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(features.float())


def _head_case(count: int, width: int) -> Case:
    def make() -> tuple:
        model = FullHead(width)
        return model, _sgd(model), *_samples(count)

    return Case(f"{count} samples, width {width}, head in fp32", make)


def _backward(
    model,
    optimizer,
    x,
    y,
    inside: bool = False,
    end: str = "plain wipe",
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """A step, with the backward pass in or behind the block."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = mean_loss(model, (x, y))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    _finish(end, optimizer)


NOT_BF16 = (
    "the forward pass does not run in bf16: put it under "
    '`torch.autocast("cpu", torch.bfloat16)`.'
)

check_backward_outside = Exercise(
    signature="backward_outside(model, optimizer, x, y)",
    cases=[_head_case(16, 16), _head_case(5, 8)],
    observe=amp_update,
    solution=_backward,
    mistakes=[
        (
            "the backward pass runs under autocast. The model's head was "
            "taken out of it and is in fp32, but its gradients were computed "
            "in bf16; and the 16-bit copies of all weights stay alive as "
            "long as the block does. Leave the block after the loss.",
            partial(_backward, inside=True),
        ),
        (NOT_BF16, partial(_backward, dtype=None)),
        (NOT_BF16, partial(_backward, dtype=torch.float16)),
        (
            "the optimizer does not step.",
            partial(_backward, end="wipe"),
        ),
        (
            "there are two steps: one is asked.",
            partial(_backward, end="plain plain wipe"),
        ),
    ],
    shown=(
        "Neither the backward pass nor the step is under autocast. Each "
        "gradient has the precision that its operator had, and no 16-bit "
        "copy that no gradient needs is alive in the backward pass."
    ),
    tolerance=1e-5,
)


# Losses compared in fp16


def _epochs(*losses: float) -> Case:
    return Case(
        f"losses {list(losses)}",
        lambda: (list(map(torch.tensor, losses)),),
    )


def _first(
    losses: Sequence[torch.Tensor],
    pick: Callable = min,
    dtype: torch.dtype = torch.float32,
    shift: int = 0,
    last: bool = False,
) -> int:
    """The index of a loss.

    Args:
        losses: of the exercise.
        pick: ``min`` or ``max``.
        dtype: in which they are compared.
        shift: added to the index.
        last: whether the last of equal ones is taken.
    """
    values = [loss.to(dtype).item() for loss in losses]
    indices = range(len(values))
    if last:
        indices = reversed(indices)
    return pick(indices, key=values.__getitem__) + shift


IN_FP16 = (
    "the losses are compared in fp16: from 2 to 4 its numbers are 0.00195 "
    "apart, and from 65 520 on all are infinite. Compare them as they are, "
    "in fp32."
)
IN_BF16 = (
    "the losses are compared in bf16, which has three fraction bits fewer "
    "than fp16: from 2 to 4 its numbers are 0.0156 apart. Compare them as "
    "they are, in fp32."
)

check_best_epoch = Exercise(
    signature="best_epoch(losses)",
    cases=[
        _epochs(2.34, 2.303, 2.3013, 2.3016, 2.3011, 2.3019, 2.3012, 2.3022),
        _epochs(95000.0, 81000.0, 70000.0, 72000.0),
        _epochs(4e-8, 2e-8, 1e-8, 3e-8),
        _epochs(0.5),
    ],
    observe=answer,
    solution=_first,
    mistakes=[
        (IN_FP16, partial(_first, dtype=torch.float16)),
        (IN_FP16, partial(_first, dtype=torch.float16, last=True)),
        (IN_BF16, partial(_first, dtype=torch.bfloat16)),
        (IN_BF16, partial(_first, dtype=torch.bfloat16, last=True)),
        (
            "this is the epoch with the largest loss.",
            partial(_first, pick=max),
        ),
        (
            "this is the epoch after the best one: count from 0.",
            partial(_first, shift=1),
        ),
        (
            "this is the loss itself: the index of its epoch is asked.",
            lambda losses: min(loss.item() for loss in losses),
        ),
    ],
    shown=(
        "A loss is a single number: to keep it in fp32 costs nothing, and "
        "the digits that tell two epochs apart are still there."
    ),
)


# A scaler under bf16


def _dtype_case(dtype: torch.dtype, power: int, small: bool = False) -> Case:
    """A step in a format.

    Args:
        dtype: the format.
        power: of two, the loss scale.
        small: whether gradients underflow in fp16 without a scale: there are
            many samples, and a last layer that is small, and frozen.
    """

    def make() -> tuple:
        model = _model()
        x, y = _samples(512 if small else 8)
        if small:
            model[-1].requires_grad_(False).weight.mul_(2.0**-12)
        return model, _sgd(model), _scaler(2.0**power), 16 * x, y, dtype

    told = f"{dtype}, loss scale 2^{power}"
    return Case(f"{told}{', small gradients' * small}", make)


def _fp16(dtype: torch.dtype) -> bool:
    return dtype == torch.float16


def _train_step(
    model,
    optimizer,
    scaler,
    x,
    y,
    dtype,
    scaled: Callable[[torch.dtype], bool] = _fp16,
    stepped: Callable[[torch.dtype], bool] | None = None,
    updated: Callable[[torch.dtype], bool] | None = None,
    end: str = "step wipe",
    casts: Callable[[torch.dtype], torch.dtype | None] = lambda dtype: dtype,
) -> None:
    """A step in a format.

    Args:
        model, optimizer, scaler, x, y, dtype: of the exercise.
        scaled: where the loss is scaled.
        stepped: where the scaler steps, if elsewhere.
        updated: where it is updated, if elsewhere.
        end: what comes after the backward pass where the scaler steps.
        casts: dtype of autocast.
    """
    cast = casts(dtype)
    with torch.autocast("cpu", cast, enabled=cast is not None):
        loss = mean_loss(model, (x, y))
    if scaled(dtype):
        loss = scaler.scale(loss)
    loss.backward()
    stepped = stepped or scaled
    _finish(end if stepped(dtype) else "plain wipe", optimizer, scaler)
    if (updated or stepped)(dtype):
        scaler.update()


def _always(dtype: torch.dtype) -> bool:
    return True


def _never(dtype: torch.dtype) -> bool:
    return False


ALWAYS = (
    "the scaler works under bf16, too. No gradient of bf16 underflows where "
    "fp32's would not, so the scale only grows, until the scaled gradient "
    "overflows and good steps are skipped; and a gradient that is infinite "
    "by itself is skipped without a word. Use the scaler under fp16 alone."
)
NOT_UPDATED = (
    "the scaler scales and steps under bf16, and only its update is left "
    "out: here the loss scale makes the gradient overflow, and a good step "
    "is skipped. Under bf16 leave all three out: `loss.backward()` and "
    "`optimizer.step()`."
)
WRONG_CAST = "the forward pass does not run in `dtype`: hand it to autocast."


def _train_seen(fn: Callable, args: tuple) -> Seen:
    seen = amp_update(fn, args)
    _, _, scaler, _, _, dtype = args
    if seen.parts and not _fp16(dtype) and scaler._scale is not None:
        seen.hint = seen.hint or (
            "the scaler is used under bf16: leave out `scale`, `step` and "
            "`update` there."
        )
    return seen


check_train_step = Exercise(
    signature="train_step(model, optimizer, scaler, x, y, dtype)",
    cases=[
        _dtype_case(torch.bfloat16, 127),
        _dtype_case(torch.bfloat16, 10),
        _dtype_case(torch.float16, 14, small=True),
        _dtype_case(torch.float16, 40),
    ],
    observe=_train_seen,
    solution=_train_step,
    mistakes=[
        (ALWAYS, partial(_train_step, scaled=_always)),
        (NOT_UPDATED, partial(_train_step, scaled=_always, updated=_fp16)),
        (
            "`scaler.update()` is called and the scaler has scaled no loss. "
            "The call comes last, under fp16 alone, and without a number: "
            "the scaler looks for its scale by itself.",
            partial(_train_step, updated=_always),
        ),
        (
            "the loss is scaled under bf16, and the gradient never unscaled: "
            "leave the scaler out of both.",
            partial(_train_step, scaled=_always, stepped=_fp16),
        ),
        (
            "the scaler steps under bf16 although the loss is not scaled: "
            "leave it out of both.",
            partial(_train_step, stepped=_always),
        ),
        (
            "the scaler is left out under fp16, too, and there small "
            "gradients become zero or lose their digits: scale, step and "
            "update.",
            partial(_train_step, scaled=_never),
        ),
        (
            "under fp16 the loss is scaled, and the gradient never unscaled: "
            "`scaler.step(optimizer)` and `scaler.update()`.",
            partial(_train_step, stepped=_never),
        ),
        (NO_UPDATE, partial(_train_step, updated=_never)),
        (NO_SCALE, partial(_train_step, scaled=_never, stepped=_fp16)),
        (
            "under fp16 an overflow must skip the step: "
            "`scaler.step(optimizer)` does, `optimizer.step()` does not.",
            partial(_train_step, end="unscale plain wipe"),
        ),
        (
            WRONG_CAST,
            partial(_train_step, casts=lambda dtype: torch.float16),
        ),
        (
            WRONG_CAST,
            partial(_train_step, casts=lambda dtype: torch.bfloat16),
        ),
        (WRONG_CAST, partial(_train_step, casts=lambda dtype: None)),
    ],
    shown=(
        "The scaler is for fp16, and left alone elsewhere. bf16 has the "
        "exponents of fp32: its gradients need no scale, and what is "
        "infinite there should be seen and not skipped."
    ),
    tolerance=1e-3,
)
