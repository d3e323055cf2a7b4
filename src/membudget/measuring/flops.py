"""Floating-point operations, counted without holding a tensor."""

from functools import cache

import torch
from torch.utils.flop_counter import flop_registry

from membudget.internals import TorchDispatchMode, has_kernel, has_kernel_for
from membudget.measuring.storages import is_wrapper

aten = torch.ops.aten


def _attention(query, key, value, *args, **kwargs) -> int:
    """Two matrix products: scores, and their sum of values."""
    batch, heads, rows, width = query.shape
    columns, value_width = value.shape[-2:]
    return 2 * batch * heads * rows * columns * (width + value_width)


def _attention_backward(gradient, query, key, value, *args, **kwargs) -> int:
    """Five: the scores again, and the gradients of scores, q, k and v."""
    batch, heads, rows, width = query.shape
    columns, value_width = value.shape[-2:]
    inner = 3 * width + 2 * value_width
    return 2 * batch * heads * rows * columns * inner


MISSING = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _attention_backward
    ),
}


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations that run inside the block.

    A multiplication and an addition are two. The formulas are those of
    :mod:`torch.utils.flop_counter` (matrix products, convolutions, fused
    attention; attention counts as if nothing were masked), with those of the
    fused attention on a CPU, which it lacks, by its own rule (``sdpa_flop``).
    An operator without a formula counts nothing: elementwise work, norms,
    recurrent kernels, nested tensors.

    ``FlopCounterMode`` follows the modules with hooks that keep activations
    alive; this one keeps nothing, so it may be used together with
    :class:`membudget.measuring.PeakTracker`, in either order.

    Attributes:
        by_operator: operations by the operator's name (``"mm"``,
            ``"convolution_backward"``), those with a formula that ran.

    Example:
        >>> with FlopCounter() as flops:
        ...     model(x).sum().backward()
        >>> flops.total, flops.by_operator["addmm"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Operations so far."""
        return sum(self.by_operator.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        formula = flop_registry.get(packet) or MISSING.get(packet)
        # Subclasses, such as nested tensors, take operators apart themselves.
        whole = not any(map(is_wrapper, types))
        if formula is None and whole and _composite(func):
            with self:  # such as linear, on tensors of inference mode
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if formula is not None:
            count = formula(*args, **kwargs, out_val=result)
            name = packet.__name__
            self.by_operator[name] = self.by_operator.get(name, 0) + count
        return result


@cache
def _composite(func) -> bool:
    """Whether it is made of others (what asks for a size has no kernel)."""
    name, key = func.name(), "CompositeImplicitAutograd"
    return has_kernel(name) and has_kernel_for(name, key)
