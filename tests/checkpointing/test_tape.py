"""The tape machine, against a second one and by what must always hold."""

import dataclasses
import random

import pytest
from checkpointing_helpers import random_segments
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget import checkpointing
from membudget.checkpointing import (
    KINDS,
    PARTS,
    Action,
    ImpossibleAction,
    Stage,
    actions,
    equal_segments,
    no_segments,
    simulate,
)

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


def test_a_kept_boundary_counts_until_it_is_dropped():
    run = simulate(
        2,
        """
        forward 0
        keep 1
        record 1
        backward 1
        record 0
        drop 1
        backward 0
        """,
    )
    assert [m.parts for m in run.moments[:4]] == [
        (0, 1, 0, 0, 0),
        (1, 0, 0, 0, 0),
        (1, 0, 1, 0, 0),  # on the tape, too, but counted once
        (1, 0, 1, 0, 1),
    ]
    assert run.moments[3].after == 2  # kept, and the gradient
    # the tape of stage 0 holds the same boundary
    assert [m.live for m in run.moments[4:]] == [2, 2, 3]


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


def test_where_a_recomputation_ends_its_output_is_not_there():
    """Nothing reads it: a drop between does not count it."""
    stage = Stage(holds_output=False, recompute_workspace=-1)
    run = simulate([stage] * 3, [0, [1, [2]]])
    drop = [m for m in run.moments if str(m.action) == "drop 2"]
    before = run.moments[run.moments.index(drop[0]) - 1]
    assert str(before.action) == "record 2"
    assert drop[0].live <= before.live
    assert drop[0].parts[PARTS.index("value")] == 0


def test_a_view_is_where_its_input_is():
    view = Stage(output=0, holds_input=False, holds_output=False)
    run = simulate([Stage(output=8), view, Stage(output=8)], [0, 1, 2])
    assert [m.live for m in run.moments[:3]] == [8, 8, 16]
    assert run.moments[2].parts == (0, 0, 16, 0, 0)  # not 24
    kept = simulate(
        [Stage(output=8), view, Stage(output=8)],
        "forward 0\nkeep 1\nforward 1\nkeep 2\nrecord 2\nbackward 2\n"
        "drop 2\nrecord 1\nbackward 1\nrecord 0\nbackward 0",
    )
    assert kept.moments[3].parts[0] == 8  # kept twice, counted once


def test_gradients_that_are_made_stay():
    chain = [Stage(gradients=5), Stage(gradients=7)]
    run = simulate(chain, [0, 1])
    assert [m.after for m in run.moments] == [1, 2, 1 + 1 + 7, 5 + 7]
    assert run.moments[-1].parts[PARTS.index("gradients")] == 1 + 7


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

RUN = ["record 0", "record 1"]


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (["forward 2"], "action 0, forward 2: the stages are 0 to 1"),
        ([Action("keep", -1)], "action 0, keep -1: the stages are 0 to 1"),
        (
            [*RUN, "backward 1", "forward 1"],
            "action 3, forward 1: the backward pass of stage 1 is over",
        ),
        (
            [*RUN, "backward 1", "record 1"],
            "action 3, record 1: the backward pass of stage 1 is over",
        ),
        (
            ["record 1"],
            "action 0, record 1: its input, boundary 1, is not there: "
            "neither the value at work, nor kept, nor on the tape of stage 0",
        ),
        (
            ["forward 0", "forward 0", "forward 1", "forward 1"],
            "action 3, forward 1: its input, boundary 1, is not there: "
            "neither the value at work, nor kept, nor on the tape of stage 0",
        ),
        (
            ["record 0", "record 0"],
            "action 1, record 0: stage 0 has its tape already",
        ),
        (
            ["keep 0"],
            "action 0, keep 0: boundary 0 is the input, which is always there",
        ),
        (
            ["forward 0", "keep 1", "keep 1"],
            "action 2, keep 1: boundary 1 is kept already",
        ),
        (
            ["keep 1"],
            "action 0, keep 1: boundary 1, the input of stage 1, is not there",
        ),
        (["drop 0"], "action 0, drop 0: boundary 0 is not kept"),
        (
            ["forward 0", "keep 1", "drop 1", "drop 1"],
            "action 3, drop 1: boundary 1 is not kept",
        ),
        (
            [*RUN, "backward 0"],
            "action 2, backward 0: the gradient stands before stage 1, "
            "which goes backward first",
        ),
        (
            [*RUN, "backward 1", "backward 1"],
            "action 3, backward 1: the backward pass of stage 1 is over",
        ),
        (
            ["record 0", "forward 1", "backward 1"],
            "action 2, backward 1: stage 1 has no tape: record it first",
        ),
        (
            [*RUN, "backward 1"],
            "at its end (after 3 actions): the backward pass of stage 0 is "
            "missing",
        ),
        (
            [],
            "at its end (after 0 actions): the backward pass of stage 1 is "
            "missing",
        ),
    ],
)
def test_an_impossible_action_is_refused_with_a_sentence(schedule, sentence):
    with pytest.raises(ImpossibleAction) as error:
        simulate(2, schedule)
    assert str(error.value) == sentence
    after = sentence.startswith("at its end")
    assert error.value.index == len(schedule) - (not after)


def test_a_schedule_that_drops_what_it_needs_is_refused():
    """The value has moved on, so the checkpoint was the only copy."""
    needs = ["forward 0", "keep 1", "forward 1", "drop 1", "record 1"]
    with pytest.raises(ImpossibleAction, match="boundary 1, is not there"):
        simulate(2, needs)
    needs.remove("drop 1")
    simulate(2, [*needs, "backward 1", "record 0", "backward 0"])


@pytest.mark.parametrize("chain", [0, [], ()])
def test_an_empty_chain_is_refused(chain):
    with pytest.raises(ValueError, match=r"^the chain is empty: it needs at"):
        simulate(chain, [])


@pytest.mark.parametrize("chain", [2.0, True, None])
def test_a_chain_is_stages_or_their_number(chain):
    with pytest.raises(TypeError, match=r"^the chain is .*: use a list of st"):
        simulate(chain, [0, 1])


def test_a_chain_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"^the chain holds 2: use Stage\("):
        simulate([Stage(), 2], [0, 1])


# A second machine --------------------------------------------------------


class Second:
    """The cost model once more: who holds what.

    A holder ("value", ("kept", i) or ("tape", i)) holds storages, which are
    boundaries and ("inner", i); what has a holder is alive.
    """

    def __init__(self, chain):
        self.chain = chain
        self.storage = [0]
        for i, stage in enumerate(chain):
            self.storage.append(i + 1 if stage.output else self.storage[i])
        self.holders = {"value": {0}}
        self.done, self.left, self.time = len(chain), 0, 0
        self.runs = [0] * len(chain)

    def alive(self):
        return set().union(*self.holders.values()) | {0}

    def bytes(self):
        total = self.left
        for thing in self.alive() - {0}:
            boundary = isinstance(thing, int)
            stage = self.chain[thing - 1 if boundary else thing[1]]
            total += stage.output if boundary else stage.inner
        if 0 < self.done < len(self.chain):
            total += self.chain[self.done - 1].gradient
        return total

    def can(self, kind, i):
        if not 0 <= i < len(self.chain):
            return False
        there = self.storage[i] in self.alive()
        if kind in ("forward", "record"):
            taped = kind == "record" and ("tape", i) in self.holders
            return i < self.done and there and not taped
        if kind == "keep":
            return i > 0 and there and ("kept", i) not in self.holders
        if kind == "drop":
            return ("kept", i) in self.holders
        return i == self.done - 1 and ("tape", i) in self.holders

    def do(self, kind, i, before_backward):
        """Returns the bytes at the worst moment."""
        stage, storage = self.chain[i], self.storage
        if kind == "keep":
            self.holders["kept", i] = {storage[i]}
            return self.bytes()
        if kind == "drop":
            worst = self.bytes()
            del self.holders["kept", i]
            return worst
        if kind == "backward":
            self.holders.pop("value", None)
            worst = self.bytes() + (
                stage.again_workspace
                if self.runs[i] > 1
                else stage.backward_workspace
            )
            del self.holders["tape", i]
            self.done, self.left = i, self.left + stage.gradients
            self.time += stage.backward_time
            return worst
        workspace, time = stage.forward_workspace, stage.time
        ends = kind == "record" and self.runs[i] and before_backward
        if kind == "record":
            workspace = stage.record_workspace
            tape = self.holders["tape", i] = {("inner", i)}
            tape |= {storage[i]} if stage.holds_input else set()
            tape |= {storage[i + 1]} if stage.holds_output else set()
        if ends:
            workspace, time = stage.recompute_workspace, stage.recompute_time
        self.holders["value"] = {storage[i], storage[i + 1]}
        worst = self.bytes() + workspace
        self.holders["value"] = set() if ends else {storage[i + 1]}
        self.runs[i] += 1
        self.time += time
        return worst


def second(chain, schedule):
    """Peak, runs and time; or the index of what cannot be done."""
    machine, peak = Second(chain), 0
    for index, (kind, stage) in enumerate(schedule):
        if not machine.can(kind, stage):
            return index
        later = [k for k, _ in schedule[index + 1 :] if k[0] in "frb"]
        worst = machine.do(kind, stage, later[:1] == ["backward"])
        peak = max(peak, worst)
    if machine.done:
        return len(schedule)
    return peak, tuple(machine.runs), machine.time


def first(chain, schedule):
    """The same of the machine under test."""
    try:
        run = simulate(chain, schedule)
    except ImpossibleAction as error:
        return error.index
    return run.peak, run.runs, run.time


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
    for _ in range(1500):
        length = rng.randint(1, 6)
        chain = random_stages(rng, length)
        schedule = random_schedule(rng, length)
        expected = second(chain, schedule)
        assert first(chain, schedule) == expected, schedule
        possible += not isinstance(expected, int)
        refused += isinstance(expected, int)
    assert possible > 300
    assert refused > 300


# What always holds -------------------------------------------------------


@st.composite
def cases(draw):
    """Stages, and a schedule that is possible."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    length = draw(st.integers(1, 7))
    chain = random_stages(rng, length)
    schedule = random_schedule(rng, length)
    if isinstance(second(chain, schedule), int):
        schedule = actions(random_segments(rng, length))
    return chain, schedule


@settings(max_examples=150)
@given(cases())
def test_the_peak_is_no_less_than_the_largest_need(case):
    """Of each stage: its tape, the gradient and the workspace of backward."""
    chain, schedule = case
    run = simulate(chain, schedule)
    homes = [0]
    for i, stage in enumerate(chain):
        homes.append(i + 1 if stage.output else homes[i])
    left = 0
    for i in reversed(range(len(chain))):
        stage = chain[i]
        held = {homes[i]} if stage.holds_input else set()
        held |= {homes[i + 1]} if stage.holds_output else set()
        need = left + stage.inner
        need += sum(chain[b - 1].output for b in held if b)
        need += stage.gradient if i < len(chain) - 1 else 0
        need += min(stage.backward_workspace, stage.again_workspace)
        left += stage.gradients
        assert run.peak >= need
    assert run.peak == max(moment.live for moment in run.moments)
    assert run.moments[run.peak_moment].live == run.peak
    assert all(m.live < run.peak for m in run.moments[: run.peak_moment])
    assert run.moments[-1].after >= left  # what is kept to the end, too
    assert len(run.moments) == len(schedule)


@settings(max_examples=150)
@given(cases(), st.data())
def test_another_run_never_lowers_the_extra_runs(case, data):
    """A stage runs once more, just before it runs, where its input stays."""
    chain, schedule = case
    before = simulate(chain, schedule)
    places = []
    for index, (kind, stage) in enumerate(schedule):
        more = [*schedule[:index], Action("forward", stage)]
        more += schedule[index:]
        runs = kind in ("forward", "record")
        if runs and not isinstance(second(chain, more), int):
            places.append((stage, more))
    stage, more = data.draw(st.sampled_from(places))
    after = simulate(chain, more)
    assert after.extra_runs == before.extra_runs + 1
    assert after.runs[stage] == before.runs[stage] + 1
    assert sum(m.extra for m in after.moments) == after.extra_runs
    units = [Stage()] * len(chain)  # of which no run ends early
    if isinstance(second(units, schedule), int):
        return
    if isinstance(second(units, more), int):
        return
    before, after = simulate(units, schedule), simulate(units, more)
    assert after.peak >= before.peak
    assert after.time == before.time + 1
    assert after.extra_time == before.extra_time + 1


@settings(max_examples=150)
@given(cases(), st.data())
def test_what_is_kept_and_not_used_changes_no_run(case, data):
    chain, schedule = case
    before = simulate(chain, schedule)
    stage = data.draw(st.integers(0, len(chain) - 1))
    start = data.draw(st.integers(0, len(schedule)))
    end = data.draw(st.integers(start, len(schedule)))
    more = [
        *schedule[:start],
        Action("keep", stage),
        *schedule[start:end],
        Action("drop", stage),
        *schedule[end:],
    ]
    touched = {Action("keep", stage), Action("drop", stage)}
    if isinstance(second(chain, more), int) or touched & set(schedule):
        return
    after = simulate(chain, more)
    assert (after.runs, after.time) == (before.runs, before.time)
    assert after.extra_time == before.extra_time
    assert after.peak >= before.peak


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_time_is_linear_in_the_runs(length):
    rng = random.Random(length)
    chain = random_stages(rng, length)
    for segments in (no_segments(length), equal_segments(length, 1)):
        run = simulate(chain, segments)
        again = sum(
            stage.recompute_time if i == length - 1 else stage.time
            for i, stage in enumerate(chain)
        )
        assert run.extra_time == again * (run.extra_runs > 0)
        assert run.time == run.extra_time + sum(
            stage.time + stage.backward_time for stage in chain
        )


def test_recomputed_tapes_are_told_apart():
    """The last stage keeps its tape; the others' are recomputed."""
    run = simulate(3, [[0, 1], 2])
    assert [(str(m.action), m.recomputed) for m in run.moments[2:]] == [
        ("record 2", 0),
        ("backward 2", 0),
        ("record 0", 1),
        ("record 1", 2),
        ("backward 1", 2),
        ("backward 0", 1),
    ]
    plain = simulate(3, [0, 1, 2])
    assert not any(moment.recomputed for moment in plain.moments)
    for moment in simulate(16, [[0, 1, 2, 3], *range(4, 16)]).moments:
        assert 0 <= moment.recomputed <= moment.part("tapes")


def test_results_cannot_be_changed():
    made = [k for k in vars(checkpointing).values() if isinstance(k, type)]
    made = [k for k in made if dataclasses.is_dataclass(k)]
    changing = [k for k in made if not k.__dataclass_params__.frozen]
    assert made and changing == []
