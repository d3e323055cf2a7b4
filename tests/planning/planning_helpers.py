"""What the tests of this room share: random plans, and their programs run."""

from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from membudget.ledger import RECIPES, TARGETS, Adapter, Transformer
from membudget.measuring import PeakTracker
from membudget.planning import Job, Plan
from membudget.sharding._private import fake_group


def any_plan(rng: Random, kind: str) -> tuple[Job, Plan]:
    """A tiny job and one of its plans.

    Args:
        rng: draws them.
        kind: ``"one rank"``, ``"ddp"`` or ``"shards"``.
    """
    family = rng.choice(["gpt", "llama"])
    own = {"kv_heads": 2, "hidden": 40} if family == "llama" else {}
    network = Transformer(
        rng.choice([40, 300]),
        16,
        rng.randint(1, 4),
        4,
        context=16,
        family=family,
        tied=rng.random() < 0.5,
        fused=rng.random() < 0.7,
        **own,
    )
    ranks = 1 if kind == "one rank" else rng.choice([2, 4])
    stages = ("zero-2", "zero-3") if kind == "shards" else ("ddp",)
    recipes = list(RECIPES)
    if kind == "ddp":
        recipes.remove("master-fp32-gradients")
    share = rng.randint(1, 6)
    job = Job(network, rng.choice([8, 12, 16]), share * ranks, "cpu")
    recipe = rng.choice(recipes)
    plan = Plan(
        rng.randint(1, share),
        rng.randint(0, network.depth),
        rng.choice([None, None, 2, 3, 4]),
        recipe,
        rng.choice(["sgd", "momentum", "adam"]),
        rng.choice(stages),
        ranks,
        network.fused and rng.random() < 0.4,
        adapter=None if kind == "shards" else any_adapter(rng, family, recipe),
    )
    return job, plan


def any_host(rng: Random, plan: Plan) -> Plan:
    """The plan with nothing, something or much in the host's memory."""
    plan = replace(plan, offloaded=rng.random() < 0.5)
    if rng.random() < 0.5:
        with suppress(ValueError):
            return replace(plan, optimizer_on_host=True)
    return plan


def any_adapter(rng: Random, family: str, recipe: str) -> Adapter | None:
    """Of those that a recipe can have, or none."""
    if recipe.startswith("master") or rng.random() < 0.5:
        return None
    names = rng.sample(TARGETS[family], rng.randint(1, 4))
    itemsize = rng.choice([2, 4]) if recipe == "bf16" else 4
    return Adapter(names, 3, itemsize, rng.random() < 0.3)


def measured(job: Job, plan: Plan) -> int:
    """The peak of a step of the plan's program, run on this CPU."""
    torch.manual_seed(0)
    names = {}
    with _group(plan):
        exec(plan.code(job), names)
        model, optimizer = names["model"], names["optimizer"]
        batch = names["tokens"], names["targets"]
        kept = [*names.get("copies", []), *names.get("sums", [])]
        if plan.stage == "ddp" and plan.ranks > 1:  # its buckets
            kept += [p.grad for p in model.parameters() if p.requires_grad]
        with PeakTracker(model, optimizer, *batch, *kept) as tracker:
            names["step"](*batch)
    return tracker.peak


def making(job: Job, plan: Plan) -> int:
    """The peak of the plan's program up to its first step, on this CPU.

    Its model has no memory before ``to_empty``.
    """
    names = {}
    program, _, _ = plan.code(job).partition("def step")
    shapes, empty, rest = program.partition("model.to_empty")
    with _group(plan):
        exec(shapes, names)
        assert all(p.is_meta for p in names["model"].parameters())
        with PeakTracker() as tracker:
            exec(empty + rest, names)
    return tracker.peak


@contextmanager
def _group(plan: Plan):
    """One rank of the plan's; DDP's reductions need one that exists."""
    if torch.cuda.is_available():
        pytest.skip("the program would run on the GPU, and needs torchrun")
    begin = dist.init_process_group
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    fake = plan.stage != "ddp"
    init = (lambda: None) if fake else partial(begin, "gloo", **alone)
    end = dist.destroy_process_group
    with fake_group(plan.ranks, 0) if fake else nullcontext():
        ends = mock.Mock()  # the group stays for the step that is measured
        try:
            with mock.patch.multiple(
                dist, init_process_group=init, destroy_process_group=ends
            ):
                yield
        finally:
            if dist.is_initialized() and not fake:
                end()
