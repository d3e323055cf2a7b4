"""Errors for sizes and names that cannot be."""

from collections.abc import Iterable


def whole(value: object, name: str, least: int = 1) -> int:
    """The value, if it is a whole number of at least ``least``.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} is {value!r}: use a whole number of at least {least}"
        )
    return value


def one_of(value: object, names: Iterable[str], what: str) -> str:
    """The value, if it is among the names.

    Raises:
        ValueError: it is not.
    """
    names = list(names)
    if value not in names:
        raise ValueError(
            f"there is no {what} {value!r}: use one of {', '.join(names)}"
        )
    return value
