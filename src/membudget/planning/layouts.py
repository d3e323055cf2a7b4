"""Which layout of many cards fits, the fastest first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from membudget.cards import CARDS
from membudget.checks import one_of, whole
from membudget.ledger import RECIPES, Transformer
from membudget.measuring import format_bytes
from membudget.parallelism import (
    bubble,
    context_traffic,
    tensor_tape,
    tensor_traffic,
)
from membudget.planning.counter import Counts, added, less
from membudget.planning.layout import Layout, check_network
from membudget.planning.machine import EFFICIENCY, Machine
from membudget.planning.plan import Job
from membudget.planning.ranks import Need, stage_states, worst
from membudget.planning.work import counts_of_blocks

NODE = 8
"""Cards that NVLink connects."""

NETWORK = 50e9
"""Bytes/s that a card sends to another node: 400 Gb/s InfiniBand, one
adapter for each card (NVIDIA DGX H100, data sheet, 2023)."""

ASSUMED = (
    f"Cards reach {EFFICIENCY:.0%} of their data sheets, links included; "
    "nothing was measured for it.",
    "Ranks are placed tensor first, then context, pipeline, data; an axis "
    "that does not stay within a node sends over the network.",
    "FSDP2 gathers and reduces beside the computation; all other traffic "
    "and the bubble are added.",
)
"""What the seconds of a layout rest on."""

MICRO = (1, 2, 4)
"""Sequences of a micro-batch that are tried."""


class Time(NamedTuple):
    """Seconds of an optimizer step, by what they are spent on.

    Attributes:
        computing: of the slowest stage, all micro-batches.
        tensor, context, pipeline: their traffic.
        data: what gathers and reductions add.
        bubble: in which a stage waits.
    """

    computing: float
    tensor: float
    context: float
    pipeline: float
    data: float
    bubble: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self)


@dataclass(frozen=True)
class Spread:
    """A layout, what its worst rank needs, and how long a step takes."""

    layout: Layout
    need: Need
    time: Time

    def __str__(self) -> str:
        layout = self.layout
        kept = ", checkpointed" if layout.checkpointed else ""
        return (
            f"{layout.text()}{kept}, micro-batches of {layout.micro_batch}: "
            f"{format_bytes(self.need.bytes)} on stage {self.need.stage}, "
            f"{self.time.total:.1f} s"
        )


def layouts(
    job: Job,
    card: str,
    cards: int,
    recipe: str = "master",
    most: int = 5,
) -> list[Spread]:
    """The fastest layouts of a job on many cards that fit, if any do.

    Tried are all powers of two of tensor (with sequence parallelism),
    pipeline (1F1B) and context ranks, the rest data ranks that share the
    states; with checkpoints and without; one, two or four sequences at once.
    The seconds rest on :data:`ASSUMED`.

    Args:
        job: what is trained.
        card: one of :data:`membudget.cards.CARDS`.
        cards: how many, a power of two; a fast link connects 8.
        recipe: one of :data:`membudget.ledger.RECIPES`.
        most: how many that fit.

    Raises:
        ValueError: cards that are no power of two.
    """
    network = check_network(job)
    budget = CARDS[one_of(card, CARDS, "card")].usable
    cards, most = whole(cards, "cards"), whole(most, "most")
    if cards & (cards - 1):
        raise ValueError(
            f"{cards} cards are no power of two, and the axes are: use "
            f"{1 << cards.bit_length() - 1} or {1 << cards.bit_length()}"
        )
    machine = Machine.of_card(card)
    tried = [
        (layout_seconds(job, layout, machine), layout)
        for layout in _all(job, network, cards, recipe)
        if least(job, layout) <= budget
    ]
    tried.sort(key=lambda pair: pair[0].total)
    found: list[Spread] = []
    for time, layout in tried:
        held = worst(job, layout, budget)
        if held.bytes <= budget:
            found.append(Spread(layout, held, time))
        if len(found) == most:
            break
    return found


def least(job: Job, layout: Layout) -> int:
    """Bytes that the first stage has at least: its states and tapes.

    Args:
        job, layout: as for :func:`membudget.planning.need`.
    """
    network, tensor = check_network(job), layout.tensor
    blocks = -(-network.depth // layout.pipeline)
    numbers = blocks * network.block_parameters // tensor
    local = layout.micro_batch * job.tokens // layout.context
    itemsize = RECIPES[layout.recipe].parameters
    shared = tensor if layout.sequence else 1
    tape = local * network.width * itemsize // shared
    if not layout.checkpointed:
        kept = _tape(network, job.tokens, tensor, layout.sequence, itemsize)
        tape = kept * local // job.tokens
    flying = layout.pipeline if layout.schedule == "1F1B" else 1
    held = stage_states((numbers,), layout)
    return held.total + flying * blocks * tape


@lru_cache(100)
def _tape(
    network: Transformer,
    tokens: int,
    ranks: int,
    sequence: bool,
    itemsize: int,
) -> int:
    """Of a block and one sequence, less what does not grow with tokens."""
    of = replace(network, depth=1), 1, tokens, ranks, sequence
    return tensor_tape(*of, itemsize=itemsize, kernels="cuda")


def _all(
    job: Job, network: Transformer, cards: int, recipe: str
) -> Iterator[Layout]:
    """All layouts that are tried."""
    for tensor in _powers(min(cards, network.kv_heads)):
        for pipeline in _powers(min(cards // tensor, network.depth)):
            for context in _powers(cards // tensor // pipeline):
                base = Layout(
                    tensor=tensor,
                    sequence=tensor > 1,
                    pipeline=pipeline,
                    context=context,
                    data=cards // tensor // pipeline // context,
                    recipe=recipe,
                )
                for size in MICRO:
                    layout = replace(base, micro_batch=size)
                    if layout.fault(job) is None:
                        yield layout
                        yield replace(layout, checkpointed=True)


def _powers(most: int) -> list[int]:
    """1, 2, 4, … up to it."""
    return [1 << n for n in range(most.bit_length())]


def layout_seconds(
    job: Job, layout: Layout, machine: Machine, node: int = NODE
) -> Time:
    """How long an optimizer step takes, by :data:`ASSUMED`.

    Args:
        job: what is trained.
        layout: how it is spread.
        machine: whose ``link`` is within a node.
        node: cards of one.
    """
    many = layout.micro_batches(job)
    links = _links(layout, machine, node)
    computing = many * _computing(job, layout, machine)
    sums, ring, between = (
        many * sent / links[name] for name, sent in _sent(job, layout).items()
    )
    numbers = _numbers(check_network(job), layout.pipeline) // layout.tensor
    data = numbers * _moved(layout, many) / links["data"]
    if layout.pipeline == 1 and layout.sharded:
        data = max(0.0, data - computing)
    passes, waits = computing + sums + ring + between, 0.0
    if layout.pipeline > 1:
        idle = bubble(layout.schedule, layout.pipeline, many)
        waits = passes * idle / (1 - idle)
    return Time(computing, sums, ring, between, data, waits)


def _links(layout: Layout, machine: Machine, node: int) -> dict[str, float]:
    """Bytes/s of each axis, by how far apart its ranks are."""
    reach, found = 1, {}
    for name in ("tensor", "context", "pipeline", "data"):
        reach *= getattr(layout, name)
        fast = reach <= node
        found[name] = machine.link if fast else EFFICIENCY * NETWORK
    return found


def _blocks(network: Transformer, layout: Layout) -> int:
    """Of the stage with the most."""
    return -(-network.depth // layout.pipeline)


def _computing(job: Job, layout: Layout, machine: Machine) -> float:
    """Seconds of a micro-batch on its slowest stage, as if it had the ends,
    too."""
    network = check_network(job)
    ends, block, again = _counts(network, job.tokens, layout.recipe)
    blocks = _blocks(network, layout)
    flops, moved, called = added(
        [(1, ends), (blocks, block), (blocks * layout.checkpointed, again)]
    )
    share = layout.micro_batch / (layout.tensor * layout.context)
    rate = machine.rate(layout.recipe)
    work = share * (flops / rate + moved / machine.bandwidth)
    return work + called * machine.operator


def _sent(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes that a rank sends of a micro-batch, by the axis.

    With checkpoints it sends those of the forward pass twice.
    """
    network, ranks = check_network(job), layout.tensor
    itemsize = RECIPES[layout.recipe].parameters
    size, again = layout.micro_batch, layout.checkpointed
    local = job.tokens // layout.context
    blocks = _blocks(network, layout)
    traffic = tensor_traffic(network, size, local, itemsize=itemsize)
    sums = traffic["all-reduce"].bytes * (1.5 if again else 1)
    unit = size * job.tokens * network.width * itemsize
    others, kv = layout.context - 1, network.shared / network.width
    ring = context_traffic(layout.context, kv)
    ring += again * 2 * kv * others / layout.context
    parts = layout.context * (ranks if layout.sequence else 1)
    return {
        "tensor": blocks * 2 * (ranks - 1) / ranks * sums,
        "context": blocks * ring * unit / ranks,
        "pipeline": 2 * unit / parts * (layout.pipeline > 1),
    }


def _moved(layout: Layout, many: int) -> float:
    """Bytes that a rank sends for each parameter that it has in a step."""
    recipe, ranks = RECIPES[layout.recipe], layout.data * layout.context
    if not layout.sharded:
        return 2 * recipe.gradients * (ranks - 1) / ranks
    each = recipe.parameters + recipe.gradients
    if layout.pipeline == 1:  # gathered again, of each micro-batch
        each = many * (each + recipe.parameters)
    return each * (ranks - 1) / ranks


def _numbers(network: Transformer, stages: int) -> int:
    """Parameters of the stage with the most."""
    table = network.vocabulary * network.width
    ends = 2 * table if stages == 1 else table
    return -(-network.depth // stages) * network.block_parameters + ends


def _counts(
    network: Transformer, tokens: int, recipe: str
) -> tuple[Counts, Counts, Counts]:
    """Of a sequence: embedding, head and loss; a block; its recomputation."""
    one, two, again = counts_of_blocks(network, tokens, recipe, None, None, 1)
    block = less(two, one)
    return less(one, block), block, less(again, one)
