"""The solutions of chapter 7 against the room."""

import pytest

from membudget import exercises, sharding
from membudget.exercises import sharding as checkers


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


def test_what_is_said_about_the_ends_of_the_stages():
    for stage, whole in (("ddp", 16), ("zero-1", 4), ("zero-2", 2)):
        n = 10**9
        fits = checkers.fewest_ranks(n, stage, whole * n, 0)
        assert (fits is None) == (stage != "ddp")
        assert checkers.fewest_ranks(n, stage, whole * n + n // 16, 0)
