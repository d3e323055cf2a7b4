"""What a rank of a layout holds at its worst moment."""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple

from membudget.checks import instance, whole
from membudget.ledger import RECIPES, States, Transformer, states
from membudget.ledger.parts import Passes, passes
from membudget.ledger.recipes import update_workspace
from membudget.parallelism.pipeline import spread
from membudget.planning.layout import Layout, check_network
from membudget.planning.plan import Job
from membudget.planning.sharded import sharded_peak


class Need(NamedTuple):
    """Bytes of a rank at its worst moment, by what they are.

    Attributes:
        stage: of the pipeline.
        moment: ``"forward"``, ``"backward"`` or ``"update"``.
        parameters, gradients, optimizer: the states, as far as they are
            there.
        boundaries: buffers for what the stages send each other.
        inputs: tokens and targets.
        others: micro-batches in flight, but the one at work.
        working: the one at work, or the optimizer.
    """

    stage: int
    moment: str
    parameters: int
    gradients: int
    optimizer: int
    boundaries: int
    inputs: int
    others: int
    working: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self[2:])


def need(job: Job, layout: Layout, stage: int = 0) -> Need:
    """The bytes of a rank of this stage, at its worst moment.

    Exact, as PyTorch's own classes need them on a simulated rank: tensor
    parallelism, with or without a pipeline; a pipeline whose data ranks share
    gradients and optimizer states (``shard(stage, blocks, "zero-2")``, of
    weights whose rows the ranks divide); context parallelism alone, but for
    1 % where a ring's last step is the worst moment. The other products are
    of the same rules, and no rank was compared with them.

    Where data ranks share all states of one stage, FSDP2 gathers block by
    block, and this is an upper bound, as in
    :func:`membudget.planning.memory`. Where it is not exact, it is above by
    the number with which the loss counts its targets, 2 or 4 bytes.

    * A stage has a buffer for what it receives of *each* micro-batch, and
      one for each gradient, from the first step on.
    * A stage under 1F1B holds the gradient that it sent until it has made
      the next one, and the last one its logits until it has made new ones.

    Args:
        job: what is trained, in micro-batches of the layout.
        layout: how it is spread.
        stage: number of one.

    Raises:
        ValueError: a layout that is not one of the job's.
    """
    many = instance(layout, Layout, "layout", "a Layout").micro_batches(job)
    stage = whole(stage, "stage", 0, layout.pipeline - 1)
    rank = _Rank(job, layout, stage, many)
    if layout.shards > 1 and layout.pipeline == 1:
        return _sharded(job, layout, rank)
    return max(rank.moments(), key=lambda need: need.bytes)


def worst(job: Job, layout: Layout, budget: float = inf) -> Need:
    """The bytes of the rank that needs most.

    It is one of the first two stages or the last one: between them a stage
    has no more blocks and holds fewer micro-batches.

    Args:
        job, layout: as for :func:`need`.
        budget: of bytes; the first of these stages that needs more is told.
    """
    layout = instance(layout, Layout, "layout", "a Layout")
    last = layout.pipeline - 1
    found = []
    for stage in sorted({0, min(1, last), last}):
        found.append(need(job, layout, stage))
        if found[-1].bytes > budget:
            break
    return max(found, key=lambda need: need.bytes)


@lru_cache(10**5)
def _passes(
    network: Transformer,
    size: int,
    tokens: int,
    blocks: range,
    ranks: int,
    sequence: bool,
    ring: bool,
    itemsize: int,
    checkpointed: bool,
    device: str,
) -> Passes:
    return passes(
        network,
        size,
        tokens,
        blocks=blocks,
        ranks=ranks,
        sequence=sequence,
        ring=ring,
        itemsize=itemsize,
        checkpointed=checkpointed,
        device=device,
    )


def _sharded(job: Job, layout: Layout, rank: "_Rank") -> Need:
    """Of one stage, under FSDP2: the shards, and all that comes and goes."""
    recipe, many = rank.recipe, rank.many
    own = tuple(-(-n // layout.shards) for n in rank.passes.sizes)
    numbers = sum(own)
    held = states(own, layout.recipe, layout.optimizer)
    stored = recipe.stepped * numbers
    kept = held.optimizer - recipe.master * numbers
    network = check_network(job)
    most = sharded_peak(network, job.tokens, layout, job.device, many > 1)
    summed = stored if many > 1 else 0
    working = most - stored - summed - kept
    passes = Need(
        0, "backward", stored, summed, kept, 0, rank.inputs, 0, working
    )
    return max(passes, rank.update(), key=lambda need: need.bytes)


def stage_states(sizes: tuple[int, ...], layout: Layout) -> States:
    """The states of a rank whose stage has parameters of these sizes.

    Where data ranks share them, a pipeline's are gathered for the whole step
    beside their shards, and the gradients are whole until its end.
    """
    shards, recipe = layout.shards, RECIPES[layout.recipe]
    if shards == 1:
        return states(sizes, layout.recipe, layout.optimizer)
    own = tuple(-(-size // shards) for size in sizes)
    shared = states(own, layout.recipe, layout.optimizer)
    if layout.pipeline == 1:
        return shared
    numbers = sum(sizes)
    stored = (recipe.stepped - recipe.master) * sum(own)
    return States(
        recipe.parameters * numbers + stored,
        recipe.gradients * numbers,
        shared.optimizer,
    )


class _Rank:
    """A rank of a stage: what there is, and one operation after the other."""

    def __init__(
        self, job: Job, layout: Layout, stage: int, many: int
    ) -> None:
        network = check_network(job)
        self.job, self.layout, self.stage, self.many = job, layout, stage, many
        self.last = stage == layout.pipeline - 1
        self.recipe = RECIPES[layout.recipe]
        self.passes = _passes(
            network,
            layout.micro_batch,
            job.tokens // layout.context,
            spread(network.depth, layout.pipeline)[stage],
            layout.tensor,
            layout.sequence,
            layout.context > 1,
            self.recipe.parameters,
            layout.checkpointed,
            job.device,
        )
        tokens = layout.micro_batch * job.tokens // layout.context
        self.sent = tokens * network.width * self.recipe.parameters
        if layout.sequence:
            self.sent //= layout.tensor
        self.states = stage_states(self.passes.sizes, layout)
        self.inputs = 8 * tokens * many * ((stage == 0) + self.last)
        self.boundaries = self.sent * many * ((stage > 0) + (not self.last))

    def moments(self) -> Iterator[Need]:
        """The operations of a step, each at its worst, and the update."""
        flying, done = 0, 0
        buckets = self.layout.data > 1 and not self.layout.sharded
        for kind in self.order():
            late = self.states.gradients if done or buckets else 0
            if kind == "F":
                yield self.at("forward", late, flying, self.forward(done))
                flying += 1
            else:
                flying -= 1
                yield self.at("backward", late, flying, self.backward(done))
                done += 1
        yield self.update()

    def update(self) -> Need:
        """The optimizer's step, on the shards where there are some."""
        shards, layout = self.layout.shards, self.layout
        sizes = tuple(-(-size // shards) for size in self.passes.sizes)
        held = states(sizes, layout.recipe, layout.optimizer)
        fused = self.job.device == "cuda" and layout.optimizer == "adam"
        how = layout.recipe, layout.optimizer, False, fused
        return Need(
            self.stage,
            "update",
            *(held.parameters, held.gradients, held.optimizer),
            self.boundaries,
            self.inputs,
            0,
            max(update_workspace(sizes, *how)),
        )

    def at(self, moment: str, gradients: int, others: int, working: int):
        """A moment with so many other micro-batches."""
        held = self.passes.held + self.kept_logits
        return Need(
            self.stage,
            moment,
            self.states.parameters,
            gradients,
            self.states.optimizer,
            self.boundaries,
            self.inputs,
            others * held,
            working,
        )

    def order(self) -> Iterator[str]:
        """Forward and backward passes, in the order of the schedule."""
        many, layout = self.many, self.layout
        ahead = many
        if layout.pipeline == 1:
            ahead = 1
        elif layout.schedule == "1F1B":
            ahead = min(layout.pipeline - self.stage, many)
        for _ in range(ahead):
            yield "F"
        for _ in range(many - ahead):
            yield from "BF"
        for _ in range(ahead):
            yield "B"

    @property
    def kept_logits(self) -> int:
        """A stage returns them, and its caller keeps them."""
        return self.passes.logits if self.layout.pipeline > 1 else 0

    @property
    def turns(self) -> bool:
        """Whether forward and backward passes take turns."""
        pipeline = self.layout.pipeline > 1
        return pipeline and self.layout.schedule == "1F1B"

    def forward(self, done: int) -> int:
        """One micro-batch, after so many backward passes."""
        needs = self.passes
        sent = self.sent if done and self.turns and self.stage else 0
        body = needs.body
        if done and self.turns:
            body += self.kept_logits  # of the one before
        most = max(body, needs.forward)
        return most + sent + self.losses(done)

    def backward(self, done: int) -> int:
        """One micro-batch, likewise."""
        needs = self.passes
        sent = self.sent if done and self.turns and self.stage else 0
        most = needs.later if done else needs.first
        return most + self.kept_logits + sent + self.losses(done)

    def losses(self, done: int) -> int:
        """Those of the micro-batches that are done."""
        return self.passes.loss * done if self.layout.pipeline > 1 else 0
