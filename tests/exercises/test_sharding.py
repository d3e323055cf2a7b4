"""The solutions of chapter 9 against the room."""

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
