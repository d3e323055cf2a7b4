"""What to look at: a function's answer, the gradient or the step it left."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from math import inf, log2
from typing import NamedTuple, TypeVar
from weakref import WeakSet, ref

import torch
from torch import nn

from membudget.checkpointing import Action, Run, Stage, simulate
from membudget.exercises.compare import Seen, numbers
from membudget.exercises.guard import Problem, kind, message, uses_arguments
from membudget.exercises.leaks import GRADIENTS_LEFT, leak
from membudget.internals import TorchDispatchMode
from membudget.measuring import PeakTracker

Kind = TypeVar("Kind")
Observer = Callable[[Callable, tuple], Seen]
"""Runs a function on arguments and says what it did."""

NO_RETURN = "your function returns None: end it with `return`."


def returned(fn: Callable, result: object) -> object:
    """What a function returned, if it is anything."""
    if result is None and uses_arguments(fn):
        raise Problem(NO_RETURN)
    if is_empty(result):
        raise Problem
    return result


def found(
    fn: Callable,
    result: object,
    kinds: type[Kind] | tuple[type[Kind], ...],
    needed: str,
) -> Kind:
    """What a function returned, if it is of the kinds that are needed."""
    result = returned(fn, result)
    if not isinstance(result, kinds):
        raise Problem(
            f"your function returns {kind(result)}: {needed} is needed."
        )
    return result


def answer(fn: Callable, args: tuple) -> Seen:
    """The number or the list of numbers that a function returns."""
    return Seen({"answer": doubles(returned(fn, fn(*args)))})


def several(*names: str) -> Observer:
    """The numbers that a function returns together, each by its name."""

    def observe(fn: Callable, args: tuple) -> Seen:
        result = returned(fn, fn(*args))
        values = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, list | tuple) or len(values) != len(names):
            raise Problem(
                f"your function returns {kind(result)}: {len(names)} numbers "
                f"are needed, {_and(names)}."
            )
        each = zip(names, values, strict=True)
        return Seen({name: doubles(value) for name, value in each})

    return observe


def calls(
    name: Callable[..., str],
    said: Callable[[torch.Tensor], str] = numbers,
) -> Observer:
    """The number that a function returns for each of several calls.

    Each argument is a tuple, the arguments of one call, which name it.
    """

    def observe(fn: Callable, args: tuple) -> Seen:
        results = [fn(*call) for call in args]
        parts = {
            name(*call): doubles(returned(fn, result))
            for call, result in zip(args, results, strict=True)
        }
        return Seen(parts, said=said)

    return observe


def verdict(code: torch.Tensor) -> str:
    """True or False, for an answer that is one of the two."""
    truth = not code.ndim and code.item() in (0, 1)
    return str(bool(code)) if truth else numbers(code)


def search(fn: Callable, args: tuple) -> Seen:
    """The answer of a function that measures sizes 1 … n: (measure, …, n)."""
    measure, *rest = args
    asked: list[int] = []

    def asking(size: int) -> int:
        asked.append(size)
        return measure(size)

    seen = answer(fn, (asking, *rest))
    enough = 2 * log2(rest[-1]) + 4
    if len(asked) > enough:
        seen.remark = (
            f"It measured {len(asked)} times, and each is a training step: "
            f"halving the interval needs about {log2(rest[-1]):.0f}."
        )
    return seen


def gradient(fn: Callable, args: tuple) -> Seen:
    """The gradient that a function leaves in ``param.grad``.

    The first argument is the model, the last one how many samples may be
    alive at once, or the micro-batches.
    """
    model, *_, last = args
    parameters = list(model.parameters())
    before = flat(parameters)
    with _Graphs(model) as graphs:
        result = fn(*args)
    grads = [p.grad for p in parameters]
    missing = sum(grad is None for grad in grads)
    if not graphs.largest and is_empty(result) and missing == len(grads):
        raise Problem
    if missing:
        raise Problem(_no_gradient(result))
    hint = graphs.hint(last if isinstance(last, int) else _largest(last))
    if not torch.equal(flat(parameters), before):
        hint = "the parameters have changed: only the gradient is asked."
    return Seen({"gradient": flat(grads)}, hint)


def update(fn: Callable, args: tuple) -> Seen:
    """What a function adds to the parameters.

    The first arguments are a model, its optimizer, and micro-batches.
    """
    with _Graphs(args[0]) as graphs:
        seen = _update(fn, args, graphs)
    seen.hint = seen.hint or graphs.hint(_largest(args[2]))
    return seen


def _largest(micro_batches: Sequence[tuple[torch.Tensor, ...]]) -> int:
    """Samples in the largest of them."""
    return max(len(x) for x, _ in micro_batches)


def amp_update(fn: Callable, args: tuple) -> Seen:
    """What one step adds to the parameters, and what it does to the scaler.

    And where autocast was on besides the forward pass, and whether its copies
    were still there. The first arguments are a model and its optimizer.
    """
    with _Graphs(args[0]) as graphs, _Autocast(*args[:2]) as autocast:
        seen = _update(fn, args, graphs)
    seen.hint = seen.hint or autocast.hint()
    for scaler in args:
        if isinstance(scaler, torch.amp.GradScaler):
            used = scaler._scale is not None
            seen.parts["new loss scale"] = doubles(scaler.get_scale())
            seen.parts["number of scalers in use"] = doubles(used)
    return seen


def _update(fn: Callable, args: tuple, graphs: "_Graphs") -> Seen:
    parameters = list(args[0].parameters())
    before = flat(parameters)
    with cleared_first(parameters) as cleared:
        result = fn(*args)
    moved = flat(parameters) - before
    left = not cleared() and any(
        p.grad is not None and bool(p.grad.any()) for p in parameters
    )
    if not (graphs.largest or left or moved.any()):
        if is_empty(result):
            raise Problem
        raise Problem(f"nothing ran: this returns {kind(result)}.")
    hint = GRADIENTS_LEFT if left else ""
    return Seen({"update of the parameters": moved}, hint)


@contextmanager
def cleared_first(
    parameters: list[torch.Tensor],
) -> Iterator[Callable[[], bool]]:
    """Tell whether gradients were cleared before the first was made.

    A loop that clears them there needs none to be cleared at the end. Zeros,
    which change no sum, are planted, and are looked for when the first
    gradient comes.
    """
    planted = []
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
            planted.append((p, p.grad, p.grad._version))
    found: list[bool] = []

    def look(gradient: torch.Tensor) -> None:
        if not found:
            found.append(
                all(
                    p.grad is not zero or zero._version != version
                    for p, zero, version in planted
                )
            )

    handles = [p.register_hook(look) for p, *_ in planted]
    try:
        yield lambda: found == [True]
    finally:
        for handle in handles:
            handle.remove()
        for p, zero, _ in planted:
            if p.grad is zero and not zero.any():
                p.grad = None


def training(fn: Callable, args: tuple) -> Seen:
    """What a training loop returns, does and leaves alive.

    The arguments are a model, its optimizer, and a list of ``(x, y)``.
    """
    model, optimizer, batches = args
    parameters = list(model.parameters())
    before = flat(parameters)
    with (
        cleared_first(parameters) as cleared,
        PeakTracker(model, optimizer, *chain(*batches)) as tracker,
    ):
        model.register_forward_pre_hook(lambda *_: tracker.mark("forward"))
        result = fn(*args)
        left = any(p.grad is not None for p in parameters)
    if not tracker.marks and is_empty(result):
        raise Problem
    if result is None:
        raise Problem(NO_RETURN)
    parts = {
        "list of losses": doubles(result),
        "update of the parameters": flat(parameters) - before,
    }
    return Seen(parts, leak(result, tracker, left and not cleared()))


class Allowed(NamedTuple):
    """The targets of a puzzle: units that may be alive, time that
    recomputation may take, and how often one stage may run again."""

    peak: int
    extra: float = inf
    again: float = inf


def schedule(allowed: Callable[..., Allowed]) -> Observer:
    """The schedule that a function returns, run on the tape machine.

    The first argument is the chain, or its length in units; all of them say
    what is allowed.
    """

    def observe(fn: Callable, args: tuple) -> Seen:
        result = returned(fn, fn(*args))
        actions = _as_lists(result)
        if not isinstance(actions, list | str):
            raise Problem(
                f"your function returns {kind(result)}: a schedule is "
                'needed, a list of actions such as "forward 3", or segments.'
            )
        try:
            run = simulate(args[0], actions)
        except (ValueError, TypeError) as error:
            raise Problem(f"{message(error)}.") from error
        target = allowed(*args)
        missed = _beyond(run, target, args[0])
        seen = Seen({"schedule": torch.ones(())}, missed)
        if run.peak < target.peak or run.extra_time < target.extra < inf:
            seen.remark = (
                f"Better than asked: with {len(run.runs)} stages yours peaks "
                f"at {run.peak} units and runs {_stages(run)} again."
            )
        return seen

    return observe


MOST = 10_000
"""Items of a list that are looked at: a generator may have no end."""


def _as_lists(value: object) -> object:
    """Tuples, ranges, arrays and generators as lists, and so within."""
    if isinstance(value, str | Action):
        return value
    if isinstance(value, tuple) and list(map(type, value)) == [str, int]:
        return Action(*value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable):
        return [_as_lists(item) for item in islice(value, MOST)]
    return value


def _beyond(run: Run, allowed: Allowed, chain: int | list[Stage]) -> str:
    """Say which targets a schedule misses, and where."""
    missed = []
    if run.peak > allowed.peak:
        moment = run.moments[run.peak_moment]
        alive = zip(moment.parts, ALIVE, strict=True)
        parts = ", ".join(f"{size} {name}" for size, name in alive if size)
        missed.append(
            f"the peak is {run.peak} units in action {run.peak_moment}, "
            f"{moment.action}: {parts}; at most {allowed.peak} are allowed."
            f"{_to_forget(run, chain)}"
        )
    if run.extra_time > allowed.extra:
        again = f"it runs {_stages(run)} again"
        if run.extra_time != run.extra_runs:
            again += f", which takes {run.extra_time}"
        few = f"at most {allowed.extra} are" if allowed.extra else "none is"
        told = TO_REMEMBER * isinstance(chain, list)
        missed.append(f"{again}; {few} allowed.{told}")
    if max(run.runs) > allowed.again + 1:
        stage = run.runs.index(max(run.runs))
        missed.append(
            f"stage {stage} runs {run.runs[stage] - 1} times again; at most "
            f"{allowed.again} are allowed."
        )
    return " And ".join(missed)


ALIVE = ("kept", "at work", "on tapes", "of gradient", "of workspace")
"""What to call the parts of a moment."""


TO_REMEMBER = (
    " Let a stage keep its tape where that is small, where its turn comes "
    "soon, or where it takes long."
)


def _to_forget(run: Run, chain: int | list[Stage]) -> str:
    """The largest boundary that waits at the peak, where sizes differ."""
    if isinstance(chain, int) or len({stage.output for stage in chain}) == 1:
        return ""
    actions = [moment.action for moment in run.moments[: run.peak_moment + 1]]
    kept = {i for kind, i in actions if kind == "keep"}
    kept -= {i for kind, i in actions if kind == "drop"}
    held = {b for kind, i in actions if kind == "record" for b in (i, i + 1)}
    at_work = actions[-1].stage
    waiting = [b for b in kept | held if 0 < b < at_work]
    if not waiting:
        return ""
    largest = max(waiting, key=lambda b: chain[b - 1].output)
    return (
        f" Boundary {largest}, with {chain[largest - 1].output} units, is the "
        f"largest that waits below stage {at_work}: forget large ones, in a "
        "segment that begins and ends at small ones."
    )


def _stages(run: Run) -> str:
    return f"{run.extra_runs} stage{'s' * (run.extra_runs != 1)}"


def segmented_step(fn: Callable, args: tuple) -> Seen:
    """The gradients of segments that run one after the other, and the peak.

    The arguments are the segments, which have as many layers each, and the
    input of the first.
    """
    segments, x = args
    runs = _count_runs(segments)
    with PeakTracker(*segments, x) as tracker:
        try:
            result = fn(*args)
        except RuntimeError as error:
            if "does not require grad" in message(error):
                raise Problem(NO_GRAPH) from error
            raise
    if not any(runs) and is_empty(result):
        raise Problem
    seen = Seen({"gradient": _gradients("segment", segments, result)})
    alive, enough = tracker.peak - tracker.start, _enough(segments, x)
    once = [i for i, count in enumerate(runs) if count == 1]
    if len(once) == len(segments):
        seen.hint = (
            "no segment runs again in the backward pass: nothing is "
            "checkpointed, and all activations are alive together."
        )
    elif alive > enough:
        seen.hint = (
            f"{alive} bytes are alive at the peak, besides parameters and "
            f"input; the boundaries and one segment need {enough}."
        )
        seen.hint += (
            f" {_named('segment', once).capitalize()} ran once, with all "
            "activations kept."
            if once
            else " Checkpoint each segment by itself, and keep nothing else."
        )
    return seen


def _enough(segments: list[nn.Sequential], x: torch.Tensor) -> int:
    """Bytes of the boundaries, a segment, and what goes back through it."""
    parameters = sum(p.nbytes for s in segments for p in s.parameters())
    return (len(segments) + len(segments[0]) + 4) * x.nbytes + parameters


def planned_gradients(fn: Callable, args: tuple) -> Seen:
    """The gradients of blocks, and how often each of them ran.

    The arguments are the blocks, the loss, and what the loop needs.
    """
    runs = _count_runs(args[0])
    result = fn(*args)
    if not any(runs) and is_empty(result):
        raise Problem
    return Seen(
        {
            "gradient": _gradients("block", args[0], result),
            "list of runs, block by block,": doubles(runs),
        }
    )


def segmented_network(fn: Callable, args: tuple) -> Seen:
    """The output of checkpointed layers, its gradients, and what it kept.

    The arguments are the layers, all of one width, the input, and the number
    of segments.
    """
    layers, x, count = args
    runs = _count_runs(layers)
    with PeakTracker(*layers, x) as tracker:
        output = found(fn, fn(*args), torch.Tensor, "a tensor")
        kept = (tracker.live - tracker.start) // x.nbytes
    if not output.requires_grad:
        raise Problem(NO_GRAPH)
    forward = list(runs)
    try:
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
        (output.flatten() * weights).sum().backward()
    except RuntimeError:
        if max(runs) <= 2:
            raise
    if often := [i for i, count in enumerate(runs) if count > 2]:
        raise Problem(
            "the backward pass recomputes the wrong layers: "
            f"{_named('layer', often)} too often. A lambda in a loop looks "
            "its variables up when it runs, and finds those of the last "
            "turn: hand them over as arguments."
        )
    seen = Seen(
        {
            "output": output.detach().double(),
            "gradient": _gradients("layer", layers),
        }
    )
    last = len(layers) - len(layers) // count * (count - 1)
    if runs == forward:
        seen.hint = (
            "no layer runs again in the backward pass: nothing is "
            "checkpointed."
        )
    elif not count <= kept < count + last:
        side = "more" if kept < count else "less"
        seen.hint = (
            f"{kept} × the size of x is alive after the forward pass; "
            f"{count} segments leave {side}, their boundaries and the output."
        )
    return seen


CUT = (
    "What comes out of `no_grad` or `detach` has none, and with "
    "`use_reentrant=True` neither has the output of a checkpoint whose input "
    "needs no gradient."
)
NO_GRAPH = f"the output has no graph. {CUT}"


def _count_runs(modules: Sequence[nn.Module]) -> list[int]:
    """How often each runs, from now on: its first module with parameters."""
    runs = [0] * len(modules)

    def count(index: int) -> None:
        runs[index] += 1

    for index, module in enumerate(modules):
        _first_layer(module).register_forward_pre_hook(
            lambda *_, index=index: count(index)
        )
    return runs


def _first_layer(model: nn.Module) -> nn.Module:
    """The first module that has parameters itself."""
    modules = model.modules()
    return next(m for m in modules if list(m.parameters(recurse=False)))


def _gradients(
    name: str, modules: Sequence[nn.Module], result: object = None
) -> torch.Tensor:
    """Those of all parameters in a row; ``result`` is what was returned.

    Raises:
        Problem: a module has none; ``name`` is what to call it.
    """
    missing = [
        index
        for index, module in enumerate(modules)
        if any(p.grad is None for p in module.parameters())
    ]
    if len(missing) == len(modules):
        raise Problem(_no_gradient(result))
    if missing:
        without = _named(name, missing)
        raise Problem(f"no gradient for {without}: the graph is cut. {CUT}")
    return flat(p.grad for m in modules for p in m.parameters())


def _named(name: str, numbers: Sequence[int]) -> str:
    """Such as "segments 0, 1 and 2"."""
    return f"{name}{'s' * (len(numbers) > 1)} {_and(map(str, numbers))}"


def _and(words: Iterable[str]) -> str:
    """Such as "0, 1 and 2"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def attempts(fn: Callable, args: tuple) -> Seen:
    """The size that a function settles on, and those that it tried.

    The first argument notes in ``sizes`` what it is called with, and in
    ``haunted`` whether a failed attempt was still alive at the next one.
    """
    step = args[0]
    seen = answer(fn, args)
    seen.parts["list of sizes tried"] = doubles(step.sizes)
    if step.haunted:
        seen.hint = (
            "the failed attempt is still alive when the next one begins: the "
            "exception holds its traceback, that the frames, and these their "
            "tensors. Try again after the `except` block, not in it, and "
            "keep no exception."
        )
    return seen


class _Pass:
    """A forward pass, alive as long as a graph of it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples


class _Graphs(torch.autograd.graph.saved_tensors_hooks):
    """Count the samples in one forward pass, and in all graphs alive."""

    def __init__(self, model: nn.Module) -> None:
        self.largest = self.most = 0
        self._current: _Pass | None = None
        self._alive: WeakSet[_Pass] = WeakSet()
        _first_layer(model).register_forward_pre_hook(self._begin)
        # detached: an output that its own graph held would never be freed
        super().__init__(
            lambda tensor: (tensor.detach(), self._current),
            lambda packed: packed[0],
        )

    def __enter__(self) -> "_Graphs":
        super().__enter__()
        return self

    def _begin(self, module: nn.Module, args: tuple) -> None:
        self._current = _Pass(len(args[0]))
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


class _Autocast(TorchDispatchMode):
    """Watch autocast in the backward pass and in the optimizer's steps.

    Autocast keeps its 16-bit copies of parameters until its outermost block
    ends. The reader's is made the outermost, although a checker runs in a
    block of its own. Copies of biases are looked for: no gradient needs one,
    so none is alive in the backward pass unless the block is open.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__()
        trained = [p for p in model.parameters() if p.requires_grad]
        self._biases = [p for p in trained if p.ndim == 1]
        self._copies: list[ref[torch.UntypedStorage]] = []
        self._in_backward = self._kept = self._in_step = False
        self._steps = 0
        for parameter in trained:
            parameter.register_hook(self._backward)
        optimizer.register_step_pre_hook(self._step)

    def __enter__(self) -> "_Autocast":
        torch.clear_autocast_cache()
        self._depth = _set_nesting(0)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.clear_autocast_cache()
        _set_nesting(self._depth)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and any(
            args[0] is bias for bias in self._biases
        ):
            self._copies.append(ref(result.untyped_storage()))
        return result

    def _backward(self, gradient: torch.Tensor) -> None:
        self._in_backward |= torch.is_autocast_enabled("cpu")
        self._kept |= any(copy() is not None for copy in self._copies)

    def _step(self, *_: object) -> None:
        self._in_step |= torch.is_autocast_enabled("cpu")
        self._steps += 1

    def hint(self) -> str:
        """What is wrong even if the numbers are right."""
        if self._steps > 1:
            return (
                f"the optimizer steps {self._steps} times: add all gradients "
                "up, and step once."
            )
        if self._in_backward:
            return (
                "the backward pass runs under autocast: what an fp32 part of "
                "a model computes there is in 16 bits, and the 16-bit copies "
                "of all weights stay alive. Leave the block after the loss."
            )
        if self._kept:
            return (
                "autocast is off in the backward pass, but a block is still "
                "open: the 16-bit copies of all weights live until the "
                "outermost one ends, those too that no gradient needs. Leave "
                "the block after the loss; `enabled=False` inside it is not "
                "enough."
            )
        if self._in_step:
            return (
                "the optimizer steps under autocast: only the forward pass "
                "and the loss belong in the block."
            )
        return ""


def _set_nesting(depth: int) -> int:
    """Say how many autocast blocks are open; returns how many were."""
    before = torch.autocast_increment_nesting() - 1
    while torch.autocast_decrement_nesting() > depth:
        pass
    for _ in range(depth - before):
        torch.autocast_increment_nesting()
    return before


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All of their numbers in a row, in fp64."""
    return torch.cat([t.detach().double().flatten() for t in tensors]).cpu()


def is_empty(result: object) -> bool:
    """Whether a function returned nothing, as one to be written does."""
    return any(result is empty for empty in (None, ..., NotImplemented))


def _no_gradient(result: object) -> str:
    why = "nothing called `backward()`, or it was wiped"
    if not is_empty(result):
        why = f"your function returns {kind(result)} instead"
    return f"there is no gradient in `param.grad` at the end: {why}."


def doubles(value: object) -> torch.Tensor:
    """A number or a list of numbers in fp64, or else a problem."""
    try:
        return torch.as_tensor(value, dtype=torch.float64).detach()
    except Exception:
        raise Problem(
            f"your function returns {kind(value)} that is not made of numbers."
        ) from None
