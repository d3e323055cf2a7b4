"""What the tests have to know of the planner."""

from functools import lru_cache

import planning_cases
from kind import Kind

from membudget import widgets
from membudget.widgets import format_bytes
from membudget.widgets.planning_rows import SHOWN

MIB = 2**20


def make(model="small GPT", **settings):
    settings = {"card": "T4", "recipe": "fp32"} | settings
    return widgets.Planning(model, **settings)


def numbers(widget):
    state = widget.state()
    del state["tables"], state["pick"]
    return _numbers(tuple(state.items()))


@lru_cache
def _numbers(state):
    return planning_cases.numbers(make(**dict(state)))


def shown(widget):
    n = numbers(widget)
    offered = [n["yours"]] * bool(n["yours"]) + n["best"] + n["frontier"]
    place = widget.pick if widget.pick < len(offered) else 0
    return place, offered


def controls(widget):
    adapted = widget.trained != "all"
    alone = widget.ranks == 1 or "stage" in widget.free
    return {
        "model": widget.model,
        "card": widget.card,
        "ranks": widget.ranks.bit_length() - 1,
        "budget": widget.bytes // MIB,
        "batch": widget.job.batch.bit_length() - 1,
        "recipe": "bf16" if adapted else widget.recipe,
        "trained": widget.trained,
        "optimizer": widget.optimizer,
        "checkpointed": widget.checkpointed,
        "chunks": widget.chunks,
        "micro": widget.micro,
        "stage": "any" if alone else widget.stage,
        "pick": widget.pick,
    }


def printed(widget):
    n = numbers(widget)
    place, offered = shown(widget)
    plan = offered[place]
    found = {
        "peak": plan["peak"],
        "budget": widget.bytes,
        "count": SHOWN[widget.model].parameters,
        "least": n["frontier"][0]["peak"],
        "frontier": len(n["frontier"]),
        "seconds": plan["seconds"],
        "slowdown": plan["seconds"]
        / min(one["seconds"] for one in n["frontier"]),
    }
    for i, one in enumerate(n["best"]):
        found[f"best.{i}.peak"] = one["peak"]
    return found


def said(widget):
    n = numbers(widget)
    budget = format_bytes(widget.bytes)
    if not n["best"]:
        least = n["frontier"][0]
        return [
            f"Nothing fits in {budget}.",
            f"needs {format_bytes(least['peak'])}: {least['text']}.",
        ]
    return [f"The fastest plan in {budget}: {n['best'][0]['text']}. It needs"]


KIND = Kind(
    "planning",
    make,
    "What fits",
    controls,
    printed,
    said,
    states=[
        {"budget": 300},
        {"budget": 20},
        {"ranks": 4},
        {"ranks": 1, "optimizer": "sgd", "budget": 120},
        {"checkpointed": "all", "chunks": "8"},
        {"checkpointed": "any", "chunks": "any", "pick": 4},
        {"pick": 0, "card": "RTX 4090", "budget": 500},
        {"micro": 2},
        {"recipe": "any", "micro": 0},
        {"trained": "lora", "ranks": 2, "budget": 60},
        {"trained": "qlora"},
    ],
    given=[
        {"budget": 300, "ranks": 2},
        {"batch": 4, "optimizer": "adam-8bit"},
        {"trained": "qlora", "ranks": 4},
    ],
    tabs=("model", "card", "ranks", "trained"),
    rest=("ranks", {"ranks": 32}),
    spoken={"ranks": "1 card", "batch": "16 sequences"},
    columns=("at the peak", "bytes"),
    parts=6,
    state=90_000,
    moves=[({"budget": 300}, [{"budget": 200}, {"budget": 20}, {"ranks": 2}])],
)
