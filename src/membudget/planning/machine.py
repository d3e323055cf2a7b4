"""How long a machine takes for the work of a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

import torch

from membudget.cards import CARDS, Card
from membudget.checks import function, instance, listed, number, one_of
from membudget.ledger import RECIPES, Recipe
from membudget.offloading import FULL
from membudget.planning.counter import Counts
from membudget.planning.own import OwnJob
from membudget.planning.plan import JOBS, Plan, TrainedJob
from membudget.planning.work import Work, work

EFFICIENCY = 0.4
"""Share of a data sheet's figures that a training step is taken to reach. A
round number; nothing was measured for it."""

LAUNCH = 5e-6
"""Seconds that an operator is taken to cost a GPU beside its FLOPs and its
bytes. A round number; nothing was measured for it."""

HOST = 1e11
"""Bytes/s that a host's processors are taken to read and write in its memory
for one GPU. A round number; nothing was measured for it."""


@dataclass(frozen=True)
class Machine:
    """Constants of a rank's machine.

    Args:
        flops: FLOP/s in matrix products, above 0; where they depend on the
            recipe of precision, of each.
        bandwidth: bytes/s that operators read and write, above 0.
        operator: seconds for each operator, not below 0.
        link: bytes/s that a rank sends, above 0; infinite where it sends
            nothing.
        source: where they are from.
        host_link: bytes/s one way between the device and the host, above 0;
            None where nothing is known.
        host_bandwidth: bytes/s that the host reads and writes in its memory,
            likewise.
    """

    flops: float | Mapping[str, float]
    bandwidth: float
    operator: float
    link: float
    source: str
    host_link: float | None = None
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        rates = {name: getattr(self, name) for name in ("bandwidth", "link")}
        if isinstance(self.flops, Mapping):
            for recipe in self.flops:
                one_of(recipe, RECIPES, "recipe")
            rates |= self.flops
        else:
            rates["flops"] = self.flops
        for name, rate in rates.items():
            number(rate, name, above=0, infinite=True)
        for name in ("host_link", "host_bandwidth"):
            if getattr(self, name) is not None:
                number(getattr(self, name), name, above=0)
        number(self.operator, "operator", 0)
        instance(self.source, str, "source", "a string")

    def rate(self, recipe: str) -> float:
        """FLOP/s in the matrix products of a recipe that has a rate."""
        one_of(recipe, RECIPES, "recipe")
        if not isinstance(self.flops, Mapping):
            return self.flops
        return self.flops[one_of(recipe, self.flops, "recipe")]

    @classmethod
    def of_card(cls, name: str, link: float | None = None) -> "Machine":
        """A card by its data sheet, of which nothing was measured.

        Products in fp32 round to TF32 where the card can, which takes
        ``torch.set_float32_matmul_precision("high")``. Where it has no bf16,
        autocast runs in fp16, and a model in bf16 is taken to run as fast as
        one in fp32: PyTorch emulates it. Of its link to the host it is taken
        to sustain :data:`membudget.offloading.FULL`, and of the host's memory
        :data:`HOST`.

        Args:
            name: one of :data:`membudget.cards.CARDS`.
            link: bytes/s to the other cards, above 0; None for the data
                sheet's.
        """
        card = CARDS[one_of(name, CARDS, "card")]
        products = {name: _products(card, RECIPES[name]) for name in RECIPES}
        single, mixed, half = (
            products[name][0] for name in ("fp32", "autocast", "bf16")
        )
        halves = half if half == mixed else f"{mixed} (autocast) or {half}"
        if link is None:
            link = EFFICIENCY * card.link
        return cls(
            {name: EFFICIENCY * peak for name, (_, peak) in products.items()},
            EFFICIENCY * card.bandwidth,
            LAUNCH,
            link,
            f"{card.sheet}: its figures × {EFFICIENCY}, fp32 products in "
            f"{single}, 16-bit ones in {halves}, and "
            f"{LAUNCH * 1e6:g} µs for each operator, not measured",
            FULL * card.host_link,
            HOST,
        )


def _products(card: Card, recipe: Recipe) -> tuple[str, float]:
    """In what a card multiplies matrices by a recipe, and its FLOP/s then."""
    if recipe.autocast:
        return "bf16" if card.bf16 else "fp16", card.half_flops
    if recipe.parameters == 2:
        if card.bf16:
            return "bf16", card.half_flops
        return "emulated bf16", card.flops
    if card.tf32_flops:
        return "TF32", card.tf32_flops
    return "fp32", card.flops


def seconds(work: Work, machine: Machine, recipe: str = "fp32") -> float:
    """How long a step takes: FLOPs/F + bytes/B + operators · c + traffic/link.

    A copy to the host or back is hidden behind what runs beside it, and what
    it takes longer is added, as is the time of an optimizer there, which
    works at the rate of the host's memory.

    Args:
        work: of a plan.
        machine: that does it.
        recipe: of the plan, which says how fast matrices are multiplied; one
            for which the machine has a rate.

    Raises:
        ValueError: something is on the host, and nothing is known of the
            machine's link to it or of its memory.
    """
    instance(work, Work, "work", "what planning.work returns")
    instance(machine, Machine, "machine", "a Machine")
    here = _computed(work[:3], machine, recipe) + work.traffic / machine.link
    if work.copies:
        link = _known(machine, "host_link")
        for times, size, beside in work.copies:
            hidden = _computed(beside, machine, recipe)
            here += times * max(0.0, size / link - hidden)
    if work.host:
        here += work.host / _known(machine, "host_bandwidth")
    return here


def _computed(counts: Counts, machine: Machine, recipe: str) -> float:
    flops, moved, operators = counts
    return (
        flops / machine.rate(recipe)
        + moved / machine.bandwidth
        + operators * machine.operator
    )


def _known(machine: Machine, rate: str) -> float:
    found = getattr(machine, rate)
    if found is None:
        raise ValueError(
            f"the plan puts something in the host's memory, and the machine "
            f"has no {rate}: give it one, in bytes/s, or use Machine.of_card"
        )
    return found


def calibrate(
    run: Callable[[Plan], float],
    job: TrainedJob,
    plans: Sequence[Plan] | None = None,
) -> Machine:
    """The constants of this machine, from the times of a few plans.

    They are those, not below zero, with the least squares of the relative
    errors. A cost that explains nothing is zero, and its rate infinite.

    Args:
        run: takes a plan and returns the seconds of one optimizer step. The
            step warmed up before; the least of several, above 0, is the best
            time.
        job: which the plans do; a small one is quick, and tells less about
            large ones.
        plans: three or more, on one rank. By default the corners: the whole
            batch at once and single sequences, without savings and with
            every block checkpointed, the last with its loss in chunks (an
            ``OwnJob`` has none).
    """
    function(run, "run", "a function of a plan that returns seconds")
    instance(job, TrainedJob, "job", JOBS)
    if plans is None:
        all_blocks = job.depth
        chunks = None if isinstance(job, OwnJob) else 4
        plans = [
            Plan(job.batch),
            Plan(1),
            Plan(job.batch, checkpointed=all_blocks),
            Plan(1, checkpointed=all_blocks, loss_chunks=chunks),
        ]
    plans = listed(plans, "plans", "plans", 3)
    rows = []
    for plan in plans:
        instance(plan, Plan, "a plan", "a Plan")
        if plan.ranks > 1:
            raise ValueError(
                f"a plan is for {plan.ranks} ranks: calibrate on one, and "
                "give the machine its link"
            )
        time = number(run(plan), "the seconds of a run", above=0)
        rows.append([cost / time for cost in work(job, plan)[:3]])
    flops, moved, called = least_squares(
        torch.tensor(rows, dtype=torch.double)
    )
    return Machine(
        1 / flops if flops else inf,
        1 / moved if moved else inf,
        called,
        inf,
        f"fitted on {len(plans)} runs",
    )


def least_squares(rows: torch.Tensor) -> list[float]:
    """The x ≥ 0 with the least ‖rows · x − 1‖.

    With a few unknowns every choice of those above zero can be tried.
    """
    scale = rows.norm(dim=0)
    count = rows.shape[1]
    best, least = [0.0] * count, inf
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            part = rows[:, chosen] / scale[chosen]
            ones = torch.ones(len(rows), 1, dtype=rows.dtype)
            x = torch.linalg.lstsq(part, ones).solution
            error = (part @ x - ones).norm().item()
            if (x >= 0).all() and error < least:
                least = error
                best = [0.0] * count
                for place, value in zip(chosen, x.flatten(), strict=True):
                    best[place] = (value / scale[place]).item()
    return best
