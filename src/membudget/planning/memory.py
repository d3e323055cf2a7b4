"""The peak of a plan: the ledger's, and what FSDP2 holds beside it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from membudget.checks import instance
from membudget.ledger import (
    RECIPES,
    Adapter,
    PaperMoment,
    States,
    states,
    update_workspace,
)
from membudget.ledger.adapters import checked_trained, stepped_recipe
from membudget.ledger.paper import Paper
from membudget.planning.own import OwnJob
from membudget.planning.plan import (
    Job,
    Network,
    Plan,
    TrainedJob,
    as_job,
    checked,
)
from membudget.planning.rows import Row, Rows, Step, needs
from membudget.sharding import (
    Held,
    Unit,
    rank_moments,
    rank_states,
    rows,
    units_of,
)

SCALED = 8
"""Bytes of the loss times its share of the batch, and of its gradient."""


def memory(job: TrainedJob, plan: Plan) -> int:
    """The most bytes alive on a rank in a step.

    Of a :class:`Job` see :func:`at_peak`. Of an :class:`OwnJob` it is what
    :func:`membudget.measuring.trace_step` measures, to the byte.
    """
    return peak(job, plan, checked(job, plan))


def at_peak(job: Job, plan: Plan) -> PaperMoment:
    """The moment with the most bytes on a rank: row, phase, split.

    One rank's is :func:`membudget.ledger.predict`'s, to the byte. So is that
    of DDP, whose gradients stay in its buckets from step to step
    (``gradient_as_bucket_view``).

    With FSDP2 each place of the step (:data:`membudget.sharding.PLACES`) has
    what :func:`membudget.sharding.rank_moments` holds there beside what one
    micro-batch needs there. Where a place has several moments, each of the
    two is the worst; so it is an upper bound. Where several micro-batches
    are summed, 8 bytes are added for the loss times its share. Gathered
    parameters count as parameters, and what collectives read and write as
    temporaries.

    Raises:
        ValueError: a plan that is not one of the job's (:meth:`Plan.share`),
            or FSDP2 of a version of PyTorch without rules.
    """
    instance(job, Job, "the job", "a Job")
    share = checked(job, plan)
    part = max(parts_of(job, plan, share), key=Part.most)
    row, needed = part.rows.worst(part.size)
    activations, temporaries, gradients = needed
    beside = part.beside
    split = (
        beside.parameters,
        beside.gradients + gradients,
        beside.optimizer,
        activations,
        input_bytes(job, share),
        beside.temporaries + temporaries,
    )
    return PaperMoment(row.name, row.phase, split)


def peak(job: TrainedJob, plan: Plan, share: int) -> int:
    """As :func:`memory`, of a plan that is one of the job's.

    Args:
        job: what is trained.
        plan: one of its plans.
        share: sequences of each rank.
    """
    if isinstance(job, OwnJob):
        return job.dry.peak(plan)
    job = as_job(job)
    most = max(part.most() for part in parts_of(job, plan, share))
    return input_bytes(job, share) + most


class Beside(NamedTuple):
    """Bytes that are there whatever a micro-batch needs."""

    parameters: int
    gradients: int
    optimizer: int
    temporaries: int = 0

    def more(self, temporaries: int) -> "Beside":
        """With these besides."""
        return self._replace(temporaries=self.temporaries + temporaries)


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        beside: what is there besides.
        rows: its moments.
        size: sequences.
    """

    beside: Beside
    rows: Rows
    size: int

    def most(self) -> int:
        """Bytes at its worst moment, the batch aside."""
        return sum(self.beside) + self.rows.most(self.size)


STEPPED = Rows((Row("", 0, "update", "optimizer"),))
"""The optimizer's step."""

UNSHARDED = Rows((Row("", 0, "optimizer", "optimizer"),))
"""That of FSDP2."""


def parts_of(job: Job, plan: Plan, share: int) -> Iterator[Part]:
    """The parts of a step that can be its worst."""
    family, depth = family_of(plan), job.network.depth
    size, recipe = plan.micro_batch, plan.recipe
    sums = recipe == "master-fp32-gradients"
    sharded = plan.stage != "ddp"
    step = Step(
        replace(job.network, depth=1),
        job.tokens,
        job.device,
        "master" if sums and sharded else recipe,  # FSDP2 sums the shards
        plan.loss_chunks,
        plan.kept_attention,
        sharded=sharded,
        adapter=plan.adapter,
        offloaded=plan.offloaded,
    )
    work = workspace(job.network, family, job.device)
    if sharded:
        held = sharded_of(job.network, family, False).step
        yield Part(held.more(work), UNSHARDED, 0)
        for part, summed, scaled in passes(share, size):
            places = sharded_of(job.network, family, summed).places
            found = needs(step, depth, plan.checkpointed, part)
            for (place, block), rows in found.items():
                yield Part(places[place][block].more(scaled), rows, part)
        return

    def alone(beside: Beside, size: int, kept: bool) -> Part:
        variant = replace(step, scaled=several, kept=kept)
        found = needs(variant, depth, plan.checkpointed, size)
        return Part(beside, found["", 0], size)

    several = size < share
    whole = states_of(job.network, family)
    later = Beside(whole.parameters, whole.gradients, whole.optimizer)
    if sums or plan.ranks > 1 or size * 2 <= share:
        yield alone(later, size, True)
    else:
        yield alone(later._replace(gradients=0), size, False)
        if several:  # the second has the gradients beside it
            yield alone(later, share - size, True)
    yield Part(later.more(work), STEPPED, 0)


def passes(share: int, size: int) -> list[tuple[int, bool, int]]:
    """The micro-batches of a step under FSDP2 that can be its worst: their
    sequences, whether shards of gradients are there, and bytes of the loss
    times its share of the batch."""
    if size >= share:
        return [(size, False, 0)]
    if size * 2 <= share:
        return [(size, True, SCALED)]
    return [(size, False, SCALED), (share - size, True, SCALED)]


def static(job: TrainedJob, plan: Plan) -> States:
    """Bytes of the model's states on a rank, as the optimizer finds them."""
    checked(job, plan)
    if isinstance(job, OwnJob):
        return job.dry.states
    return states_of(as_job(job).network, family_of(plan))


def input_bytes(job: Job, sequences: int) -> int:
    """Of tokens and targets."""
    return 2 * 8 * job.tokens * sequences


def family_of(plan: Plan) -> Plan:
    """The plan that differs in nothing but what its states do not know."""
    return replace(
        plan,
        micro_batch=1,
        checkpointed=0,
        loss_chunks=None,
        kept_attention=False,
        offloaded=False,
    )


@lru_cache(1000)
def states_of(network: Network, family: Plan) -> States:
    """Bytes of a rank's states."""
    if family.stage == "ddp":
        return _whole(network, family)
    item, ranks = RECIPES[family.recipe].stepped, family.ranks
    return rank_states(_units(network), ranks, 0, family.optimizer, item)


def _whole(network: Network, family: Plan) -> States:
    """Those of a rank that has all of them; frozen weights have their bytes
    alone."""
    paper = _written(network, family)
    sizes = [p.elements for p in paper.parameters]
    frozen = sum(p.bytes for p in paper.frozen)
    found = states(sizes, _stepped(family), family.optimizer)
    frozen += network.buffers_beside(RECIPES[family.recipe].parameters)
    found = replace(found, parameters=found.parameters + frozen)
    return replace(found, optimizer=0) if family.optimizer_on_host else found


def _stepped(family: Plan) -> str:
    return stepped_recipe(family.recipe, family.adapter)


@lru_cache(1000)
def workspace(network: Network, family: Plan, device: str) -> int:
    """Bytes that the optimizer's step allocates, at its worst moment.

    What is not fused steps as PyTorch does by itself on the device.
    """
    if family.optimizer_on_host:
        return 0
    written = _written(network, family).parameters
    recipe, sizes = _stepped(family), tuple(p.elements for p in written)
    if family.stage != "ddp":  # the rank's rows, as they are stored
        recipe = "bf16" if RECIPES[recipe].stepped == 2 else "fp32"
        sizes = tuple(
            rows(shape[0], family.ranks, 0) * prod(shape[1:])
            for unit in _units(network)
            for shape in unit.shapes
        )
    foreach = device == "cuda" and not family.fused
    return max(
        update_workspace(
            sizes, recipe, family.optimizer, foreach, family.fused
        )
    )


@dataclass(frozen=True)
class Sharded:
    """What FSDP2 holds beside a micro-batch.

    Attributes:
        places: each of :data:`membudget.sharding.PLACES`, of each block.
        step: while the optimizer steps, its workspace aside.
    """

    places: dict[str, tuple[Beside, ...]]
    step: Beside


@lru_cache(1000)
def sharded_of(network: Network, family: Plan, summed: bool) -> Sharded:
    """Of a micro-batch; ``summed`` as for ``rank_moments``."""
    recipe = RECIPES[family.recipe]
    moments = rank_moments(
        _units(network),
        family.ranks,
        0,
        family.stage,
        family.optimizer,
        itemsize=recipe.stepped,
        gathered=recipe.parameters,
        reduced=recipe.gradients,
        embedding=2 if network.family == "gpt" else 1,
        summed=summed,
    )
    places = {
        name: tuple(_beside(one.held, one.whole) for one in blocks)
        for name, blocks in moments.places.items()
    }
    return Sharded(places, _beside(moments.step))


def _beside(held: Held, whole: int = 0) -> Beside:
    """All but whole gradients of these bytes."""
    return Beside(
        held.parameters + held.gathered,
        held.gradients - whole,
        held.optimizer,
        held.buffers,
    )


@lru_cache(100)
def _paper(network: Network, itemsize: int, adapter: Adapter | None) -> Paper:
    trained = checked_trained(None, adapter)
    how: dict[str, Any] = {"trained": trained, "adapter": adapter}
    return network.write(1, 1, itemsize=itemsize, **how)


def _written(network: Network, family: Plan) -> Paper:
    """A sheet with the parameters, trained ones and frozen ones."""
    itemsize = RECIPES[family.recipe].parameters
    return _paper(network, itemsize, family.adapter)


@lru_cache(100)
def _units(network: Network) -> tuple[Unit, ...]:
    """As FSDP2 groups them; a tied weight counts once, as one of its own."""
    model = network.build()
    return tuple(
        Unit(unit.name, unit.shapes, unit.itemsizes)
        for unit in units_of(model, model.blocks)
    )
