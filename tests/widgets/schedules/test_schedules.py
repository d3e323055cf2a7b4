"""The game of schedules in Python: its levels, their pars and its traits."""

import random
from functools import cache
from itertools import pairwise
from math import inf

import pytest
import torch
from kind_schedules import NESTED, nested, platinum, spans
from schedules_cases import random_segments
from traitlets import TraitError

from membudget.checkpointing import (
    actions,
    equal_segments,
    peak_of_segments,
    profile,
    simulate,
)
from membudget.checkpointing.tape import SIZES
from membudget.models import Block
from membudget.schedules import (
    binomial_segments,
    longest_chain,
    optimal_segments,
)
from membudget.widgets import Schedules
from membudget.widgets.schedules import (
    ATTENTION,
    BOSS,
    BUDGET,
    LENGTHS,
    LEVELS,
    MLP,
    ONE_LEVEL,
    TIMES,
    level_of,
)
from tests.soak import SOAK

PARS = {
    9: (7, 6, 5, 5),
    12: (8, 7, 6, 5),
    16: (8, 7, 6, 6),
    20: (9, 8, 7, 6),
    24: (10, 9, 8, 6),
    36: (12, 10, 9, 7),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_pars(length):
    """Equal segments win bronze, those of :func:`binomial_segments` silver,
    and nothing in which a stage runs only twice wins gold."""
    medals = level_of(length).medals
    assert tuple(medal.peak for medal in medals) == PARS[length]
    peaks = [peak_of_segments(length, k) for k in range(1, length + 1)]
    equal = equal_segments(length, 1 + peaks.index(min(peaks)))
    game = Schedules(length, equal)
    assert game.medals()[0] == "bronze"
    assert (game.medals() == ["bronze"]) == (length >= 16)
    game.segments = binomial_segments(length, 2)
    assert game.medals() == ["bronze", "silver"]
    assert longest_chain(medals[2].peak, runs=2) < length


@pytest.mark.parametrize("level", LEVELS)
def test_each_medal_is_harder_than_the_one_before(level):
    """What wins it wins all before it, and something wins these alone."""
    medals, rng = level_of(level).medals, random.Random(0)
    for easy, hard in pairwise(medals):
        assert hard.peak <= easy.peak and hard.extra <= easy.extra
        assert (hard.peak, hard.extra) != (easy.peak, easy.extra)
    game, won = Schedules(level), set()
    for game.segments in plans(level, rng):
        won.add(len(game.medals()))
    assert won == set(range(len(medals) + 1))


def plans(level, rng):
    """The best for each medal, and these with more and more segments."""
    found = level_of(level)
    count = len(found.stages)
    best = [optimal_segments(found.stages, m.peak) for m in found.medals]
    for plan in [*best, *([ONE_LEVEL] if level == BOSS else [])]:
        given = spans(plan)
        yield plan
        for _ in range(40):
            first = rng.randrange(count)
            more = (first, rng.randrange(first, count))
            if not any(crosses(more, span) for span in given):
                given.append(more)
                yield nested(count, given)


def crosses(one, other):
    (a, b), (c, d) = sorted([one, other])
    return a < c <= b < d


@pytest.mark.parametrize("level", LEVELS)
def test_the_best_schedule_wins_each_medal(level):
    stages, points, medals = level_of(level)
    for rank, medal in enumerate(medals, 1):
        best = optimal_segments(stages, medal.peak)
        game = Schedules(level, best)
        assert game.run().extra_time <= medal.extra
        assert len(game.medals()) >= rank
    assert (best_of := (game.run().peak, game.run().extra_time)) in points
    assert best_of == (medals[-1].peak, medals[-1].extra)


def test_the_stages_of_the_boss_are_those_of_gpt2():
    with torch.device("meta"):
        block, x = Block(768, heads=12), torch.empty(1, 1024, 768)
    stages = profile(*block.halves(), x=x)
    third = 2 * x.numel() * 768 / 3
    for stage, written in zip(stages, (ATTENTION, MLP), strict=True):
        for name in SIZES:
            size, units = getattr(stage, name), getattr(written, name)
            assert size / x.numel() / 4 == pytest.approx(units, abs=0.02), name
        for name in TIMES:
            assert getattr(stage, name) / third == getattr(written, name)


@pytest.mark.parametrize("level", LEVELS)
def test_platinum_can_be_won(level):
    game = Schedules(level, platinum(level))
    assert game.medals()[-1] == "platinum"
    assert "platinum" in game.sentence()
    assert Schedules(level).medals() == []
    assert "no medal" in Schedules(level).sentence()


@cache
def one_level(start, held):
    """The least extra time of the boss's stages from ``start`` on, without
    segments in segments, while so many units are held before them."""
    stages = level_of(BOSS).stages
    if start == len(stages):
        return 0
    best, held = inf, held + (start > 0)  # its input
    inner = time = worst = again = 0
    for last, stage in enumerate(stages[start:], start):
        more, gradient = last - start, last < len(stages) - 1
        forward = held + (more > 0) + 1 + stage.forward_workspace
        inner += stage.inner
        tapes = held + inner + more
        recorded = tapes + 1 + stage.record_workspace
        early = tapes + 1 + stage.recompute_workspace + gradient
        back = tapes + gradient + stage.backward_workspace
        if not more and max(recorded, back) <= BUDGET:  # it keeps its tape
            best = one_level(last + 1, tapes)
        if max(worst, forward, again + gradient, early, back) <= BUDGET:
            extra = time + stage.recompute_time
            best = min(best, extra + one_level(last + 1, held))
        worst, again = max(worst, forward, back), max(again, recorded)
        time += stage.time
    return best


def test_the_boss():
    stages = level_of(BOSS).stages
    forward = sum(stage.time for stage in stages)
    flat = simulate(stages, ONE_LEVEL)
    best = simulate(stages, platinum(BOSS))
    assert len(stages) == 24
    assert simulate(stages, list(range(24))).peak == 198
    assert max(flat.peak, best.peak) <= BUDGET
    assert f"{flat.extra_time / forward:.3f}" == "0.818"
    assert f"{best.extra_time / forward:.3f}" == "0.799"
    assert one_level(0, 0) == flat.extra_time
    extras = [medal.extra for medal in level_of(BOSS).medals]
    assert extras == [1.5 * forward, forward, flat.extra_time, best.extra_time]


@pytest.mark.parametrize("holds", [(0,), (1,), (0, 1)])
def test_no_output_is_made_while_the_old_one_is_alive(holds):
    """``holds``: whether a tape holds the stage's input, its output."""
    rng = random.Random(4)
    for _ in range(5000 if SOAK else 300):
        length = rng.randint(1, 14)
        segments = random_segments(rng, 0, length, rng.random())
        kept, tapes = set(), set()
        for kind, stage in actions(segments, length):
            if kind in ("forward", "record"):
                on_tape = {tape + edge for tape in tapes for edge in holds}
                assert stage + 1 not in kept | on_tape, segments
            changes = {"keep": kept.add, "drop": kept.remove}
            changes |= {"record": tapes.add, "backward": tapes.remove}
            changes.get(kind, bool)(stage)


def test_a_level_takes_other_segments_along():
    game = Schedules(9, NESTED)
    assert game.run().peak == 5
    game.level = 12
    assert game.segments == list(range(12))
    game.level, game.segments = 24, equal_segments(24, 4)
    game.level = BOSS  # of as many stages
    assert game.segments == equal_segments(24, 4)
    game.set_state({"level": 9, "segments": NESTED})
    assert (game.level, game.segments) == (9, NESTED)
    assert repr(game) == f"Schedules(9, {NESTED})"


def test_segments_are_plain_lists():
    game = Schedules(9, (range(5), [5, (6, 7)], 8))
    assert game.segments == [[0, 1, 2, 3, 4], [5, [6, 7]], 8]


def test_segments_of_another_level_are_refused():
    with pytest.raises(TraitError, match="use 0 to 11, each once, in order"):
        Schedules(12, NESTED)
