"""Which layout of many cards fits, the fastest first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from membudget.cards import CARDS
from membudget.checks import one_of, whole
from membudget.ledger import RECIPES, Transformer
from membudget.measuring import format_bytes
from membudget.parallelism import tensor_tape
from membudget.planning.counter import Counts, added, less
from membudget.planning.layout import Layout, check_network
from membudget.planning.machine import EFFICIENCY, Machine
from membudget.planning.plan import Job
from membudget.planning.ranks import Need, stage_states, worst
from membudget.planning.work import micro_batches

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
    node: int = NODE,
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
        cards: how many, a power of two.
        node: cards that the fast link connects.
        recipe: one of :data:`membudget.ledger.RECIPES`.
        most: how many that fit.

    Raises:
        ValueError: cards that are no power of two.
    """
    network = check_network(job)
    budget = CARDS[one_of(card, CARDS, "card")].usable
    cards, node = whole(cards, "cards"), whole(node, "node")
    most = whole(most, "most")
    if cards & (cards - 1):
        raise ValueError(
            f"{cards} cards are no power of two, and the axes are: use "
            f"{1 << cards.bit_length() - 1} or {1 << cards.bit_length()}"
        )
    machine = Machine.of_card(card)
    tried = [
        (seconds_of(job, layout, machine, node), layout)
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


def seconds_of(
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
    network = check_network(job)
    recipe = RECIPES[layout.recipe]
    tensor, context = layout.tensor, layout.context
    stages, size = layout.pipeline, layout.micro_batch
    within = tensor * context
    links = {
        name: machine.link if reach <= node else EFFICIENCY * NETWORK
        for name, reach in {
            "tensor": tensor,
            "context": within,
            "pipeline": within * stages,
            "data": layout.cards,
        }.items()
    }
    ends, block, again = _counts(network, job.tokens, layout.recipe)
    blocks = -(-network.depth // stages)
    again_too = blocks * layout.checkpointed
    flops, moved, called = added(
        [(1, ends), (blocks, block), (again_too, again)]
    )
    share = size / within
    computing = (
        share * flops / machine.rate(layout.recipe)
        + share * moved / machine.bandwidth
        + called * machine.operator
    )
    local = size * job.tokens // context
    unit = local * network.width * recipe.parameters
    sums = 4 + 2 * layout.checkpointed
    reduced = 2 * (tensor - 1) / tensor * unit * sums * blocks
    pairs = 2 * local * network.shared // tensor * recipe.parameters
    rounds = 3 + layout.checkpointed  # two of them with gradients
    ring = (context - 1) * pairs * rounds * blocks
    sent = 2 * unit / (tensor if layout.sequence else 1) * (stages > 1)
    summing = many * reduced / links["tensor"]
    passing = many * ring / links["context"]
    sending = many * sent / links["pipeline"]
    computing *= many
    numbers = _numbers(network, stages) // tensor
    data = numbers * _moved(layout, many) / links["data"]
    beside = computing if stages == 1 and layout.sharded else 0
    passes = computing + summing + passing + sending
    waits = (stages - 1) / many * passes
    more = max(0.0, data - beside)
    return Time(computing, summing, passing, sending, more, waits)


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


@lru_cache(100)
def _counts(
    network: Transformer, tokens: int, recipe: str
) -> tuple[Counts, Counts, Counts]:
    """Of a sequence: embedding, head and loss; a block; its recomputation."""
    one, two, again = (
        micro_batches(
            replace(network, depth=depth),
            1,
            tokens,
            checkpointed,
            None,
            recipe,
        )[0]
        for depth, checkpointed in ((1, 0), (2, 0), (1, 1))
    )
    block = less(two, one)
    return less(one, block), block, less(again, one)
