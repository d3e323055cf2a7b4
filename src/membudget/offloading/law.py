"""When a copy to the host's memory hides behind the next block's work.

A copy and a computation run side by side, so a block's activations leave at
no cost of time if their copy is over before the next block's forward pass
is. Symbols: h the width, n the tokens of a micro-batch, T those of a
sequence, F the FLOP/s that a card sustains, B the bytes/s of its link to the
host one way, a the bytes kept for each token and unit of width.

Blocks are GPT's, with an MLP four times as wide as the block and attention
over the whole sequence (a kernel that leaves out what is masked halves the
4·T). Nothing here was measured; F and B are shares of a data sheet's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from membudget.cards import CARDS
from membudget.checks import (
    flag,
    instance,
    listed,
    number,
    one_of,
    told,
    whole,
)

TAPE = 32
"""a of a block's tape: 16 numbers of 2 bytes, with fused attention
(:func:`membudget.ledger.block_activations`)."""

CHECKPOINT = 2
"""a of a checkpoint: the block's input alone."""

MACHINES = {
    **{
        name: (CARDS[name].half_flops, CARDS[name].host_link)
        for name in ("T4", "RTX 4090", "RTX 5090", "A100 80 GB", "H100 80 GB")
    },
    "GH200": (CARDS["H100 80 GB"].half_flops, 450e9),
}
"""F and B of data sheets: FLOP/s on 16-bit numbers, and bytes/s one way to
the host. The last one is an H100's GPU beside NVLink-C2C, of which NVIDIA
prints both directions, 900 GB/s (GH200 Grace Hopper Superchip, 2023)."""

BUSY, FULL = 0.4, 0.8
"""Shares of F and of B that a step is taken to sustain. Round numbers; no
GPU was measured for them."""


def sustained(
    machine: str, busy: float = BUSY, full: float = FULL
) -> tuple[float, float]:
    """F and B, the FLOP/s and the bytes/s that a machine sustains.

    Args:
        machine: one of :data:`MACHINES`.
        busy: share of the data sheet's FLOP/s, above 0, at most 1.
        full: share of the data sheet's bytes/s, likewise.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: an unknown machine, or a share that cannot be.
    """
    flops, link = MACHINES[one_of(machine, MACHINES, "machine")]
    busy = number(busy, "busy", above=0, most=1)
    return busy * flops, number(full, "full", above=0, most=1) * link


def forward_flops(width: int, tokens: int) -> int:
    """FLOPs of a GPT block's forward pass for one token: 24·h² + 4·T·h.

    A product with a matrix of k numbers takes 2·k: those of the projections
    are 12·h² (qkv 3, out 1, the MLP 8), and a token's scores and their sum
    over the values are two of T·h.
    (Compare Narayanan et al. 2021, arXiv 2104.04473, appendix.)

    Args:
        width: h.
        tokens: T, of a sequence; 0 leaves attention's part out.

    Raises:
        TypeError: a number that is not whole.
        ValueError: a width below 1, or fewer tokens than none.
    """
    width, tokens = whole(width, "width"), whole(tokens, "tokens", 0)
    return 24 * width**2 + 4 * tokens * width


def least_width(
    kept: float, flops: float, link: float, tokens: int = 0
) -> float:
    """The least width at which a copy hides: (a·F/B − 4·T)/24.

    The copy of a block's a·h·n bytes takes a·h·n/B, the next block's forward
    pass (24·h² + 4·T·h)·n/F. The first is not longer where 24·h + 4·T ≥
    a·F/B. A tape is moved in less time than it is made again from
    ``least_width(a / 2, …)`` on: there a copy takes two forward passes, of
    which one sticks out in the forward pass and none in the backward pass.

    Args:
        kept: a, above 0; :data:`TAPE` or :data:`CHECKPOINT`.
        flops: F, above 0.
        link: B, above 0.
        tokens: T; 0 leaves attention out, so that it is the least width for
            sequences of any length.

    Returns:
        The width; 0 where copies hide at any.

    Raises:
        TypeError: what is no number.
        ValueError: a number that cannot be.
    """
    tokens = whole(tokens, "tokens", 0)
    a, f, b = (
        number(value, name, above=0)
        for name, value in dict(kept=kept, flops=flops, link=link).items()
    )
    return max(0.0, (a * f / b - 4 * tokens) / 24)


@dataclass(frozen=True)
class Block:
    """What :func:`lanes` has to know of a block.

    Args:
        forward: seconds of its forward pass, above 0; its backward pass
            takes twice as long.
        kept: bytes that it keeps for its backward pass: its tape, or its
            input where it is checkpointed.
        again: bytes that a checkpointed block makes once more, in a second
            forward pass; 0: there is none.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a number that cannot be.
    """

    forward: float
    kept: int
    again: int = 0

    def __post_init__(self) -> None:
        number(self.forward, "forward", above=0)
        whole(self.kept, "kept", 0)
        whole(self.again, "again", 0)

    @property
    def runs(self) -> list[tuple[str, float]]:
        """What its backward pass consists of, and the seconds of each."""
        second = [("recomputation", self.forward)] if self.again else []
        return [*second, ("backward", 2 * self.forward)]


def gpt_block(
    width: int,
    tokens: int,
    flops: float,
    batch: int = 1,
    checkpointed: bool = False,
) -> Block:
    """A GPT block in 16 bits, with fused attention.

    Args:
        width: h.
        tokens: T, of a sequence.
        flops: F, above 0.
        batch: sequences of a micro-batch, so that n is batch·T.
        checkpointed: whether it keeps its input alone.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a number that cannot be.
    """
    count = whole(batch, "batch") * whole(tokens, "tokens")
    flops = number(flops, "flops", above=0)
    seconds = forward_flops(width, tokens) * count / flops
    if not flag(checkpointed, "checkpointed"):
        return Block(seconds, TAPE * width * count)
    rest = (TAPE - CHECKPOINT) * width * count
    return Block(seconds, CHECKPOINT * width * count, rest)


class Piece(NamedTuple):
    """Something that a lane does, from a second on to another.

    Attributes:
        block: its number, from 0.
        kind: "forward", "recomputation", "backward"; "out" or "back".
    """

    block: int
    kind: str
    start: float
    end: float


class Lanes(NamedTuple):
    """One micro-batch, forward and backward.

    Attributes:
        compute: what is computed, in order.
        link: what is copied, in order.
        on_card: from when on how many bytes of blocks are on the card.
        waited: seconds in which the first lane waits for the second.
    """

    compute: tuple[Piece, ...]
    link: tuple[Piece, ...]
    on_card: tuple[tuple[float, int], ...]
    waited: float

    @property
    def time(self) -> float:
        """Seconds from the beginning to the end."""
        return self.compute[-1].end

    @property
    def peak(self) -> int:
        """The most bytes on the card."""
        return max(size for _, size in self.on_card)


def lanes(blocks: Sequence[Block], link: float | None = None) -> Lanes:
    """Who computes and who copies when, in a row of blocks.

    What a block keeps is copied out when its forward pass is over and the
    link is free. The last block's stays: it is needed at once. Two blocks'
    are on the card at a time: a block begins when what the last but one kept
    has left, and a copy back begins with the backward pass of the block
    above, if the link is free by then. A block's backward pass waits for it.
    The link copies one thing at a time. Of equal blocks, three or more, none
    waits where width is :func:`least_width` or more.

    Counted are the bytes that blocks keep, from the beginning of the pass
    or the copy that makes them, and not what operators hold for a while.

    Args:
        blocks: in the order of the forward pass.
        link: B, above 0; None: nothing is copied.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: no blocks, or a link that cannot be.
    """
    use = "a Block"
    row = [
        instance(block, Block, "one of blocks", use)
        for block in listed(blocks, "blocks", "blocks")
    ]
    if link is not None:
        link = number(link, "link", above=0)
    clock = _Clock(row, link)
    for place in range(len(row)):
        clock.forward(place)
    for place in reversed(range(len(row))):
        clock.backward(place)
    return clock.lanes()


class _Clock:
    """Two lanes as they go on."""

    def __init__(self, blocks: list[Block], link: float | None) -> None:
        self.blocks, self.speed = blocks, link
        self.now = self.free = self.waited = 0.0
        self.left = [0.0 for _ in blocks]  # when a copy out is over
        self.there = [0.0 for _ in blocks]  # and when one back is
        self.compute: list[Piece] = []
        self.link: list[Piece] = []
        self.changes: list[tuple[float, int]] = []

    def forward(self, place: int) -> None:
        kept = self.blocks[place].kept
        if place > 1:
            self._wait(self.left[place - 2])
        self.changes.append((self.now, kept))
        self._run(place, "forward", self.blocks[place].forward)
        if self.speed and place + 1 < len(self.blocks):
            self.left[place] = self._copy(place, "out").end
            self.changes.append((self.left[place], -kept))

    def backward(self, place: int) -> None:
        block = self.blocks[place]
        self._wait(self.there[place])
        if self.speed and place > 0:
            _, _, start, end = self._copy(place - 1, "back")
            self.there[place - 1] = end
            self.changes.append((start, self.blocks[place - 1].kept))
        self.changes.append((self.now, block.again))
        for kind, seconds in block.runs:
            self._run(place, kind, seconds)
        self.changes.append((self.now, -block.kept - block.again))

    def _wait(self, until: float) -> None:
        self.waited += max(until - self.now, 0.0)
        self.now = max(self.now, until)

    def _run(self, place: int, kind: str, seconds: float) -> None:
        end = self.now + seconds
        self.compute.append(Piece(place, kind, self.now, end))
        self.now = end

    def _copy(self, place: int, kind: str) -> Piece:
        start = max(self.now, self.free)
        seconds = self.blocks[place].kept / told(self.speed)
        self.free = start + seconds
        self.link.append(Piece(place, kind, start, self.free))
        return self.link[-1]

    def lanes(self) -> Lanes:
        size, sizes = 0, {}
        for moment, change in sorted(self.changes):
            size += change
            sizes[moment] = size
        on_card = tuple(sizes.items())
        return Lanes(
            tuple(self.compute), tuple(self.link), on_card, self.waited
        )
