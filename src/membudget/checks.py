"""The one way to refuse a wrong argument.

A wrong kind of thing is a ``TypeError``, a wrong value a ``ValueError``. The
message says what was wrong and what to use instead. Each function returns
what it was given in the plain type of Python, because numpy's whole numbers
overflow in silence.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from inspect import signature
from math import isfinite, isnan
from numbers import Integral, Rational, Real
from types import UnionType
from typing import Any, TypeVar, cast

import torch
from torch import nn

Thing = TypeVar("Thing")

MOST = 10**50
"""The most of anything: products of a few are still floats, and words."""


def whole(
    value: object, name: str, least: int | None = 1, most: int | None = None
) -> int:
    """The value, if it is a whole number from ``least`` to ``most``.

    Numpy's whole numbers and those in a tensor are, ``True`` and 3.0 are not.
    Without bounds it may be as large as :data:`MOST`, on either side of 0.
    """
    number = value if type(value) is int else _index(value)
    if number is None:
        raise refused(name, value, _range("a whole number", least, most))
    if abs(number) > MOST:
        raise ValueError(
            f"{name} is {shown(value)}: use a whole number of at most "
            f"{MOST:.0e}"
        )
    if not _within(number, least, most):
        use = _range("a whole number", least, most)
        raise ValueError(f"{name} is {shown(value)}: use {use}")
    return number


def number(
    value: object,
    name: str,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    infinite: bool = False,
) -> float:
    """The value, if it is a number in a range; exact ones stay exact.

    ``above`` itself is too small, and NaN is never a number.
    """
    kind = "a number" if infinite else "a finite number"
    use = _range(kind, least, most, above)
    given = _plain(value)
    if not isinstance(given, Real) or isinstance(given, bool):
        raise refused(name, value, use)
    try:
        if isinstance(given, Integral):
            real: float = int(given)
        elif isinstance(given, Rational):  # which stays exact
            real = cast("float", given)
        else:
            real = float(given)
        good = not isnan(real) if infinite else isfinite(real)
    except OverflowError:  # a whole number above all floats
        good = False
    if not good or not _within(real, least, most, above):
        raise ValueError(f"{name} is {shown(value)}: use {use}")
    return real


def told(value: Thing | None) -> Thing:
    """The value, which is there."""
    if value is None:
        raise RuntimeError("a value that should be there is missing")
    return value


def flag(value: bool, name: str) -> bool:
    """The value, if it is True or False."""
    return instance(value, bool, name, "True or False")


def one_of(value: object, names: Iterable[str], what: str) -> str:
    """The value, if it is among the names."""
    names = list(names)
    if isinstance(value, str) and value in names:
        return value
    error = ValueError if isinstance(value, str) else TypeError
    raise error(
        f"there is no {what} {shown(value)}: use one of {', '.join(names)}"
    )


def instance(
    value: Thing,
    kind: type | tuple[type, ...] | UnionType,
    name: str,
    use: str,
) -> Thing:
    """The value, if it is of a kind; ``use`` says of which."""
    if not isinstance(value, kind):
        raise refused(name, value, use)
    return value


def function(value: Thing, name: str, use: str = "a function") -> Thing:
    """The value, if it can be called."""
    if not callable(value):
        raise refused(name, value, use)
    return value


def module(value: Thing, name: str = "the model") -> Thing:
    """The value, if it is a module of PyTorch."""
    return instance(value, nn.Module, name, "a torch.nn.Module")


def trained(
    model: nn.Module, use: str = "hand over the model of the step"
) -> list[nn.Parameter]:
    """The model's parameters that are trained, if there are any."""
    found = [p for p in module(model).parameters() if p.requires_grad]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no parameters that are trained "
            f"(requires_grad): {use}"
        )
    return found


def stepper(
    value: torch.optim.Optimizer, name: str = "the optimizer"
) -> torch.optim.Optimizer:
    """The value, if it is an optimizer of PyTorch."""
    kind = torch.optim.Optimizer
    return instance(value, kind, name, "a torch.optim.Optimizer")


def plain_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, if its step takes existing gradients: not LBFGS."""
    taken = signature(stepper(optimizer).step).parameters.get("closure")
    if taken is not None and taken.default is taken.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss again inside its "
            "step and cannot use a gradient that is there already: use "
            "another optimizer"
        )
    return optimizer


def device(value: object, name: str = "device") -> torch.device:
    """The device, here or not; ``"cuda"`` stays without a number."""
    use = "a name, such as 'cpu' or 'cuda:0', or a torch.device"
    instance(value, str | torch.device, name, use)
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError(f"{name} is {shown(value)}: use {use}") from None


def iterable(values: Iterable, name: str, what: str) -> Iterable:
    """The values, if they can be iterated; neither text nor a mapping.

    Args:
        what: what they are, as ``"tensors"``.
    """
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        iter(values)
    except TypeError:
        raise refused(name, values, f"a list of {what}") from None
    return values


def listed(
    values: Iterable[Thing], name: str, what: str, least: int = 1
) -> list[Thing]:
    """The values of an ordered collection, no text, as a list of Python's.

    Args:
        what: what they are, as ``"tensors"``.
        least: how many there have to be.
    """
    other = str, bytes, Mapping, set, frozenset
    plain = type(values) in (list, tuple)  # by far most
    try:
        if not plain and (
            not isinstance(values, Collection) or isinstance(values, other)
        ):
            raise TypeError
        items = list(values)
    except TypeError:  # also of an array without dimensions
        raise refused(name, values, f"a list of {what}") from None
    if len(items) < least:
        has = "is empty" if not items else f"has {len(items)}"
        raise ValueError(f"{name} {has}: use {least} {what} or more")
    return items


def strings(
    values: Iterable[str], name: str, what: str, least: int = 1
) -> tuple[str, ...]:
    """As :func:`listed`, of strings alone."""
    return tuple(
        instance(value, str, f"one of {name}", "a string")
        for value in listed(values, name, what, least)
    )


def scalar_loss(loss: object) -> torch.Tensor:
    """The loss, if it is a tensor of one element with a graph."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the loss is a {type(loss).__name__}: backward needs a tensor "
            "with one element"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the loss is {list(loss.shape)}: backward needs a tensor with "
            "one element"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph: compute it from the model's output, "
            "outside torch.no_grad() and without detach() or item()"
        )
    return loss


def check_heads(
    width: int, heads: int, kv_heads: int = 1, paired: bool = False
) -> None:
    """Refuse heads of attention that do not divide what they share.

    Args:
        width: of a token's vector, which the heads share.
        kv_heads: heads of keys and values, which the heads share.
        paired: whether each head's numbers are paired for rotary positions.
    """
    if width % heads:
        raise ValueError(
            f"width {width} is not a multiple of {heads} heads: use a number "
            "of heads that divides it"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{heads} heads cannot share {kv_heads} heads of keys and "
            "values: use a number that divides the heads"
        )
    if paired and width // heads % 2:
        raise ValueError(
            f"{width // heads} numbers for each head cannot be paired for "
            "rotary positions: use an even number"
        )


def check_positions(tokens: int, context: int) -> None:
    """Refuse more tokens than there are learned positions."""
    if tokens > context:
        raise ValueError(
            f"{tokens} tokens are more than the {context} learned positions: "
            "use fewer tokens or a larger context"
        )


def installed(name: str, what: str) -> Any:
    """A module that the extra ``course`` brings, imported.

    Args:
        name: of the module.
        what: the reader wants, in words.

    Raises:
        ModuleNotFoundError: it is not there; the message says how to get it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package, _, _ = name.partition(".")
        raise ModuleNotFoundError(
            f'{what} needs {package}: pip install "membudget[course]"',
            name=package,
        ) from error


def refused(name: str, value: object, use: str) -> TypeError:
    """The error for a value of a wrong kind."""
    return TypeError(f"{name} is {shown(value)}: use {use}")


def shown(value: object) -> str:
    """The value in an error message: its text, or its kind where that is
    long."""
    try:
        text = repr(value)
    except Exception:  # of a foreign class, or too many digits
        text = "\n"
    if len(text) <= 60 and "\n" not in text:
        return text
    if isinstance(value, int):
        return "a number of many digits"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _plain(value: object) -> Any:
    """The number in a tensor that has data; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return value.item() if value.numel() == 1 and not value.is_meta else ()
    except RuntimeError:  # a fake tensor
        return ()


def _index(value: object) -> int | None:
    """The whole number that it is, if it is one."""
    try:
        number = _plain(value)
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def _range(
    kind: str,
    least: float | None,
    most: float | None = None,
    above: float | None = None,
) -> str:
    """In words."""
    low = "" if least is None else f" of at least {least}"
    if above is not None:
        low = f" above {above}"
    if most is None:
        return kind + low
    if least is not None:
        return f"{kind} from {least} to {most}"
    return f"{kind}{low}{' and' if low else ''} up to {most}"


def _within(
    number: float,
    least: float | None,
    most: float | None = None,
    above: float | None = None,
) -> bool:
    return (
        (least is None or number >= least)
        and (most is None or number <= most)
        and (above is None or number > above)
    )
