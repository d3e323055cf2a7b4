"""Three ways to keep a running sum of gradients, to compare their peaks.

PyTorch's own ``param.grad`` is kept in place: the first backward pass hands
its gradient over, later ones are added. Its peak is lower than that of
:func:`in_place`, because each layer's gradient is freed once it is added.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from membudget.checks import (
    function,
    instance,
    iterable,
    listed,
    scalar_loss,
)

Gradients = list[torch.Tensor]
Add = Callable[[Gradients, Gradients], Gradients]


def new_sum(total: Gradients, gradients: Gradients) -> Gradients:
    """Make a new sum: old sum, gradient and new sum are alive together."""
    return [t + g for t, g in _pairs(total, gradients)]


def in_place(total: Gradients, gradients: Gradients) -> Gradients:
    """Add to the old sum: old sum and gradient are alive together."""
    for t, g in _pairs(total, gradients):
        t.add_(g)
    return total


def memory_aware(is_tight: Callable[[], bool]) -> Add:
    """A new sum while memory is plentiful, in place when it is tight."""
    function(is_tight, "is_tight", "a function that returns True or False")

    def add(total: Gradients, gradients: Gradients) -> Gradients:
        return (in_place if is_tight() else new_sum)(total, gradients)

    return add


def sum_gradients(
    losses: Iterable[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    add: Add,
) -> Gradients:
    """Sum the gradients of ``losses``, outside ``param.grad``.

    Args:
        losses: scalars with a graph, at least one; a generator, so that one
            graph is alive at a time.
        parameters: with respect to which the gradients are taken.
        add: one of this module's strategies.

    Returns:
        One tensor for each parameter.
    """
    parameters, total = _tensors(parameters, "parameters"), None
    function(add, "add", "in_place, new_sum or memory_aware(…)")
    for loss in map(scalar_loss, iterable(losses, "losses", "losses")):
        gradients = list(torch.autograd.grad(loss, parameters))
        total = _own(gradients) if total is None else add(total, gradients)
        del gradients
    if total is None:
        raise ValueError("losses is empty: give at least one micro-batch")
    return total


def _tensors(values: Sequence[torch.Tensor], name: str) -> Gradients:
    return [
        instance(t, torch.Tensor, f"one of the {name}", "a tensor")
        for t in listed(values, name, "tensors")
    ]


def _pairs(total: Gradients, gradients: Gradients) -> list[tuple]:
    """Of the sum's tensors and the gradient's."""
    total = _tensors(total, "total")
    gradients = _tensors(gradients, "gradients")
    if len(total) != len(gradients):
        raise ValueError(
            f"the sum has {len(total)} tensors and the gradient "
            f"{len(gradients)}: use one for each parameter in both"
        )
    return list(zip(total, gradients, strict=True))


def _own(gradients: Gradients) -> Gradients:
    """Copy what cannot be added to in place.

    Autograd may return one tensor for two parameters, or one expanded value.
    """
    own, seen = [], set()
    for gradient in gradients:
        storage = gradient.untyped_storage()
        if storage._cdata in seen or storage.nbytes() < gradient.nbytes:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        seen.add(storage._cdata)
        own.append(gradient)
    return own
