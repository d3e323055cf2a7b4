"""Every checker on the solution, the stub, wrong and hostile answers."""

import gc
import heapq
import inspect
import random
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import count, product
from math import comb, inf
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget import checkpointing as ck
from membudget import exercises, models, precision
from membudget.exercises.core_old import CORRECT, NOT_RIGHT
from membudget.exercises.core_old import Exercise as OldExercise
from membudget.measuring import (
    PeakTracker,
)

from . import solutions, stubs, wrong

NAMES = [
    name.removeprefix("check_")
    for name in dir(exercises)
    if isinstance(getattr(exercises, name), OldExercise)
]
each_exercise = pytest.mark.parametrize("name", NAMES)


def checker(name):
    return getattr(exercises, f"check_{name}")


def parameters(name):
    return list(inspect.signature(getattr(solutions, name)).parameters)


BROKEN = {
    "padded_gradient": "a token among few weighs more",
    "train_epoch": "the last window is dropped",
    "clipped_step": "clipped after every micro-batch",
    "segment_step": "no gradient for segments 0, 1 and 2: the graph is cut",
    "same_network": "without them the network is linear",
    "clipped_amp_step": "clipped while it is still multiplied",
    "two_losses": "the auxiliary loss has a scaler of its own",
    "backward_outside": "the backward pass runs under autocast",
    "best_epoch": "the losses are compared in fp16",
    "train_step": "the scaler works under bf16, too",
    "in_step": "the ranks agree with each other and not with one process",
}


EMPTY = {
    "none": lambda *args: None,
    "dots": lambda *args: ...,
    "not implemented": lambda *args: NotImplemented,
}


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, k) for name in NAMES for k in range(len(wrong.ANSWERS[name]))],
)
def test_wrong_answer(name, number):
    answer, words = wrong.ANSWERS[name][number]
    outcome = checker(name).judge(answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text


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
VALUES = {
    "weights",
    "token_weights",
    "mean_of_means_error",
    "noise_scale",
    "largest_micro_batch",
}


PUZZLES = {
    "remember",
    "forget",
    "square_root",
    "shrinking",
    "two_sweeps",
    "uneven",
    "expensive",
}


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

    assert exercises.check_amp_step.judge(zeros).state == CORRECT
    assert exercises.check_accumulate.judge(autograd).state == CORRECT
    assert exercises.check_weights.judge(array).state == CORRECT
    for kind in (tuple, torch.tensor):
        outcome = exercises.check_weights.judge(
            lambda counts, kind=kind: kind(solutions.weights(counts))
        )
        assert outcome.state == CORRECT


# Chapter 4: the puzzles against theory and exhaustive search


def cases(name):
    """Of a puzzle: the chain, and what is allowed."""
    check = checker(name)
    for case in check.cases:
        peak, limit = map(int, re.findall(r"≤ (\d+)", case.told))
        yield case.make()[0], peak, limit


def one_level(chain) -> Iterator[ck.Run]:
    """All ways to checkpoint segments and to keep the tapes of the rest."""
    length = len(chain)
    for cuts in product((False, True), repeat=length - 1):
        parts = [[0]]
        for stage, cut in enumerate(cuts, 1):
            if cut:
                parts.append([stage])
            else:
                parts[-1].append(stage)
        choices = [(True, False) if len(p) == 1 else (True,) for p in parts]
        for forget in product(*choices):
            segments = []
            for part, forgotten in zip(parts, forget, strict=True):
                segments += [part] if forgotten else part
            yield ck.simulate(chain, segments)


@pytest.mark.parametrize("name", ["uneven", "expensive"])
def test_targets_are_the_best_of_one_level(name):
    for chain, peak, extra in cases(name):
        runs = list(one_level(chain))
        fitting = [run.extra_time for run in runs if run.peak <= peak]
        assert min(fitting) == extra
        assert peak == min(run.peak for run in runs)


def test_equal_segments_do_not_fit_the_uneven_chain():
    ((chain, peak, _),) = cases("uneven")
    equal = [
        ck.simulate(chain, ck.equal_segments(len(chain), count)).peak
        for count in range(1, len(chain) + 1)
    ]
    assert min(equal) == 32 > peak  # as the text after "Correct." says


def longest(peak: int) -> int:
    """Stages that segments on one level can hold, one unit each.

    Behind j checkpoints a segment of s stages needs j + s + 2 units, and
    the last, which has no gradient to receive, one less.
    """
    sizes = [peak - 2 - j for j in range(peak)]
    return max(sum(sizes[:k]) + peak - 1 - k for k in range(peak - 1))


def test_longest_chain_of_one_level():
    for length in range(2, 9):
        least = min(run.peak for run in one_level([ck.Stage()] * length))
        assert longest(least - 1) < length <= longest(least)


def test_equal_segments_do_not_reach_the_shrinking_ones():
    for length, peak, extra in cases("shrinking"):
        m = peak - 2
        assert length == extra == m * (m + 1) // 2
        for number in range(1, length + 1):
            for split in (ck.equal_segments, ck.pytorch_segments):
                assert ck.simulate(length, split(length, number)).peak > peak
        assert longest(peak - 1) < length  # nor does any other one level


@cache
def reversible(length: int, units: int, runs: int, last: int = 1) -> bool:
    """Whether so many units for outputs are enough, and runs of each stage.

    ``last``: 1 if these stages receive the loss's gradient, which is a number.
    """
    if length <= units + last and runs:
        return True
    return min(units, runs) > 0 and any(
        reversible(length - m, units - 1, runs, last)
        and reversible(m, units, runs - 1, 0)
        for m in range(1, length)
    )


def possible(length: int, peak: int, again: int) -> bool:
    """The same, of all schedules that there are."""
    start = (length - 1, 0, *[frozenset()] * 3), (0,) * length
    seen, stack = {start}, [start]
    while stack:
        state, runs = stack.pop()
        if state[0] < 0:
            return True
        for kind, stage in product(ck.KINDS, range(length)):
            found = after(state, (kind, stage), length, peak)
            ran = list(runs)
            ran[stage] += kind in ("forward", "record")
            following = found and (found[1], tuple(ran))
            if found and max(ran) <= again + 1 and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def test_the_longest_chain_of_a_number_of_runs():
    for peak, runs in product(range(3, 9), range(1, 5)):
        most = comb(peak + runs - 3, runs) + 1
        assert reversible(most, peak - 2, runs)
        assert not reversible(most + 1, peak - 2, runs)
        if peak < 5 and runs < 3:
            assert possible(most, peak, runs - 1)
            assert not possible(most + 1, peak, runs - 1)


def test_the_targets_of_two_sweeps_are_exact():
    for length, peak, again in cases("two_sweeps"):
        assert longest(peak) < length  # one level is not enough
        assert reversible(length, peak - 2, again + 1)
        assert not reversible(length, peak - 3, again + 1)


@pytest.mark.parametrize("n", range(2, 12))
def test_square_root_solution_is_exact(n):
    run = ck.simulate(n * n, solutions.square_root(n * n))
    assert (run.peak, run.extra_runs) == (2 * n, n * n - n)


@pytest.mark.parametrize("m", range(2, 10))
def test_shrinking_solution_is_exact(m):
    length = m * (m + 1) // 2
    run = ck.simulate(length, solutions.shrinking(length))
    assert (run.peak, run.extra_runs) == (m + 2, length)


@pytest.mark.parametrize("length", range(4, 12))
def test_forget_solution_is_exact(length):
    run = ck.simulate(length, solutions.forget(length))
    assert (run.peak, run.extra_runs) == (4, length * (length - 1) // 2)


@pytest.mark.parametrize("name", ["forget", "remember"])
def test_no_lower_peak_is_possible(name):
    for length, peak, extra in cases(name):
        if length < 6:
            assert fewest_extra_runs(length, peak - 1) == (
                inf if name == "forget" else 2
            )
            assert fewest_extra_runs(length, peak) <= extra


def fewest_extra_runs(length: int, peak: int) -> float:
    """Of all schedules of equal stages, by Dijkstra's algorithm."""
    names = [
        ck.Action(kind, stage) for kind in ck.KINDS for stage in range(length)
    ]
    start = (length - 1, 0, frozenset(), frozenset(), frozenset())
    best, order = {start: 0}, count()
    queue = [(0, next(order), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state[0] < 0:
            return cost
        for action in names:
            found = after(state, action, length, peak)
            if found and cost + found[0] < best.get(found[1], inf):
                best[found[1]] = cost + found[0]
                heapq.heappush(queue, (cost + found[0], next(order), found[1]))
    return inf


def after(state, action, length, peak):
    """Extra runs and the state after an action, or None: written anew."""
    turn, value, kept, tapes, ran = state
    kind, i = action
    held = {b for tape in tapes for b in (tape, tape + 1)}
    there = i in kept | held | {0, value}
    gradient = turn < length - 1

    def alive(*more):
        return len({*kept, *held, *more} - {0, None}) + gradient

    if kind in ("forward", "record"):
        if not there or i > turn or i in tapes or alive(i, i + 1) > peak:
            return None
        tapes |= {i} if kind == "record" else set()
        return (i in ran), (turn, i + 1, kept, tapes, ran | {i})
    if kind == "keep":
        if i == 0 or i in kept or not there:
            return None
        return 0, (turn, value, kept | {i}, tapes, ran)
    if kind == "drop":
        return (
            (0, (turn, value, kept - {i}, tapes, ran)) if i in kept else None
        )
    if i != turn or i not in tapes or alive() + 1 > peak:
        return None
    return 0, (turn - 1, None, kept, tapes - {i}, ran)


def test_better_than_asked_is_said():
    def fewer(length):  # two tapes at both ends
        schedule = [f"forward {i}" for i in range(length - 2)]
        schedule += [f"record {length - 2}", f"record {length - 1}"]
        schedule += [f"backward {length - 1}", f"backward {length - 2}"]
        for stage in reversed(range(2, length - 2)):
            schedule += [f"forward {i}" for i in range(stage)]
            schedule += [f"record {stage}", f"backward {stage}"]
        return [*schedule, "record 0", "record 1", "backward 1", "backward 0"]

    outcome = exercises.check_forget.judge(fewer)
    assert outcome.state == CORRECT
    assert "with 5 stages yours peaks at 4 units and runs 5 stages" in str(
        outcome
    )
    assert fewest_extra_runs(5, 4) == 5
    exact = exercises.check_forget.judge(solutions.forget)
    assert "Better" not in exact.text


KINDS_OF_SCHEDULES = {
    "generator": lambda length: (s for s in solutions.remember(length)),
    "tuple": lambda length: tuple(solutions.remember(length)),
    "lines": lambda length: "\n".join(solutions.remember(length)),
    "actions": lambda length: ck.actions(range(length)),
    "range": lambda length: range(length),
    "numbers": np.arange,
    "tensor": torch.arange,
    "pairs": lambda length: [
        tuple(action) for action in ck.actions(range(length))
    ],
}


@pytest.mark.parametrize("kind", KINDS_OF_SCHEDULES)
def test_a_schedule_in_any_form(kind):
    outcome = exercises.check_remember.judge(KINDS_OF_SCHEDULES[kind])
    assert outcome.state == CORRECT


def test_segments_in_any_form():
    def nested(length):
        n = round(length**0.5)
        for start in range(0, length - n, n):
            yield (stage for stage in range(start, start + n))
        yield from np.arange(length - n, length)

    assert exercises.check_square_root.judge(nested).state == CORRECT
    assert exercises.check_two_sweeps.judge(
        lambda length: tuple(map(tuple, solutions.two_sweeps(length)))
    ).text.startswith("Two more runs for each stage")


def test_a_schedule_without_an_end():
    def endless(length):
        yield "record 0"
        while True:
            yield "keep 1"
            yield "drop 1"

    outcome = exercises.check_remember.judge(endless)
    assert outcome.state == NOT_RIGHT
    assert "after 10000 actions" in outcome.text


def test_a_mistake_while_a_schedule_is_made():
    def broken(length):
        for stage in range(length):
            yield f"record {1 // (2 - stage)}"

    outcome = exercises.check_remember.judge(broken)
    assert "ZeroDivisionError in line 3 of your function" in outcome.text


@pytest.mark.parametrize("length", range(1, 41))
def test_sequential_peak_is_exact(length):
    for number in range(1, length + 1):
        run = ck.simulate(length, ck.pytorch_segments(length, number))
        assert solutions.sequential_peak(length, number) == run.peak


def test_other_right_answers_of_chapter_4():
    def by_hand(segments, x):
        inputs = [x]
        with torch.no_grad():
            for segment in segments:
                inputs.append(segment(inputs[-1]))
        gradient = torch.ones_like(inputs.pop())
        for segment in reversed(segments):
            x = inputs.pop().requires_grad_(len(inputs) > 0)
            segment(x).backward(gradient)
            gradient = x.grad

    def last_open(segments, x):
        for segment in segments[:-1]:
            x = checkpoint(segment, x, use_reentrant=False)
        loss = segments[-1](x).sum()
        loss.backward()
        return loss

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, segment, x, *parameters):
            ctx.segment = segment
            ctx.save_for_backward(x, *parameters)
            return segment(x)

        @staticmethod
        def backward(ctx, gradient):
            x, *parameters = ctx.saved_tensors
            inputs = x.detach().requires_grad_(), *parameters
            with torch.enable_grad():
                y = ctx.segment(inputs[0])
            return None, *torch.autograd.grad(y, inputs, gradient)

    def by_function(segments, x):
        for segment in segments:
            x = Again.apply(segment, x, *segment.parameters())
        x.sum().backward()

    def sequential(layers, x, count):
        stages = [nn.Sequential(layer, nn.ReLU()) for layer in layers]
        segments = ck.pytorch_segments(len(layers), count)
        return ck.Checkpointed(*stages, segments=segments)(x)

    def outside(layers, x, count):
        def run(x, part):
            for i in part[:-1]:
                x = layers[i](x).relu()
            return layers[part[-1]](x)

        for part in ck.equal_segments(len(layers), count):
            x = checkpoint(run, x, part, use_reentrant=False).relu()
        return x

    def recursive(step, batch):
        try:
            step(batch)
            fits = True
        except torch.OutOfMemoryError:
            fits = False
            if batch < 2:
                raise
        return batch if fits else recursive(step, batch // 2)

    for answer in (by_hand, last_open, by_function):
        assert exercises.check_segment_step.judge(answer).state == CORRECT
    for answer in (sequential, outside):
        assert exercises.check_same_network.judge(answer).state == CORRECT
    assert exercises.check_survive.judge(recursive).state == CORRECT


# Chapter 6: the solutions against PyTorch and the room


# The lab's repairs: what the broken loops really cost


def autocast_step(name):
    """A step's peak above its start, and autocast in its backward pass."""
    model, optimizer, x, y = exercises.check_backward_outside.cases[0].make()
    seen = []

    def watch(module, args, output):
        output.register_hook(
            lambda grad: seen.append(torch.is_autocast_enabled("cpu"))
        )

    model.register_forward_hook(watch)
    with PeakTracker(model, optimizer, x, y) as tracker:
        name.backward_outside(model, optimizer, x, y)
    return tracker.peak - tracker.start, seen


def test_backward_under_autocast_keeps_the_copies():
    broken, inside = autocast_step(stubs)
    mended, outside = autocast_step(solutions)
    assert inside == [True]
    assert outside == [False]
    assert broken > mended


def test_backward_under_autocast_is_right_without_an_island():
    updates = []
    for name in (stubs, solutions):
        torch.manual_seed(0)
        model = models.mlp(inputs=4, width=8, depth=2, outputs=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        name.backward_outside(model, optimizer, x, y)
        updates.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *updates))


def test_a_block_with_a_block_in_it_keeps_the_copies():
    nested = next(
        answer
        for answer, words in wrong.ANSWERS["backward_outside"]
        if "still open" in words
    )
    still, inside = autocast_step(SimpleNamespace(backward_outside=nested))
    mended, _ = autocast_step(solutions)
    assert inside == [False]
    assert still > mended


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_loops_are_not_under_autocast_but_for_the_loss(dtype, scaled):
    args = checker("clipped_amp_step").cases[0].make()
    model, optimizer, scaler, *batch, _ = args
    forward, backward = [], []

    def under():
        return (
            torch.is_autocast_enabled("cpu")
            and torch.get_autocast_dtype("cpu"),
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
        )[0]

    model.register_forward_pre_hook(lambda *_: forward.append(under()))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: backward.append(under()))
    two = [tuple(batch), tuple(batch)]
    exercises.loops.step(
        model, optimizer, scaler, two, 1.0, end="", dtype=dtype, scaled=scaled
    )
    assert forward == [dtype or False] * 2
    assert backward == [False] * 2 * len(list(model.parameters()))
    assert (scaler._scale is None) == (not scaled)


@pytest.mark.parametrize(
    ("scale", "weight"),
    [(65536.0, 1), (32768.0, 2), (16384.0, 4), (131072.0, 0.5)],
)
def test_a_second_scaler_gives_its_loss_another_weight(scale, weight):
    model, _, scaler, x, y = checker("two_losses").cases[0].make()

    def grads(*losses):
        sums = [0.0 * p.detach() for p in model.parameters()]
        for factor, loss in losses:
            found = torch.autograd.grad(
                loss, list(model.parameters()), retain_graph=True
            )
            sums = [a + factor * b for a, b in zip(sums, found, strict=True)]
        return torch.cat([s.flatten() for s in sums])

    with torch.autocast("cpu", torch.float16):
        logits = model(x)
        main = F.cross_entropy(logits, y)
        auxiliary = logits.float().square().mean()
    expected = grads((1, main), (weight, auxiliary))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    scaler = torch.amp.GradScaler("cpu", scale)
    stubs.two_losses(model, optimizer, scaler, x, y)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (before - after - expected).norm() < 0.01 * expected.norm()


def test_steps_in_one_block_read_stale_copies():
    def losses(blocks, steps):
        torch.manual_seed(0)
        model = models.mlp(inputs=4, width=8, depth=2, outputs=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        for _ in range(blocks):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(steps):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield loss.item()

    assert len(set(losses(1, 5))) == 1
    assert len(set(losses(5, 1))) == 5


def test_a_scaler_under_bf16_changes_nothing_until_it_overflows():
    check = exercises.check_train_step
    top, usual = check.cases[:2]
    broken = check.see(stubs.train_step, usual).parts
    right = check.see(solutions.train_step, usual).parts
    name = "update of the parameters"
    assert torch.equal(broken[name], right[name])
    assert not check.see(stubs.train_step, top).parts[name].any()
    assert check.see(solutions.train_step, top).parts[name].any()


def test_fp16_without_a_scaler_loses_half_of_the_update():
    check = exercises.check_train_step
    small = next(case for case in check.cases if "small" in case.told)

    name = "update of the parameters"
    right = check.see(solutions.train_step, small).parts[name]
    lost = check.see(wrong.ANSWERS["train_step"][1][0], small).parts[name]
    assert 0.3 < (right - lost).norm() / right.norm() < 0.8


def test_other_right_answers_of_chapter_6():
    def by_torch(x, exponent_bits, fraction_bits):
        kind = precision.Format("", exponent_bits, fraction_bits, 0, None)
        return torch.tensor(kind.round(x))

    def by_loop(gradients, largest, smallest):
        sizes, scale = gradients.abs().double(), 1.0
        while sizes.max() * scale > largest:
            scale /= 2
        while sizes.max() * scale * 2 <= largest:
            scale *= 2
        lost = (sizes > 0) & (sizes * scale <= smallest / 2)
        return [torch.tensor(scale), lost.sum() / (sizes > 0).sum()]

    def shifted(x, noise):
        bits = x.view(torch.int32) + noise
        return (bits >> 16 << 16).view(torch.float32)

    def compared(x, noise):
        bits = x.view(torch.int32)
        below = (bits & -65536).view(torch.float32)
        above = ((bits & -65536) + 65536).view(torch.float32)
        return torch.where((bits & 65535) > noise, above, below)

    def apart(model, optimizer, scaler, x, y):
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
            main = F.cross_entropy(logits, y)
        auxiliary = logits.float().square().mean()
        scaler.scale(auxiliary).backward(retain_graph=True)
        scaler.scale(main).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()

    def around_loss(model, optimizer, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def disabled(model, optimizer, scaler, x, y, dtype):
        if dtype == torch.bfloat16:
            scaler = torch.amp.GradScaler("cpu", enabled=False)
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def uncached(model, optimizer, x, y):
        cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with cast:
            loss = F.cross_entropy(model(x), y)
            with torch.autocast("cpu", enabled=False):
                loss.backward()
                optimizer.step()
        optimizer.zero_grad()

    def scaled_norm(model, optimizer, scaler, x, y, max_norm):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        norm = max_norm * scaler.get_scale()
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def of_one_scale(model, optimizer, scaler, x, y):
        second = torch.amp.GradScaler("cpu", scaler.get_scale())
        main, auxiliary = wrong.both_losses(model, x, y)
        scaler.scale(main).backward(retain_graph=True)
        second.scale(auxiliary).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def by_the_package(model, optimizer, scaler, x, y, dtype):
        of = {torch.bfloat16: ("bf16", None), torch.float16: ("fp16", scaler)}
        name, scaler = of[dtype]
        mixed = precision.MixedPrecision(
            optimizer, name, scaler=scaler, emulated=True
        )
        with mixed.autocast():
            loss = F.cross_entropy(model(x), y)
        mixed.backward(loss)
        mixed.step()

    for name, answer in (
        ("stochastic_round", compared),
        ("backward_outside", uncached),
        ("clipped_amp_step", scaled_norm),
        ("two_losses", of_one_scale),
        ("train_step", by_the_package),
    ):
        outcome = checker(name).judge(answer)
        assert outcome.state == CORRECT, (name, outcome)

    for name, answer in {
        "round_to": by_torch,
        "loss_scale": by_loop,
        "stochastic_round": shifted,
        "two_losses": apart,
        "backward_outside": around_loss,
        "train_step": disabled,
        "best_epoch": lambda losses: losses.index(min(losses)),
        "survives": lambda w, u, bits: np.bool_(
            solutions.survives(w, u, bits)
        ),
        "scale_history": lambda *args: torch.tensor(
            solutions.scale_history(*args)
        ),
    }.items():
        outcome = checker(name).judge(answer)
        assert outcome.state == CORRECT, (name, outcome)


# Nothing leaks, in either direction


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
