"""Tensors without data, as the kernels of a real step would make them."""

from contextlib import nullcontext
from functools import cache
from math import prod
from typing import Any

import torch

from membudget.checks import told
from membudget.internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    device_of,
    no_dispatch,
)
from membudget.measuring.storages import is_wrapper, tensors

SMALL = 1 << 24
"""Bytes of integers and booleans that keep their values."""

aten = torch.ops.aten


CONVERTED = "Couldn't swap"
"""What PyTorch says when ``Module.to`` is to convert fake tensors."""

SPARSE = (
    "the bytes of a sparse tensor depend on its values, which a dry run has "
    "not: use strided tensors (to_dense, sparse=False in an embedding), or "
    "measure a real step with trace_step"
)

FOREIGN = (
    "the step uses a tensor that is neither the model's nor the batch's: make "
    "it a buffer, or hand it over in the batch"
)


class Fakes(TorchDispatchMode):
    """Above a fake mode: what a real step knows, and what it makes.

    Models read their masks and positions (``mask.all()``, ``ids[-1]``). So
    integers and booleans of at most :data:`SMALL` bytes are plain tensors
    with values: an operator that takes and makes nothing else runs, any
    other goes to the fake mode. A plain tensor takes part as a fake one from
    the moment when an operator writes unknown values into it. On a CPU
    the results of :data:`KERNELS` are those of the real kernels.

    Args:
        fake: the mode below.

    Attributes:
        nested: whether there are nested tensors.

    Raises:
        ValueError: a tensor of floating-point numbers that is not fake, or
            one of another fake mode; a sparse one, whose bytes the fake mode
            does not know.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.nested = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.nested |= "nested" in func.name()
        if func is torch.ops.prim.device.default:
            return device_of(*args)
        if any(map(is_wrapper, types)):
            return NotImplemented  # it asks again for the tensors inside
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if func is not aten.lift_fresh.default:  # of torch.tensor(...)
            self._check(given)
        if func in PRODUCTS and len({t.dtype for t in given}) > 1:
            kinds = " and ".join(str(t.dtype)[6:] for t in given)
            raise ValueError(
                f"{func} is given {kinds}, which no real kernel multiplies: "
                "convert the batch to the model's dtype, or use autocast"
            )
        known = all(map(_plain if _looks(func) else _known, given))
        if known and not (_random(func) and _changed(func)):
            result = _real(func, args, kwargs)
        else:
            result = _fake(func, args, kwargs)
        for tensor in tensors(result):
            if tensor.layout is not torch.strided:
                raise ValueError(SPARSE)
        if isinstance(result, FakeTensor):
            value = _number(func, args, kwargs, given)
            if value is not None:
                return _filled(result, value)
        return result

    def _check(self, given: list[torch.Tensor]) -> None:
        for tensor in given:
            if isinstance(tensor, FakeTensor):
                foreign = tensor.fake_mode is not self.fake
            else:
                foreign = not is_whole(tensor) or tensor.device.type == "meta"
            if foreign:
                raise ValueError(FOREIGN)


def _real(func, args, kwargs):
    """The result with its values; a fake one if it is not for us."""
    if not _aliases(func):
        try:
            made = func(*_without_data(args), **_without_data(kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass
        else:
            if _random(func) or not all(map(is_small, tensors(made))):
                return made
    with no_dispatch():
        return func(*args, **kwargs)


def _fake(func, args, kwargs):
    """The result without data, as the real kernel would make it."""
    written = _written(func, args, kwargs)
    for tensor in written:
        remember(tensor, None)
    if func in INDEXED:
        args = args[0], _positions(args[1]), *args[2:]
    if func is aten._grouped_mm.default and args[0].device.type == "cpu":
        return _grouped(*args, **kwargs)
    if func is aten.masked_select.default and _known(args[1]):
        return _selected(*args)
    result = func(*_without_data(args), **_without_data(kwargs))
    if func is aten._fused_moving_avg_obs_fq_helper.default:
        _observed(*args)
    if written and _aliases(func):
        return written[0] if len(written) == 1 else tuple(written)
    if func in KERNELS and args[0].device.type == "cpu":
        return KERNELS[func](args, result)
    return result


def _without_data(tree):
    """Arguments with fake tensors for the plain ones."""
    if isinstance(tree, torch.Tensor) and _plain(tree):
        return torch.empty_strided(
            tree.shape, tree.stride(), dtype=tree.dtype, device=tree.device
        )
    if isinstance(tree, dict):
        return {key: _without_data(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_without_data, tree))
    return tree


def _number(func, args, kwargs, given: list[torch.Tensor]) -> complex | None:
    """The number that fills the result, as of ``torch.ones(3) == 1``."""
    if func in FILLED:
        return FILLED[func](args)
    if len(given) != 1 or not _pointwise(func):
        return None
    value = recall(given[0])
    if value is None or given[0] is not args[0]:
        return None
    how = {k: v for k, v in kwargs.items() if k != "memory_format"}
    with no_dispatch():
        one = torch.full((), value, dtype=args[0].dtype)
        return func(one, *args[1:], **how).item()


def _filled(result: torch.Tensor, value: complex) -> torch.Tensor:
    """The result that this number fills, with values if it is small."""
    if not is_small(result):
        remember(result, value)
        return result
    with no_dispatch():
        return torch.empty_strided(
            result.shape,
            result.stride(),
            dtype=result.dtype,
            device=result.device,
        ).fill_(value)


def remember(tensor: torch.Tensor, value: complex | None) -> None:
    """Note the number that fills a tensor's storage; None if it is unknown."""
    tensor.untyped_storage().filled_with = value


def recall(tensor: torch.Tensor) -> complex | None:
    """The number that fills a tensor's storage, if we know one."""
    return getattr(tensor.untyped_storage(), "filled_with", None)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor of integers or booleans."""
    return not isinstance(tensor, FakeTensor) and is_whole(tensor)


def _known(tensor: torch.Tensor) -> bool:
    """Whether it has values: nothing unknown was written into it."""
    return _plain(tensor) and not hasattr(
        tensor.untyped_storage(), "filled_with"
    )


def _positions(indices: list) -> list:
    """Indices with the positions for each mask whose values we know."""
    found = []
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if mask and index.ndim and _known(index):
            with no_dispatch():
                found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a mask whose values we know selects."""
    shape = torch.broadcast_shapes(values.shape, mask.shape)
    with no_dispatch():
        count = int(mask.expand(shape).sum())
    return values.new_empty(count)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether it is to keep its values."""
    return (
        is_whole(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.untyped_storage().nbytes() <= SMALL
    )


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it holds integers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


@cache
def _aliases(func: OpOverload) -> bool:
    """Whether an operator hands out its arguments or views of them."""
    return any(r.alias_info is not None for r in func._schema.returns)


@cache
def _random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _pointwise(func: OpOverload) -> bool:
    """Whether each number of the result comes from one number."""
    if func is aten._to_copy.default:
        return True
    return torch.Tag.pointwise in func.tags and not _random(func)


@cache
def _looks(func: OpOverload) -> bool:
    """Whether an operator only makes views, whatever the values."""
    return _aliases(func) and not _changed(func)


@cache
def _changed(func: OpOverload) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operator changes."""
    return [
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]


def _written(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operator changes."""
    changed = [
        args[i] if i < len(args) else kwargs.get(name)
        for i, name in _changed(func)
    ]
    return tensors(changed)


FILLED = {
    aten.zeros.default: lambda args: 0,
    aten.ones.default: lambda args: 1,
    aten.full.default: lambda args: args[1],
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}
"""Operators that take only the shape of their tensor, with their value."""

PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
}
"""Operators whose fake kernels take tensors of several dtypes."""

INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operators whose second argument is a list of positions and masks."""


# What the kernels of a CPU make --------------------------------------------


def _in(numbers: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at the start of a storage for this many numbers."""
    room = tensor.new_empty(numbers)
    return room.as_strided(tensor.shape, tensor.stride())


def _reduced(args: tuple, result: torch.Tensor) -> torch.Tensor:
    """A loss: its scalar stays in the storage of the unreduced one."""
    if result.ndim:
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return _in(max(prod(shape), 1), result)


def _statistics(args: tuple, result: tuple) -> tuple:
    """A norm: mean and 1/σ have the weights' dtype, not the input's."""
    values, *moments = result
    weights = [a for a in args[1:5] if isinstance(a, torch.Tensor)]
    dtype = weights[0].dtype if weights else values.dtype
    return values, *(m.to(dtype) for m in moments)


def _gradients(args: tuple, result: tuple) -> tuple:
    """A norm's gradients: the input's has its dtype, if one is asked for."""
    pairs = zip(result, args[-1], strict=True)
    first, *others = (r if wanted else None for r, wanted in pairs)
    return first if first is None else first.to(args[1].dtype), *others


def _rows(args: tuple, result: tuple) -> tuple:
    """Layer norm's gradient lies row by row, however the result's came."""
    first, *others = result
    return first if first is None else first.contiguous(), *others


def _folded(args: tuple, result: torch.Tensor) -> torch.Tensor:
    """A sum of patches stays in a storage that took all of them."""
    return _in(max(args[0].numel(), result.numel()), result)


def _in_order(args: tuple, result: torch.Tensor) -> torch.Tensor:
    """A loss's gradient is contiguous, however the prediction came."""
    return result.contiguous()


def _bags(args: tuple, result: tuple) -> tuple:
    """An embedding bag: which bag is only noted off the fast path."""
    rest: tuple = (False, 0, False, None, False, -1)
    given = args + rest[len(args) - 3 :]
    weight, indices, offsets, _, mode, _, scale, _, padding = given
    values, bag, size, most = result
    fast = (
        mode == 0
        and padding < 0
        and weight.dtype is not torch.double
        and weight.stride(1) == 1
        and (scale is None or scale.stride(0) == 1)
    )
    if fast:
        bag = size.new_empty(0)
    else:
        bag = _in(len(indices) + 1, size.new_empty(len(indices)))
    return values, bag, _in(len(offsets), size), most


def _frozen_bags(args: tuple, result: tuple) -> tuple:
    """The same without a backward pass."""
    *others, most = _bags(args, result)
    summed = len(args) < 5 or args[4] == 0
    return *others, _in(len(args[2]), most) if summed else most


def _observed(values: torch.Tensor, *args: Any) -> None:
    """The first observation gives its statistics a number for each row."""
    *_, axis, by_row = (*args, False)[:11]
    for tensor in args[2:6] if by_row else ():
        with no_dispatch() if _plain(tensor) else nullcontext():
            tensor.resize_(values.size(axis))


def _grouped(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups; the fake kernel knows only bf16.

    A matrix with two dimensions holds all groups. Rows begin at multiples
    of 16 bytes.
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim:
        shape.insert(0, len(left) if left.ndim == 3 else len(told(ends)))
    made = left.new_empty(0, dtype=out_dtype)
    unit = 16 // made.itemsize
    row = -(-shape[-1] // unit) * unit
    stride = [shape[-2] * row, row, 1][-len(shape) :]
    return made.new_empty(prod(shape[:-1]) * row).as_strided(shape, stride)


KERNELS = {
    aten.mse_loss.default: _reduced,
    aten.smooth_l1_loss.default: _reduced,
    aten.soft_margin_loss.default: _reduced,
    aten.binary_cross_entropy.default: _reduced,
    aten.mse_loss_backward.default: _in_order,
    aten.smooth_l1_loss_backward.default: _in_order,
    aten.huber_loss_backward.default: _in_order,
    aten.col2im.default: _folded,
    aten.native_batch_norm.default: _statistics,
    aten.native_group_norm.default: _statistics,
    aten.native_layer_norm.default: _statistics,
    aten.native_layer_norm_backward.default: _rows,
    aten.native_batch_norm_backward.default: _gradients,
    aten.native_group_norm_backward.default: _gradients,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _frozen_bags,
}
"""Operators whose fake result is not that of a CPU, and its correction."""
