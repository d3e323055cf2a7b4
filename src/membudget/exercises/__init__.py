"""Checked exercises: ``check_NAME(fn)`` prints how a solution fares.

It prints one of three states, "Not attempted yet.", "Not right yet:" with a
hint, or "Correct.", and raises nothing. ``check_NAME.judge(fn)`` returns the
same as an :class:`Outcome`.
"""

from importlib import import_module

from membudget.exercises.core import Exercise, Outcome

__all__ = ["Exercise", "Outcome"]

SUBJECTS = (
    "measuring",
    "ledger",
    "own_ledger",
    "optimizers",
    "accumulation",
    "reacting",
    "checkpointing",
    "schedules",
    "precision",
    "amp_loops",
    "adapters",
    "four_bits",
    "in_backward",
    "offloading",
    "losses",
    "elsewhere",
    "tensor_parallel",
    "planning",
    "policy",
    "context",
    "pipelines",
    "experts",
    "sharding",
)
"""The modules of exercises; sharding last: its imports take a second."""


def __getattr__(name: str) -> object:
    """A checker, from the first module that has one of this name."""
    if name.startswith("check_"):
        for subject in SUBJECTS:
            module = import_module(f"{__name__}.{subject}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of all checkers, too."""
    modules = [import_module(f"{__name__}.{name}") for name in SUBJECTS]
    checkers = {n for m in modules for n in vars(m) if n.startswith("check_")}
    return sorted({*globals(), *checkers})
