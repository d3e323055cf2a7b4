"""The solutions of chapter 7 and lab 4 against the room."""

import pytest
import torch

from membudget import exercises, sharding
from membudget.exercises import sharding as checkers


@pytest.mark.parametrize("stage", sharding.STAGES)
@pytest.mark.parametrize(("count", "ranks"), [(4000, 4), (7_500_000_000, 64)])
def test_rank_bytes_are_those_of_the_paper(count, ranks, stage):
    states = sharding.zero_states(count, ranks, stage)
    assert checkers.rank_bytes(count, ranks, stage) == (
        states.parameters,
        states.gradients,
        states.optimizer,
    )


def test_stored_rows_are_those_of_fsdp():
    for length, ranks in ((10, 4), (3, 8), (7, 1)):
        own = [len(part) for part in torch.empty(length).chunk(ranks)]
        own += [0] * (ranks - len(own))
        for rank in range(ranks):
            found = checkers.stored_rows(length, ranks, rank)
            assert found == (own[rank], own[0])


@pytest.mark.parametrize("case", exercises.check_shard_bytes.cases)
def test_shard_bytes_are_those_of_the_room(case):
    for shapes, ranks, rank in case.make():
        unit = sharding.Unit("", tuple(shapes))
        held = sharding.rank_states([unit], ranks, rank)
        assert checkers.shard_bytes(shapes, ranks, rank) == (
            held.parameters,
            held.gradients,
            held.optimizer,
        )


def test_what_is_said_about_7_5_billion():
    totals = [
        sum(checkers.rank_bytes(7_500_000_000, 64, stage)) / 1e9
        for stage in sharding.STAGES
    ]
    assert [round(total, 1) for total in totals] == [120, 31.4, 16.6, 1.9]
    assert "120, 31.4, 16.6 and 1.9 GB" in exercises.check_rank_bytes.shown


def test_what_is_said_about_the_ends_of_the_stages():
    for stage, whole in (("ddp", 16), ("zero-1", 4), ("zero-2", 2)):
        n = 10**9
        fits = checkers.fewest_ranks(n, stage, whole * n, 0)
        assert (fits is None) == (stage != "ddp")
        assert checkers.fewest_ranks(n, stage, whole * n + n // 16, 0)
