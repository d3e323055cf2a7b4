"""What a function did, and how it differs from what is right."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from membudget.exercises.guard import describe, kind, message

EXACT = 1e-12
"""Relative tolerance of what is computed exactly, such as bytes."""


def numbers(tensor: torch.Tensor) -> str:
    """A few numbers; whole ones in full, others rounded."""
    texts = list(map(_number, tensor.flatten().tolist()))
    return f"[{', '.join(texts)}]" if tensor.ndim else texts[0]


def _number(value: float) -> str:
    whole = value.is_integer() and abs(value) < 1e15
    return f"{value:.0f}" if whole else f"{value:.4g}"


@dataclass
class Seen:
    """What a function did in one case.

    Attributes:
        parts: named numbers, compared with the right ones.
        hint: what is wrong even if the numbers are right.
        remark: what to add to "Correct."
        attempted: False for a stub.
        raised: the exception, if there was one.
        said: puts a few of the numbers into words.
    """

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    hint: str = ""
    remark: str = ""
    attempted: bool = True
    raised: BaseException | None = None
    said: Callable[[torch.Tensor], str] = numbers


def same(one: Seen, other: Seen, tolerance: float) -> bool:
    """Whether two functions gave the same numbers, or the same error."""
    if one.raised and other.raised:
        return type(one.raised) is type(other.raised) and (
            message(one.raised) == message(other.raised)
        )
    if one.raised or other.raised:
        return False
    return bool(one.parts) and all(
        close(one.parts[name], right, tolerance)
        for name, right in other.parts.items()
    )


def close(mine: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Equal but for ``tolerance`` × the norm of ``right``."""
    room = tolerance * right.nan_to_num(0, 0, 0).norm().item() + 1e-12
    return mine.shape == right.shape and torch.allclose(
        mine, right, rtol=0, atol=room, equal_nan=True
    )


def difference(
    fn: Callable, mine: Seen, right: Seen, tolerance: float, step: str = ""
) -> str:
    """Say how far off a function is whose mistake is not a known one.

    ``step`` is what to check where the numbers are wrong.
    """
    if right.raised:
        needed = f"{kind(right.raised)} is needed here"
        if mine.raised:
            return f"{needed}. {describe(mine.raised, fn)}"
        return f"{needed}; your function raised nothing."
    if mine.raised:
        return describe(mine.raised, fn)
    if not mine.attempted:
        return "your function does nothing here."
    if mine.hint:
        return mine.hint
    name = next(
        name
        for name in right.parts
        if not close(mine.parts[name], right.parts[name], tolerance)
    )
    a, b = mine.parts[name], right.parts[name]
    if a.shape != b.shape:
        return f"the {name} is {shape(a)}; it must be {shape(b)}."
    if not a.isfinite().all():
        return f"the {name} holds NaN or infinity."
    if a.numel() <= 8:
        text = f"the {name} is {right.said(a)}; {right.said(b)} is right"
        if not a.ndim and right.said is numbers:
            side = "small" if a < b else "large"
            text += f": too {side} by {numbers((a - b).abs())}"
        return f"{text}. {step}".strip()
    if not a.any():
        return f"the {name} is zero."
    factor = ((a * b).sum() / (b * b).sum()).item()
    if close(a, factor * b, tolerance):
        return f"the {name} is {factor:.4g} times the right one."
    if not b.any():
        return f"the {name} must be zero here."
    off = (a - b).norm() / b.norm()
    return f"the {name} is off by {off:.2g} times its norm."


def shape(tensor: torch.Tensor) -> str:
    """How many numbers a tensor holds, in words."""
    if tensor.ndim > 1:
        return f"a table of {' × '.join(map(str, tensor.shape))} numbers"
    count = tensor.numel() if tensor.ndim else "a single"
    return f"{count} number{'s' * (tensor.ndim and count != 1)}"
