"""The shards of FSDP2, to the byte: on paper, and of a real model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from membudget.checks import one_of, whole
from membudget.ledger import OPTIMIZERS, States

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that ``fully_shard`` gathers and reduces together.

    Attributes:
        name: of its module; ``""`` is the whole model, which has what no
            block has.
        shapes: of its parameters, each once.
    """

    name: str
    shapes: tuple[Shape, ...]

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
        return sum(
            -(-shape[0] // ranks) * prod(shape[1:]) for shape in self.shapes
        )


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
            and what ``fully_shard`` refuses: a parameter without a dimension
            or one that two units would have.
    """
    names = {module: name for name, module in model.named_modules()}
    units: list[Unit] = []
    done: set[nn.Module] = set()
    seen: dict[nn.Parameter, str] = {}
    for block in [*blocks, model]:
        if block not in names:
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
        own = dict.fromkeys(
            p for m in modules for p in m.parameters(recurse=False)
        )
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
        seen.update(dict.fromkeys(own, name))
        if own:
            shapes = tuple(tuple(p.shape) for p in own)
            units.append(Unit(names[block], shapes))
    return [u for u in units if not u.name] + [u for u in units if u.name]


def rows(length: int, ranks: int, rank: int) -> int:
    """How many of the first dimension's rows a rank has, padding aside.

    As ``torch.chunk``: the first ranks have ⌈length / ranks⌉ each, the one
    where they end has the rest, later ones none.
    """
    each = -(-length // ranks)
    return max(min(each, length - rank * each), 0)


def rank_states(
    units: Sequence[Unit],
    ranks: int,
    rank: int = 0,
    optimizer: str = "adam",
    itemsize: int = 4,
) -> States:
    """Bytes of a rank's shards at the optimizer's step, under FSDP2.

    Parameters and gradients are stored with padding; the optimizer's states
    have the shape of the rank's own rows, and Adam counts its steps in 4
    bytes for each parameter. Gradients have the dtype of the stored
    parameters, whatever ``MixedPrecisionPolicy`` says.

    Args:
        units: of :func:`units_of`; all parameters are trained.
        ranks, rank: of the group.
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        itemsize: bytes of a stored number.

    Raises:
        ValueError: no such rank or optimizer.
    """
    whole(ranks, "ranks")
    whole(rank, "rank", 0)
    if rank >= ranks:
        raise ValueError(
            f"rank is {rank}: {ranks} ranks are numbered 0 to {ranks - 1}"
        )
    known = [name for name in OPTIMIZERS if not OPTIMIZERS[name].block]
    kind = OPTIMIZERS[one_of(optimizer, known, "optimizer")]
    shapes = [shape for unit in units for shape in unit.shapes]
    own = sum(rows(s[0], ranks, rank) * prod(s[1:]) for s in shapes)
    stored = itemsize * sum(unit.padded(ranks) for unit in units)
    states = kind.numbers * itemsize * own + 4 * kind.counts * len(shapes)
    return States(stored, stored, states)


def held_states(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> States:
    """Bytes that this rank's model states hold, measured.

    Storages count once each, with their padding, on whatever device.

    Args:
        model: sharded or not.
        optimizer: of its parameters.
    """
    parameters = list(model.parameters())
    kept = optimizer.state.values() if optimizer else ()
    return States(
        _stored(parameters),
        _stored(p.grad for p in parameters),
        _stored(value for state in kept for value in state.values()),
    )


def _stored(values: Iterable[object]) -> int:
    found = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            found[storage._cdata] = storage.nbytes()
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
        ValueError: another stage, and what :func:`units_of` refuses.
    """
    one_of(stage, ("zero-2", "zero-3"), "stage of FSDP2")
    blocks = list(blocks)
    units_of(model, blocks)
    for module in [*blocks, model]:
        fully_shard(module, reshard_after_forward=stage == "zero-3", **options)
    return model
