"""Errors for sizes, names and losses that cannot be."""

from collections.abc import Iterable

import torch


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


def scalar_loss(loss: object) -> torch.Tensor:
    """The loss, if a backward pass can start from it.

    Raises:
        ValueError: it is no tensor with one element, or has no graph.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(getattr(loss, "shape", [])) or type(loss).__name__
        raise ValueError(
            f"the loss is {shape}: backward needs a tensor with one element"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph: compute it from the model's output, "
            "outside torch.no_grad() and without detach() or item()"
        )
    return loss
