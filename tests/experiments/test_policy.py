"""The experiment on a policy, with little training."""

import torch
from experiments_helpers import ran

from membudget import tabletop
from membudget_experiments import policy
from membudget_experiments.sizes import VLA_POLICY

CPU = torch.device("cpu")


def test_the_runs_differ_in_bytes_and_not_in_what_they_learn():
    runs = VLA_POLICY["tiny"]["runs"]
    rows, samples = ran(
        policy.vla_policy,
        CPU,
        shape=dict(width=8, depth=1, heads=2, patch=16),
        batch=8,
        limit=600_000,
        steps=policy.PIECES,
        rate=1e-2,
        episodes=3,
        neighbours=40,
        replayed=2,
        runs=runs,
        warm_up=0,
        repeats=1,
    )
    whole, accumulated, *others = samples
    assert rows[1]["peak"] <= 600_000 < rows[0]["peak"]
    assert 1 <= rows[1]["micro_batch"] < rows[0]["micro_batch"] == 8
    for row, sample in zip(rows, samples, strict=True):
        assert sample["peak"] == row["peak"]
    torch.testing.assert_close(
        torch.tensor(whole["losses"]),
        torch.tensor(accumulated["losses"]),
        rtol=1e-3,
        atol=0,
    )
    assert whole["losses"][-1] < whole["losses"][0]
    for sample in others:
        assert sample["peak"] is sample["losses"] is None


def test_a_record_holds_what_moved_an_episode():
    generator = torch.Generator().manual_seed(0)
    start = tabletop.scenes(5, generator)
    seen = tabletop.rollout(start, lambda now: tabletop.expert(now)[:, None])
    actions = torch.tensor(policy._actions(seen, 3))
    actions = actions.view(tabletop.HORIZON, 3, 3)
    now = start[:3]
    for action in actions:
        now = tabletop.step(now, action)
    assert now.solved.all() and torch.equal(now.gripper, seen[-1].gripper[:3])


def test_the_nearest_neighbour_of_an_example_is_itself():
    """It then does what the expert does."""
    plan = policy._nearest_neighbour(30, torch.Generator().manual_seed(0))
    now = tabletop.moments(30, torch.Generator().manual_seed(0))
    chosen = plan(now)
    for place in range(3):
        going = ~now.solved[:, None]
        expert = tabletop.expert(now)
        arrived = tabletop.step(now, chosen[:, place] * going)
        now = tabletop.step(now, expert)
        assert torch.equal(arrived.gripper, now.gripper)
