"""What FSDP2 holds on a rank of tensor parallelism, one stage deep."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from torch import nn

from membudget.ledger import RECIPES, Transformer
from membudget.ledger.parts import MANY, ROWS, written
from membudget.ledger.walk import walk
from membudget.planning.layout import Layout
from membudget.planning.rows import placed
from membudget.sharding import Unit, rank_moments


def units(network: Transformer, ranks: int) -> list[Unit]:
    """As FSDP2 groups what a rank of tensor parallelism has.

    Args:
        network: all of it.
        ranks: of tensor parallelism.
    """
    model = network.build()
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    own = [
        (name, part)
        for name, part in model.named_children()
        if name != "blocks"
    ]
    first = Unit(
        "", tuple(tuple(p.shape) for _, m in own for p in m.parameters())
    )
    return [
        first,
        *(Unit(name, tuple(_shapes(block, ranks))) for name, block in blocks),
    ]


def _shapes(block: nn.Module, ranks: int) -> Iterator[tuple[int, ...]]:
    """Of a block's parameters, as a rank has them."""
    for name, p in block.named_parameters():
        layer, kind = name.split(".")
        shape = list(p.shape)
        if layer in ROWS and kind == "weight":
            shape[1] //= ranks
        elif layer not in ROWS and "norm" not in layer:
            shape[0] //= ranks
        yield tuple(shape)


@lru_cache(10**4)
def sharded_peak(
    network: Transformer,
    tokens: int,
    layout: Layout,
    device: str,
    summed: bool,
) -> int:
    """The most bytes of a micro-batch's passes, the batch aside.

    An upper bound, as :func:`membudget.planning.at_peak` says.

    Args:
        network: all of it.
        tokens: of a sequence, on all ranks.
        layout: of one stage.
        device: whose kernels run.
        summed: whether shards of earlier gradients are there.
    """
    how = tokens, layout, device, summed
    few = min(network.depth, MANY)
    depths = [few, few + 1] if network.depth > few else [few]
    found = [_groups(replace(network, depth=n), *how) for n in depths]
    if len(found) == 1:
        return max(found[0])
    further = network.depth - few
    pairs = zip(*found, strict=True)
    return max(a + further * (b - a) for a, b in pairs)


def _groups(
    network: Transformer,
    tokens: int,
    layout: Layout,
    device: str,
    summed: bool,
) -> list[int]:
    """The most bytes at the first and the last half of each way."""
    kind = RECIPES[layout.recipe]
    places = rank_moments(
        units(network, layout.tensor),
        layout.shards,
        0,
        "zero-3",
        layout.optimizer,
        itemsize=kind.stepped,
        gathered=kind.parameters,
        reduced=kind.gradients,
        embedding=2 if network.family == "gpt" else 1,
        summed=summed,
    ).places
    paper = written(
        network,
        layout.micro_batch,
        tokens // layout.context,
        blocks=range(network.depth),
        ranks=layout.tensor,
        sequence=layout.sequence,
        ring=layout.context > 1,
        itemsize=kind.parameters,
        checkpointed=layout.checkpointed,
        device=device,
    )
    forward = True
    found: dict[tuple[bool, bool], int] = {}
    for row in placed(walk([paper])):
        forward = forward and row.phase == "forward"
        block = row.block if row.place else 0
        beside = places[row.place][block]
        most = beside.beside + row.line(0)[0]
        key = forward, 2 * row.block >= network.depth
        found[key] = max(found.get(key, 0), most)
    return [found.get((a, b), 0) for a in (True, False) for b in (True, False)]
