"""What to look at: a function's answer, the gradient or the step it left."""

import gc
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from itertools import chain
from math import log2
from weakref import WeakSet

import torch
from torch import nn

from membudget.exercises.compare import Seen
from membudget.exercises.guard import kind, uses_arguments
from membudget.exercises.leaks import leak
from membudget.measuring import PeakTracker

Limit = Callable[..., int]
NO_RETURN = "your function returns None: end it with `return`."


def answer(fn: Callable, args: tuple) -> Seen:
    """The number or the list of numbers that a function returns."""
    result = fn(*args)
    return _missing(fn, result) or _numbers("answer", result)


def words(allowed: Sequence[str]) -> Callable[[Callable, tuple], Seen]:
    """The list of words that a function returns.

    Args:
        allowed: the words that it may hold.
    """

    def said(codes: torch.Tensor) -> str:
        return str([allowed[int(code)] for code in codes])

    def observe(fn: Callable, args: tuple) -> Seen:
        result = fn(*args)
        if missing := _missing(fn, result):
            return missing
        if not isinstance(result, list | tuple):
            return Seen(
                hint=f"your function returns {kind(result)}: a list is needed."
            )
        if unknown := [word for word in result if word not in allowed]:
            return Seen(
                hint=f"the list may hold {_listed(allowed)}, and this one "
                f"holds {_quoted(unknown[0])}."
            )
        codes = [float(allowed.index(word)) for word in result]
        seen = _numbers("answer", codes)
        seen.said = said
        return seen

    return observe


def table(
    name: str, keys: Collection[str]
) -> Callable[[Callable, tuple], Seen]:
    """The dictionary of numbers that a function returns.

    Args:
        name: of a number, with ``{}`` for its key.
        keys: those that it may hold; the number of a missing one is 0.
    """

    def observe(fn: Callable, args: tuple) -> Seen:
        result = fn(*args)
        if missing := _missing(fn, result):
            return missing
        if not isinstance(result, Mapping):
            return Seen(
                hint=f"your function returns {kind(result)}: a dictionary is "
                "needed."
            )
        if unknown := [key for key in result if key not in keys]:
            return Seen(
                hint=f"the keys may be {_listed(keys)}, and one here is "
                f"{_quoted(unknown[0])}."
            )
        parts = {}
        for key in keys:
            seen = _numbers(name.format(key), result.get(key, 0))
            if seen.hint:
                return seen
            parts |= seen.parts
        return Seen(parts)

    return observe


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


def training(fn: Callable, args: tuple) -> Seen:
    """What a training loop returns, does and leaves alive.

    The arguments are a model, its optimizer, and a list of ``(x, y)``.
    """
    model, optimizer, batches = args
    parameters = list(model.parameters())
    before = _flat(parameters)
    with PeakTracker(model, optimizer, *chain(*batches)) as tracker:
        model.register_forward_pre_hook(lambda *_: tracker.mark("forward"))
        result = fn(*args)
    if not tracker.marks and _is_empty(result):
        return Seen(attempted=False)
    if result is None:
        return Seen(hint=NO_RETURN)
    seen = _numbers("list of losses", result)
    if seen.parts:
        moved = _flat(parameters) - before
        seen.parts = seen.parts | {"update of the parameters": moved}
        seen.hint = leak(result, tracker)
    return seen


def collection(fn: Callable, args: tuple) -> Seen:
    """What a collector returns, and whether it collected.

    The first argument has ``fill()``, which makes garbage, and ``used()``,
    which the function gets.
    """
    memory, *rest = args
    with _collections() as collections:
        memory.fill()
        seen = answer(fn, (memory.used, *rest))
    if seen.parts:
        ran = torch.tensor(bool(collections), dtype=torch.float64)
        seen.parts = seen.parts | {"number of collections": ran}
    return seen


@contextmanager
def _collections() -> Iterator[list[int]]:
    """List the garbage collections that someone asks for.

    Python starts none by itself, and none looks at what was there before:
    it is fast, and always finds the same.
    """
    seen: list[int] = []
    collects = gc.isenabled()

    def note(phase: str, info: dict) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.disable()
    gc.freeze()
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
        (gc.enable if collects else gc.disable)()


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


def _missing(fn: Callable, result: object) -> Seen | None:
    """What to say of a function that returned nothing."""
    if result is None and uses_arguments(fn):
        return Seen(hint=NO_RETURN)
    return Seen(attempted=False) if _is_empty(result) else None


def _numbers(name: str, value: object) -> Seen:
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach()
    except Exception:
        return Seen(
            hint=f"your function returns {kind(value)} that is not made of "
            "numbers."
        )
    return Seen({name: numbers})


def _listed(words: Iterable[str]) -> str:
    *most, last = map(_quoted, words)
    return f"{', '.join(most)} or {last}"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else kind(value)
