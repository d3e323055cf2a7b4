"""The solutions of chapter 7 and lab 4 against the room and one process."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from membudget import exercises, sharding
from membudget.exercises import sharding as checkers


def whole(shares):
    """What several ranks or micro-batches hold, as one batch."""
    x, y = map(torch.cat, zip(*shares, strict=True))
    return x, y


def alone(check, case):
    """What one process does with the data of all ranks."""
    start = {
        "average_gradients": gradient_of_all,
        "weighted_average": gradient_of_all,
        "in_step": steps_on_all,
        "accumulate_sharded": accumulated_by_one,
    }
    return start[check.name](*case.make())


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
    "name",
    [
        "average_gradients",
        "weighted_average",
        "in_step",
        "accumulate_sharded",
    ],
)
def test_the_ranks_do_what_one_process_does_with_all_data(name):
    check = getattr(exercises, f"check_{name}")
    for case in check.cases:
        expected = alone(check, case)
        parts = check.see(check.solution, case).parts
        assert parts
        for found in parts.values():
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


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
