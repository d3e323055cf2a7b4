"""What makes a generator function an experiment, and what is known of it."""

import inspect
import json
import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from membudget.records.record import SIZES, Experiment
from membudget_experiments.source import source_hash


def experiment(
    *,
    sizes: dict[str, dict],
    units: dict[str, str],
    over: str,
    compares: dict[str, str] | None = None,
    gpu: bool = True,
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
        compares: values of a sample, each with the one of its row in the
            prediction that it should be.
        gpu: whether the sizes above ``tiny`` need one.

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
        function.experiment = Experiment(
            name=name,
            subject=Path(inspect.getfile(function)).stem,
            summary=(inspect.getdoc(function) or "").partition("\n")[0],
            sizes=sizes,
            units=units,
            over=over,
            gpu=gpu,
            compares=compares or {},
            source=source_hash(Path(inspect.getfile(function)), name),
        )
        return function

    return declare


def of(experiment: Experiment) -> Callable:
    """The function of an experiment; no other module is imported."""
    module = import_module(f"{__package__}.{experiment.subject}")
    return getattr(module, experiment.name)


def definitions() -> dict[str, Callable]:
    """Every experiment of this package, by name.

    Raises:
        ValueError: two have one name.
    """
    found: dict[str, Callable] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name == "__main__":
            continue
        name = f"{__package__}.{module.name}"
        for thing in vars(import_module(name)).values():
            if getattr(thing, "__module__", None) != name:
                continue
            if hasattr(thing, "experiment"):
                if thing.__name__ in found:
                    raise ValueError(
                        f"two experiments are named {thing.__name__}: rename "
                        f"the one in {module.name}.py"
                    )
                found[thing.__name__] = thing
    return dict(sorted(found.items()))
