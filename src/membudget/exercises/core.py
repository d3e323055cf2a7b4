"""How an exercise is judged: the same for every subject."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from inspect import signature

import torch

from membudget.exercises import guard
from membudget.exercises.compare import Seen, difference, same
from membudget.exercises.mistakes import Known, mistakes, pairs

NOT_ATTEMPTED = "Not attempted yet."
NOT_RIGHT = "Not right yet:"
CORRECT = "Correct."
CHANGED = "your function changes its arguments: copy them."
DISTURBED = (
    "your function draws random numbers (a DataLoader does too) or sets a "
    "seed, and needs neither."
)


@dataclass(frozen=True)
class Outcome:
    """One of the three states, and the sentence after it."""

    state: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.state} {self.text}".strip()


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments to try: said in words, and made anew for every call."""

    told: str
    make: Callable[[], tuple]


def given(**arguments) -> Case:
    """A case whose arguments are told as they are."""
    told = ", ".join(f"{name} = {a!r}" for name, a in arguments.items())
    return Case(told, lambda: tuple(deepcopy(arguments).values()))


@dataclass(frozen=True, repr=False, eq=False)
class Checker:
    """Call it with the reader's function, and it prints the outcome.

    Args:
        solution: a function that is right, as the page shows it.
    """

    solution: Callable

    @property
    def name(self) -> str:
        return self.solution.__name__

    @property
    def signature(self) -> str:
        """Such as ``"weights(counts)"``."""
        return f"{self.name}({', '.join(signature(self.solution).parameters)})"

    def __call__(self, fn: Callable | None = None, hint: bool = True) -> None:
        """Print the outcome; with ``hint=False`` without the diagnosis."""
        outcome = self.judge(fn)
        if not hint and outcome.state == NOT_RIGHT:
            outcome = Outcome(NOT_RIGHT, "take `hint=False` away for a hint.")
        for line in str(outcome).split("\n"):
            print(
                textwrap.fill(
                    line,
                    width=79,
                    subsequent_indent="  " * line.startswith("- "),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )

    def __repr__(self) -> str:
        return f"check_{self.name}"

    def judge(self, fn: Callable | None) -> Outcome:
        """The outcome; whatever ``fn`` does, nothing is raised."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False, eq=False)
class Exercise(Checker):
    """A checker of what a function does with arguments.

    The function runs on each case. Where it differs from the solution, so do
    the known mistakes, and the hint is that of the one that does the same.

    Args:
        solution: a function that is right, as the page shows it.
        cases: in the first, every mistake that it can show should differ
            from every other.
        observe: runs a function on arguments and says what it did.
        mistakes: edits of the solution, each with a hint (see
            :func:`~membudget.exercises.mistakes.mistakes`).
        shown: the sentence after "Correct."
        right: what is right, if the solution is only near it.
        tolerance: relative, of the norm of each part.
        two: whether two mistakes at once are known, too.
        step: what to check where the numbers fit no known mistake.
    """

    cases: Sequence[Case]
    observe: Callable[[Callable, tuple], Seen]
    mistakes: str
    shown: str
    right: Callable | None = None
    tolerance: float = 1e-6
    two: bool = True
    step: str = ""

    def known(self) -> Iterator[Known]:
        """The known mistakes: each alone, then pairs."""
        yield from mistakes(self.solution, self.mistakes)
        if self.two:
            yield from pairs(self.solution, self.mistakes)

    def judge(self, fn: Callable | None) -> Outcome:
        """The outcome; whatever ``fn`` does, nothing is raised."""
        problem = guard.unusable(fn, self.signature)
        if fn is None or problem:
            return Outcome(NOT_RIGHT, problem)
        remark = ""
        for case in self.cases:
            seen = self.see(fn, case)
            if not seen.attempted and case is self.cases[0]:
                return Outcome(NOT_ATTEMPTED)
            if hint := self._hint(fn, seen, case):
                return Outcome(NOT_RIGHT, f"{hint} (Tried: {case.told}.)")
            remark = remark or seen.remark
        return Outcome(CORRECT, f"{self.shown} {remark}".strip())

    def see(self, fn: Callable, case: Case) -> Seen:
        """Run ``fn`` on its own copy of the arguments."""
        with guard.sealed() as disturbed:
            before = case.make()
            torch.manual_seed(0)
            args = case.make()
            torch.manual_seed(0)
            try:
                seen = self.observe(fn, args)
            except KeyboardInterrupt:
                raise
            except guard.Problem as problem:
                attempted = bool(problem.args)
                seen = Seen(hint=str(problem), attempted=attempted)
            except BaseException as error:
                return Seen(raised=error, attempted=not guard.is_stub(error))
            if not guard.unchanged(args, before):
                seen.hint = CHANGED
            elif disturbed():
                seen.hint = DISTURBED
        return seen

    def _hint(self, fn: Callable, seen: Seen, case: Case) -> str:
        right = _known(self, self.right or self.solution, case)
        if right.raised and isinstance(seen.raised, type(right.raised)):
            return ""
        if same(seen, right, self.tolerance):
            return seen.hint
        if seen.parts or seen.raised:
            for hint, wrong in self.known():
                if same(seen, _known(self, wrong, case), self.tolerance):
                    return hint
        return difference(fn, seen, right, self.tolerance, self.step)


@cache
def _known(exercise: Exercise, fn: Callable, case: Case) -> Seen:
    return exercise.see(fn, case)
