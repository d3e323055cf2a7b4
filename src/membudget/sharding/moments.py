"""What FSDP2 holds at each moment of a step, on paper."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

import torch

from membudget.checks import flag, instance, whole
from membudget.sharding.shards import (
    Unit,
    checked_units,
    frees,
    rank_states,
)


@dataclass(frozen=True)
class _Rules:
    """What FSDP2 does in its own way in some versions of PyTorch.

    Attributes:
        at_once: a gathered buffer is freed when the next one is filled, and
            the last whole gradient when it is copied; a whole gradient gets
            the dtype in which it waits as soon as it is made.
        late: the buffer that is reduced stays until the next unit's shard is
            there, and not until the next unit is to be reduced.
    """

    at_once: bool = False
    late: bool = False


RULES = {
    "2.11": _Rules(),
    "2.12": _Rules(late=True),
    "2.13": _Rules(),
    "2.14": _Rules(),
    "2.15": _Rules(at_once=True),
}
"""By version, read in its source and compared with what it holds."""


PLACES = {
    "embedding": "forward, before the first block",
    "enter": "forward, between the block before and this one",
    "forward": "forward through this block",
    "loss": "forward, after the last block",
    "gather": "the model's own unit is gathered again",
    "softmax": "back to where its first gradient is made",
    "head": "back through the rest of what comes after the blocks",
    "return": "backward, between the block after and this one",
    "backward": "back through this block",
    "leave": "backward, after the first block",
    "end": "back through what comes before the blocks",
    "last": "when the backward pass is over, and the rest is reduced",
}
"""Of a micro-batch, in order."""


@dataclass(frozen=True)
class Held:
    """Bytes on one rank that are there because of the model's states.

    Attributes:
        parameters: shards of the parameters.
        gathered: whole parameters of the units at work.
        gradients: shards, and whole gradients before they are reduced.
        optimizer: states of the rank's shards.
        buffers: inputs and outputs of collectives.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Place:
    """What is held at the worst moment of a place.

    Attributes:
        held: all that the model's states need.
        whole: bytes of whole gradients of it that come and go with what the
            micro-batch computes: where units are reduced those that are
            there when it begins, everywhere else all of them.
    """

    held: Held
    whole: int

    @property
    def beside(self) -> int:
        """Bytes beside what the micro-batch computes."""
        return self.held.total - self.whole


@dataclass(frozen=True)
class Moments:
    """What a rank holds, activations aside.

    Attributes:
        forward: at the worst moment of the forward pass.
        after_forward: when it is over.
        backward: at the worst moment of the backward pass.
        step: when the backward pass is over and the optimizer steps.
        places: of each of :data:`PLACES`, and of each block in their order
            where it is one of a block's.
        waits: bytes of a number of a whole gradient until the unit's are
            complete.
    """

    forward: Held
    after_forward: Held
    backward: Held
    step: Held
    places: dict[str, tuple[Place, ...]]
    waits: int

    @property
    def peak(self) -> Held:
        """The largest."""
        return _largest(self.forward, self.backward)


def _largest(*held: Held) -> Held:
    return max(held, key=lambda one: one.total)


def rank_moments(
    units: Sequence[Unit],
    ranks: int,
    rank: int = 0,
    stage: str = "zero-3",
    optimizer: str = "adam",
    *,
    itemsize: int | None = None,
    gathered: int | None = None,
    reduced: int | None = None,
    summed: bool = False,
    embedding: int = 0,
    version: str | None = None,
) -> Moments:
    """Bytes that FSDP2 holds on a rank at each moment of a micro-batch.

    The rules, for units that run one after the other:

    * Forward: on more than one rank a unit's shards are gathered into a
      buffer, which is copied into the whole parameters; the buffer stays
      until the next unit has copied its own (from torch 2.15 on until it has
      gathered). Under ZeRO-3 the whole parameters are freed after the unit's
      forward pass, under ZeRO-2 kept.
    * Backward: they are gathered again, and the buffer of the next unit is
      prefetched meanwhile. When the unit's whole gradients are complete, its
      parameters are freed and the gradients copied into a buffer, from which
      the reduce-scatter makes the rank's shard. The last of the whole
      gradients stays until the shard is there (from torch 2.15 on until it
      is copied), and the buffer until the next unit is to be reduced (in
      torch 2.12 until its shard is there).
    * The unit of the whole model is at work from beginning to end. Its
      gradients are reduced at the end of the backward pass, and after them
      those of the first block: its input is the batch, which needs no
      gradient that would tell when the block is done.
    * With an ``embedding`` the model's own unit works before the first block,
      too, whose gradients are then reduced as the others'. The embedding's
      come last.
    * From torch 2.15 on a gradient that is reduced in a narrower dtype is
      cast as soon as it is made.

    The optimizer's own temporaries are not counted, nor what a collective
    allocates within itself.

    On ranks that gloo connects this is the least that is held. Two threads
    of gloo run a group's collectives, and each holds the tensors of its last
    one until it comes to drop them, which may be after FSDP2 did. So at any
    moment up to two buffers more may be there, other ones in each run.

    Args:
        units: of :func:`membudget.sharding.units_of`; each runs once, and
            all parameters are trained, in one module, and of one dtype.
        ranks, rank: of the group.
        stage: ``"zero-3"`` or ``"zero-2"``, see
            :func:`membudget.sharding.shard`.
        optimizer: as for :func:`membudget.sharding.rank_states`.
        itemsize: bytes of a number as it is stored, and of its gradient's
            shard; by default as the model has it.
        gathered: bytes of a gathered number, ``param_dtype`` of
            ``MixedPrecisionPolicy``; by default as it is stored. Its
            gradient has the same.
        reduced: bytes of a gradient on its way, ``reduce_dtype``; by default
            as FSDP2 does without one: as it is gathered, and from torch 2.15
            on as it is stored.
        summed: whether shards of the gradients of earlier micro-batches are
            there; the new ones are added to them, and gone then.
        embedding: how many tensors of the model's own unit, its first ones,
            are used before the first block: 2 for tokens and positions.
        version: of PyTorch, as ``"2.13"``; by default the one that is
            installed. An error lists those whose rules are known.

    Raises:
        ValueError: no units, or an embedding of more tensors than the model's
            own unit has; parameters that are frozen, tied, or of several
            dtypes; a version whose rules are not known.
    """
    rules = _rules_of(version)
    units = checked_units(units)
    if not units:
        raise ValueError("units is empty: use those of units_of")
    for unit in units:
        if unit.frozen or unit.tied:
            what = "frozen" if unit.frozen else "tied"
            raise ValueError(
                f"{unit.name or 'the model'} has {what} parameters, and by "
                "these rules each is trained and used once: use simulate_rank"
            )
    sizes = {size for unit in units for size in unit.itemsizes}
    if itemsize is None:
        if len(sizes) > 1:
            raise ValueError(
                f"parameters of {' and '.join(map(str, sorted(sizes)))} bytes "
                "a number: these rules are for one dtype; use simulate_rank"
            )
        itemsize = next(iter(sizes), 4)
    itemsize = whole(itemsize, "itemsize")
    gathered = itemsize if gathered is None else whole(gathered, "gathered")
    usual = itemsize if rules.at_once else gathered
    reduced = usual if reduced is None else whole(reduced, "reduced")
    flag(summed, "summed")
    own = sum(len(unit.shapes) for unit in units if not unit.name)
    embedding = whole(embedding, "embedding", 0)
    if embedding > own:
        raise ValueError(
            f"embedding is {embedding}: the model's own unit has {own} tensors"
        )
    again = frees(stage)
    ranks = whole(ranks, "ranks")
    states = rank_states(units, ranks, rank, optimizer, itemsize)
    walk = _Walk(units, ranks, itemsize, gathered, reduced, summed, rules)
    walk.live["parameters"] = states.parameters
    walk.live["optimizer"] = states.optimizer
    walk.forward(again)
    forward, after_forward = walk.worst, walk.held()
    walk.worst = after_forward
    walk.backward(again, embedding)
    return Moments(
        forward,
        after_forward,
        walk.worst,
        step=walk.held(),
        places={name: tuple(walk.places[name]) for name in PLACES},
        waits=walk.waits,
    )


def _rules_of(version: str | None) -> _Rules:
    """Those of a version, or of the one that is installed."""
    if version is not None:
        instance(version, str, "version", 'text, as "2.13"')
    else:
        version = ".".join(torch.__version__.split(".")[:2])
    if version not in RULES:
        raise ValueError(
            f"what FSDP2 of torch {version} holds when is not known: pass "
            f"version=, one of {', '.join(RULES)}, for those rules, or use "
            "simulate_rank"
        )
    return RULES[version]


class _Walk:
    """Allocates and frees what FSDP2 does, unit by unit."""

    def __init__(
        self,
        units: Sequence[Unit],
        ranks: int,
        itemsize: int,
        gathered: int,
        reduced: int,
        summed: bool,
        rules: _Rules,
    ) -> None:
        self.units, self.ranks, self.rules = units, ranks, rules
        self.itemsize, self.gathered = itemsize, gathered
        self.reduced = reduced
        self.waits = min(gathered, reduced) if rules.at_once else gathered
        self.live = dict.fromkeys((field.name for field in fields(Held)), 0)
        self.there = 0  # bytes of whole gradients
        self.summed = summed
        if summed:
            self.live["gradients"] = sum(map(self.shard, units))
        self.places: dict[str, list[Place]] = {name: [] for name in PLACES}
        self.worst = self.held()
        self.begin()

    def held(self) -> Held:
        return Held(**self.live)

    def now(self) -> Place:
        return Place(
            self.held(), self.there if self.begun is None else self.begun
        )

    def begin(self, between: bool = False) -> None:
        """A place begins here; ``between`` units at work, or at work."""
        self.begun = self.there if between else None
        self.here = self.now()

    def end(self, place: str) -> None:
        """A place ends here; note its worst moment."""
        self.places[place].append(self.here)

    def add(self, kind: str, size: int) -> None:
        self.live[kind] += size
        self.worst = _largest(self.worst, self.held())
        self.here = max(self.here, self.now(), key=lambda place: place.beside)

    def grow(self, size: int) -> None:
        """Whole gradients come, or go."""
        self.there += size
        self.add("gradients", size)

    def whole(self, unit: Unit) -> int:
        """Bytes of a unit's gathered parameters; those of all ranks."""
        return unit.padded(self.ranks) * self.ranks * self.gathered

    def shard(self, unit: Unit) -> int:
        """Bytes of the rank's gradients of a unit."""
        return unit.padded(self.ranks) * self.itemsize

    def _copies(self, unit: Unit) -> int:
        """Bytes of the shards in another dtype, which are gathered."""
        if self.gathered == self.itemsize:
            return 0
        return unit.padded(self.ranks) * self.gathered

    def gather(self, unit: Unit) -> int:
        """Fill the buffer; its bytes."""
        if self.ranks == 1:
            return 0
        self.add("buffers", self._copies(unit))
        self.add("buffers", self.whole(unit))
        self.add("buffers", -self._copies(unit))
        return self.whole(unit)

    def unshard(self, unit: Unit) -> None:
        """Fill the whole parameters; one rank does it one by one."""
        if self.ranks > 1:
            self.add("gathered", self.whole(unit))
            return
        before = 0
        for shape in unit.shapes:
            copy = self._copies(Unit("", (shape,)))
            self.add("buffers", copy)
            self.add("buffers", -before)
            self.add("gathered", self.gathered * prod(shape))
            before = copy
        self.add("buffers", -before)

    def forward(self, again: bool) -> None:
        before = 0
        self.begin()
        for unit in self.units:
            if unit.name:
                self.begin(between=True)
            buffer = self.gather(unit)
            if self.rules.at_once:
                self.add("buffers", -before)
            self.unshard(unit)
            if not self.rules.at_once:
                self.add("buffers", -before)
            before = buffer
            if unit.name:
                self.end("enter")
                self.begin()
                self.end("forward")
                if again:
                    self.add("gathered", -self.whole(unit))
            else:
                self.end("embedding")
        self.begin()
        self.end("loss")
        self.add("buffers", -before)
        for unit in self.units:
            if not unit.name and again:
                self.add("gathered", -self.whole(unit))

    def backward(self, again: bool, embedding: int) -> None:
        own = [unit for unit in self.units if not unit.name]
        blocks = [unit for unit in self.units if unit.name][::-1]
        order = own + blocks
        late = own + ([] if embedding else blocks[-1:])
        self.begin()
        fetched = self.gather(order[0]) if again else 0
        buffer = 0
        for i, unit in enumerate(order):
            if again:
                self.unshard(unit)
                self.add("buffers", -fetched)
            if again and i + 1 < len(order):
                fetched = self.gather(order[i + 1])
            self.end("return" if unit.name else "gather")
            self.begin()
            if unit in own:
                self.end("softmax")
            first = 0 if unit.name else embedding
            self.gradients(unit.shapes[first:])
            self.end("backward" if unit.name else "head")
            self.begin(between=True)
            if unit not in late:
                buffer = self.reduce(unit, buffer)
        self.end("leave")
        self.begin()
        for unit in own:
            self.gradients(unit.shapes[:embedding])
        self.end("end")
        self.begin(between=True)
        for unit in late:
            buffer = self.reduce(unit, buffer)
        self.add("buffers", -buffer)
        self.end("last")
        for place in ("return", "backward"):
            self.places[place].reverse()

    def gradients(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Whole gradients of a unit, in the dtype in which they wait."""
        for number in map(prod, reversed(shapes)):
            self.grow(number * self.gathered)
            if self.waits < self.gathered:
                self.grow(number * self.waits)
                self.grow(-number * self.gathered)

    def reduce(self, unit: Unit, buffer: int) -> int:
        """Reduce-scatter a unit's gradients; the bytes of its buffer."""
        self.add("gathered", -self.whole(unit))
        if not self.rules.late:
            self.add("buffers", -buffer)
        size = unit.padded(self.ranks) * self.reduced
        self.add("buffers", size * self.ranks)
        stays = self.ranks > 1 and not self.rules.at_once
        last = prod(unit.shapes[-1]) * self.waits if stays else 0
        self.grow(last - unit.numbers * self.waits)
        self.add("buffers", size)
        if self.reduced == self.itemsize:
            self.add("buffers", -size)
        self.add("gradients", self.shard(unit))
        if self.reduced != self.itemsize:
            self.add("buffers", -size)
        self.grow(-last)
        if self.summed:
            self.add("gradients", -self.shard(unit))
        if self.rules.late:
            self.add("buffers", -buffer)
        return size * self.ranks
