"""The tape machine, by hand and against a second one."""

import dataclasses
import random

import pytest
from checkpointing_helpers import random_segments

from membudget import checkpointing
from membudget.checkpointing import (
    KINDS,
    Action,
    ImpossibleAction,
    Stage,
    actions,
    simulate,
)
from tests.soak import examples

# By hand -----------------------------------------------------------------


def test_every_moment_of_a_short_schedule():
    """Three layers, the first two of them one segment; in units."""
    run = simulate(3, [[0, 1], 2])
    assert [
        (str(m.action), *m.parts, m.extra, m.after) for m in run.moments
    ] == [
        # kept, value, tapes, gradients, workspace; again; after
        ("forward 0", 0, 1, 0, 0, 0, False, 1),
        ("forward 1", 0, 2, 0, 0, 0, False, 1),
        ("record 2", 0, 0, 2, 0, 0, False, 2),
        ("backward 2", 0, 0, 2, 0, 1, False, 1),
        ("record 0", 0, 0, 1, 1, 0, True, 2),
        ("record 1", 0, 0, 2, 1, 0, True, 3),
        ("backward 1", 0, 0, 2, 1, 1, False, 2),
        ("backward 0", 0, 0, 1, 1, 1, False, 0),
    ]
    assert run.peak == 4
    assert run.peak_moment == 6
    assert run.runs == (2, 2, 1)
    assert run.extra_runs == 2
    assert run.time == 3 * 3 + 2
    assert run.extra_time == 2


def test_sizes_and_times_of_each_kind_of_run():
    """Powers of ten, so that every sum says what it is made of."""
    stage = Stage(
        output=1,
        inner=10,
        gradient=100,
        holds_input=False,
        holds_output=False,
        forward_workspace=1_000,
        record_workspace=2_000,
        recompute_workspace=3_000,
        backward_workspace=4_000,
        again_workspace=5_000,
        gradients=10_000,
        time=1,
        recompute_time=10,
        backward_time=100,
    )
    run = simulate([stage] * 2, [[0, 1]])
    assert [m.parts for m in run.moments] == [
        (0, 1, 0, 0, 1_000),
        (0, 2, 0, 0, 1_000),
        (0, 1, 10, 0, 2_000),  # is followed by another run
        (0, 2, 20, 0, 3_000),  # is the last of the recomputation
        (0, 0, 20, 0, 5_000),
        (0, 0, 10, 10_100, 5_000),
    ]
    assert run.time == 1 + 1 + 1 + 10 + 100 + 100
    assert run.extra_time == 11
    plain = simulate([stage] * 2, [0, 1])
    assert [m.parts[4] for m in plain.moments] == [2_000, 2_000, 4_000, 4_000]
    assert plain.time == 202
    assert plain.moments[-1].after == 20_000


def test_what_follows_from_other_sizes():
    assert Stage() == Stage(
        output=1, gradient=1, again_workspace=1, recompute_time=1
    )
    stage = Stage(output=3, backward_workspace=4, time=5)
    assert stage.gradient == 3
    assert stage.again_workspace == 4
    assert stage.recompute_time == 5
    stage = Stage(gradient=0, again_workspace=0, recompute_time=0)
    assert stage.gradient == stage.again_workspace == 0
    assert stage.recompute_time == 0


# Impossible --------------------------------------------------------------

NOT_THERE = (
    "its input, boundary 1, is not there: neither the value at work, nor "
    "kept, nor on the tape of stage 0"
)


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ("forward 2", "the stages are 0 to 1"),
        (
            "record 0, record 1, backward 1, forward 1",
            "the backward pass of stage 1 is over",
        ),
        ("record 1", NOT_THERE),
        ("record 0, record 0", "stage 0 has its tape already"),
        ("keep 0", "boundary 0 is the input, which is always there"),
        ("forward 0, keep 1, keep 1", "boundary 1 is kept already"),
        ("keep 1", "boundary 1, the input of stage 1, is not there"),
        ("forward 0, keep 1, drop 1, drop 1", "boundary 1 is not kept"),
        (
            "record 0, record 1, backward 0",
            "the gradient stands before stage 1, which goes backward first",
        ),
        (
            "record 0, record 1, backward 1, backward 1",
            "the backward pass of stage 1 is over",
        ),
        (
            "record 0, forward 1, backward 1",
            "stage 1 has no tape: record it first",
        ),
    ],
)
def test_an_impossible_action_is_refused_with_a_sentence(schedule, why):
    schedule = schedule.split(", ")
    with pytest.raises(ImpossibleAction) as error:
        simulate(2, schedule)
    assert error.value.index == len(schedule) - 1
    assert (
        str(error.value)
        == f"action {error.value.index}, {schedule[-1]}: {why}"
    )


def test_a_stage_below_zero_is_refused():
    with pytest.raises(ImpossibleAction, match="the stages are 0 to 1"):
        simulate(2, [Action("keep", -1)])


def test_a_schedule_that_ends_too_early_is_refused():
    with pytest.raises(ImpossibleAction) as error:
        simulate(2, ["record 0", "record 1", "backward 1"])
    assert error.value.index == 3
    assert str(error.value) == (
        "at its end (after 3 actions): the backward pass of stage 0 is missing"
    )


# A second machine --------------------------------------------------------


class Second:
    """The cost model once more: who holds what.

    A holder, ("value",), ("kept", i) or ("tape", i), holds storages, which
    are boundaries and ("inner", i); what has a holder is alive.
    """

    def __init__(self, chain):
        self.chain = chain
        self.storage = [0]
        for i, stage in enumerate(chain):
            self.storage.append(i + 1 if stage.output else self.storage[i])
        self.holders = {("value",): {0}}
        self.done, self.left = len(chain), 0
        self.time = self.extra_time = 0
        self.runs = [0] * len(chain)

    def held(self, kind):
        all_of = [t for h, t in self.holders.items() if h[0] == kind]
        return set().union(*all_of) - {0}

    def bytes(self, things):
        return sum(
            self.chain[thing - 1].output
            if isinstance(thing, int)
            else self.chain[thing[1]].inner
            for thing in things
        )

    def parts(self, workspace=0):
        """Each thing counts once: kept, on a tape, or the value at work.

        And last, of those on tapes, what only recomputed ones hold.
        """
        kept, tapes, value = map(self.held, ("kept", "tape", "value"))
        gradients = self.left
        if 0 < self.done < len(self.chain):
            gradients += self.chain[self.done - 1].gradient
        once = [
            things
            for (kind, *i), things in self.holders.items()
            if kind == "tape" and self.runs[i[0]] == 1
        ]
        return (
            self.bytes(kept),
            self.bytes(value - tapes - kept),
            self.bytes(tapes - kept),
            gradients,
            workspace,
            self.bytes(tapes - kept.union(*once)),
        )

    def can(self, kind, i):
        if not 0 <= i < len(self.chain):
            return False
        there = self.storage[i] in set().union({0}, *self.holders.values())
        if kind in ("forward", "record"):
            taped = kind == "record" and ("tape", i) in self.holders
            return i < self.done and there and not taped
        if kind == "keep":
            return i > 0 and there and ("kept", i) not in self.holders
        if kind == "drop":
            return ("kept", i) in self.holders
        return i == self.done - 1 and ("tape", i) in self.holders

    def do(self, kind, i, before_backward):
        """Returns the parts at the worst moment."""
        stage, storage = self.chain[i], self.storage
        if kind == "keep":
            self.holders["kept", i] = {storage[i]}
            return self.parts()
        if kind == "drop":
            worst = self.parts()
            del self.holders["kept", i]
            return worst
        if kind == "backward":
            self.holders.pop(("value",), None)
            worst = self.parts(
                stage.again_workspace
                if self.runs[i] > 1
                else stage.backward_workspace
            )
            del self.holders["tape", i]
            self.done, self.left = i, self.left + stage.gradients
            self.time += stage.backward_time
            return worst
        self.runs[i] += 1
        again = self.runs[i] > 1
        workspace, time = stage.forward_workspace, stage.time
        ends = kind == "record" and again and before_backward
        if kind == "record":
            workspace = stage.record_workspace
            tape = self.holders["tape", i] = {("inner", i)}
            tape |= {storage[i]} if stage.holds_input else set()
            tape |= {storage[i + 1]} if stage.holds_output else set()
        if ends:
            workspace, time = stage.recompute_workspace, stage.recompute_time
        self.holders["value",] = {storage[i], storage[i + 1]}
        worst = self.parts(workspace)
        self.holders["value",] = set() if ends else {storage[i + 1]}
        self.time += time
        self.extra_time += again * time
        return worst


def second(chain, schedule):
    """Of each action the parts at its worst moment and the bytes after it;
    runs, time and that of runs again. Or the index of what cannot be done.
    """
    machine, moments = Second(chain), []
    for index, (kind, stage) in enumerate(schedule):
        if not machine.can(kind, stage):
            return index
        later = [k for k, _ in schedule[index + 1 :] if k[0] in "frb"]
        worst = machine.do(kind, stage, later[:1] == ["backward"])
        moments.append((worst, sum(machine.parts()[:-1])))
    if machine.done:
        return len(schedule)
    return moments, tuple(machine.runs), machine.time, machine.extra_time


def first(chain, schedule):
    """The same of the machine under test."""
    try:
        run = simulate(chain, schedule)
    except ImpossibleAction as error:
        return error.index
    moments = [((*m.parts, m.recomputed), m.after) for m in run.moments]
    lives = [m.live for m in run.moments]
    assert lives == [sum(m.parts) for m in run.moments]
    assert run.peak == max(lives)
    assert run.peak_moment == lives.index(run.peak)
    assert run.extra_runs == sum(m.extra for m in run.moments)
    return moments, run.runs, run.time, run.extra_time


def random_stages(rng, length):
    def size():
        return rng.choice([0, 1, 2, 3, 5, 8, 13])

    return [
        Stage(
            output=size(),
            inner=size(),
            holds_input=rng.random() < 0.5,
            holds_output=rng.random() < 0.5,
            forward_workspace=size(),
            record_workspace=size(),
            recompute_workspace=size() - 3,
            backward_workspace=size(),
            again_workspace=rng.choice([None, size()]),
            gradients=size(),
            gradient=rng.choice([None, size()]),
            time=size(),
            recompute_time=rng.choice([None, size()]),
            backward_time=size(),
        )
        for _ in range(length)
    ]


def random_schedule(rng, length):
    """Actions of random segments, some put in, taken out or exchanged."""
    schedule = actions(random_segments(rng, length))
    for _ in range(rng.randint(0, 4)):
        place = rng.randint(0, len(schedule))
        action = Action(rng.choice(KINDS), rng.randint(0, length - 1))
        change = rng.random()
        if change < 0.7:
            schedule.insert(place, action)
        elif change < 0.8:
            schedule[place : place + 1] = []
        elif change < 0.9:
            schedule[place : place + 1] = [action]
        else:
            schedule[place : place + 2] = schedule[place : place + 2][::-1]
    return schedule


def test_random_schedules_cost_the_same_in_a_second_machine():
    rng = random.Random(4)
    possible = refused = 0
    for _ in range(examples(300)):
        length = rng.randint(1, 6)
        chain = random_stages(rng, length)
        schedule = random_schedule(rng, length)
        expected = second(chain, schedule)
        assert first(chain, schedule) == expected, schedule
        possible += not isinstance(expected, int)
        refused += isinstance(expected, int)
    assert min(possible, refused) > examples(60)


def test_results_cannot_be_changed():
    made = [k for k in vars(checkpointing).values() if isinstance(k, type)]
    made = [k for k in made if dataclasses.is_dataclass(k)]
    changing = [k for k in made if not k.__dataclass_params__.frozen]
    assert made and changing == []
