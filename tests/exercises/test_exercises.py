"""What holds of every exercise: its page, its mistakes, and hostile answers.

What one subject's solutions are compared with is in that subject's file.
"""

import gc
import inspect
import random
import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from project import notebooks

from membudget import exercises
from membudget.exercises.compare import numbers
from membudget.exercises.core import CORRECT, NOT_ATTEMPTED, NOT_RIGHT
from membudget.exercises.mistakes import mistakes, source

from .pages import asked, on_its_page, page_of, shown

CHECKERS = {
    name.removeprefix("check_"): getattr(exercises, name)
    for name in dir(exercises)
    if name.startswith("check_")
}
EXERCISES = {
    name: check
    for name, check in CHECKERS.items()
    if isinstance(check, exercises.Exercise)
}


def observer(check):
    return check.observe.__qualname__.split(".")[0]


OBSERVED = {observer(check): name for name, check in EXERCISES.items()}
"""For each way to observe a function, an exercise that does."""

each_exercise = pytest.mark.parametrize("name", EXERCISES)
each_observer = pytest.mark.parametrize("name", OBSERVED.values(), ids=str)


# The page


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_page_shows_the_solutions_of_what_it_asks(path):
    assert asked(path) == list(shown(path))
    for name, text in shown(path).items():
        assert text == source(CHECKERS[name].solution)


@each_exercise
def test_solution(name, capsys, monkeypatch):
    monkeypatch.syspath_prepend(page_of(name).parent)
    solution = EXERCISES[name].solution
    assert EXERCISES[name](on_its_page(solution)) is None
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{CORRECT} ")
    assert not printed.err
    assert all(len(line) < 80 for line in printed.out.splitlines())
    assert len(inspect.getsource(solution).splitlines()) <= 12
    assert repr(EXERCISES[name]) == f"check_{name}"


# Mistakes


@each_exercise
def test_every_mistake_gets_its_hint(name):
    check = EXERCISES[name]
    known = mistakes(check.solution, check.mistakes)
    # any schedule may be right: what a wrong one misses is seen
    assert len(known) >= 2 or observer(check) == "schedule"
    for hint, mistake in known:
        outcome = check.judge(mistake)
        assert outcome.state == NOT_RIGHT
        assert outcome.text.startswith(hint)


@pytest.mark.few(16)
@each_exercise
def test_every_pair_of_mistakes_is_a_function(name):
    assert all(callable(mistake) for _, mistake in EXERCISES[name].known())


def doubled(numbers):
    total = sum(numbers)
    return [2 * n for n in numbers if total]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n * 2 => n\n a hint", "stands 0 times"),
        ("n => m\n a hint", "times in"),
        ("2 * n => 3 * n", "and a hint after them"),
        ("a hint", "a mistake is lines"),
        ("2 * n => 2 *\n a hint", "invalid syntax"),
    ],
)
def test_an_edit_that_cannot_be_made(text, words):
    with pytest.raises(ValueError, match=words):
        mistakes(doubled, text)


def test_edits_of_a_solution():
    text = """
        2 * n => n
        or total = sum(numbers) =>
        if total =>
            a hint of
            two lines
        in numbers if => in numbers[1:] if
            another
        """
    single, compound, other = mistakes(doubled, text)
    assert single[0] == compound[0] == "a hint of two lines"
    assert single[1]([1, 2]) == [1, 2]
    assert compound[1]([0, 0]) == [0, 0]
    assert other[1]([1, 2]) == [4]
    *_, both, _ = exercises.Exercise(doubled, [], None, text, "").known()
    assert both[0] == single[0]
    assert both[1]([1, 2]) == [2]


# Hostile functions: a hint each, and never an exception


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises(error):
    def function(*args):
        raise error

    return function


def yields(*args):
    yield args


def seeds(*args):
    torch.manual_seed(1)
    return random.random() + np.random.random()


def disables_gradients(*args):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return "abc"


def disables_collection(*args):
    gc.disable()
    return "abc"


def vandal(*args):
    for arg in args:
        if isinstance(arg, list):
            arg.clear()
        if isinstance(arg, torch.Tensor):
            arg.zero_()
        if isinstance(arg, torch.nn.Module):
            torch.nn.init.zeros_(next(arg.parameters()))
    return 1.0


def recursive(*args):
    return recursive(*args)


HOSTILE = {
    "a division": (lambda *args: 1 / 0, "ZeroDivisionError in line 1"),
    "generator": (yields, "returns a generator"),
    "gradients off": (disables_gradients, ""),
    "collection off": (disables_collection, ""),
    "seeds": (seeds, ""),
    "vandal": (vandal, ""),
    "string": (lambda *args: "0.5", ""),
    "strings": (lambda *args: ["a", "b", "c"], ""),
    "dictionary": (lambda *args: {"a": 1}, ""),
    "object": (lambda *args: object(), ""),
    "nothing": (lambda *args: [], ""),
    "nan": (lambda *args: float("nan"), ""),
    "nans": (lambda *args: [float("nan")] * 3, ""),
    "too deep": (lambda *args: [[1.0, 2.0], [3.0]], ""),
    "table": (lambda *args: torch.ones(2, 3), ""),
    "builtin": (print, ""),
    "partial": (partial(max, default=0), ""),
}
UNSEEN = {
    "an exit": (lambda *args: sys.exit(), "SystemExit in line 1"),
    "an exit code": (lambda *args: sys.exit(3), "your function: 3."),
    "unprintable": (raises(Unprintable()), "Unprintable in line 2"),
    "address": (raises(KeyError(object())), "object at 0x…>"),
    "many lines": (raises(OSError("one\ntwo")), "your function: one."),
    "recursion": (recursive, "RecursionError in line 2 of your function"),
    "too few": (lambda *, a: 1, "your function takes (a); keep `"),
    "too many": (
        lambda a, b, c, d, e, f, g, h: a,
        "your function takes (a, b, c,",
    ),
    "a class": (Unprintable, "; this is a class."),
    "an object": (object(), "this is an object."),
    "None": (None, "; this is None."),
    "a result": ([0.5, 0.5], "; this is a list."),
    "a string": ("weights", "; this is a str."),
}
"""What no observer looks at: errors, and what cannot be called."""


def refuses(check, function, words, capsys):
    before = global_state()
    check(function)
    printed = capsys.readouterr()
    text = " ".join(printed.out.split())
    if function is not print:
        assert text.startswith(f"{NOT_RIGHT} ")
        assert len(text) > len(NOT_RIGHT) + 10
    assert words in text
    assert not printed.err
    assert "Traceback" not in text
    assert_same_state(before)


@pytest.mark.few(20)
@pytest.mark.filterwarnings("error")
@each_observer
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_function(name, kind, capsys):
    function, words = HOSTILE[kind]
    if name == OBSERVED["schedule"] and kind == "generator":
        words = ""  # a schedule may be yielded
    refuses(CHECKERS[name], function, words, capsys)


@pytest.mark.few(13)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name", ["selection_weights", "average_gradients", "own_ledger"]
)
@pytest.mark.parametrize("kind", UNSEEN)
def test_what_no_observer_sees(name, kind, capsys):
    refuses(CHECKERS[name], *UNSEEN[kind], capsys)


EMPTY = {
    "none": lambda *args: None,
    "dots": lambda *args: ...,
    "not implemented": lambda *args: NotImplemented,
    "raised": raises(NotImplementedError()),
}


@pytest.mark.few(16)
@each_observer
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_function(name, empty):
    assert CHECKERS[name].judge(EMPTY[empty]).state == NOT_ATTEMPTED


@pytest.mark.few(5)
@each_observer
def test_the_callers_state_is_kept_and_does_not_matter(name):
    check = EXERCISES[name]
    first = mistakes(check.solution, check.mistakes)[:1]
    answers = [check.solution, vandal, *(mistake for _, mistake in first)]
    expected = [check.judge(answer) for answer in answers]
    with another_state():
        assert [check.judge(answer) for answer in answers] == expected


@contextmanager
def another_state():
    """A block with settings of its own, which must be the same after it."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
        ):
            before = global_state()
            yield
            assert_same_state(before)
    finally:
        torch.set_default_dtype(torch.float32)


def global_state():
    kind, keys, *place = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        (kind, keys.tobytes(), *place),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.autocast_increment_nesting(),
        torch.autocast_decrement_nesting(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        gc.isenabled(),
        list(gc.callbacks),
    )


def assert_same_state(before):
    for was, now in zip(before, global_state(), strict=True):
        assert was == now


# Words


def test_hint_for_values():
    def text(result):
        check = exercises.check_selection_weights
        return check.judge(lambda counts, probabilities, draws: result).text

    assert "returns a str that is not made of numbers" in text("0.5")
    assert "holds NaN or infinity" in text([float("nan")] * 3)
    assert "the answer is 0 numbers; it must be 3 numbers" in text([])
    assert "a table of 2 × 3 numbers" in text(torch.ones(2, 3))


def test_hint_for_random_numbers():
    check = exercises.check_selection_weights

    def random_weights(counts, probabilities, draws):
        torch.manual_seed(0)
        torch.rand(1)
        return check.solution(counts, probabilities, draws)

    outcome = check.judge(random_weights)
    assert "draws random numbers" in outcome.text


def test_hint_for_changed_batch():
    def accumulate(model, x, y, micro_batch):
        exercises.check_accumulate.solution(model, x, y, micro_batch)
        x.zero_()

    outcome = exercises.check_accumulate.judge(accumulate)
    assert "changes its arguments" in outcome.text


def test_missing_operator_is_no_stub():
    def accumulate(model, x, y, micro_batch):
        F.cross_entropy(model(x[:micro_batch]).long(), y[:micro_batch])

    outcome = exercises.check_accumulate.judge(accumulate)
    assert "not implemented for 'Long'" in outcome.text
    assert "NotImplementedError in line 2 of your function" in outcome.text


@pytest.mark.parametrize("name", ["selection_weights", "own_ledger"])
def test_interrupt_is_not_swallowed(name):
    with pytest.raises(KeyboardInterrupt):
        CHECKERS[name](raises(KeyboardInterrupt()))


def test_a_hint_can_be_kept_back(capsys):
    check = exercises.check_selection_weights
    check(lambda counts, probabilities, draws: counts, hint=False)
    assert capsys.readouterr().out == (
        f"{NOT_RIGHT} take `hint=False` away for a hint.\n"
    )
    check(check.solution, hint=False)
    assert capsys.readouterr().out.startswith(CORRECT)


def test_numbers_are_said_in_full_or_short():
    values = [131072.0, 0.25, 1 / 3, -4.0, 1e300, float("nan"), float("inf")]
    assert numbers(torch.tensor(values, dtype=torch.float64)) == (
        "[131072, 0.25, 0.3333, -4, 1e+300, nan, inf]"
    )
    assert numbers(torch.tensor(2.0)) == "2"


def test_no_checker_of_another_name():
    with pytest.raises(AttributeError, match="no attribute 'check_nothing'"):
        exercises.check_nothing  # noqa: B018
