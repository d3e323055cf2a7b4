"""Run a reader's function without letting it disturb anything."""

import dis
import gc
import inspect
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch


class Problem(Exception):
    """What a function did cannot be judged; the message is the hint.

    Without one, nothing was attempted.
    """


@contextmanager
def sealed() -> Iterator[Callable[[], bool]]:
    """A block that starts alike every time and leaves nothing behind.

    Random number generators, gradient mode, autocast and the default dtype
    and device are the usual ones inside and the caller's again afterwards;
    so is afterwards whether Python collects garbage; warnings are silent.

    Yields:
        A function: were random numbers drawn or seeds set since the start?
    """
    dtype = torch.get_default_dtype()
    python, array = random.getstate(), np.random.get_state()
    ready = torch.cuda.is_initialized()
    collects = gc.isenabled()
    with (
        warnings.catch_warnings(action="ignore"),
        torch.random.fork_rng(range(torch.cuda.device_count() * ready)),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        before = torch.get_rng_state()

        def disturbed() -> bool:
            return not (
                torch.equal(torch.get_rng_state(), before)
                and random.getstate() == python
                and unchanged(np.random.get_state(), array)
            )

        try:
            yield disturbed
        finally:
            torch.set_default_dtype(dtype)
            (gc.enable if collects else gc.disable)()
            random.setstate(python)
            np.random.set_state(array)


def unchanged(value: object, before: object) -> bool:
    """Compare arguments, looking into lists; models and the like pass."""
    if type(value) is not type(before):
        return False
    if isinstance(value, list | tuple) and isinstance(before, list | tuple):
        return len(value) == len(before) and all(map(unchanged, value, before))
    if isinstance(before, torch.Tensor):
        return torch.equal(value, before)
    if isinstance(value, np.ndarray) and isinstance(before, np.ndarray):
        return np.array_equal(value, before)
    if isinstance(before, int | float | str | slice):
        return value == before
    return True


def unusable(fn: object, signature: str) -> str:
    """Say why ``fn`` cannot be called like ``signature``, if it cannot."""
    name, arguments = signature.rstrip(")").split("(")
    if not callable(fn) or inspect.isclass(fn):
        return (
            f"hand over the function itself, `check_{name}({name})`; this "
            f"is {kind(fn)}."
        )
    with suppress(TypeError, ValueError):  # a builtin may have no signature
        parameters = inspect.signature(fn)
        try:
            parameters.bind(*filter(None, arguments.split(", ")))
        except TypeError:
            takes = ", ".join(parameters.parameters)
            return f"your function takes ({takes}); keep `{signature}`."
    return ""


def uses_arguments(fn: Callable) -> bool:
    """Whether the body of a Python function reads any local variable."""
    try:
        steps = [step.opname for step in dis.get_instructions(fn)]
    except TypeError:
        return False
    return any(name.startswith(("LOAD_FAST", "LOAD_DEREF")) for name in steps)


def is_stub(error: BaseException) -> bool:
    """Whether the exception says that nothing was written yet.

    PyTorch raises the same type for an operator that lacks a dtype.
    """
    return isinstance(error, NotImplementedError) and (
        "not implemented for" not in message(error)
    )


def describe(error: BaseException, fn: Callable) -> str:
    """An exception as a sentence: its type, message and line."""
    code = getattr(fn, "__code__", None)
    lines = [
        line - code.co_firstlineno + 1
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code is code
    ]
    where = f" in line {lines[-1]} of your function" if lines else ""
    return f"{type(error).__name__}{where}: {message(error) or 'no message'}."


def message(error: BaseException) -> str:
    """The first line of an exception's message, without addresses."""
    try:
        text = re.sub("0x[0-9a-fA-F]+", "0x…", str(error)).strip()
    except Exception:
        return ""
    return text.split("\n")[0][:400].rstrip(".")


def kind(value: object) -> str:
    """The type of a value with its article: "a list", "an int"."""
    if value is None or value is ...:
        return str(value)
    name = "class" if inspect.isclass(value) else type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
