"""What a training loop leaves alive, and which line is to blame."""

from collections.abc import Iterable

import torch

from membudget.measuring import OUTSIDE, Allocation, PeakTracker

NUMBER = 8
"""Bytes a step that may be kept until the end: its loss, at most in fp64."""

GRADIENTS_LEFT = (
    "gradients are still there at the end: call `optimizer.zero_grad()` "
    "after each step, or before each step's backward pass."
)


def leak(result: object, tracker: PeakTracker, left: bool) -> str:
    """Say what is alive that should not be, while ``result`` still is.

    The tracker has a mark where each forward pass begins; ``left`` says
    whether gradients are there that should not be.
    """
    made = [
        a
        for a in tracker.allocations
        if a.birth >= 0 and a.category not in ("optimizer", "gradients")
    ]
    begins = _begins(tracker)
    grown = _growth(made, begins)
    grows = f"memory grows by {grown} bytes with every step"
    items = result if isinstance(result, list | tuple) else [result]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if any(t.requires_grad for t in tensors):
        return (
            f"{grows}. The losses in the list are tensors, and each holds "
            "the graph it was computed with: append `loss.item()`."
        )
    if tensors:
        return (
            "the losses are detached, so they hold no graph; but they are "
            f"tensors{f', and {grows}' * (grown > 0)}. Floats are asked: "
            "append `loss.item()`, or make them numbers at the end."
        )
    if grown > NUMBER:
        stay = _at(made, begins[-1])
        old = [a for a in stay if a.birth < begins[-2]]
        return (
            f"{grows}. {_largest(old or stay)} Find the name that holds it, "
            "or holds an output of its graph."
        )
    if graph := _graph(tracker, begins):
        return (
            f"{_bytes(graph)} bytes of a step's activations are still alive "
            "when the next step begins: `backward()` frees them, "
            "unless it is told `retain_graph=True`."
        )
    if left:
        return GRADIENTS_LEFT
    stays = [a for a in made if a.death is None]
    if stays:
        return (
            f"{_bytes(stays)} bytes that were made in the loop are still "
            f"alive at the end. {_largest(stays)}"
        )
    return ""


def _begins(tracker: PeakTracker) -> list[int]:
    """Where each step begins: the first forward pass after the last step."""
    begins: list[int] = []
    for index, _ in tracker.marks:
        since = tracker.operators[begins[-1] : index] if begins else []
        if not begins or any(o.phase == "optimizer" for o in since):
            begins.append(index)
    return begins


def _at(made: Iterable[Allocation], begin: int) -> list[Allocation]:
    """What is alive where a step begins, of all that was made before."""
    return [a for a in made if a.birth < begin and a.alive(begin)]


def _growth(made: list[Allocation], begins: list[int]) -> int:
    """Bytes by which a step begins with more than the one before.

    From the second step to the last: the first one has none before it.
    """
    if len(begins) < 3:
        return 0
    grown = _bytes(_at(made, begins[-1])) - _bytes(_at(made, begins[1]))
    return max(grown // (len(begins) - 2), 0)


def _graph(tracker: PeakTracker, begins: list[int]) -> list[Allocation]:
    """What the second step finds of the first one's activations.

    Not the model's output and what was computed from it: variables may hold
    those. What the layers before the last one made, a graph holds.
    """
    if len(begins) < 2:
        return []
    begin = begins[1]
    forward = [o for o in tracker.operators[:begin] if o.phase == "forward"]
    last = [o.module for o in forward if o.module != OUTSIDE][-1]
    return [
        a
        for a in _at(tracker.allocations, begin)
        if a.category == "activations"
        and a.operator.module not in (OUTSIDE, last)
    ]


def _bytes(allocations: Iterable[Allocation]) -> int:
    return sum(a.bytes for a in allocations)


def _largest(allocations: Iterable[Allocation]) -> str:
    largest = max(allocations, key=lambda a: a.bytes)
    name, module, _ = largest.operator
    where = f"in layer {module} of the model" if module else "after the model"
    return (
        f"The largest tensor that stays has {largest.bytes} bytes and was "
        f"made by `{name}` {where}."
    )
