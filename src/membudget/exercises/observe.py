"""What to look at: a function's answer, the gradient or the step it left."""

from collections.abc import Callable, Iterable
from math import log2
from weakref import WeakSet

import torch
from torch import nn

from membudget.exercises.compare import Seen
from membudget.exercises.guard import kind, uses_arguments

Limit = Callable[..., int]


def answer(fn: Callable, args: tuple) -> Seen:
    """The number or the list of numbers that a function returns."""
    result = fn(*args)
    if result is None and uses_arguments(fn):
        return Seen(hint="your function returns None: end it with `return`.")
    if _is_empty(result):
        return Seen(attempted=False)
    try:
        numbers = torch.as_tensor(result, dtype=torch.float64).detach()
    except Exception:
        return Seen(
            hint=f"your function returns {kind(result)} that is not made of "
            "numbers."
        )
    return Seen({"answer": numbers})


def search(fn: Callable, args: tuple) -> Seen:
    """The answer of a function that measures sizes 1 … n: (measure, …, n)."""
    measure, *rest = args
    asked = []
    seen = answer(
        fn, (lambda size: asked.append(size) or measure(size), *rest)
    )
    enough = 2 * log2(rest[-1]) + 4
    if len(asked) > enough:
        seen.remark = (
            f"It measured {len(asked)} times, and each is a training step: "
            f"halving the interval needs about {log2(rest[-1]):.0f}."
        )
    return seen


def gradient(limit: Limit) -> Callable[[Callable, tuple], Seen]:
    """The gradient that a function leaves in ``param.grad``.

    Args:
        limit: most samples that may be alive at once, from the arguments.
    """

    def observe(fn: Callable, args: tuple) -> Seen:
        parameters = list(args[0].parameters())
        before = _flat(parameters)
        with _Graphs(args[0]) as graphs:
            result = fn(*args)
        grads = [p.grad for p in parameters]
        missing = sum(grad is None for grad in grads)
        if graphs.unused and _is_empty(result) and missing == len(grads):
            return Seen(attempted=False)
        if missing:
            return Seen(
                hint="there is no gradient in `param.grad` at the end"
                + (
                    ": nothing called `backward()`, or it was wiped."
                    if _is_empty(result)
                    else f": your function returns {kind(result)} instead."
                )
            )
        hint = graphs.hint(limit(*args))
        if not torch.equal(_flat(parameters), before):
            hint = "the parameters have changed: only the gradient is asked."
        return Seen({"gradient": _flat(grads)}, hint)

    return observe


def update(limit: Limit) -> Callable[[Callable, tuple], Seen]:
    """What a function adds to the parameters, and the scaler's new scale.

    Args:
        limit: most samples that may be alive at once, from the arguments.
    """

    def observe(fn: Callable, args: tuple) -> Seen:
        parameters = list(args[0].parameters())
        before = _flat(parameters)
        with _Graphs(args[0]) as graphs:
            result = fn(*args)
        moved = _flat(parameters) - before
        left = any(
            p.grad is not None and bool(p.grad.any()) for p in parameters
        )
        if graphs.unused and not (left or moved.any()):
            if _is_empty(result):
                return Seen(attempted=False)
            return Seen(hint=f"nothing ran: this returns {kind(result)}.")
        hint = graphs.hint(limit(*args))
        if left:
            hint = (
                "gradients are still there at the end: call "
                "`optimizer.zero_grad()`, which sets them to None."
            )
        parts = {"update of the parameters": moved}
        for scaler in args:
            if isinstance(scaler, torch.amp.GradScaler):
                scale = torch.tensor(scaler.get_scale(), dtype=torch.float64)
                parts["new loss scale"] = scale
        return Seen(parts, hint)

    return observe


class _Graphs(torch.autograd.graph.saved_tensors_hooks):
    """Count the samples in one forward pass, and in all graphs alive."""

    class _Pass:
        def __init__(self, samples: int) -> None:
            self.samples = samples

    def __init__(self, model: nn.Module) -> None:
        self.largest = self.most = 0
        self._current: _Graphs._Pass | None = None
        self._alive: WeakSet[_Graphs._Pass] = WeakSet()
        first = next(
            m for m in model.modules() if list(m.parameters(recurse=False))
        )
        first.register_forward_pre_hook(self._begin)
        # detached: an output that its own graph held would never be freed
        super().__init__(
            lambda tensor: (tensor.detach(), self._current),
            lambda packed: packed[0],
        )

    def __enter__(self) -> "_Graphs":
        super().__enter__()
        return self

    @property
    def unused(self) -> bool:
        return not self.largest

    def _begin(self, module: nn.Module, args: tuple) -> None:
        self._current = _Graphs._Pass(len(args[0]))
        self._alive.add(self._current)
        self.largest = max(self.largest, len(args[0]))
        self.most = max(self.most, sum(run.samples for run in self._alive))

    def hint(self, limit: int) -> str:
        """What is wrong if more than ``limit`` samples were alive."""
        if self.largest > limit:
            return (
                f"{self.largest} samples ran through the model at once; a "
                f"micro-batch holds {limit}."
            )
        if self.most > limit:
            return (
                f"the graphs of {self.most} samples were alive at once: call "
                "`backward()` for each micro-batch, inside the loop, so that "
                "its activations are freed."
            )
        return ""


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors]).cpu()


def _is_empty(result: object) -> bool:
    return any(result is empty for empty in (None, ..., NotImplemented))
