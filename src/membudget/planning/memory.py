"""The peak of a plan: the ledger's, and what FSDP2 holds beside it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from membudget.checks import instance
from membudget.ledger import (
    RECIPES,
    PaperMoment,
    Prediction,
    States,
    Transformer,
    predict,
    rules,
    states,
    update_workspace,
)
from membudget.planning.own import OwnJob
from membudget.planning.plan import Job, Plan, TrainedJob, as_job, checked
from membudget.sharding import (
    Held,
    Place,
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
    return at_peak(as_job(job), plan).live


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
        TypeError: something else than a job and a plan.
        ValueError: a plan that is not one of the job's (:meth:`Plan.share`),
            or FSDP2 of a version of PyTorch without rules.
    """
    instance(job, Job, "the job", "a Job")
    share = checked(job, plan)
    if plan.stage == "ddp":
        return _predicted(job, plan, share).at_peak
    inputs = input_bytes(job, share)
    how = job.network, family_of(plan), job.device
    found = [_stepped(sharded_of(*how, False), inputs)]
    for size, summed, scaled in passes(share, plan.micro_batch):
        found += _under(job, plan, sharded_of(*how, summed), size, scaled)
    return max(found, key=lambda moment: moment.live)


def passes(share: int, size: int) -> list[tuple[int, bool, int]]:
    """The micro-batches of a step under FSDP2 that can be its worst: their
    sequences, whether shards of gradients are there, and bytes of the loss
    times its share of the batch."""
    if size >= share:
        return [(size, False, 0)]
    if size * 2 <= share:
        return [(size, True, SCALED)]
    return [(size, False, SCALED), (share - size, True, SCALED)]


def _under(
    job: Job, plan: Plan, sharded: "Sharded", size: int, scaled: int
) -> list[PaperMoment]:
    """All moments of a micro-batch under FSDP2."""
    inputs, found = input_bytes(job, plan.share(job)), []
    prediction = _predicted(job, replace(plan, micro_batch=size), size)
    for place, block, moment, made in placed(prediction):
        here, split = sharded.places[place][block], moment.split
        held, gradients = here.held, here.held.gradients - here.whole
        needs = {
            "parameters": held.parameters + held.gathered,
            "gradients": gradients + sharded.waiting(made),
            "optimizer": held.optimizer,
            "activations": split["activations"],
            "inputs": inputs,
            "temporaries": sum(
                (split["temporaries"], held.buffers, sharded.newest, scaled)
            ),
        }
        parts = tuple(needs.values())
        found.append(PaperMoment(moment.row, moment.phase, parts))
    return found


def _stepped(sharded: "Sharded", inputs: int) -> PaperMoment:
    """When the optimizer steps."""
    step = sharded.step
    held = step.parameters + step.gathered, step.gradients, step.optimizer
    rest = 0, inputs, step.buffers + sharded.workspace
    return PaperMoment("optimizer", "optimizer", (*held, *rest))


def static(job: TrainedJob, plan: Plan) -> States:
    """Bytes of the model's states on a rank, as the optimizer finds them.

    Raises:
        TypeError, ValueError: as :func:`at_peak`.
    """
    checked(job, plan)
    if isinstance(job, OwnJob):
        return job.dry.states
    return states_of(as_job(job).network, family_of(plan))


def placed(
    prediction: Prediction,
) -> list[tuple[str, int, PaperMoment, int]]:
    """The moments of a micro-batch: one of
    :data:`membudget.sharding.PLACES`, the block's number or 0, the moment,
    and bytes of the whole gradients of the units that are at work.

    The first moment of the backward pass makes the loss's gradient. Then the
    model's own unit is gathered again.
    """
    found = []
    ends = {}  # gradients when the backward pass enters a block
    *back, leave, last = (
        m for m in prediction.between if m.phase == "backward"
    )
    own = back[0].split["gradients"]
    before = own
    for m in back:
        ends[_block(m.row)] = gradients = m.split["gradients"]
        row = replace(m, row="reduce-scatter")
        found.append(("return", _block(m.row), row, own + gradients - before))
        before = gradients
    done = leave.split["gradients"]
    rest = last.split["gradients"] - done
    for place, m, made in (
        ("leave", leave, done - before),
        ("last", last, rest),
    ):
        row = replace(m, row="reduce-scatter")
        found.append((place, 0, row, own + made))
    for m in prediction.between:
        if m.phase == "forward" and m.row:
            row = replace(m, row="all-gather")
            found.append(("enter", _block(m.row), row, 0))
    place = "embedding"
    for m in prediction.moments:
        if m.row.startswith("blocks."):
            forward = place in ("embedding", "forward")
            place = "forward" if forward else "backward"
            block = _block(m.row)
            made = 0 if forward else own + m.split["gradients"] - ends[block]
            found.append((place, block, m, made))
            continue
        if place == "forward":
            place = "loss"
        elif place == "loss" and m.phase == "backward":
            place = "gather"
        elif place == "gather":
            place = "softmax"
        if place == "softmax" and m.phase == "backward":
            place = "head" if m.row.startswith("head") else place
        elif place == "backward":
            place = "end"
        made = m.split["gradients"] - (done - own) * (place == "end")
        found.append((place, 0, m, made))
    return found


def _block(row: str) -> int:
    """Its number."""
    return int(row.split(".")[1].split()[0])


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
        places: each of :data:`membudget.sharding.PLACES`.
        step: while the optimizer steps.
        workspace: bytes that its step allocates.
        waits, gathered: bytes of a number of a whole gradient that waits,
            and of one that is made.
        newest: bytes of one that is both, at most.
    """

    places: dict[str, tuple[Place, ...]]
    step: Held
    workspace: int
    waits: int
    gathered: int
    newest: int

    def waiting(self, made: int) -> int:
        """What new gradients of this size take while they wait."""
        return made * self.waits // self.gathered


@lru_cache(1000)
def sharded_of(
    network: Transformer, family: Plan, device: str, summed: bool
) -> Sharded:
    """Of a micro-batch; ``summed`` as for ``rank_moments``."""
    recipe, units = RECIPES[family.recipe], _units(network)
    moments = rank_moments(
        units,
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
    most = max(prod(shape) for unit in units for shape in unit.shapes)
    both = moments.waits != recipe.parameters
    return Sharded(
        moments.places,
        moments.step,
        workspace(network, family, device),
        moments.waits,
        recipe.parameters,
        newest=most * recipe.parameters * both,
    )


def _predicted(job: Job, plan: Plan, batch: int):
    """The ledger's step with this many sequences."""
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
