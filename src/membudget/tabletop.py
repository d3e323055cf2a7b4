"""A small tabletop: blocks, bowls, a gripper and an instruction in words.

Positions are whole pixels of a 64 × 64 picture, so every processor makes the
same scenes, pictures and episodes. The four blocks have a colour each; two
bowls look alike, and one stands in each half of the picture. All functions
work on many scenes at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import torch

from membudget.checks import function, instance, listed, whole

SIDE, CELL, JITTER = 64, 16, 3
"""Pixels of the picture, of a cell that holds one thing, and how far from
the cell's middle the thing may be."""
REACH, NEAR = 8, 4
"""Pixels: how far a step goes at most along x and along y, and how near the
gripper must be to grasp a block, or a released block to a bowl's middle."""
CHUNK, HORIZON = 8, 32
"""Actions that a policy plans at once, and steps of an episode."""
MOST, MOST_STEPS = 2**16, 1000
"""Scenes at once, and steps of an episode."""

COLOURS = "red", "green", "blue", "yellow"
SIDES = "left", "right"
PAIRS = tuple(product(COLOURS, SIDES))
UNSEEN = (("red", "right"), ("blue", "left"))
"""Pairs of block and bowl that are kept from training."""
SEEN = tuple(pair for pair in PAIRS if pair not in UNSEEN)

PHRASES = (
    "move {colour} to the {side}",
    "{colour} block {side} bowl",
    "put the {colour} block into the {side} bowl",
    "the {side} bowl is for the {colour} block",
    "take the {colour} thing and bring it to the bowl on the {side}",
)
WORDS = max(len(phrase.split()) for phrase in PHRASES)
"""Of the longest instruction; the others are padded with 0."""
VOCABULARY = (
    "",
    *sorted(
        {w for phrase in PHRASES for w in phrase.split() if w[0] != "{"}
        | {*COLOURS, *SIDES}
    ),
)

_TABLE, _BOWL, _INSIDE = (226, 218, 206), (110, 74, 48), (176, 138, 104)
_GRIPPER = (30, 30, 36)
_PAINT = ((204, 52, 44), (46, 148, 70), (44, 92, 200), (238, 196, 38))


@dataclass(frozen=True)
class Scenes:
    """n scenes; whole numbers, along the first dimension.

    Attributes:
        blocks: n × 4 × 2, x and y of the middle, by colour.
        bowls: n × 2 × 2, the left one first.
        gripper: n × 2.
        closed: n, 1 where the gripper is closed.
        held: n, the block in the gripper, or -1.
        colour, side: n, the block that is asked for, and its bowl.
        words: n × :data:`WORDS`, places in :data:`VOCABULARY`; 0 is padding.
    """

    blocks: torch.Tensor
    bowls: torch.Tensor
    gripper: torch.Tensor
    closed: torch.Tensor
    held: torch.Tensor
    colour: torch.Tensor
    side: torch.Tensor
    words: torch.Tensor

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, which: slice | torch.Tensor) -> "Scenes":
        """Some of the scenes: a slice, a mask or places."""
        return Scenes(*(getattr(self, f.name)[which] for f in fields(self)))

    @property
    def block(self) -> torch.Tensor:
        """The middle of the block that is asked for, n × 2."""
        return self.blocks[torch.arange(len(self)), self.colour]

    @property
    def bowl(self) -> torch.Tensor:
        """The middle of the bowl that is asked for, n × 2."""
        return self.bowls[torch.arange(len(self)), self.side]

    @property
    def solved(self) -> torch.Tensor:
        """Where the block lies in its bowl, and the gripper let go of it."""
        near = (self.block - self.bowl).abs().amax(1) <= NEAR
        return near & (self.held < 0)


def scenes(
    count: int,
    generator: torch.Generator,
    pairs: Sequence[tuple[str, str]] = PAIRS,
) -> Scenes:
    """Random scenes, the gripper open and empty.

    Args:
        count: how many, up to 2¹⁶.
        generator: of PyTorch, on the CPU.
        pairs: colours and sides that the instructions ask for.
    """
    count = whole(count, "count", 1, MOST)
    use = "a torch.Generator"
    instance(generator, torch.Generator, "generator", use)
    pairs = listed(pairs, "pairs", "pairs of a colour and a side")
    if unknown := [pair for pair in pairs if pair not in PAIRS]:
        raise ValueError(
            f"there is no pair {unknown[0]!r}: use pairs of tabletop.PAIRS"
        )

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (count, *shape), generator=generator)

    # A key for each cell; the smallest key of a half is its bowl's cell.
    cells = SIDE // CELL
    keys = draw(2**40, cells, cells)  # rows, columns
    half = keys.unflatten(2, (2, cells // 2)).transpose(1, 2).flatten(2)
    at = half.argmin(2)
    row, column = at // (cells // 2), at % (cells // 2)
    column = column + torch.tensor([0, cells // 2])
    bowls = torch.stack([column, row], 2)
    keys = keys.flatten(1).scatter(1, row * cells + column, 2**40)
    place = keys.argsort(stable=True, dim=1)[:, : len(COLOURS)]
    blocks = torch.stack([place % cells, place // cells], 2)
    middles = torch.cat([bowls, blocks], 1) * CELL + CELL // 2
    middles = middles + draw(2 * JITTER + 1, len(COLOURS) + 2, 2) - JITTER

    goals = torch.tensor([PAIRS.index(pair) for pair in pairs])
    goal = goals[draw(len(goals))]
    phrase = draw(len(PHRASES))
    return Scenes(
        blocks=middles[:, 2:],
        bowls=middles[:, :2],
        gripper=draw(SIDE, 2),
        closed=torch.zeros(count, dtype=torch.int64),
        held=torch.full((count,), -1),
        colour=goal // len(SIDES),
        side=goal % len(SIDES),
        words=_INSTRUCTIONS[phrase, goal],
    )


def tokens(text: str) -> torch.Tensor:
    """An instruction as :data:`WORDS` places in the vocabulary.

    Args:
        text: 1 to :data:`WORDS` words of :data:`VOCABULARY`.
    """
    instance(text, str, "text", "an instruction in words")
    words = text.lower().split()
    if unknown := [word for word in words if word not in VOCABULARY]:
        raise ValueError(
            f"the word {unknown[0]!r} is unknown: use those of "
            "tabletop.VOCABULARY"
        )
    if not 0 < len(words) <= WORDS:
        raise ValueError(
            f"the instruction has {len(words)} words: use 1 to {WORDS}"
        )
    places = [VOCABULARY.index(word) for word in words]
    return torch.tensor(places + [0] * (WORDS - len(words)))


def instruction(words: torch.Tensor) -> str:
    """The text of one row of words."""
    use = "a row of word numbers"
    if instance(words, torch.Tensor, "words", use).ndim != 1:
        raise ValueError(f"words has {words.ndim} dimensions: use {use}")
    return " ".join(VOCABULARY[place] for place in words.tolist() if place)


def render(of: Scenes) -> torch.Tensor:
    """Pictures: n × 3 × 64 × 64, uint8, rows from top to bottom."""
    _scenes(of)
    line = torch.arange(SIDE, dtype=torch.int16)
    paint = torch.zeros(len(of), SIDE, SIDE, dtype=torch.uint8)

    def distances(middle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each column and of each row."""
        x, y = (line - middle[..., None].to(torch.int16)).unbind(1)
        return x[:, None, :], y[:, :, None]

    for bowl in range(len(SIDES)):
        x, y = distances(of.bowls[:, bowl])
        round_ = x * x + y * y
        paint[round_ <= 42] = 1
        paint[round_ <= 22] = 2
    for block in range(len(COLOURS)):
        x, y = distances(of.blocks[:, block])
        paint[(x.abs() <= 3) & (y.abs() <= 3)] = 4 + block
    x, y = distances(of.gripper)
    wide = (6 - 2 * of.closed).to(torch.int16)[:, None, None]
    fingers = (x.abs() == wide) & (y.abs() <= 4)
    paint[fingers | (x.abs() <= wide) & (y == -5)] = 3
    return torch.tensor(_PALETTE, dtype=torch.uint8)[paint.long()].movedim(
        3, 1
    )


def senses(of: Scenes) -> torch.Tensor:
    """Proprioception: x, y, closed and holding, n × 4, from -1 to 1."""
    _scenes(of)
    place = of.gripper.float() / (SIDE // 2) - 1
    more = torch.stack([of.closed, (of.held >= 0).long()], 1)
    return torch.cat([place, 2.0 * more - 1], 1)


def step(of: Scenes, actions: torch.Tensor) -> Scenes:
    """What one action makes of each scene.

    The gripper moves, with what it holds, and then closes or opens. Closing
    around a block grasps it.

    Args:
        of: n scenes; they stay as they are.
        actions: n × 3 whole numbers: pixels along x and along y, cut to
            :data:`REACH`, and 1 to close or 0 to open.
    """
    _scenes(of)
    instance(actions, torch.Tensor, "actions", "a tensor, n × 3")
    if actions.shape != (len(of), 3):
        raise ValueError(
            f"actions is {list(actions.shape)}: use {[len(of), 3]}"
        )
    move = actions[:, :2].clamp(-REACH, REACH)
    gripper = (of.gripper + move).clamp(0, SIDE - 1)
    close = (actions[:, 2] > 0).long()
    away = (of.blocks - gripper[:, None]).abs().amax(2)
    grasps = (close > of.closed) & (away.amin(1) <= NEAR)
    held = torch.where(grasps, away.argmin(1), of.held)
    moved = torch.where(held >= 0, held, of.held)  # also what is let go
    here = torch.arange(len(COLOURS)) == moved[:, None]
    return replace(
        of,
        blocks=torch.where(here[..., None], gripper[:, None], of.blocks),
        gripper=gripper,
        closed=close,
        held=torch.where(close > 0, held, -1),
    )


def expert(of: Scenes) -> torch.Tensor:
    """The next action of a script that always succeeds, n × 3.

    Go to the block, grasp it, go to the bowl, let go. It lets go of another
    block first, and opens an empty gripper on the way.
    """
    _scenes(of)
    has, empty = of.held == of.colour, of.held < 0
    goal = torch.where(has[:, None], of.bowl, of.block)
    way = goal - of.gripper
    arrives = way.abs().amax(1) <= REACH
    close = torch.where(has, ~arrives, empty & arrives & (of.closed == 0))
    moves = (has | empty) & ~of.solved
    action = [way.clamp(-REACH, REACH) * moves[:, None]]
    return torch.cat([*action, (close & ~of.solved).long()[:, None]], 1)


def rollout(
    start: Scenes,
    plan: Callable[[Scenes], torch.Tensor],
    look: int = 2,
    steps: int = HORIZON,
) -> list[Scenes]:
    """Let a policy act in closed loop, in all scenes at once.

    Args:
        start: n scenes.
        plan: gives the next actions, n × k × 3 whole numbers, k from 1. A
            scene that is solved gets no more.
        look: how many of them are done before the policy looks again.
        steps: of an episode, up to 1 000.

    Returns:
        The scenes before each step and after the last.

    Raises:
        ValueError: actions of another shape.
    """
    _scenes(start), function(plan, "plan")
    look = whole(look, "look")
    steps = whole(steps, "steps", 1, MOST_STEPS)
    seen = [start]
    while len(seen) <= steps:
        use = "a tensor, n × k × 3"
        actions = instance(plan(seen[-1]), torch.Tensor, "the plan", use)
        if actions.ndim != 3 or not actions.shape[1]:
            raise ValueError(f"the plan is {list(actions.shape)}: use {use}")
        for action in actions[:, :look].unbind(1)[: steps + 1 - len(seen)]:
            going = ~seen[-1].solved[:, None]
            seen.append(step(seen[-1], action * going))
    return seen


def examples(
    count: int,
    generator: torch.Generator,
    pairs: Sequence[tuple[str, str]] = SEEN,
) -> tuple[torch.Tensor, ...]:
    """What a policy learns from: single moments and what the expert does.

    The moments are those of episodes and of others that went wrong: the
    gripper is anywhere or near its goal, open or closed around nothing, with
    the block that is asked for or with another. So the policy also learns
    how to come back from its own mistakes.

    Args:
        count, generator, pairs: as for :func:`scenes`.

    Returns:
        Pictures, n × 3 × 64 × 64, uint8; words, n × :data:`WORDS`; senses,
        n × 4; actions, n × :data:`CHUNK` × 3: where the gripper will be,
        from where it is now, in half pictures, and 1 where it closes; and
        which of these are real, n × :data:`CHUNK`: those up to the end of
        the episode.
    """
    now = moments(count, generator, pairs)
    pictures, feels = render(now), senses(now)
    actions, real = [], []
    words, start = now.words, now.gripper
    for _ in range(CHUNK):
        action = expert(now)
        real.append(~now.solved)
        now = step(now, action)
        action[:, :2] = now.gripper - start
        actions.append(action)
    half = SIDE // 2
    shares = torch.stack(actions, 1) / torch.tensor([half, half, 1.0])
    return pictures, words, feels, shares, torch.stack(real, 1)


def moments(
    count: int,
    generator: torch.Generator,
    pairs: Sequence[tuple[str, str]] = SEEN,
) -> Scenes:
    """Scenes in the middle of an episode, as :func:`examples` has them."""
    now = scenes(count, generator, pairs)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (count, *shape), generator=generator)

    kind = draw(8)  # 0–3 empty, 4–6 with the block, 7 with another
    other = (now.colour + 1 + draw(len(COLOURS) - 1)) % len(COLOURS)
    held = torch.where(kind > 3, now.colour, -1)
    held = torch.where(kind == 7, other, held)
    goal = torch.where((kind > 3)[:, None], now.bowl, now.block)
    near = goal + draw(4 * REACH + 1, 2) - 2 * REACH
    close_by = (kind % 2 == 0) & (kind > 0) | (kind == 3)
    gripper = torch.where(close_by[:, None], near, now.gripper)
    now = replace(
        now,
        gripper=gripper.clamp(0, SIDE - 1),
        closed=((kind > 3) | (kind == 3)).long(),
        held=held,
    )
    colours = torch.arange(len(COLOURS))
    gone = (draw(2, len(COLOURS)) > 0) & (colours != now.colour[:, None])
    blocks = torch.where(gone[..., None], -SIDE, now.blocks)
    here = colours == held[:, None]
    blocks = torch.where(here[..., None], now.gripper[:, None], blocks)
    return replace(now, blocks=blocks)


def interval(solved: int, episodes: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a success rate (Wilson 1927).

    Args:
        solved: episodes with success.
        episodes: independent ones, up to 2¹⁶.
    """
    episodes = whole(episodes, "episodes", 1, MOST)
    share, z = whole(solved, "solved", 0, episodes) / episodes, 1.96
    middle = share + z**2 / (2 * episodes)
    spread = share * (1 - share) / episodes + (z / (2 * episodes)) ** 2
    low, high = (middle + sign * z * spread**0.5 for sign in (-1, 1))
    scale = 1 + z**2 / episodes
    return max(0.0, low / scale), min(1.0, high / scale)


_PALETTE = (_TABLE, _BOWL, _INSIDE, _GRIPPER, *_PAINT)
_INSTRUCTIONS = torch.stack(
    [
        torch.stack([tokens(p.format(colour=c, side=s)) for c, s in PAIRS])
        for p in PHRASES
    ]
)


def _scenes(of: Scenes) -> Scenes:
    return instance(of, Scenes, "the scenes", "tabletop.Scenes")
