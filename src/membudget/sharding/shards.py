"""The shards of FSDP2, to the byte: on paper, and of a real model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from membudget.checks import (
    flag,
    instance,
    iterable,
    listed,
    module,
    one_of,
    whole,
)
from membudget.ledger import OPTIMIZERS, PLANNED, States
from membudget.measuring import optimizer_tensors
from membudget.measuring.storages import storages

Shape = tuple[int, ...]

FSDP2 = ("zero-2", "zero-3")
"""The stages of ZeRO that FSDP2 has."""


@dataclass(frozen=True)
class Unit:
    """Parameters that ``fully_shard`` gathers and reduces together.

    Attributes:
        name: of its module; ``""`` is the whole model, which has what no
            block has.
        shapes: of its parameters, each once.
        itemsizes: bytes of a number of each of them; 4 if left out.
        frozen: which of them are not trained, as positions in ``shapes``.
        tied: whether several modules share one of them.
    """

    name: str
    shapes: tuple[Shape, ...]
    itemsizes: tuple[int, ...] = ()
    frozen: frozenset[int] = frozenset()
    tied: bool = False

    def __post_init__(self) -> None:
        instance(self.name, str, "the name of a unit", "a string")
        shapes = tuple(
            tuple(
                whole(size, "a size in a shape", 0)
                for size in listed(shape, "a shape", "sizes")
            )
            for shape in listed(self.shapes, "shapes", "shapes", 0)
        )
        object.__setattr__(self, "shapes", shapes)
        itemsizes = listed(self.itemsizes, "itemsizes", "bytes", 0)
        sizes = tuple(whole(size, "an itemsize") for size in itemsizes)
        if sizes and len(sizes) != len(shapes):
            raise ValueError(
                f"{len(sizes)} itemsizes for {len(shapes)} shapes: use one "
                "for each, or none"
            )
        object.__setattr__(self, "itemsizes", sizes or (4,) * len(shapes))
        instance(self.frozen, frozenset, "frozen", "a frozenset of positions")
        flag(self.tied, "tied")
        for place in self.frozen:
            whole(place, "a position in frozen", 0, len(shapes) - 1)

    @property
    def trained(self) -> "Unit":
        """Of its parameters those that are trained; the unit, if all are."""
        if not self.frozen:
            return self
        kept = [i for i in range(len(self.shapes)) if i not in self.frozen]
        return Unit(
            self.name,
            tuple(self.shapes[i] for i in kept),
            tuple(self.itemsizes[i] for i in kept),
            tied=self.tied,
        )

    @property
    def numbers(self) -> int:
        """How many numbers its parameters have."""
        return sum(map(prod, self.shapes))

    def padded(self, ranks: int) -> int:
        """Numbers of a rank's shards, padding included; on all ranks alike.

        A parameter is cut along its first dimension. Each rank stores as
        many rows as the first one has, ⌈rows / ranks⌉, because the
        collectives move equal parts.
        """
        ranks = whole(ranks, "ranks")
        return sum(_padded(shape, ranks) for shape in self.shapes)

    def stored(self, ranks: int, itemsize: int | None = None) -> int:
        """Bytes of a rank's shards, padding included.

        Args:
            ranks: N.
            itemsize: bytes of a number, instead of ``itemsizes``.
        """
        ranks = whole(ranks, "ranks")
        if itemsize is not None:
            itemsize = whole(itemsize, "itemsize")
            return itemsize * self.padded(ranks)
        pairs = zip(self.shapes, self.itemsizes, strict=True)
        return sum(size * _padded(shape, ranks) for shape, size in pairs)


def _padded(shape: Shape, ranks: int) -> int:
    return -(-shape[0] // ranks) * prod(shape[1:])


def units_of(model: nn.Module, blocks: Iterable[nn.Module]) -> list[Unit]:
    """What ``fully_shard`` on each block, then on the model, would group.

    Args:
        model: not sharded yet; on any device, ``meta`` included.
        blocks: modules of the model, in the order in which they run; those
            inside another one before it.

    Returns:
        The whole model's own unit first (it is gathered first), then those
        of the blocks. Modules without parameters of their own make none.

    Raises:
        ValueError: a block that is not in the model, or not in this order,
            and what ``fully_shard`` refuses, some of it in the first step: a
            parameter without a dimension, one that two units would have,
            trained ones of one unit in two dtypes.
    """
    named = module(model).named_modules()
    names = {part: name for name, part in named}
    blocks = list(iterable(blocks, "blocks", "modules"))
    units: list[Unit] = []
    done: set[nn.Module] = set()
    seen: dict[nn.Parameter, str] = {}
    for block in [*blocks, model]:
        if module(block, "one of the blocks") not in names:
            raise ValueError(
                f"a {type(block).__name__} among the blocks is not a part "
                "of the model: pass modules of the model"
            )
        name = names[block] or "the model"
        if block in done:
            raise ValueError(
                f"{name} comes twice, or after a block that contains it: "
                "pass each block once, inner ones first, and not the model"
            )
        modules = [m for m in block.modules() if m not in done]
        done.update(modules)
        every = [
            p
            for m in modules
            for _, p in m.named_parameters(
                recurse=False, remove_duplicate=False
            )
        ]
        own = dict.fromkeys(every)
        for p in own:
            if p in seen:
                raise ValueError(
                    f"{name} shares a parameter with {seen[p]}, and "
                    "fully_shard keeps tied weights in one unit: leave out "
                    "the blocks that share it, or use one that has both"
                )
            if not p.ndim:
                raise ValueError(
                    f"{name} has a parameter without a dimension, which "
                    "fully_shard cannot cut: give it the shape (1,)"
                )
        dtypes = {str(p.dtype)[6:] for p in own if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"{name} trains parameters in {' and '.join(sorted(dtypes))},"
                " and fully_shard reduces one dtype in a unit: convert some, "
                "or make them blocks of their own"
            )
        seen.update(dict.fromkeys(own, name))
        if own:
            units.append(
                Unit(
                    names[block],
                    tuple(tuple(p.shape) for p in own),
                    tuple(p.itemsize for p in own),
                    frozenset(
                        i for i, p in enumerate(own) if not p.requires_grad
                    ),
                    len(own) < len(every),
                )
            )
    return [u for u in units if not u.name] + [u for u in units if u.name]


def rows(length: int, ranks: int, rank: int) -> int:
    """How many of the first dimension's rows a rank has, padding aside.

    As ``torch.chunk``: the first ranks have ⌈length / ranks⌉ each, the one
    where they end has the rest, later ones none.
    """
    length, ranks = whole(length, "length", 0), whole(ranks, "ranks")
    rank = whole(rank, "rank", 0, ranks - 1)
    each = -(-length // ranks)
    return max(min(each, length - rank * each), 0)


def frees(stage: str) -> bool:
    """Whether a stage of FSDP2 frees what it gathered for a forward pass."""
    return one_of(stage, FSDP2, "stage of FSDP2") == "zero-3"


def checked_units(units: Sequence[Unit]) -> list[Unit]:
    """The units as a list; there may be none."""
    return [
        instance(unit, Unit, "one of the units", "a Unit, as of units_of")
        for unit in listed(units, "units", "units, as of units_of", 0)
    ]


def rank_states(
    units: Sequence[Unit],
    ranks: int,
    rank: int = 0,
    optimizer: str = "adam",
    itemsize: int | None = None,
) -> States:
    """Bytes of a rank's shards at the optimizer's step, under FSDP2.

    Parameters and gradients are stored with padding; the optimizer's states
    have the shape of the rank's own rows, and Adam counts its steps in 4
    bytes for each parameter. Gradients have the dtype of the stored
    parameters, whatever ``MixedPrecisionPolicy`` says. What is frozen has
    neither gradient nor states.

    Args:
        units: of :func:`units_of`; every trained parameter takes part in
            the step.
        ranks, rank: of the group.
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        itemsize: bytes of a stored number, of all parameters; by default
            each as the model has it.
    """
    units, ranks = checked_units(units), whole(ranks, "ranks")
    rank = whole(rank, "rank", 0, ranks - 1)
    if itemsize is not None:
        itemsize = whole(itemsize, "itemsize")
    known = [name for name in PLANNED if not OPTIMIZERS[name].block]
    kind = OPTIMIZERS[one_of(optimizer, known, "optimizer")]
    trained = [unit.trained for unit in units]
    own = sum(
        rows(shape[0], ranks, rank) * prod(shape[1:]) * (itemsize or size)
        for unit in trained
        for shape, size in zip(unit.shapes, unit.itemsizes, strict=True)
    )
    counts = kind.counts * sum(len(unit.shapes) for unit in trained)
    return States(
        sum(unit.stored(ranks, itemsize) for unit in units),
        sum(unit.stored(ranks, itemsize) for unit in trained),
        kind.numbers * own + 4 * counts,
    )


def held_states(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> States:
    """Bytes that this rank's model states hold, measured.

    Storages count once each, with their padding, on whatever device.

    Args:
        model: sharded or not.
        optimizer: of its parameters.
    """
    parameters = list(module(model).parameters())
    return States(
        _stored(parameters),
        _stored(p.grad for p in parameters if p.grad is not None),
        0 if optimizer is None else _stored(optimizer_tensors(optimizer)),
    )


def _stored(held: Iterable[torch.Tensor]) -> int:
    found = {s._cdata: s.nbytes() for tensor in held for s in storages(tensor)}
    return sum(found.values())


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    stage: str = "zero-3",
    **options: object,
) -> FSDPModule:
    """``fully_shard`` on each block, then on the model.

    Args:
        model: on the device of this rank.
        blocks: modules that are gathered one at a time.
        stage: ``"zero-3"`` frees a block's gathered parameters after its
            forward pass (``reshard_after_forward=True``, here for the whole
            model's own parameters, too); ``"zero-2"`` keeps them until its
            backward pass.
        **options: of ``fully_shard``, as ``mesh``, ``mp_policy`` and
            ``offload_policy``.

    Raises:
        ValueError: what :func:`units_of` refuses.
    """
    again = frees(stage)
    blocks = list(iterable(blocks, "blocks", "modules"))
    units_of(model, blocks)
    for part in [*blocks, model]:
        fully_shard(part, reshard_after_forward=again, **options)
    return model
