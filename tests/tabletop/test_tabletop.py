"""The simulator: its rules, its expert, its pictures."""

import hashlib
from dataclasses import replace

import pytest
import torch

from membudget import tabletop
from membudget.tabletop import (
    CHUNK,
    COLOURS,
    HORIZON,
    NEAR,
    PAIRS,
    REACH,
    SIDE,
    SIDES,
    UNSEEN,
    Scenes,
)

torch.set_num_threads(1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def by_expert(scenes):
    return tabletop.expert(scenes)[:, None]


@pytest.fixture(scope="module")
def start():
    return tabletop.scenes(500, seeded())


def test_the_expert_always_succeeds(start):
    moments = tabletop.moments(500, seeded(1), PAIRS)
    for scenes in (start, moments):
        assert not scenes.solved.any()
        assert tabletop.rollout(scenes, by_expert)[-1].solved.all()


def test_it_succeeds_in_ample_time(start):
    """Half of the steps is left for mistakes."""
    seen = tabletop.rollout(start, by_expert, steps=HORIZON // 2)
    assert seen[-1].solved.all()


def test_random_actions_hardly_ever_do(start):
    draws = seeded(2)

    def plan(scenes):
        moves = torch.randint(
            -REACH, REACH + 1, (len(scenes), 1, 2), generator=draws
        )
        close = torch.randint(2, (len(scenes), 1, 1), generator=draws)
        return torch.cat([moves, close], 2)

    assert tabletop.rollout(start, plan)[-1].solved.float().mean() < 0.02


def test_things_do_not_overlap_and_the_left_bowl_is_on_the_left(start):
    things = torch.cat([start.bowls, start.blocks], 1)
    assert things.min() >= 0 and things.max() < SIDE
    away = (things[:, :, None] - things[:, None]).abs().amax(3)
    away += SIDE * torch.eye(things.shape[1], dtype=torch.int64)
    assert away.min() > 9  # a bowl's 6 pixels, and a block's 3
    assert (start.bowls[:, 0, 0] < SIDE / 2).all()
    assert (start.bowls[:, 1, 0] > SIDE / 2).all()


def test_all_scenes_places_and_pairs_come(start):
    for thing in (start.blocks.flatten(0, 1), start.bowls[:, 0]):
        assert len(set(thing[:, 1].tolist())) > SIDE / 3
    goals = {
        (COLOURS[c], SIDES[s])
        for c, s in zip(start.colour, start.side, strict=True)
    }
    assert goals == set(PAIRS)
    held_out = tabletop.scenes(50, seeded(), UNSEEN)
    pairs = zip(held_out.colour, held_out.side, strict=True)
    assert {(COLOURS[c], SIDES[s]) for c, s in pairs} == set(UNSEEN)


def test_the_words_say_what_is_asked_for(start):
    lengths = set()
    for row, colour, side in zip(
        start.words, start.colour, start.side, strict=True
    ):
        text = tabletop.instruction(row)
        assert [w for w in text.split() if w in COLOURS] == [COLOURS[colour]]
        assert [w for w in text.split() if w in SIDES] == [SIDES[side]]
        assert torch.equal(tabletop.tokens(text), row)
        lengths.add(len(text.split()))
    assert lengths == {4, 5, 8, 13} and max(lengths) == tabletop.WORDS


def test_everything_is_the_same_on_every_machine():
    batch = tabletop.examples(40, seeded(3))
    found = hashlib.sha256(b"".join(t.numpy().tobytes() for t in batch))
    assert found.hexdigest()[:16] == HASH


def test_what_is_in_the_picture(start):
    pictures = tabletop.render(start)
    assert pictures.shape == (500, 3, SIDE, SIDE)
    assert pictures.dtype == torch.uint8
    everywhere = torch.arange(500)
    for colour, paint in enumerate(tabletop._PAINT):
        x, y = start.blocks[:, colour].unbind(1)
        # the gripper may lie over it
        right = (pictures[everywhere, :, y, x] == torch.tensor(paint)).all(1)
        assert right.float().mean() > 0.95
    closed = tabletop.render(replace(start, closed=1 - start.closed))
    assert (closed != pictures).flatten(1).any(1).all()


def test_examples_are_the_experts_next_actions():
    pictures, words, senses, actions, real = tabletop.examples(60, seeded(4))
    now = tabletop.moments(60, seeded(4))
    assert torch.equal(pictures, tabletop.render(now))
    assert torch.equal(words, now.words)
    assert senses.abs().max() <= 1 and actions.abs().max() <= 2
    assert torch.equal(senses[:, 3] > 0, now.held >= 0)
    half, start = SIDE // 2, now.gripper
    for place in range(CHUNK):
        assert torch.equal(real[:, place], ~now.solved)
        moves = start + half * actions[:, place, :2] - now.gripper
        action = torch.cat([moves, actions[:, place, 2:]], 1)
        now = tabletop.step(now, action.long())
    assert real[:, 0].all() and not real[:, -1].all()


def one(**changes) -> Scenes:
    """A red block at (20, 20), the gripper above it, bowls far away."""
    scene = Scenes(
        blocks=torch.tensor([[[20, 20], [50, 20], [20, 50], [50, 50]]]),
        bowls=torch.tensor([[[8, 35], [56, 35]]]),
        gripper=torch.tensor([[20, 20]]),
        closed=torch.tensor([0]),
        held=torch.tensor([-1]),
        colour=torch.tensor([0]),
        side=torch.tensor([0]),
        words=tabletop.tokens("move red to the left")[None],
    )
    changes = {name: torch.tensor([value]) for name, value in changes.items()}
    return replace(scene, **changes)


def after(scene, *actions):
    for action in actions:
        scene = tabletop.step(scene, torch.tensor([action]))
    return scene


def test_a_block_is_grasped_carried_and_released():
    scene = after(one(), [NEAR, 0, 1])
    assert scene.held == 0 and scene.blocks[0, 0].tolist() == [20 + NEAR, 20]
    scene = after(scene, [-2 - NEAR, 7, 1])
    assert scene.blocks[0, 0].tolist() == [18, 27] and not scene.solved
    scene = after(scene, [-8, 8, 1])
    assert not scene.solved  # above its bowl, and still held
    scene = after(scene, [-2, 0, 0])
    assert scene.blocks[0, 0].tolist() == [8, 35] and scene.solved
    assert after(scene, [4, 0, 0]).solved


def test_too_far_away_nothing_is_grasped():
    assert after(one(), [NEAR + 1, 0, 1]).held == -1


def test_only_a_gripper_that_closes_grasps():
    scene = after(one(gripper=[28, 20]), [0, 0, 1], [-8, 0, 1])
    assert scene.gripper.tolist() == [[20, 20]] and scene.held == -1
    assert after(scene, [0, 0, 0], [0, 0, 1]).held == 0


def test_a_step_has_a_reach_and_ends_at_the_edge():
    scene = after(one(gripper=[2, 60]), [-100, 100, 0])
    assert scene.gripper.tolist() == [[0, SIDE - 1]]
    assert after(one(), [100, 9, 0]).gripper.tolist() == [[28, 28]]


def test_the_wrong_block_or_bowl_does_not_solve_it():
    at = one().blocks.clone()
    at[0, 0] = torch.tensor([56, 35])
    assert not replace(one(), blocks=at).solved
    at[0, 1] = torch.tensor([8, 35])
    assert not replace(one(), blocks=at).solved
    at[0, 0] = torch.tensor([8, 35 + NEAR])
    assert replace(one(), blocks=at).solved


def test_a_solved_scene_stays_as_it_is(start):
    def plan(scenes):
        expert = by_expert(scenes)
        away = torch.tensor([REACH, REACH, 1])
        return torch.where(scenes.solved[:, None, None], away, expert)

    seen = tabletop.rollout(start[:20], plan)
    assert len(seen) == HORIZON + 1 and seen[-1].solved.all()


@pytest.mark.parametrize(
    ("solved", "episodes", "low", "high"),
    [(0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1)],
)
def test_the_interval_of_a_success_rate(solved, episodes, low, high):
    """As in Newcombe 1998, method 3."""
    found = tabletop.interval(solved, episodes)
    assert found == pytest.approx((low, high), abs=1e-4)


def test_a_policy_looks_again_after_so_many_actions(start):
    looks = []

    def plan(scenes):
        looks.append(scenes)
        return torch.zeros(len(scenes), CHUNK, 3, dtype=torch.int64)

    assert len(tabletop.rollout(start[:2], plan, look=3, steps=7)) == 8
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: tabletop.scenes(1, seeded(), [("red", "up")]), "no pair"),
        (lambda s: tabletop.tokens("move the cube"), "'cube' is unknown"),
        (lambda s: tabletop.tokens(" ".join(["the"] * 14)), "14 words"),
        (lambda s: tabletop.tokens(""), "0 words"),
        (lambda s: tabletop.step(s, torch.zeros(2, 3)), r"\[500, 3\]"),
    ],
)
def test_what_is_wrong_is_refused(call, words, start):
    with pytest.raises(ValueError, match=words):
        call(start)


HASH = "821c44bc62617b7d"
