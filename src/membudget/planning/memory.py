"""The peak of a plan: the ledger's, and for shards a bound."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from membudget.checks import instance
from membudget.ledger import (
    RECIPES,
    PaperMoment,
    States,
    Transformer,
    predict,
    rules,
    states,
    update_workspace,
)
from membudget.planning.own import OwnJob
from membudget.planning.plan import Job, Plan, TrainedJob, checked
from membudget.sharding import (
    PARTS,
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

    Raises:
        TypeError, ValueError: as :func:`at_peak`.
    """
    if isinstance(job, OwnJob):
        checked(job, plan)
        return job.dry.peak(plan)
    return at_peak(job, plan).live


def at_peak(job: Job, plan: Plan) -> PaperMoment:
    """The moment with the most bytes on a rank: row, phase, split.

    One rank's is :func:`membudget.ledger.predict`'s, to the byte. So is that
    of DDP, whose gradients stay in its buckets from step to step
    (``gradient_as_bucket_view``).

    With FSDP2 it is an upper bound. For each part of the step it adds the
    most that :func:`membudget.sharding.rank_moments` holds and the most that
    one micro-batch needs beside the model's states. These need not be at the
    same moment, so the bound is too large by as much as the smaller of the
    two, at most; where the peak is at the loss, by less than a thousandth.
    The parts are :data:`membudget.sharding.PARTS` and the optimizer's step.
    Gathered parameters count as parameters, and what collectives read and
    write as temporaries.

    Raises:
        TypeError: something else than a job and a plan.
        ValueError: a plan that is not one of the job's (:meth:`Plan.share`),
            or FSDP2 of a version of PyTorch without rules.
    """
    instance(job, Job, "the job", "a Job")
    share = checked(job, plan)
    if plan.stage == "ddp":
        return _predicted(job, plan, share).at_peak
    found = []
    moments = _predicted(job, plan, plan.micro_batch).moments
    parts = list(zip(parts_of(moments), moments, strict=True))
    several, device = plan.micro_batch < share, job.device
    family = family_of(plan)
    for part, held, extra in held_in(job.network, family, device, several):
        at = max(
            (moment for place, moment in parts if place == part),
            key=load,
            default=PaperMoment("optimizer", "optimizer", (0,) * 6),
        )
        split = at.split
        needs = {
            "parameters": held.parameters + held.gathered,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": split["activations"],
            "inputs": input_bytes(job, share),
            "temporaries": split["temporaries"] + held.buffers + extra,
        }
        found.append(PaperMoment(at.row, at.phase, tuple(needs.values())))
    return max(found, key=lambda moment: moment.live)


def static(job: TrainedJob, plan: Plan) -> States:
    """Bytes of the model's states on a rank, as the optimizer finds them.

    Raises:
        TypeError, ValueError: as :func:`at_peak`.
    """
    checked(job, plan)
    if isinstance(job, OwnJob):
        return job.dry.states
    return states_of(job.network, family_of(plan))


def parts_of(moments: Sequence[PaperMoment]) -> list[str]:
    """For each moment one of :data:`membudget.sharding.PARTS`.

    The first moment of the backward pass makes the loss's gradient. Then the
    model's own unit is gathered again.
    """
    places: dict[tuple[bool, bool], list[int]] = {}
    for number, m in enumerate(moments):
        key = m.phase == "forward", m.row.startswith("blocks.")
        places.setdefault(key, []).append(number)
    through, back = places[True, True][-1], places[False, False][0]
    first, last = places[False, True][0], places[False, True][-1]
    head = next(
        n
        for n in range(back, first)
        if moments[n].phase == "backward" and moments[n].row.startswith("head")
    )
    ends = through, back - 1, back, head - 1, first - 1, last, len(moments)
    return [PARTS[bisect_left(ends, n)] for n in range(len(moments))]


def load(moment: PaperMoment) -> int:
    """Bytes that a micro-batch needs beside states and batch."""
    split = moment.split
    return split["activations"] + split["temporaries"]


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
    )


@lru_cache(1000)
def states_of(network: Transformer, family: Plan) -> States:
    """Bytes of a rank's states."""
    recipe, optimizer = family.recipe, family.optimizer
    if family.stage == "ddp":
        return states(_sizes(network), recipe, optimizer)
    item = RECIPES[recipe].stepped
    return rank_states(_units(network), family.ranks, 0, optimizer, item)


@lru_cache(1000)
def workspace(network: Transformer, family: Plan, device: str) -> int:
    """Bytes that the optimizer's step allocates, at its worst moment.

    What is not fused steps as PyTorch does by itself on the device.
    """
    recipe, sizes = family.recipe, _sizes(network)
    if family.stage != "ddp":  # the rank's rows, as they are stored
        recipe = "bf16" if RECIPES[recipe].stepped == 2 else "fp32"
        sizes = [
            rows(shape[0], family.ranks, 0) * prod(shape[1:])
            for unit in _units(network)
            for shape in unit.shapes
        ]
    foreach = device == "cuda" and not family.fused
    return max(
        update_workspace(
            sizes, recipe, family.optimizer, foreach, family.fused
        )
    )


@lru_cache(1000)
def held_in(
    network: Transformer, family: Plan, device: str, several: bool
) -> list[tuple[str, Held, int]]:
    """Of FSDP2: parts of the step, what is held in them, and further bytes.

    Args:
        several: whether the step has several micro-batches.
    """
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
        summed=several,
    )
    before = several * SCALED
    last = workspace(network, family, device)
    return [
        *((part, moments.parts[part], before) for part in PARTS),
        ("optimizer", moments.step, last),
    ]


def _predicted(job: Job, plan: Plan, batch: int):
    """The ledger's step with so many sequences."""
    sharded, recipe = plan.stage != "ddp", plan.recipe
    if sharded and recipe == "master-fp32-gradients":
        recipe = "master"  # FSDP2 sums the shards
    return predict(
        job.network,
        batch,
        job.tokens,
        recipe=recipe,
        optimizer=None if sharded else plan.optimizer,
        micro_batch=plan.micro_batch,
        checkpointed=plan.checkpointed,
        loss_chunks=plan.loss_chunks,
        kept_attention=plan.kept_attention,
        **{
            **rules(job.network, job.device),
            "foreach": job.device == "cuda" and not plan.fused,
            "fused": plan.fused,
        },
        keep_gradients=plan.ranks > 1 and not sharded,
    )


@lru_cache(100)
def _sizes(network: Transformer) -> tuple[int, ...]:
    """Of the parameters."""
    return tuple(p.elements for p in network.write(1, 1).parameters)


@lru_cache(100)
def _units(network: Transformer) -> tuple[Unit, ...]:
    """As FSDP2 groups them; a tied weight counts once, as one of its own."""
    model = network.build()
    return tuple(
        Unit(unit.name, unit.shapes, unit.itemsizes)
        for unit in units_of(model, model.blocks)
    )
