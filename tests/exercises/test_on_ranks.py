"""Exercises on two ranks: against one process, and what can go wrong."""

import linecache
import time

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from membudget import exercises, sharding
from membudget.exercises import on_ranks
from membudget.exercises import sharding as checkers
from membudget.exercises.core import NOT_ATTEMPTED, NOT_RIGHT

from .judging import accepts, checker, edits, judged


@pytest.fixture
def short():
    """Who waits gets to know it soon: after many times what is needed."""
    judged("in_step", checkers.in_step)  # imports what is needed
    start = time.monotonic()
    judged("in_step", checkers.in_step)
    seconds = round(max(2, 10 * (time.monotonic() - start)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ranks, "DEADLINE", seconds)
        yield patch


# Against one process


def whole(shares):
    """What several ranks or micro-batches hold, as one batch."""
    x, y = map(torch.cat, zip(*shares, strict=True))
    return x, y


def gradient_of_all(sizes, frozen, told):
    model, shares = checkers._averaging_start(sizes, frozen)
    x, y = whole(shares)
    F.cross_entropy(model(x), y).backward()
    return checkers._gradients(model)


def steps_on_all(steps, broken):
    model, optimizer, windows = checkers._stepping_start(steps, broken)
    start, clipped = checkers._weights(model), []
    for shares in windows:
        x, y = whole(shares)
        F.cross_entropy(model(x), y).backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        clipped.append(norm > 1)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
    assert clipped[0] and not clipped[1]
    return checkers._weights(model) - start


def accumulated_by_one(count):
    model, windows = checkers._accumulating_start(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start = checkers._weights(model)
    for shares in windows:
        x, y = whole([*shares[0], *shares[1]])
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkers._weights(model) - start


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("average_gradients", gradient_of_all),
        ("weighted_average", gradient_of_all),
        ("in_step", steps_on_all),
        ("accumulate_sharded", accumulated_by_one),
    ],
)
def test_the_ranks_do_what_one_process_does_with_all_data(name, alone):
    check = checker(name)
    for case in check.cases:
        expected = alone(*case.make())
        parts = check.see(check.solution, case).parts
        assert parts
        for found in parts.values():
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# How functions get there


def test_a_function_of_a_notebook_takes_along_what_it_uses():
    source = """
import torch.distributed as dist

def mean(gradient):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()

def average_gradients(model, parameters=None):
    if parameters is None:
        parameters = [p for p in model.parameters() if p.grad is not None]
    if parameters:
        parameters[0].grad = mean(parameters[0].grad)
        average_gradients(model, parameters[1:])

def forgets(model):
    for p in model.parameters():
        dist.all_reduce(grad)
"""
    file = "/no/such/folder/büro 𝟏.py"
    entry = len(source), None, source.splitlines(True), file
    cell = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linecache.cache, file, entry)
        exec(compile(source, file, "exec"), cell)
        accepts("average_gradients", cell["average_gradients"])
        text = judged("average_gradients", cell["forgets"]).text
    assert "NameError in line 3 of your function: name 'grad'" in text


def test_other_forms_of_functions():
    step = 1.0

    def average_gradients(
        model: "no_such_name",  # noqa: F821
        times: int = 1,
        *,
        op=dist.ReduceOp.SUM,
    ) -> "None":
        def each(parameter):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op)
                parameter.grad *= step * times / dist.get_world_size()

        list(map(each, model.parameters()))

    accepts("average_gradients", average_gradients)


def test_what_cannot_travel():
    lines = (line for line in ())

    def average_gradients(model):
        return list(lines)

    outcome = judged("average_gradients", average_gradients)
    assert outcome.state == NOT_RIGHT
    assert "lines, which average_gradients uses, cannot be" in outcome.text
    assert "make anything else inside the function." in outcome.text


# Ranks that wait, fail or die


def test_who_skips_a_step_lets_the_others_wait(short):
    def in_step(model, optimizer, x, y, average):
        loss = F.cross_entropy(model(x), y)
        if not loss.isfinite():
            return
        loss.backward()
        for p in model.parameters():
            average(p.grad)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    outcome = judged("in_step", in_step)
    assert outcome.state == NOT_RIGHT
    said = f"after {on_ranks.DEADLINE} s not all ranks were done"
    assert said in outcome.text
    assert "Still there: rank 0 in line 7 of your function" in outcome.text
    short.undo()  # new ranks: they import again
    accepts("in_step", checkers.in_step)


def test_a_collective_on_one_rank(short):
    def average_gradients(model):
        if dist.get_rank() == 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)

    text = judged("average_gradients", average_gradients).text
    assert "Still there: rank 1 in line 4 of your function" in text


@pytest.mark.few(0)
def test_both_ranks_wait(short, monkeypatch):
    def average_gradients(model):
        dist.recv(torch.empty(1), 1 - dist.get_rank())

    file = "/no/such/folder/Büro – 𝟏.py"
    entry = 1, None, ["a line\n"], file
    monkeypatch.setitem(linecache.cache, file, entry)
    average_gradients.__code__ = average_gradients.__code__.replace(
        co_filename=file, co_qualname="büro"
    )
    text = judged("average_gradients", average_gradients).text
    assert "rank 0 in line 2 of your function" in text
    assert "rank 1 in line 2 of your function" in text


def test_one_rank_fails():
    def average_gradients(model):
        if dist.get_rank() == 1:
            raise ValueError("no")
        for p in model.parameters():
            dist.all_reduce(p.grad)

    text = judged("average_gradients", average_gradients).text
    assert text.startswith("on rank 1: ValueError in line 3 of your function")
    assert "The other rank waits for it in a collective." in text


def test_one_rank_fails_and_nobody_waits():
    def average_gradients(model):
        if dist.get_rank() == 1:
            raise ValueError("no")

    text = judged("average_gradients", average_gradients).text
    assert text.startswith("on rank 1: ValueError in line 3 of your function")
    assert "waits" not in text


def test_one_rank_dies():
    def average_gradients(model):
        import os
        import signal

        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    text = judged("average_gradients", average_gradients).text
    assert text.startswith("rank 0 died of signal 9 (SIGKILL).")
    accepts("average_gradients", checkers.average_gradients)


@pytest.mark.few(0)
def test_a_message_that_nobody_took_does_not_reach_the_next_function():
    def average_gradients(model):
        if dist.get_rank() == 0:
            dist.isend(torch.ones(3), 1)

    judged("average_gradients", checkers.average_gradients)
    before = on_ranks._pool().processes
    assert len(before) == on_ranks.RANKS
    assert judged("average_gradients", average_gradients).state == NOT_RIGHT
    assert not set(before) & set(on_ranks._pool().processes)
    accepts("average_gradients", checkers.average_gradients)
    assert not any(map(psutil.pid_exists, before))


def test_the_ranks_are_shared_by_right_and_wrong_answers():
    def wrong(model):
        raise ValueError("no")

    judged("average_gradients", checkers.average_gradients)
    before = on_ranks._pool().processes
    judged("weighted_average", checkers.weighted_average)
    judged("average_gradients", wrong)
    judged("accumulate_sharded", checkers.accumulate_sharded)
    assert on_ranks._pool().processes == before


def test_what_rank_0_prints_is_shown(capsys):
    def average_gradients(model):
        print("rank", dist.get_rank())
        raise NotImplementedError

    outcome = judged("average_gradients", average_gradients)
    assert outcome.state == NOT_ATTEMPTED
    assert capsys.readouterr().out == "rank 0\n"


def test_an_interrupt_ends_the_ranks(monkeypatch):
    judged("average_gradients", checkers.average_gradients)
    before = on_ranks._pool().processes

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sharding.Ranks, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exercises.check_average_gradients(checkers.average_gradients)
    assert not any(map(psutil.pid_exists, before))


# What must be told apart, and what is right as well


def test_seeds_and_modes_do_not_stay_in_the_ranks():
    def average_gradients(model):
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        torch.manual_seed(7)
        checkers.average_gradients(model)

    for fn in (average_gradients, checkers.average_gradients):
        accepts("average_gradients", fn)


RIGHT = {
    "average_gradients": """
        dist.all_reduce(p.grad) => \
        parts = list(p.grad.new_empty(dist.get_world_size(), *p.grad.shape)); \
        dist.all_gather(parts, p.grad); p.grad = torch.stack(parts).sum(0)
            all parts are gathered
        dist.all_reduce(p.grad) => \
        dist.all_reduce(p.grad, async_op=True).wait()
            nobody waits but here
        """,
    "weighted_average": """
        total = torch.tensor(samples) => counts = [None, None]; \
        dist.all_gather_object(counts, samples)
        dist.all_reduce(total) => total = torch.tensor(sum(counts))
            all counts are gathered
        """,
    "in_step": """
        loss.backward() => loss.backward(); average(loss.detach())
        norm.isfinite() => loss.isfinite()
            the mean loss decides
        """,
}


@pytest.mark.parametrize(("name", "answer", "why"), edits(RIGHT))
def test_other_right_answers(name, answer, why):
    accepts(name, answer)


def test_one_collective_for_all_gradients():
    def average_gradients(model):
        trained = [p for p in model.parameters() if p.grad is not None]
        joined = torch.cat([p.grad.flatten() for p in trained])
        dist.all_reduce(joined)
        joined /= dist.get_world_size()
        parts = joined.split([p.numel() for p in trained])
        for p, part in zip(trained, parts, strict=True):
            p.grad = part.view_as(p)

    accepts("average_gradients", average_gradients)


def test_a_step_that_all_ranks_leave_out():
    def in_step(model, optimizer, x, y, average):
        loss = F.cross_entropy(model(x), y)
        mean = loss.detach().clone()
        average(mean)
        if mean.isnan():
            return
        loss.backward()
        for p in model.parameters():
            average(p.grad)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    accepts("in_step", in_step)


def test_accumulation_in_two_loops():
    def accumulate_sharded(model, optimizer, micro_batches):
        count = len(micro_batches)
        model.set_requires_gradient_sync(False)
        for x, y in micro_batches[:-1]:
            (F.cross_entropy(model(x), y) / count).backward()
        model.set_requires_gradient_sync(True)
        x, y = micro_batches[-1]
        loss = F.cross_entropy(model(x), y, reduction="sum")
        (loss / len(x) / count).backward()
        optimizer.step()
        model.zero_grad()

    accepts("accumulate_sharded", accumulate_sharded)
