"""FLOPs, bytes and operators, counted while they run."""

from collections.abc import Sequence

import torch

from membudget.measuring import FlopCounter
from membudget.measuring.storages import tensors

aten = torch.ops.aten

NOT_READ = {
    aten.embedding: 0,
    aten.nll_loss_forward: 0,
    aten.nll_loss_backward: 1,
}
"""Operators, and which of their arguments they read only here and there: the
table of an embedding, and the logarithms of which the loss picks one for each
token."""


class WorkCounter(FlopCounter):
    """Count FLOPs, bytes and operators that run inside the block.

    An operator reads its arguments and writes its results, each once and
    whole; what it changes in place counts as both. One whose results share
    the arguments' storages moves nothing, and so does one that only takes
    memory. Of an embedding's table the backward pass writes all rows.

    Attributes:
        bytes: read and written.
        operators: that moved data.

    Example:
        >>> with WorkCounter() as counter:
        ...     model(x).sum().backward()
        >>> counter.total, counter.bytes, counter.operators
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operators = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """FLOPs, bytes and operators so far."""
        return self.total, self.bytes, self.operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = tensors([result])
        packet = func.overloadpacket
        if result is None and func._schema.is_mutable:
            made = tensors(_written(func, args))
        if not made or packet.__name__.startswith(("empty", "new_empty")):
            return result
        given = tensors([*args, kwargs or {}])
        places = {t.untyped_storage()._cdata for t in given}
        if func._schema.is_mutable or any(
            t.untyped_storage()._cdata not in places for t in made
        ):
            if packet in NOT_READ:
                del given[NOT_READ[packet]]
            self.operators += 1
            self.bytes += sum(t.nbytes for t in given + made)
        return result


def _written(func, args: Sequence) -> list:
    """The arguments that an operator without a result writes.

    A fused optimizer's could write its gradients, which it does for a scaler
    alone.
    """
    schema = zip(func._schema.arguments, args, strict=False)
    return [
        value
        for argument, value in schema
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]


Counts = tuple[int, int, int]
"""FLOPs, bytes, operators."""


def added(terms: Sequence[tuple[int, Counts]]) -> Counts:
    """The sum of the counts, each times its factor."""
    flops, moved, operators = (
        sum(times * counts[i] for times, counts in terms) for i in range(3)
    )
    return flops, moved, operators


def less(a: Counts, b: Counts) -> Counts:
    """What the first has beyond the second."""
    return added([(1, a), (-1, b)])
