"""Which plans fit, at the least slowdown: the whole space, exactly."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

from membudget.cards import GIB
from membudget.checks import flag, instance, listed, one_of, shown, whole
from membudget.ledger import PLANNED, RECIPES, Adapter
from membudget.measuring import format_bytes
from membudget.planning.machine import Machine, seconds
from membudget.planning.memory import peak, static
from membudget.planning.own import OWN_AXES, OwnJob
from membudget.planning.plan import (
    HOST,
    JOBS,
    STAGES,
    Job,
    Plan,
    TrainedJob,
    as_job,
    check_adapter,
    share_of,
)
from membudget.planning.work import work

CHUNKS = (None, 2, 4, 8, 16)
"""Into which the loss may be cut."""

AXES = (
    "micro_batch",
    "checkpointed",
    "loss_chunks",
    "recipe",
    "optimizer",
    "stage",
    "kept_attention",
    "fused",
    "adapter",
    *HOST,
)
"""What a lock may hold."""

CAUSES = ("recomputation", "small micro-batches", "traffic", "other")
"""Of a slowdown; ``"other"`` is another recipe, optimizer or adapter."""


@dataclass(frozen=True)
class Choice:
    """A plan, and what it costs.

    Attributes:
        plan: to train by.
        peak: bytes on a rank.
        seconds: of an optimizer step, estimated.
        slowdown: its seconds divided by those of the fastest plan.
        causes: the slowdown less 1, by :data:`CAUSES`.
    """

    plan: Plan
    peak: int
    seconds: float
    slowdown: float
    causes: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """What :func:`search` found.

    Attributes:
        job: that was asked for.
        budget: bytes for a rank.
        best: the fastest plans that fit, each with other savings: the
            fastest of all, then the fastest of those that save in another
            way. At most three; none where nothing fits.
        frontier: the plans that no other beats in both bytes and seconds,
            whatever the budget, by rising peak.
        assumes: what the answer rests on, in sentences.
    """

    job: TrainedJob
    budget: int
    best: list[Choice]
    frontier: list[Choice]
    assumes: list[str]

    @property
    def smallest(self) -> Choice:
        """The plan with the least peak of all."""
        return self.frontier[0]

    def within(self, budget: int) -> Choice | None:
        """The fastest plan within another budget; None if nothing fits."""
        budget = whole(budget, "budget")
        fitting = [c for c in self.frontier if c.peak <= budget]
        return fitting[-1] if fitting else None

    @property
    def next_gib(self) -> Choice | None:
        """The fastest plan with a GiB more; None if nothing fits then."""
        return self.within(self.budget + GIB)

    def __str__(self) -> str:
        lines = [f"{self.job.told} in {format_bytes(self.budget)}:"]
        for place, choice in enumerate(self.best, 1):
            lines.append(
                f"{place}. {choice.plan.text(self.job)}: "
                f"{format_bytes(choice.peak)}, × {choice.slowdown:.2f}"
            )
            causes = [
                f"{cause} {share:+.2f}"
                for cause, share in choice.causes.items()
                if abs(share) >= 0.005
            ]
            if causes:
                lines.append(f"   {', '.join(causes)}")
        if not self.best:
            least = self.smallest
            lines.append(
                "nothing fits. The smallest plan needs "
                f"{format_bytes(least.peak)}. It is "
                f"{least.plan.text(self.job)}."
            )
        more = self.next_gib
        if more is not None:
            text = f"× {more.slowdown:.2f}"
            if self.best and more.seconds >= self.best[0].seconds:
                text = "nothing"
            lines.append(f"The next GiB buys {text}.")
        return "\n".join([*lines, *self.assumes])


def search(
    job: TrainedJob,
    budget: int,
    machine: Machine,
    *,
    ranks: int = 1,
    locks: Mapping[str, object] | None = None,
) -> Answer:
    """The fastest plans within a budget, of all that there are.

    The space is every micro-batch × the first j blocks checkpointed × the
    loss whole or in chunks (:data:`CHUNKS`) × the stage. Recipe and optimizer
    change the training, so they are ``"fp32"`` and ``"adam"`` unless a lock
    says otherwise, and all weights are trained but where a lock names an
    adapter. Attention is kept under a checkpoint only where a lock
    allows it, as in ``{"kept_attention": [False, True]}``, and so it is with
    ``offloaded`` and ``optimizer_on_host``. The optimizer's
    step is fused, which needs the least in every way. Plans with as many
    micro-batches take as long, so of these only the one with the least peak
    is looked at. Every n-th block instead
    of the first is no axis: with as many it takes as long, and never less
    memory.

    Of an :class:`OwnJob` the micro-batch and the checkpointed blocks are free
    and all else is the model's own.

    Args:
        job: what is to be trained.
        budget: bytes for the tensors of a rank.
        machine: what the time is estimated for.
        ranks: that share the batch equally.
        locks: for any of :data:`AXES` the value that it must have, or a list
            of those it may have.

    Raises:
        ValueError: a budget below the model's states, locks that leave no
            plan, or attention to be kept that is not fused.
    """
    instance(job, TrainedJob, "the job", JOBS)
    instance(machine, Machine, "the machine", "a planning.Machine")
    budget, ranks = whole(budget, "budget"), whole(ranks, "ranks")
    share = share_of(job, ranks)
    axes = _axes(job, share, ranks, locks)
    families = list(_families(axes, ranks))
    if not families:
        raise ValueError(
            "no plan goes with these locks: free one, or read what Plan "
            "refuses"
        )
    least = min(static(job, plan).total for plan in families)
    if budget < least:
        raise ValueError(
            f"the budget is {format_bytes(budget)}, and "
            "parameters, gradients and optimizer states alone are "
            f"{format_bytes(least)}: use a larger budget, more ranks, or "
            "another recipe or optimizer, or an adapter"
        )
    found = [
        pair
        for family, blocks, chunks, kept in product(
            families,
            axes["checkpointed"],
            axes["loss_chunks"],
            axes["kept_attention"],
        )
        if blocks or kept == axes["kept_attention"][0]  # no other then
        for pair in _by_parts(
            job,
            replace(
                family,
                checkpointed=blocks,
                loss_chunks=chunks,
                kept_attention=kept,
            ),
            share,
            axes["micro_batch"],
        )
    ]
    timed = sorted(
        (_time(job, plan, machine), size, place)
        for place, (size, plan) in enumerate(found)
    )
    fastest = timed[0]

    def choice(entry: tuple[float, int, int]) -> Choice:
        took, size, place = entry
        plan = found[place][1]
        causes = _causes(job, plan, found[fastest[2]][1], machine)
        return Choice(plan, size, took, took / fastest[0], causes)

    frontier: list[tuple[float, int, int]] = []
    best: dict[tuple, tuple[float, int, int]] = {}
    for entry in timed:
        if not frontier or entry[1] < frontier[-1][1]:
            frontier.append(entry)
        if entry[1] <= budget:
            best.setdefault(_savings(found[entry[2]][1], share), entry)
    return Answer(
        job,
        budget,
        [choice(entry) for entry in list(best.values())[:3]],
        [choice(entry) for entry in reversed(frontier)],
        _assumes(job, ranks, axes, machine),
    )


def _axes(
    job: TrainedJob, share: int, ranks: int, locks: Mapping[str, object] | None
) -> dict[str, list]:
    """What each axis may be."""
    depth, own = job.depth, isinstance(job, OwnJob)
    fixed = own or as_job(job).hub
    axes: dict[str, Iterable] = {
        "micro_batch": _sizes(share),
        "checkpointed": range(depth + 1),
        "loss_chunks": (None,) if fixed else CHUNKS,
        "recipe": RECIPES,
        "optimizer": PLANNED,
        "stage": STAGES if ranks > 1 and not fixed else ("ddp",),
        "kept_attention": (False,),
        "fused": (True,),
        "adapter": (None,),
        "offloaded": (False,),
        "optimizer_on_host": (False,),
    }
    bounds = {"micro_batch": (1, share), "checkpointed": (0, depth)}
    given: dict[str, Any] = {"recipe": "fp32", "optimizer": "adam"}
    if locks is not None:
        given |= instance(locks, Mapping, "locks", "a dict of axes")
    for axis, wanted in given.items():
        if axis not in axes:
            raise ValueError(
                f"there is no axis {shown(axis)} to lock: use one of "
                f"{', '.join(AXES)}"
            )
        if own and axis in (locks or ()) and axis not in OWN_AXES:
            raise ValueError(
                f"{axis} is locked, and an OwnJob's model and optimizer are "
                f"as they are: lock {' or '.join(OWN_AXES)}, or change them"
            )
        values: list = [wanted]
        if isinstance(wanted, Collection) and not isinstance(wanted, str):
            values = listed(wanted, axis, "values")
        if axis in bounds:
            values = [whole(value, axis, *bounds[axis]) for value in values]
        elif axis in ("fused", "kept_attention", *HOST):
            values = [flag(value, axis) for value in values]
            kept = axis == "kept_attention" and True in values
            if kept and not as_job(job).network.fused:
                raise ValueError(
                    "attention is to be kept, which is several operators in "
                    "this network: use fused=True, or free the lock"
                )
        elif axis == "adapter":
            values = [_adapter(value, as_job(job)) for value in values]
        elif axis == "loss_chunks":
            values = [v if v is None else whole(v, axis) for v in values]
        else:
            values = [one_of(value, axes[axis], axis) for value in values]
        axes[axis] = values
    return {axis: list(values) for axis, values in axes.items()}


def _families(axes: dict[str, list], ranks: int) -> Iterator[Plan]:
    """A plan of each recipe, optimizer, stage, way to step, adapter and use
    of the host's memory that go together."""
    names = "recipe", "optimizer", "stage", "fused", "adapter", *HOST
    for values in product(*(axes[name] for name in names)):
        how = dict(zip(names, values, strict=True))
        with suppress(ValueError):
            yield Plan(1, ranks=ranks, **how)


def _adapter(value: object, job: Job) -> Adapter | None:
    """A value of this axis."""
    if value is None:
        return None
    instance(value, Adapter, "the adapter", "a ledger.Adapter or None")
    adapter = cast("Adapter", value)
    check_adapter(adapter, job.network)
    return adapter


def _sizes(share: int) -> list[int]:
    """Micro-batches of which one is the best, wherever the peak is.

    Of those that cut the share into as many parts the smallest has the least
    peak: each later one finds gradients beside it. With two parts the second
    alone does, so a large first one with a small second may need less.
    """
    equal = {-(-share // parts) for parts in range(1, share + 1)}
    return sorted(equal | set(range(share // 2 + 1, share)))


def _by_parts(
    job: TrainedJob, plan: Plan, share: int, sizes: Iterable[int]
) -> list[tuple[int, Plan]]:
    """Peak and plan: the smallest for each number of micro-batches."""
    found: dict[int, tuple[int, Plan]] = {}
    for size in sizes:
        one = replace(plan, micro_batch=size)
        parts, most = -(-share // size), peak(job, one, share)
        if parts not in found or most < found[parts][0]:
            found[parts] = most, one
    return list(found.values())


def _savings(plan: Plan, share: int) -> tuple:
    """What a plan does to save, however much of it."""
    return (
        plan.micro_batch < share,
        plan.checkpointed > 0,
        plan.kept_attention,
        plan.loss_chunks is not None,
        plan.recipe,
        plan.optimizer,
        plan.stage,
        plan.fused,
        plan.adapter,
        plan.offloaded,
        plan.optimizer_on_host,
    )


def _time(job: TrainedJob, plan: Plan, machine: Machine) -> float:
    return seconds(work(job, plan), machine, plan.recipe)


def _causes(
    job: TrainedJob, plan: Plan, fastest: Plan, machine: Machine
) -> dict[str, float]:
    """The slowdown less 1, by cause.

    The traffic is what is sent beyond what the fastest plan sends, and what
    is done on the host or waited for it. Of the rest, one saving after the
    other is taken back.
    """

    def spent(plan: Plan, **other: Any) -> float:
        done = work(job, replace(plan, **other))
        here = done._replace(traffic=0, copies=(), host=0)
        return seconds(here, machine, plan.recipe)

    def recomputation(plan: Plan) -> float:
        return spent(plan) - spent(plan, **once)

    once = {"checkpointed": 0, "loss_chunks": None}
    whole_time = _time(job, fastest, machine)
    alike = {"micro_batch": fastest.micro_batch}
    parts = {
        "recomputation": recomputation(plan) - recomputation(fastest),
        "small micro-batches": spent(plan, **once)
        - spent(plan, **once, **alike),
        "traffic": _time(job, plan, machine)
        - spent(plan)
        - (whole_time - spent(fastest)),
        "other": spent(plan, **once, **alike) - spent(fastest, **once),
    }
    return {cause: parts[cause] / whole_time for cause in CAUSES}


def _assumes(job: TrainedJob, ranks: int, axes, machine: Machine) -> list[str]:
    lines = [
        "The bytes are those of PyTorch's tensors with a CPU's kernels, "
        "measured on no GPU. What a GPU's allocator rounds and its libraries "
        "keep comes on top.",
        f"The time is an estimate: {machine.source}.",
    ]
    if isinstance(job, OwnJob):
        lines[0] = (
            "The bytes are those of the model's tensors in steps without "
            "data. What a GPU's allocator rounds and its libraries keep comes "
            "on top."
        )
    if set(axes["recipe"]) != {"fp32"}:
        lines.append(
            "16 bits are bf16; for autocast on a card without it take fp16."
        )
    if any(stage != "ddp" for stage in axes["stage"]):
        lines.append("NCCL's own buffers come on top.")
    if any(axes["offloaded"]):
        lines.append(
            "Copies to the host hide behind a block's work, as far as it "
            "takes as long. A few storages that are on their way come on top."
        )
    return lines
