"""What the ranks send each other: counted, and on paper."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from membudget.checks import flag, one_of, whole
from membudget.internals import OpOverload, TorchDispatchMode
from membudget.measuring.storages import is_wrapper, tensors
from membudget.sharding.shards import Unit, checked_units, frees

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
"""The collectives of data parallelism."""

RINGS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often a ring sends (N − 1)/N of the data in each of them.

An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan 2009,
doi 10.1016/j.jpdc.2008.09.002).
"""

KINDS = {
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
}
"""The operators of ``torch.distributed`` and of its functional collectives,
which DTensor calls."""

NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators beside them that send nothing."""


def sent(collective: str, size: int, ranks: int) -> int:
    """Bytes that a rank sends in a collective, run as a ring.

    Args:
        collective: one of :data:`COLLECTIVES`.
        size: bytes of the whole, which all ranks have before or after it.
        ranks: N; it divides ``size``.
    """
    one_of(collective, COLLECTIVES, "collective")
    size, ranks = whole(size, "size", 0), whole(ranks, "ranks")
    return RINGS[collective] * size * (ranks - 1) // ranks


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind.

    Attributes:
        calls: how many.
        bytes: of their wholes, together: what is gathered, what is reduced.
    """

    calls: int = 0
    bytes: int = 0


class CommunicationCounter(TorchDispatchMode):
    """Count the collectives that run inside the ``with`` block, and bytes.

    It sees what ``torch.distributed`` calls in this thread: DDP's backward
    pass, FSDP2, DTensor, and collectives by hand. It changes nothing.

    Attributes:
        traffic: by collective, a :class:`Traffic`.
        others: how often any other collective was called, by name.

    Example:
        >>> with CommunicationCounter() as counter:
        ...     model(x).sum().backward()
        >>> counter.traffic["reduce-scatter"].bytes
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    @property
    def traffic(self) -> dict[str, Traffic]:
        return {
            name: Traffic(self.calls[name], self.bytes[name])
            for name in COLLECTIVES
        }

    def sent(self, ranks: int) -> int:
        """Bytes that this rank sent, if rings of all ranks did it all.

        Not for a mesh of replicas and shards, whose rings are smaller.
        """
        return sum(sent(name, self.bytes[name], ranks) for name in COLLECTIVES)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if any(map(is_wrapper, types)):
            return NotImplemented  # it asks again for what is inside
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].split(".")[0]
            if name not in NO_COLLECTIVES:
                self._count(name, [*args, out])
        return out

    def _count(self, name: str, given: Sequence[object]) -> None:
        kind = KINDS.get(name)
        if kind is None:
            self.others[name] += 1
            return
        self.calls[kind] += 1
        # The largest is the whole: either what goes in or what comes out.
        self.bytes[kind] += max(
            sum(t.nbytes for t in tensors(tree)) for tree in given
        )


def fsdp_traffic(
    units: Sequence[Unit],
    ranks: int,
    stage: str = "zero-3",
    *,
    gathered: int | None = None,
    reduced: int | None = None,
    accumulation_steps: int = 1,
    synchronise_last: bool = False,
) -> dict[str, Traffic]:
    """The collectives of an optimizer step with FSDP2, padding included.

    Each micro-batch gathers every unit in its forward pass, and under
    ZeRO-3 again in its backward pass; it reduces every unit's gradients,
    or the last micro-batch alone does. What is frozen has none. One rank
    gathers nothing. A block that runs twice is gathered twice as often, and
    one that does not run not at all; a recomputation gathers nothing more.

    Args:
        units: of :func:`membudget.sharding.units_of`; each runs once.
        ranks: N, all in a row.
        stage: ``"zero-3"`` or ``"zero-2"``.
        gathered, reduced: bytes of a number on its way; by default as it is
            stored.
        accumulation_steps: micro-batches in the step.
        synchronise_last: whether only the last one reduces
            (``set_requires_gradient_sync``).

    Raises:
        ValueError: a first block that is frozen, under ZeRO-3.
    """
    again = frees(stage)
    units, ranks = checked_units(units), whole(ranks, "ranks")
    if gathered is not None:
        gathered = whole(gathered, "gathered")
    if reduced is not None:
        reduced = whole(reduced, "reduced")
    accumulation_steps = whole(accumulation_steps, "accumulation_steps")
    flag(synchronise_last, "synchronise_last")
    found = {name: Traffic() for name in COLLECTIVES}
    if ranks == 1:
        return found
    trained = [unit.trained for unit in units if unit.trained.shapes]
    for first in [unit for unit in units if unit.name][:1]:
        if again and not first.trained.shapes:
            raise ValueError(
                f"{first.name}, the first block, is frozen: what comes before "
                "it decides whether the backward pass gathers it. Take the "
                "traffic of simulate_rank"
            )
    gathers = accumulation_steps * (2 if again else 1)
    reductions = 1 if synchronise_last else accumulation_steps
    for name, times, parts, itemsize in (
        ("all-gather", gathers, units, gathered),
        ("reduce-scatter", reductions, trained, reduced),
    ):
        size = ranks * sum(unit.stored(ranks, itemsize) for unit in parts)
        found[name] = Traffic(times * len(parts), times * size)
    return found
