"""The decorator that makes a generator function an experiment."""

import inspect
import json
from collections.abc import Callable

from membudget.experiments.record import SIZES


def experiment(
    *, sizes: dict[str, dict], units: dict[str, str], over: str
) -> Callable[[Callable], Callable]:
    """Declare a generator function in a module of this package.

    It is called with a device and, as keywords, the parameters of a size. The
    first value it yields is its prediction, a dictionary for JSON; it is on
    disk before the generator resumes. Each later value is one raw sample, a
    dictionary with the keys of ``units`` whose values are numbers, lists of
    numbers, text or None.

    Args:
        sizes: for each of ``tiny``, ``t4`` and ``large`` the parameters,
            among them ``warm_up`` and ``repeats``.
        units: the unit of each value of a sample, in words.
        over: the parameter, a list, that has one sample for each value.

    Write each as a literal or as a name of
    :mod:`membudget.experiments.sizes`: the book reads them without running
    the module.

    Raises:
        TypeError: not a generator function, parameters that it does not
            take, or such that JSON would not give back.
        ValueError: other sizes, missing counts, or an ``over`` that is no
            list.
    """

    def declare(function: Callable) -> Callable:
        name = function.__name__
        if not inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{name} yields nothing: yield the prediction, then samples"
            )
        if tuple(sizes) != SIZES:
            raise ValueError(
                f"{name} has the sizes {', '.join(sizes)}: give "
                f"{', '.join(SIZES)}, in this order"
            )
        for size, parameters in sizes.items():
            inspect.signature(function).bind("cpu", **parameters)
            if json.loads(json.dumps(parameters)) != parameters:
                raise TypeError(
                    f"{name} at size {size}: use numbers, text, lists and "
                    "dictionaries with text as keys"
                )
            if not {"warm_up", "repeats"} <= parameters.keys():
                raise ValueError(
                    f"{name} at size {size} lacks warm_up or repeats"
                )
            if not isinstance(parameters.get(over), list):
                raise ValueError(
                    f"{name} at size {size}: its parameter {over!r} must be "
                    "a list"
                )
        function.sizes, function.units, function.over = sizes, units, over
        return function

    return declare
