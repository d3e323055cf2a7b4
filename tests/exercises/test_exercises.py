"""Every checker on the solution, the stub, wrong and hostile answers."""

import gc
import inspect
import random
import sys
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from membudget import exercises
from membudget.exercises.compare import numbers
from membudget.exercises.core import CORRECT, NOT_ATTEMPTED, NOT_RIGHT
from membudget.measuring import MemoryMonitor, round_size, trace_step

from . import solutions, stubs, wrong

NAMES = [
    name.removeprefix("check_")
    for name in exercises.__all__
    if name.startswith("check_")
]
each_exercise = pytest.mark.parametrize("name", NAMES)


def checker(name):
    return getattr(exercises, f"check_{name}")


def parameters(name):
    return list(inspect.signature(getattr(solutions, name)).parameters)


@each_exercise
def test_solution(name, capsys):
    assert checker(name)(getattr(solutions, name)) is None
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{CORRECT} ")
    assert not printed.err
    assert all(len(line) < 80 for line in printed.out.splitlines())


@each_exercise
def test_solution_is_short(name):
    lines = inspect.getsource(getattr(solutions, name)).splitlines()
    assert len(lines) <= 12


@each_exercise
def test_signatures(name):
    signature = f"{name}({', '.join(parameters(name))})"
    assert checker(name).signature == signature
    assert parameters(name) == list(
        inspect.signature(getattr(stubs, name)).parameters
    )


BROKEN = {
    "padded_gradient": "a token among few weighs more",
    "train_epoch": "the last window is dropped",
    "clipped_step": "clipped after every micro-batch",
    "train": "each holds the graph it was computed with",
}


@each_exercise
def test_stub(name, capsys):
    checker(name)(getattr(stubs, name))
    printed = " ".join(capsys.readouterr().out.split())
    if name in BROKEN:
        assert printed.startswith(f"{NOT_RIGHT} ")
        assert BROKEN[name] in printed
    else:
        assert printed == NOT_ATTEMPTED


EMPTY = {
    "none": lambda *args: None,
    "dots": lambda *args: ...,
    "not implemented": lambda *args: NotImplemented,
}


@each_exercise
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_function(name, empty):
    assert checker(name).judge(EMPTY[empty]).state == NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, k) for name in NAMES for k in range(len(wrong.ANSWERS[name]))],
)
def test_wrong_answer(name, number):
    answer, words = wrong.ANSWERS[name][number]
    outcome = checker(name).judge(answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text


@each_exercise
def test_there_are_wrong_answers(name):
    assert len(wrong.ANSWERS[name]) + (name in BROKEN) >= 2


@each_exercise
def test_known_mistakes_get_their_own_hint(name):
    check = checker(name)
    for hint, mistake in check.mistakes:
        outcome = check.judge(mistake)
        assert outcome.state == NOT_RIGHT
        if len(getattr(mistake, "keywords", {})) < 2:
            assert outcome.text.startswith(hint)


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
    "an exit": (lambda *args: sys.exit(), "SystemExit in line 1"),
    "an exit code": (lambda *args: sys.exit(3), "your function: 3."),
    "unprintable": (raises(Unprintable()), "Unprintable in line 2"),
    "address": (raises(KeyError(object())), "object at 0x…>"),
    "many lines": (raises(OSError("one\ntwo")), "your function: one."),
    "recursion": (recursive, "RecursionError in line 2 of your function"),
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
    "too few": (lambda: 1, "your function takes (); keep `"),
    "too many": (lambda a, b, c, d, e, f: a, "your function takes (a, b, c,"),
    "a class": (Unprintable, "; this is a class."),
    "an object": (object(), "this is an object."),
    "None": (None, "; this is None."),
    "a result": ([0.5, 0.5], "; this is a list."),
    "a string": ("weights", "; this is a str."),
}
VALUES = {
    "weights",
    "token_weights",
    "mean_of_means_error",
    "noise_scale",
    "largest_micro_batch",
}


@pytest.mark.filterwarnings("error")
@each_exercise
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_function(name, kind, capsys):
    function, words = HOSTILE[kind]
    before = global_state()
    checker(name)(function)
    printed = capsys.readouterr()
    text = " ".join(printed.out.split())
    if kind != "builtin":
        assert text.startswith(f"{NOT_RIGHT} ")
        assert len(text) > len(NOT_RIGHT) + 10
    assert words in text
    assert not printed.err
    assert "Traceback" not in text
    assert_same_state(before)


@pytest.mark.parametrize("name", ["weights", "token_weights"])
def test_hint_for_values(name):
    def text(function):
        return checker(name).judge(function).text

    assert "returns a str that is not made of numbers" in text(
        lambda *args: "0.5"
    )
    assert "holds NaN or infinity" in text(lambda *args: [float("nan")] * 3)
    assert "the answer is 0 numbers; it must be 3 numbers" in text(
        lambda *args: []
    )
    assert "a table of 2 × 3 numbers" in text(lambda *args: torch.ones(2, 3))


def test_hint_for_random_numbers():
    def random_weights(counts):
        torch.manual_seed(0)
        torch.rand(1)
        return solutions.weights(counts)

    outcome = exercises.check_weights.judge(random_weights)
    assert "draws random numbers" in outcome.text


def test_hint_for_changed_batch():
    def accumulate(model, x, y, micro_batch):
        solutions.accumulate(model, x, y, micro_batch)
        x.zero_()

    outcome = exercises.check_accumulate.judge(accumulate)
    assert "changes its arguments" in outcome.text


def test_missing_operator_is_no_stub():
    def accumulate(model, x, y, micro_batch):
        F.cross_entropy(model(x[:micro_batch]).long(), y[:micro_batch])

    outcome = exercises.check_accumulate.judge(accumulate)
    assert "not implemented for 'Long'" in outcome.text
    assert "NotImplementedError in line 2 of your function" in outcome.text


def test_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        exercises.check_weights(raises(KeyboardInterrupt()))


def test_slow_search_is_correct_with_a_remark():
    def scan(peak, budget, global_batch):
        return max(s for s in range(1, global_batch + 1) if peak(s) <= budget)

    outcome = exercises.check_largest_micro_batch.judge(scan)
    assert outcome.state == CORRECT
    assert "It measured 1000 times" in outcome.text
    quick = exercises.check_largest_micro_batch.judge(
        solutions.largest_micro_batch
    )
    assert "measured" not in quick.text


def test_a_hint_can_be_kept_back(capsys):
    exercises.check_weights(lambda counts: counts, hint=False)
    assert capsys.readouterr().out == (
        f"{NOT_RIGHT} take `hint=False` away for a hint.\n"
    )
    exercises.check_weights(solutions.weights, hint=False)
    assert capsys.readouterr().out.startswith(CORRECT)


def test_other_right_answers():
    def autograd(model, x, y, micro_batch):
        parameters = list(model.parameters())
        parts = zip(x.split(micro_batch), y.split(micro_batch), strict=True)
        for a, b in parts:
            model(a)  # looked at, and not used
            loss = F.cross_entropy(model(a), b, reduction="sum") / len(x)
            grads = torch.autograd.grad(loss, parameters)
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad if p.grad is None else p.grad + grad

    def array(counts):
        return np.array(counts) / np.sum(counts)

    def zeros(model, optimizer, scaler, micro_batches, max_norm):
        solutions.amp_step(model, optimizer, scaler, micro_batches, max_norm)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    def kept(model, optimizer, batches):
        losses = np.zeros(len(batches))
        optimizer.zero_grad()
        for k in range(len(batches)):
            x, y = batches[k]
            logits = model(x)
            chances = logits.softmax(1)
            loss = -chances.log().gather(1, y[:, None]).mean()
            with torch.no_grad():
                accuracy = model(x).argmax(1) == y
            loss.backward()
            optimizer.step()
            for p in model.parameters():
                p.grad = None
            losses[k] = loss
        return tuple(losses), accuracy.sum()

    def zero(allocations):
        split = dict.fromkeys(["activations", "temporaries"], 0)
        return split | solutions.alive_at_peak(allocations)

    def by_hand(used, budget, threshold):
        before = used()
        if before / budget >= threshold:
            while gc.collect():
                pass
        return torch.tensor(before - used())

    assert exercises.check_train.judge(lambda *a: kept(*a)[0]).state == CORRECT
    assert exercises.check_alive_at_peak.judge(zero).state == CORRECT
    assert exercises.check_collect_above.judge(by_hand).state == CORRECT
    assert (
        exercises.check_statuses.judge(
            lambda *args: tuple(solutions.statuses(*args))
        ).state
        == CORRECT
    )
    assert exercises.check_amp_step.judge(zeros).state == CORRECT
    assert exercises.check_accumulate.judge(autograd).state == CORRECT
    assert exercises.check_weights.judge(array).state == CORRECT
    for kind in (tuple, torch.tensor):
        outcome = exercises.check_weights.judge(
            lambda counts, kind=kind: kind(solutions.weights(counts))
        )
        assert outcome.state == CORRECT


# The solutions of chapter 1 against what is measured


def network(width, depth, device="cpu"):
    with torch.device(device):
        pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(*[layer for pair in pairs for layer in pair])


def summed(model, x):
    return model(x).sum()


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 24), st.integers(2, 5))
def test_peak_formula_is_exact(batch, width, depth):
    model = network(width, depth)
    tracker = trace_step(model, summed, torch.randn(batch, width))
    scalars = 8  # the loss and its gradient
    formula = solutions.predict_peak(batch, width, depth)
    assert formula + scalars == tracker.peak


@pytest.mark.parametrize("case", exercises.check_predict_peak.cases)
def test_peak_is_that_of_a_real_step(case):
    batch, width, depth = case.make()
    model = network(width, depth)
    tracker = trace_step(model, summed, torch.randn(batch, width))
    assert exercises.check_predict_peak.solution(*case.make()) == tracker.peak


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_alive_at_peak_is_the_split(batch):
    model = network(16, 3)
    optimizer = torch.optim.Adam(model.parameters())
    tracker = trace_step(
        model, summed, torch.randn(batch, 16), optimizer=optimizer
    )
    alive = solutions.alive_at_peak(tracker.allocations)
    assert alive == {c: n for c, n in tracker.split().items() if n}


@given(st.lists(st.integers(0, 1 << 21)))
def test_allocated_is_rounded_as_by_the_allocator(sizes):
    assert solutions.allocated(sizes) == sum(
        round_size(size) for size in sizes if size
    )


def test_collector_is_judged_without_other_garbage():
    layer = nn.Linear(2, 2)
    layer.itself = [layer]
    other = weakref.ref(layer)
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        del layer
        outcome = exercises.check_collect_above.judge(solutions.collect_above)
        assert outcome.state == CORRECT
        assert not gc.isenabled()
        assert other() is not None
        assert gc.get_freeze_count() <= frozen
        gc.collect()
        assert other() is None
    finally:
        gc.enable()


@given(st.lists(st.integers(0, 1000)), st.integers(1, 6))
def test_statuses_are_those_of_the_monitor(readings, window):
    queue = iter(readings)
    monitor = MemoryMonitor(
        read=lambda: next(queue), budget=1000, window=window
    )
    assert solutions.statuses(readings, 1000, window) == [
        monitor(step).name.lower() for step in range(len(readings))
    ]


def test_numbers_are_said_in_full_or_short():
    values = [131072.0, 0.25, 1 / 3, -4.0, 1e300, float("nan"), float("inf")]
    assert numbers(torch.tensor(values, dtype=torch.float64)) == (
        "[131072, 0.25, 0.3333, -4, 1e+300, nan, inf]"
    )
    assert numbers(torch.tensor(2.0)) == "2"


# Nothing leaks, in either direction


def global_state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        gc.isenabled(),
        list(gc.callbacks),
    )


def assert_same_state(before):
    for was, now in zip(before, global_state(), strict=True):
        assert was == now


@each_exercise
def test_state_is_kept_and_does_not_matter(name):
    check = checker(name)
    answers = [getattr(solutions, name), wrong.ANSWERS[name][0][0]]
    expected = [check.judge(answer) for answer in answers]
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
        ):
            before = global_state()
            assert [check.judge(answer) for answer in answers] == expected
            assert_same_state(before)
    finally:
        torch.set_default_dtype(torch.float32)


@each_exercise
def test_names_carry_no_address(name, capsys):
    assert repr(checker(name)) == f"check_{name}"
    checker(name)()
    assert "this is None" in " ".join(capsys.readouterr().out.split())
