"""Experiments on planning."""

import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from membudget.experiments.definition import experiment
from membudget.experiments.sizes import PLAN_TIMES
from membudget.experiments.workload import seconds
from membudget.ledger import Transformer, predict
from membudget.models import chunked_loss
from membudget.planning import Job, Plan, work


@experiment(
    sizes=PLAN_TIMES,
    units={
        "micro_batch": "sequences that run at once",
        "checkpointed": "blocks, the first ones",
        "chunks": "of the loss; 0 for the plain loss",
        "seconds": "s for an optimizer step, each repeat",
    },
    over="runs",
)
def plan_times(
    device: torch.device,
    *,
    shape: dict,
    tokens: int,
    batch: int,
    runs: list[list[int]],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Time of an optimizer step of a transformer by each of its plans.

    ``runs`` are micro-batches, how many blocks are checkpointed, and chunks
    of the loss. All do the same step in fp32: ``batch`` sequences, and Adam,
    one parameter at a time. Predicted are the work of each plan
    (:func:`membudget.planning.work`) and its peak bytes on a CPU
    (:func:`membudget.ledger.predict`). The machine's constants are fitted on
    some of the times afterwards (:func:`membudget.planning.calibrate`).
    """
    job = Job(Transformer(**shape), tokens, batch)
    plans = [
        Plan(micro, checkpointed, chunks or None)
        for micro, checkpointed, chunks in runs
    ]
    names = "micro_batch", "checkpointed", "chunks"
    rows = []
    for run, plan in zip(runs, plans, strict=True):
        predicted = predict(
            job.network,
            batch,
            tokens,
            micro_batch=plan.micro_batch,
            checkpointed=plan.checkpointed,
            loss_chunks=plan.loss_chunks,
        )
        flops, moved, operators, _ = work(job, plan)
        rows.append(
            {
                **dict(zip(names, run, strict=True)),
                "flops": flops,
                "bytes": moved,
                "operators": operators,
                "peak": predicted.peak,
            }
        )
    yield {"work": rows}
    for run, plan in zip(runs, plans, strict=True):
        gc.collect()
        train = training(job, plan, device)
        train()  # makes Adam's states
        times = seconds(train, device, warm_up, repeats)
        yield {**dict(zip(names, run, strict=True)), "seconds": times}


def training(job: Job, plan: Plan, device: torch.device) -> Callable[[], None]:
    """A function that does one optimizer step of the plan, in fp32."""
    network = job.network.build(device)
    for block in network.blocks[: plan.checkpointed]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(network.parameters(), foreach=False)
    place = 2, job.batch, job.tokens
    ids = torch.randint(job.network.vocabulary, place, device=device)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if plan.loss_chunks:
            hidden = network.hidden(x)
            return chunked_loss(network.head, hidden, y, plan.loss_chunks)
        return F.cross_entropy(network(x).flatten(0, 1), y.flatten())

    def train() -> None:
        for part in ids.split(plan.micro_batch, 1):
            share = part.shape[1] / job.batch
            value = loss(*part)
            (value if share == 1 else value * share).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train
