"""The exercises on measuring memory."""

import gc
from collections.abc import Callable
from weakref import WeakSet

import torch
import torch.nn.functional as F

from membudget.exercises import loops
from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import answer, doubles, training

# A leak in a loop


def train(model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _loop(momentum: float, *sizes: int) -> Case:
    def make() -> tuple:
        model = loops.small_model()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=momentum
        )
        return model, optimizer, loops.samples(*sizes)

    return Case(f"batches of {list(sizes)} samples, {momentum = }", make)


check_train = Exercise(
    train,
    cases=[_loop(0.9, 8, 8, 8, 8, 8), _loop(0, 5, 2, 1)],
    observe=training,
    mistakes="""
        return losses => \
        return [sum(losses[:k]) / k for k in range(1, len(losses) + 1)]
            these are running means: return the loss of each batch.
        return losses => return sum(losses) / len(losses)
        or return losses => return sum(losses)
            this is one number for all losses: return the list of them.
        optimizer.zero_grad() =>
            the gradients are never set to None, so each step adds to those of
            all batches before: call `optimizer.zero_grad()` after each step.
        optimizer.step() =>
            the parameters have not moved: each batch needs `loss.backward()`,
            `optimizer.step()` and `optimizer.zero_grad()`, in this order.
        optimizer.step() =>
        optimizer.zero_grad() =>
        return => optimizer.step(); return
            the parameters move once, after the last batch: the optimizer
            steps on every batch.
        loss.item() => F.cross_entropy(model(x), y).item()
            the losses are those after the step: return the ones that
            `backward()` was called on.
        (model(x), y) => (model(x), y, reduction="sum")
            the losses are summed over the samples:
            `F.cross_entropy(model(x), y)` is their mean.
        loss.backward() => (loss / len(batches)).backward()
            the losses are divided by the number of batches before the
            backward pass: each batch is a step of its own.
        """,
    shown=(
        "No step's activations outlive it, and at the end nothing is left "
        "but the parameters, the data and the optimizer's states."
    ),
)

# The peak of a step


def predict_peak(batch, width, depth):
    activation = 4 * batch * width
    layer = 4 * (width * width + width)
    peak = 2 * activation + depth * layer  # in layer 1's backward
    for k in range(2, depth + 1):  # and in layer k's
        gradients = (depth - k + 1) * layer
        peak = max(peak, (k + 2) * activation + gradients)
    return depth * layer + peak


check_predict_peak = Exercise(
    predict_peak,
    cases=[
        given(batch=56, width=96, depth=3),
        given(batch=512, width=32, depth=6),
        given(batch=12, width=48, depth=3),
        given(batch=256, width=256, depth=2),
    ],
    observe=answer,
    mistakes="""
        + peak => + depth * activation
        or + peak => + (depth + 1) * activation
        or + peak => + (depth + 2) * activation
            this is what is alive in the forward pass: in the backward pass
            the gradients come on top, and each layer's activations go only
            after its gradients are there.
        return depth * layer + peak => return (depth + 1) * activation
            these are the activations and the gradient on its way back alone,
            as in section 1.3 of chapter 1. Here the parameters, the input and
            the parameters' gradients count as well.
        + peak => + 2 * depth * activation
        or + peak => + (2 * depth + 1) * activation
        or (k + 2) => (2 * k + 1)
            two activations of each layer are counted: ReLU saves its output,
            which is the input that the next Linear layer saves; the output of
            a Linear layer is freed.
        + peak => + depth * layer + (depth + 1) * activation
        or + peak => + depth * layer + (depth + 2) * activation
        or + peak => + depth * layer + (depth + 3) * activation
            all activations and all gradients are added up, and they are never
            alive at once: the backward pass frees a layer's activations as it
            makes its gradients.
        depth * layer + peak => (depth * layer + peak) // 4
            these are numbers, not bytes: in fp32 each takes 4.
        depth * layer + peak => (depth * layer + peak) * 8
            these are bits: a number of fp32 takes 4 bytes.
        depth * layer + peak => (depth * layer + peak) * 2
            a number takes 8 bytes here; in fp32 it takes 4.
        depth * layer + peak => peak
            the parameters are missing: they are alive all the time.
        max(peak, (k + 2) * activation + gradients) => \
        (k + 2) * activation + gradients
            only the last layer's backward pass is looked at. It has the most
            activations, but the first layers' has more gradients, and they
            win where the batch is small against the width.
        range(2, depth + 1) => []
        or range(2, depth + 1) => [depth]
        or (k + 2) => (k + 1)
            the peak of this step is in the second layer's backward pass: the
            gradients of its output and of its input are both there, batch ×
            width numbers each. The first layer makes none of its input.
        range(2, depth + 1) => [2]
            only the first layers' backward pass is looked at. It has the most
            gradients, but the last layer's has more activations, and they win
            where the batch is large against the width.
        2 * activation + depth * layer => 0
            the first layer's backward pass is left out. When it ends all
            gradients are there, and that is the most where the batch is small
            against the width.
        2 * activation => 3 * activation
            the first layer makes no gradient of its input: the data need
            none.
        2 * activation => activation
        (k + 2) => k
            the gradient on its way back is missing: while a Linear layer's
            backward runs, the gradient of its output and, except in the first
            layer, that of its input take batch × width numbers each.
        2 * activation => activation
        (k + 2) => (k + 1)
            the input is missing: the first layer saves it, and it is alive
            all the time.
        width * width + width => width * width
            the bias is missing, and its gradient: `width` numbers each in
            every layer.
        """,
    shown=(
        "That is what the tracker counts, within 1 %, whether the "
        "activations or the gradients decide where the peak is."
    ),
    tolerance=0.01,
)

# A collector


def collect_above(used, budget, threshold):
    before = used()
    if before < threshold * budget:
        return 0
    gc.collect()
    return before - used()


class _Memory:
    """Tensors that a list holds, and two that only reference cycles hold."""

    def __init__(self, held: int, garbage: int) -> None:
        self.sizes = held, garbage // 2, garbage // 2
        self._held: list[torch.Tensor] = []
        self._alive: WeakSet[torch.Tensor] = WeakSet()

    def fill(self) -> None:
        held, *cycles = (torch.empty(n, dtype=torch.uint8) for n in self.sizes)
        self._alive.update([held, *cycles])
        self._held.append(held)
        for tensor in cycles:
            cycle: list[object] = [tensor]
            cycle.append(cycle)

    def used(self) -> int:
        """Bytes of the tensors that are alive."""
        return sum(t.nbytes for t in self._alive)


def _filled(held: int, garbage: int, budget: int, threshold: float) -> Case:
    told = (
        f"{held} bytes in tensors that a list holds, {garbage} in reference "
        f"cycles, {budget = }, {threshold = }"
    )
    return Case(told, lambda: (_Memory(held, garbage), budget, threshold))


def collection(fn: Callable, args: tuple) -> Seen:
    """What a collector returns, and whether it collected.

    The first argument is a :class:`_Memory`. It is filled, and the function
    gets its ``used``. Python starts no collection by itself here, and none
    looks at what was there before: it is fast, and always finds the same.
    """
    memory, *rest = args
    phases: list[str] = []

    def note(phase: str, info: dict) -> None:
        phases.append(phase)

    gc.disable()
    gc.freeze()
    gc.callbacks.append(note)
    try:
        memory.fill()
        seen = answer(fn, (memory.used, *rest))
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
    seen.parts["number of collections"] = doubles(bool(phases))
    return seen


check_collect_above = Exercise(
    collect_above,
    cases=[
        _filled(400, 600, 1000, 0.8),
        _filled(900, 0, 1000, 0.8),
        _filled(100, 600, 1000, 0.8),
        _filled(500, 250, 1000, 0.75),
    ],
    observe=collection,
    mistakes="""
        return 0 =>
            it collects below the threshold as well, and a collection takes
            time: compare `used()` with threshold × budget first.
        before < => before <=
            exactly threshold × budget is enough to collect: `>=`, not `>`.
        threshold * budget => budget
            it waits for the whole budget: collect from threshold × budget on.
        gc.collect() =>
            nothing was collected, though `used()` is above threshold ×
            budget: call `gc.collect()`. To delete variables of your own frees
            nothing here, because the objects in a cycle hold each other.
        before - used() => before
            these are the bytes in use before the collection: return how many
            fewer there are after it.
        before - used() => used()
            these are the bytes still in use after the collection: return how
            many fewer they are than before.
        gc.collect() => return gc.collect()
            `gc.collect()` returns a number of objects: measure the bytes with
            `used()` before and after it.
        before - used() => used() - before
            the sign is wrong: bytes before minus bytes after.
        before - used() => 0
            it collects and returns 0: return the bytes that were freed, so
            measure with `used()` before and after.
        """,
    shown=(
        "It freed the tensors that only a reference cycle kept, 600 bytes of "
        "1000, and none of the 900 bytes of tensors that a list still holds: "
        "no collector can, until the last reference goes."
    ),
)
