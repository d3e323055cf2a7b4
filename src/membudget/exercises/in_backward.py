"""The exercise on a step inside the backward pass."""

from collections.abc import Callable

import torch
from torch.nn.utils import clip_grad_norm_

from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise
from membudget.exercises.guard import Problem
from membudget.exercises.observe import doubles, flat, is_empty
from membudget.measuring import PeakTracker
from membudget.models import mlp

# Each gradient clipped by itself


def clip_early(model, optimizer, max_norm):
    def step(p):
        clip_grad_norm_([p], max_norm)
        optimizer.step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


def _clipped(max_norm: float) -> Case:
    def make():
        model = mlp(inputs=4, width=8, depth=3, outputs=3)
        return model, torch.optim.SGD(model.parameters(), 0.5), max_norm

    return Case(f"max_norm = {max_norm}", make)


def _hooked(fn: Callable, args: tuple) -> Seen:
    """What two backward passes do to the parameters, and gradients alive."""
    model, optimizer, _ = args
    x = torch.arange(64.0).reshape(16, 4).sin()
    result = fn(*args)
    parameters = list(model.parameters())
    if is_empty(result) and not any(
        p._post_accumulate_grad_hooks for p in parameters
    ):
        raise Problem
    before = flat(parameters)
    with PeakTracker(model, optimizer, x) as tracker:
        for _ in range(2):
            model(x).square().sum().backward()
    most = max(tracker.timelines()["gradients"])
    return Seen(
        {
            "update of the parameters": flat(parameters) - before,
            "number of bytes of gradients alive at once": doubles(most),
        }
    )


CLIP = "clip_grad_norm_([p], max_norm)"

check_clip_early = Exercise(
    clip_early,
    cases=[_clipped(0.1), _clipped(1e6)],
    observe=_hooked,
    mistakes=f"""
        {CLIP} =>
        or {CLIP} => optimizer.step()
        optimizer.step() => {CLIP}
            the step is taken with the unclipped gradient: clip it in the
            hook, before `optimizer.step()`.
        {CLIP} => torch.nn.utils.clip_grad_value_([p], max_norm)
            `clip_grad_value_` cuts each number by itself; the norm of the
            gradient is to be cut.
        {CLIP} => p.grad.mul_(max_norm / p.grad.norm())
            the gradient is brought to the norm max_norm even where it is
            shorter: clipping never lengthens it.
        p.grad = None =>
            the gradient stays alive, and every later `optimizer.step()` of
            this backward pass steps its parameter again.
        optimizer.step() =>
            nothing steps: call `optimizer.step()` in the hook.
        """,
    shown=(
        "Each gradient has at most the norm max_norm when its parameter "
        "steps, and is freed at once. It is not the global norm."
    ),
)
