"""What a micro-batch needs at each moment, at any depth and of any size.

At each moment of a step the bytes are affine in the sequences of the
micro-batch and in the blocks of each kind: those that are checkpointed, and
those that are not. Blocks in the middle are alike, and what is alive at them
lies between. Where the checkpoints end is never the worst: if the bytes fall
along checkpointed blocks, they fell faster along those before. So networks of
a few blocks tell the peak of any depth. Where attention is not fused, one
sequence alone is looked at by itself, and in a model of transformers, whose
labels it need not copy; so is each micro-batch where the loss's chunks are not
all alike.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from membudget.ledger import (
    RECIPES,
    Adapter,
    CausalLM,
    PaperMoment,
    Prediction,
    Transformer,
)
from membudget.ledger import operators as op
from membudget.ledger.adapters import checked_trained
from membudget.ledger.paper import Paper
from membudget.ledger.walk import walk
from membudget.measuring import CATEGORIES

NUMBERED = re.compile(r"([a-z_.]+)\.(\d+)")
"""A block's name in a row's: ``"blocks.3"``, ``"model.layers.3"``."""

FEW = 5
"""Blocks of a network that tells what a deeper one needs: the first two and
the last three. The others stand after the second."""


@dataclass(frozen=True)
class Step:
    """A micro-batch, forward and backward, of a network of any depth.

    Attributes:
        network, tokens: as for :func:`membudget.ledger.predict`; the
            network's depth does not count.
        device: whose rules count.
        recipe: of precision.
        loss_chunks: into which its tokens are cut.
        kept_attention: whether checkpointed blocks keep attention's results.
        scaled: whether its loss is multiplied by its share of the batch.
        kept: whether gradients are there before.
        sharded: whether FSDP2 reduces its gradients.
        adapter: what alone is trained.
        offloaded: whether what it saves leaves.
    """

    network: Transformer | CausalLM
    tokens: int
    device: str
    recipe: str
    loss_chunks: int | None
    kept_attention: bool = False
    scaled: bool = False
    kept: bool = False
    sharded: bool = False
    adapter: Adapter | None = None
    offloaded: bool = False


class Bytes(NamedTuple):
    """Of m sequences, j blocks checkpointed:
    ``constant + slope * m + (more + steeper * m) * j``."""

    constant: int = 0
    slope: int = 0
    more: int = 0
    steeper: int = 0

    def at(self, size: int, blocks: int) -> int:
        """Of these sequences and checkpointed blocks."""
        more = self.more + self.steeper * size
        return self.constant + self.slope * size + more * blocks


class Row(NamedTuple):
    """A moment of a micro-batch, and what it needs.

    Attributes:
        place: one of :data:`membudget.sharding.PLACES` under FSDP2, or
            ``""``.
        block: its number; 0 outside the blocks.
        name: of the ledger's row.
        phase: one of :data:`membudget.measuring.PHASES`.
        activations, temporaries: bytes of these.
        gradients: bytes of those that the micro-batch made; under FSDP2 the
            whole ones of the units at work.
    """

    place: str
    block: int
    name: str
    phase: str
    activations: Bytes = Bytes()
    temporaries: Bytes = Bytes()
    gradients: Bytes = Bytes()

    @property
    def needs(self) -> tuple[Bytes, Bytes, Bytes]:
        """All that varies."""
        return self[4:]

    def line(self, blocks: int) -> tuple[int, int]:
        """All bytes: constant and slope, with these blocks checkpointed."""
        at, slope, more, steeper = map(sum, zip(*self.needs, strict=True))
        return at + more * blocks, slope + steeper * blocks


@dataclass(frozen=True, eq=False)
class Rows:
    """The moments of a micro-batch that have the same states beside them.

    Attributes:
        rows: one or more, in order.
        blocks: how many are checkpointed.
    """

    rows: tuple[Row, ...]
    blocks: int = 0

    @cached_property
    def highest(self) -> list[tuple[int, int]]:
        """Lines that are the most for some size."""
        lines = [row.line(self.blocks) for row in self.rows]
        return [lines[i] for i in upper(lines)]

    def most(self, size: int) -> int:
        """Bytes of these sequences at the worst moment."""
        return max(at + slope * size for at, slope in self.highest)

    def worst(self, size: int) -> tuple[Row, list[int]]:
        """The first of the worst moments, and its activations, temporaries
        and gradients."""
        found = [
            (row, [need.at(size, self.blocks) for need in row.needs])
            for row in self.rows
        ]
        return max(found, key=lambda pair: sum(pair[1]))


def upper(
    lines: Sequence[tuple[int, int]], most: float = float("inf")
) -> list[int]:
    """The numbers of the lines (constant, slope) that are the highest
    somewhere from 1 to ``most``, by rising slope; of several, the first."""
    at: float | None = 1
    found = []
    while at is not None and at <= most:
        heights = [constant + slope * at for constant, slope in lines]
        best = heights.index(max(heights))
        found.append(best)
        constant, slope = lines[best]
        at = min(
            ((constant - c) // (s - slope) + 1 for c, s in lines if s > slope),
            default=None,
        )
    return found


def few_of(step: Step, depth: int) -> int:
    """Blocks of the network that is walked through: all where they are not
    alike, with local attention in some. Offloaded they are unlike, too, where
    kinds of blocks have cosines and sines of their own; and the last that is
    checkpointed can be the worst, if attention is all that stays."""
    shape, kinds = step.network, False
    if isinstance(shape, CausalLM):
        if not shape.alike(step.tokens):
            return depth
        kinds = len(set(shape.local)) > 1
    if step.offloaded and (step.kept_attention or kinds):
        return depth
    return min(depth, FEW)


def case_of(blocks: int, depth: int) -> int:
    """How many blocks of the small network are checkpointed, for so many of
    a deep one. Rows hold for all that have this in common."""
    if depth <= FEW or blocks < 2:
        return blocks
    return max(2, blocks - (depth - FEW))


@lru_cache(10**4)
def needs(
    step: Step, depth: int, blocks: int, size: int
) -> dict[tuple[str, int], Rows]:
    """What this many sequences need, by place and block.

    Args:
        step: with them.
        depth: of the network.
        blocks: how many are checkpointed.
        size: sequences.
    """
    odd = size < least_of(step) or step.tokens % (step.loss_chunks or 1)
    return _needs(step, depth, blocks, size if odd else None)


@lru_cache(10**4)
def _needs(
    step: Step, depth: int, blocks: int, size: int | None
) -> dict[tuple[str, int], Rows]:
    found: dict[tuple[str, int], list[Row]] = {}
    case = case_of(blocks, depth)
    if few_of(step, depth) == depth:
        case = blocks
    for row in rows_of(step, depth, case, size):
        block = row.block if row.place else 0
        found.setdefault((row.place, block), []).append(row)
    return {spot: Rows(tuple(rows), blocks) for spot, rows in found.items()}


def least_of(step: Step) -> int:
    """The least sequences that all larger ones are like."""
    causal = isinstance(step.network, CausalLM)
    return 1 if step.network.fused and not causal else 2


@lru_cache(1000)
def rows_of(
    step: Step, depth: int, case: int, size: int | None = None
) -> list[Row]:
    """Rows of a network of any depth: all outside the blocks, and those of
    the first two and the last three.

    Args:
        step: of which they are.
        depth: of the network.
        case: as :func:`case_of` returns it.
        size: sequences, if the rows hold for no others.
    """
    few = few_of(step, depth)
    further = depth - few
    base = plain = again = _walked(step, case, few, size)
    if further and case <= 2:
        plain = again = _longer(step, case, size)
    if further and case >= 2:
        again = _longer(step, case + 1, size)
        plain = plain if case == 2 else again
    found = []
    for rows in zip(base, plain, again, strict=True):
        row, needs = rows[0], (row.needs for row in rows)
        block = row.block + further * (row.block >= 2)
        name = NUMBERED.sub(rf"\1.{block}", row.name, count=1)
        parts = map(partial(_deeper, further), *needs)
        found.append(Row(row.place, block, name, row.phase, *parts))
    return found


def _longer(step: Step, checkpointed: int, size: int | None) -> list[Row]:
    """Those of a network with a block more, which is left out."""
    return [
        row._replace(block=row.block - (row.block > 2))
        for row in _walked(step, checkpointed, FEW + 1, size)
        if row.block != 2
    ]


def _deeper(further: int, base: Bytes, plain: Bytes, again: Bytes) -> Bytes:
    """With more blocks, plain ones and checkpointed ones."""
    (at, more), (slope, steeper) = (
        (b + further * (p - b) - 2 * (a - p), a - p)
        for b, p, a in zip(base[:2], plain[:2], again[:2], strict=True)
    )
    return Bytes(at, slope, more, steeper)


def _walked(
    step: Step, checkpointed: int, depth: int, size: int | None
) -> list[Row]:
    """All rows of a network with few blocks."""
    if size is not None:
        return _moments(step, checkpointed, depth, size)
    least = least_of(step)
    one, two = (
        _moments(step, checkpointed, depth, n) for n in (least, least + 1)
    )
    return [
        Row(*row[:4], *map(partial(_through, least), row.needs, more.needs))
        for row, more in zip(one, two, strict=True)
    ]


def _through(size: int, one: Bytes, more: Bytes) -> Bytes:
    """The line through two points, at this size and the next."""
    slope = more.constant - one.constant
    return Bytes(one.constant - size * slope, slope)


def _moments(
    step: Step, checkpointed: int, depth: int, size: int
) -> list[Row]:
    """What this many sequences need at each moment."""
    paper = written(step, checkpointed, depth, size)
    if step.scaled:
        op.scale(paper, paper.rows[-1].makes[0])
    prediction = walk(
        [paper], gradients=int(step.kept), offloaded=step.offloaded
    )
    if step.sharded:
        return placed(prediction)
    return [
        row_of("", m, 0 if step.kept else _of(m, "gradients"))
        for m in prediction.moments
    ]


def written(
    step: Step, checkpointed: int | list[int], depth: int, size: int
) -> Paper:
    """A micro-batch on paper, of a network with so many blocks."""
    recipe = RECIPES[step.recipe]
    return replace(step.network, depth=depth).write(
        size,
        step.tokens,
        itemsize=recipe.parameters,
        autocast=recipe.autocast,
        lists=step.device,
        kernels=step.device,
        checkpointed=checkpointed,
        loss_chunks=step.loss_chunks,
        kept_attention=step.kept_attention,
        trained=checked_trained(None, step.adapter),
        adapter=step.adapter,
    )


def _of(m: PaperMoment, category: str) -> int:
    """Its bytes of a category, without a dict of all."""
    return m.bytes[CATEGORIES.index(category)]


def row_of(
    place: str, m: PaperMoment, made: int, name: str | None = None
) -> Row:
    """A moment, with these gradients; by default under its own name."""
    block = NUMBERED.match(m.row)
    return Row(
        place,
        int(block[2]) if block else 0,
        name or m.row,
        m.phase,
        Bytes(_of(m, "activations")),
        Bytes(_of(m, "temporaries")),
        Bytes(made),
    )


def placed(prediction: Prediction) -> list[Row]:
    """The moments of a micro-batch under FSDP2: the bytes of gradients are
    those of the whole ones of the units that are at work.

    The first moment of the backward pass makes the loss's gradient. Then the
    model's own unit is gathered again.
    """
    found = []
    ends = {}  # gradients when the backward pass enters a block
    *back, leave, last = (
        m for m in prediction.between if m.phase == "backward"
    )
    own = before = back[0].split["gradients"]
    for place, m in (
        *(("return", m) for m in back),
        ("leave", leave),
        ("last", last),
    ):
        ends[m.row] = gradients = _of(m, "gradients")
        made = own + gradients - before
        found.append(row_of(place, m, made, "reduce-scatter"))
        before = gradients
    done = _of(leave, "gradients")
    for m in prediction.between:
        if m.phase == "forward" and m.row:
            found.append(row_of("enter", m, 0, "all-gather"))
    place = "embedding"
    for m in prediction.moments:
        gradients = _of(m, "gradients")
        if m.row.startswith("blocks."):
            forward = place in ("embedding", "forward")
            place = "forward" if forward else "backward"
            block = re.split("[. ]", m.row)[1]
            made = 0 if forward else own + gradients - ends[f"blocks.{block}"]
            found.append(row_of(place, m, made))
            continue
        if place == "forward":
            place = "loss"
        elif place == "loss" and m.phase == "backward":
            place = "gather"
        elif place == "gather":
            place = "softmax"
        if place == "softmax" and m.phase == "backward":
            place = "head" if m.row.startswith("head") else place
        elif place == "backward":
            place = "end"
        made = gradients - (done - own) * (place == "end")
        found.append(row_of(place, m, made))
    return found
