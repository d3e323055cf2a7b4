"""Tensors without data, as the kernels of a real step would make them."""

from functools import cache

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from membudget.measuring.storages import is_wrapper, tensors

SMALL = 1 << 24
"""Bytes of integers and booleans that keep their values."""

aten = torch.ops.aten


class ForeignTensor(Exception):
    """An operator was given a tensor that was not made without data."""


class NotStrided(Exception):
    """An operator took or made a tensor whose bytes depend on its values."""


class Fakes(TorchDispatchMode):
    """Above a fake mode: what a real step knows, and what it makes.

    Models read their masks and positions (``mask.all()``, ``ids[-1]``). So
    integers and booleans of at most :data:`SMALL` bytes are plain tensors
    with values: an operator that takes and makes nothing else runs, any
    other goes to the fake mode. A plain tensor takes part as a fake one from
    the moment when an operator writes into it what nobody knows.

    Args:
        fake: the mode below.

    Raises:
        ForeignTensor: a tensor of floating-point numbers that is not fake,
            or one of another fake mode.
        NotStrided: a sparse tensor; the fake mode does not know its bytes.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return func(*args)
        if any(map(is_wrapper, types)):
            return NotImplemented  # it asks again for the tensors inside
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if func is not aten.lift_fresh.default:  # of torch.tensor(...)
            self._check(given)
        known = all(map(_plain if _looks(func) else _known, given))
        if known and not (_random(func) and _changed(func)):
            result = _real(func, args, kwargs)
        else:
            result = _fake(func, args, kwargs)
        for tensor in tensors(result):
            if tensor.layout is not torch.strided:
                raise NotStrided
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
                foreign = not _whole(tensor) or tensor.device.type == "meta"
            if foreign:
                raise ForeignTensor


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
    if func is aten.masked_select.default and _known(args[1]):
        return _selected(*args)
    result = func(*_without_data(args), **_without_data(kwargs))
    if written and _aliases(func):
        return written[0] if len(written) == 1 else tuple(written)
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
    with no_dispatch():
        one = torch.full((), value, dtype=args[0].dtype)
        return func(one, *args[1:], **kwargs).item()


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
    """Note the number that fills a tensor's storage; None: nobody knows."""
    tensor.untyped_storage().filled_with = value


def recall(tensor: torch.Tensor) -> complex | None:
    """The number that fills a tensor's storage, if we know one."""
    return getattr(tensor.untyped_storage(), "filled_with", None)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor of integers or booleans."""
    return not isinstance(tensor, FakeTensor) and _whole(tensor)


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
        _whole(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.untyped_storage().nbytes() <= SMALL
    )


def _whole(tensor: torch.Tensor) -> bool:
    """Whether it holds integers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


@cache
def _aliases(func: object) -> bool:
    """Whether an operator hands out its arguments or views of them."""
    return any(r.alias_info is not None for r in func._schema.returns)


@cache
def _random(func: object) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _pointwise(func: object) -> bool:
    """Whether each number of the result comes from one number."""
    if func is aten._to_copy.default:
        return True
    return torch.Tag.pointwise in func.tags and not _random(func)


@cache
def _looks(func: object) -> bool:
    """Whether an operator only makes views, whatever the values."""
    return _aliases(func) and not _changed(func)


@cache
def _changed(func: object) -> list[tuple[int, str]]:
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

INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operators whose second argument is a list of positions and masks."""
