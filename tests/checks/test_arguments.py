"""Every public function, given every argument wrong.

A wrong argument is refused in the package's words, or the result is sane: no
NaN, no negative bytes, and it does not take long. Each argument meets half of
what is wrong; ``SOAK=1`` in the environment tries all of it.
"""

import dataclasses
import enum
import inspect
import linecache
import signal
import types
import typing
from contextlib import contextmanager, suppress
from functools import partial
from math import inf, isfinite, isinf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  (its import takes seconds)
import torch
import traitlets
from anywidget import AnyWidget
from valid_calls import ROOMS, ROWS, STAND_INS, arguments, own, starred

import membudget
from membudget import widgets
from membudget.checkpointing import ImpossibleAction
from tests.soak import SOAK

SECONDS = 2
PACKAGE = str(Path(membudget.__file__).parent)

NEEDS_PROCESSES = {
    "parallelism.run_pipeline",
    "parallelism.tensor_parallel",
    "sharding.shard",
    "sharding.torchrun",
}
WRITES_FILES = {"sharding.save_checkpoint"}
THE_PACKAGE_CALLS = {
    "accumulation.Window",
    "ledger.Adapter.at",
    "ledger.CausalLM.alike",
    "ledger.CausalLM.buffers_beside",
    "ledger.CausalLM.is_local",
    "ledger.CausalLM.write",
    "ledger.Chain.write",
    "ledger.Transformer.buffers_beside",
    "ledger.Transformer.write",
    "measuring.PeakTracker.inside",
    "offloading.FileMemory.slot",
    "offloading.HostMemory.slot",
    "widgets.Whole",
    "widgets.Whole.validate",
    "widgets.Widget",
    "widgets.format_bytes",
}
LEFT_OUT = NEEDS_PROCESSES | WRITES_FILES | THE_PACKAGE_CALLS
"""The first two have their own tests of what is wrong, the last trust their
callers."""


class Odd:
    """Fits nowhere."""

    def __init__(self, *args, **kwargs):
        pass

    def __repr__(self):
        return "Odd()"


DIGITS = 10**5000
WRONG = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    3.0,
    nan,
    inf,
    -inf,
    "3",
    "",
    b"3",
    1j,
    10**30,
    -(10**30),
    DIGITS,
    [],
    (),
    {},
    [None],
    [-1],
    [nan],
    ["a"],
    [10**30],
    np.int64(-3),
    np.float32(nan),
    torch.tensor(-1.5),
    torch.tensor(True),
    torch.empty((), device="meta"),
    Odd,
    lambda *args, **kwargs: None,
    Odd(),
]

# What a row may do besides.
ERRORS = {
    "checkpointing.simulate": ImpossibleAction,
    "measuring.CachingAllocator.allocate": torch.OutOfMemoryError,
    "measuring.CatchOutOfMemory": torch.OutOfMemoryError,
    "measuring.PeakTracker.at": IndexError,
    "measuring.PeakTracker.split": IndexError,
    "measuring.replay": torch.OutOfMemoryError,
    "measuring.summarise": FileNotFoundError,
    "measuring.trace_events": FileNotFoundError,
    "measuring.trace_step": torch.OutOfMemoryError,
    "precision.tf32": ValueError,
    "sharding.load_checkpoint": RuntimeError,
}
NAN_IS_FINE = {"round", "encode", "text"}
MAY_BE_INFINITE = {"bandwidth", "flops", "limit", "link", "max_norm"}
OF_A_MODEL = {"batch", "k", "q", "tokens", "turns", "v", "x"}
BELOW_ZERO = {
    "checkpointing.profile",
    "accumulation.gradient_noise",  # an estimate of what is not
    "checkpointing.Stage",  # a recomputation may end before the output
    "ledger.peak_lines",  # the constant of a line
    "precision.Format.round",
    "precision.Format.value",
}


def public() -> dict[str, typing.Callable]:
    """What somebody may call with arguments, by name."""
    found = {}
    for room in ROOMS:
        short = room.__name__.partition(".")[2]
        for name in own(room):
            thing = getattr(room, name)
            if not callable(thing) or thing in found.values():
                continue
            if not is_result(thing):
                found[f"{short}.{name}"] = thing
            if not isinstance(thing, type):
                continue
            if not thing.__module__.startswith("membudget"):
                continue
            for method, function in vars(thing).items():
                if isinstance(function, classmethod):
                    function = function.__get__(None, thing)
                elif not inspect.isfunction(function):
                    continue
                if method == "__call__" or method[0] != "_":
                    found[f"{short}.{name}.{method}"] = function
    return {
        name: thing
        for name, thing in found.items()
        if parameters(thing) and name not in LEFT_OUT
    }


def is_result(thing: typing.Callable) -> bool:
    """Whether the package makes them, without checks: results and errors."""
    if not isinstance(thing, type):
        return isinstance(thing, types.GenericAlias)
    checked = "__post_init__" in vars(thing)
    plain = dataclasses.is_dataclass(thing) and not checked
    return plain or issubclass(thing, BaseException | tuple | enum.Enum)


def parameters(thing: typing.Callable) -> dict[str, object]:
    """Its arguments, each with its annotation; a widget's are its traits."""
    told = thing.__init__ if isinstance(thing, type) else thing
    hints = typing.get_type_hints(told)
    taken = {
        name: hints.get(name, object)
        for name, p in inspect.signature(thing).parameters.items()
        if p.kind is not p.VAR_KEYWORD and name != "self"
    }
    if isinstance(thing, type) and issubclass(thing, widgets.base.Widget):
        synced = thing.class_trait_names(sync=True)
        own = set(synced) - set(AnyWidget.class_trait_names())
        taken = dict.fromkeys(sorted(own), object) | taken
    return taken


THINGS = public()


def defaults(thing: typing.Callable) -> dict[str, object]:
    """What its arguments are where nobody gives them."""
    return {
        name: p.default
        for name, p in inspect.signature(thing).parameters.items()
        if p.default is not p.empty
    }


def test_rows_give_arguments():
    assert set(ROWS) <= set(THINGS)
    for name, row in ROWS.items():
        assert row().keys() - {"self"} <= parameters(THINGS[name]).keys(), name


@pytest.mark.parametrize("name", THINGS)
def test_wrong_arguments(name):
    """Each in turn; ``problems`` says which, given what."""
    call, arguments = valid(name)
    with suppress(ERRORS.get(name, ())):
        assert_sane(call(), name)
    problems = []
    for place, argument in enumerate(arguments):
        for value in WRONG if SOAK else WRONG[place % 2 :: 2]:
            if name.startswith("widgets.") and value is DIGITS:
                continue  # too many for the texts of traitlets
            if argument in OF_A_MODEL and isinstance(value, torch.Tensor):
                continue  # the model says what it takes
            if problem := tried(name, argument, value):
                problems.append(f"{argument} = {shown(value)}: {problem}")
    assert not problems, "\n".join(problems)


def valid(name, /, **others):
    """A call with the row's arguments, some replaced; and the arguments."""
    thing = THINGS[name]
    given = defaults(thing) | arguments(name, thing)
    function = STAND_INS.get(name, thing)
    if name not in STAND_INS and "self" in given:
        function = partial(function, given["self"])
    taken = {k: given[k] for k in parameters(thing) if k in given}
    several = starred(thing)

    def call():
        rest = taken | others
        if several is None:
            return function(**rest)
        order = list(taken)
        before = [rest.pop(key) for key in order[: order.index(several)]]
        return function(*before, *rest.pop(several), **rest)

    return call, taken


def tried(name, argument, value) -> str:
    """What is wrong with how the function takes a wrong value."""
    hint = parameters(THINGS[name])[argument]
    given = value
    if argument == starred(THINGS[name]):
        given = (value, *valid(name)[1][argument][1:])
    call, _ = valid(name, **{argument: given})
    allowed = (TypeError, ValueError, ERRORS.get(name, TypeError))
    if name.startswith("widgets."):
        allowed += (traitlets.TraitError,)
    try:
        with in_time():
            result = call()
    except allowed as error:
        return "" if in_our_words(error) else foreign(error)
    except BaseException as error:
        return foreign(error)
    if must_refuse(hint, value, name, argument):
        return f"taken for {hint}"
    try:
        assert_sane(result, name)
    except AssertionError as error:
        return str(error)
    return ""


def must_refuse(hint, value, name, argument) -> bool:
    """Whether the annotation has no room for the value, nor the default."""
    if value is None and defaults(THINGS[name]).get(argument, 0) is None:
        return False
    either = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(hint)) if either else {hint}
    if isinstance(value, Odd):
        return not kinds & {object, typing.Any}
    if not kinds <= {bool, int, float, str, types.NoneType}:
        return False
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        value = value.item()
    if name.startswith("widgets.") and value in (b"3", 0, inf, -inf):
        return False  # traits take 0 for False, bytes for text
    if type(value) is bool:
        return bool not in kinds
    if isinstance(value, int | np.integer):
        return not kinds & {int, float}
    if isinstance(value, float | np.floating):
        method = name.rpartition(".")[2]
        fine = isfinite(value) or method in NAN_IS_FINE
        fine |= isinf(value) and argument in MAY_BE_INFINITE
        return float not in kinds or not fine
    return type(value) not in kinds


@contextmanager
def in_time():
    """The processor's seconds, because others may be at work on it."""

    def late(*args):
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def in_our_words(error) -> bool:
    """Whether a ``raise`` of the package made it, or a trait's library."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    if isinstance(error, OSError):
        return True
    if isinstance(error, traitlets.TraitError):
        return "traitlets" in file or file.startswith(PACKAGE)
    line = linecache.getline(file, trace.tb_lineno)
    return file.startswith(PACKAGE) and line.strip().startswith("raise")


def foreign(error) -> str:
    trace = error.__traceback__
    where = []
    while trace:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(PACKAGE):
            where.append(f"{file[len(PACKAGE) + 1 :]}:{trace.tb_lineno}")
        trace = trace.tb_next
    text = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:90]} ({' '.join(where[-1:])})"


def assert_sane(result, name, depth=0):
    """No NaN, and nothing below zero where that cannot be."""
    if isinstance(result, str):
        assert "nan" not in result.lower().split(), f"result {result!r}"
    elif isinstance(result, bool | enum.Enum):
        return
    elif isinstance(result, int | float):
        fine = name.rpartition(".")[2] in NAN_IS_FINE | {"value"}
        assert fine or not isnan(result), "result nan"
        negative = name in BELOW_ZERO or result >= 0 or fine
        assert negative, f"result {result}"
    elif depth < 4:
        if dataclasses.is_dataclass(result):
            result = vars(result) if hasattr(result, "__dict__") else {}
        if isinstance(result, dict):
            result = result.values()
        elif not isinstance(result, list | tuple):
            return
        for item in list(result)[:50]:
            assert_sane(item, name, depth + 1)


def shown(value) -> str:
    try:
        return repr(value)[:40]
    except ValueError:
        return "10**5000"
