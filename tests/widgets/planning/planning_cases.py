"""What the planner shows, by the package's own search."""

import random
from itertools import cycle, islice

from membudget.cards import CARDS, GIB
from membudget.ledger import PLANNED
from membudget.planning import (
    CAUSES,
    STAGES,
    Machine,
    Plan,
    at_peak,
    search,
    seconds,
    static,
    work,
)
from membudget.widgets import Planning
from membudget.widgets.planning_rows import ADAPTERS, MIXES, RANKS, SHOWN
from tests.soak import SOAK


def answer(widget, locks):
    """The search; where a budget is below the states, the same without those
    that fit: there are none."""
    stages = STAGES if widget.ranks > 1 else STAGES[:1]
    if "stage" in locks:
        stages = (locks["stage"],)
    least = min(
        static(
            widget.job,
            Plan(
                1,
                recipe=recipe,
                optimizer=widget.optimizer,
                stage=stage,
                ranks=widget.ranks,
                adapter=locks["adapter"],
            ),
        ).total
        for recipe in locks["recipe"]
        for stage in stages
    )
    return search(
        widget.job,
        max(widget.bytes, least),
        Machine.of_card(widget.card),
        ranks=widget.ranks,
        locks=locks,
    )


def switched(widget):
    """Whether the reader has set a switch."""
    free = "any", "any", 0, "any"
    set_ = widget.checkpointed, widget.chunks, widget.micro, widget.stage
    return set_ != free


def of(job, choice):
    plan = choice.plan
    return {
        "stage": plan.stage,
        "blocks": plan.checkpointed,
        "chunks": plan.loss_chunks,
        "size": plan.micro_batch,
        "peak": choice.peak,
        "seconds": choice.seconds,
        "slowdown": choice.slowdown,
        "causes": [choice.causes[cause] for cause in CAUSES],
        "text": plan.text(job),
    }


def numbers(widget):
    found, job = answer(widget, widget.free), widget.job
    more = found.within(widget.bytes + GIB)
    best = [c for c in found.best if c.peak <= widget.bytes]
    if best and more and more.seconds >= best[0].seconds:
        more = None
    yours = None
    if switched(widget):
        locked = answer(widget, widget.locks)
        yours = locked.within(widget.bytes) or locked.smallest
    return {
        "best": [of(job, choice) for choice in best],
        "frontier": [of(job, choice) for choice in found.frontier],
        "next": more and more.slowdown,
        "yours": yours and of(job, yours),
        "gap": yours.seconds / best[0].seconds - 1 if yours and best else 0,
    }


def case(widget):
    state = widget.state()
    del state["tables"]
    return {"state": state, "numbers": numbers(widget)}


FEW = (
    {"batch": 2, "micro": 1, "chunks": "8"},
    {"batch": 16, "ranks": 2, "budget": 200, "checkpointed": "none"}
    | {"optimizer": "momentum", "stage": "zero-3"},
    {"batch": 2, "ranks": 2, "trained": "qlora", "checkpointed": "all"}
    | {"optimizer": "lion-8bit", "card": "A100 80 GB"},
    {"batch": 1, "recipe": "any", "budget": 110},
    {"batch": 2, "budget": 1},
)
"""Settings of the small GPT that every change is tried with: Python searches
seconds for each recipe and adapter, and for each size."""


def widgets_(rng, count):
    """Those settings; in a soak this many random ones of every model."""
    if not SOAK:
        for settings in FEW:
            yield Planning("small GPT", **{"recipe": "fp32"} | settings)
        return
    for index in range(count):
        widget = Planning(rng.choice(list(SHOWN)))
        widget.card = rng.choice(list(CARDS))
        widget.ranks = rng.choice(RANKS)
        widget.batch = rng.choice((1, 2, 16, 64))
        widget.budget = rng.choice((0, 200, 700, 4000))
        widget.tokens = rng.choice(
            widget.tables["models"][widget.model]["tokens"]
        )
        recipes = ("any", *MIXES)
        widget.recipe = recipes[index % len(recipes)]
        widget.trained = rng.choice(("all", *ADAPTERS))
        widget.optimizer = rng.choice(list(PLANNED))
        widget.stage = rng.choice(("any", "any", *STAGES))
        widget.chunks = rng.choice(("any", "any", "none", "8"))
        widget.checkpointed = rng.choice(("any", "any", "none", "all"))
        widget.micro = rng.choice((0, 0, 0, 4))
        yield widget


def plans(rng, count):
    """Single plans: peak, its split's sum, and seconds."""
    for widget in islice(cycle(widgets_(rng, count)), count):
        widget.batch = rng.choice((1, 2, 16, 64))
        recipe = rng.choice(widget.free["recipe"])
        if widget.trained == "all":
            widget.recipe = recipe
        job, ranks = widget.job, widget.ranks
        share = job.batch // ranks
        stage = widget.locks.get("stage", "zero-3" if ranks > 1 else "ddp")
        chunks = rng.choice((None, 2, 4, 8, 16))
        plan = Plan(
            rng.randrange(1, share + 1),
            rng.randrange(job.network.depth + 1),
            chunks,
            recipe,
            widget.optimizer,
            stage if ranks > 1 else "ddp",
            ranks,
            adapter=widget.free["adapter"],
        )
        moment = at_peak(job, plan)
        machine = Machine.of_card(widget.card)
        state = widget.state()
        del state["tables"]
        yield {
            "state": state,
            "plan": {
                "stage": plan.stage,
                "blocks": plan.checkpointed,
                "chunks": chunks,
                "size": plan.micro_batch,
            },
            "peak": moment.live,
            "phase": moment.phase,
            "seconds": seconds(work(job, plan), machine, plan.recipe),
        }


def cases():
    """The tables, searches and single plans."""
    rng = random.Random(0)
    yield {
        "tables": Planning().tables,
        "searches": [case(widget) for widget in widgets_(rng, 100)],
        "plans": list(plans(rng, 600 if SOAK else 20)),
    }
