"""Experiments on planning."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.ledger import Transformer, predict
from membudget.measuring import PeakTracker
from membudget.models import chunked_loss, convnet, mlp
from membudget.planning import Job, Plan, largest_micro_batch, work
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import BATCH_QUESTIONS, PLAN_TIMES
from membudget_experiments.workload import seconds


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
    of the loss. All do the same step in fp32: ``batch`` sequences, and a
    fused Adam. Predicted are the work of each plan
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
            fused=plan.fused,
        )
        flops, moved, operators = work(job, plan)[:3]
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
    optimizer = torch.optim.AdamW(network.parameters(), fused=plan.fused)
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


@experiment(
    sizes=BATCH_QUESTIONS,
    units={
        "kind": "of model",
        "seed": "of its sizes, its optimizer and its budget",
        "out_of_memory": "whether a step with the answer ran out of memory",
        "largest": "samples, the most that run at once; one more does not",
        "attempts": "of accelerate, the last one with success",
        "failures": "of accelerate, out of memory",
        "accelerate": "samples, its answer",
        "seconds": "s for our answer, each repeat",
    },
    over="questions",
    compares={"largest": "largest", "failures": "failures"},
)
def batch_questions(
    device: torch.device,
    *,
    scale: int,
    batch: int,
    questions: list[list],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """How many samples run at once, asked about random models and budgets.

    A question is a kind of model and a seed, which draws its sizes, its
    optimizer and a budget between what one sample needs and what ``batch``
    need. ``largest`` is predicted by
    :func:`membudget.planning.largest_micro_batch`. Beside it
    ``accelerate.find_executable_batch_size`` begins at the whole batch and
    takes a tenth off after each error.

    What is predicted then runs under the budget, and so does one sample more.
    A step here is its first two micro-batches and its last one, and the
    optimizer's step. :class:`membudget.measuring.PeakTracker` refuses what
    goes beyond the budget, on every device. The libraries transformers and
    accelerate must be there.
    """
    asked = [Question.draw(*of, scale, batch, device) for of in questions]
    rows, times = [], []
    for (kind, seed), question in zip(questions, asked, strict=True):
        taken = []
        for _ in range(warm_up + repeats):
            start = perf_counter()
            largest = question.answer()
            taken.append(perf_counter() - start)
        times.append(taken[warm_up:])
        tried = [batch]
        while tried[-1] > largest:
            tried.append(int(tried[-1] * 0.9))
        rows.append(
            {
                "kind": kind,
                "seed": seed,
                "budget": question.budget,
                "largest": largest,
                "failures": len(tried) - 1,
            }
        )
    yield {"questions": rows}
    for row, question, taken in zip(rows, asked, times, strict=True):
        answer = row["largest"]
        failed = not question.runs(answer)
        largest = answer
        while largest and not question.runs(largest):
            largest -= 1
        while largest < batch and question.runs(largest + 1):
            largest += 1
        gc.collect()
        gc.freeze()  # accelerate collects after each failure
        tried = question.accelerated()
        gc.unfreeze()
        yield {
            "kind": row["kind"],
            "seed": row["seed"],
            "out_of_memory": int(failed),
            "largest": largest,
            "attempts": len(tried),
            "failures": len(tried) - 1,
            "accelerate": tried[-1],
            "seconds": taken,
        }


@dataclass(frozen=True)
class Question:
    """A model, its step and a budget.

    Attributes:
        model, optimizer: with the optimizer's states.
        loss: called as ``loss(model, *batch)``.
        batch: of a step.
        budget: bytes; None for no limit.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., torch.Tensor]
    batch: tuple[torch.Tensor, torch.Tensor]
    budget: int | None = None

    @classmethod
    def draw(
        cls,
        kind: str,
        seed: int,
        scale: int,
        samples: int,
        device: torch.device,
    ) -> "Question":
        """One of a kind.

        Args:
            kind: of :data:`membudget_experiments.sizes.KINDS_OF_MODELS`.
            seed: draws the sizes, the optimizer and the budget.
            scale: of the sizes.
            samples: of a step.
            device: of the model.
        """
        rng = Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        model, batch, loss = _drawn(kind, rng, scale, samples)
        model, batch = model.to(device), [t.to(device) for t in batch]
        make, options = rng.choice(
            [
                (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
                (torch.optim.AdamW, {"lr": 1e-4, "foreach": False}),
                (torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
            ]
        )
        optimizer = make(model.parameters(), **options)
        free = cls(model, optimizer, loss, tuple(batch))
        free.step(samples)  # makes the optimizer's states
        least, most = (free.step(size).peak for size in (1, samples))
        budget = int(least * (most / least) ** rng.random())
        return replace(free, budget=budget)

    def answer(self) -> int:
        """The largest micro-batch, by our function."""
        return largest_micro_batch(
            self.model,
            self.loss,
            *self.batch,
            budget=self.budget,
            optimizer=self.optimizer,
        )

    def runs(self, size: int) -> bool:
        """Whether a step in micro-batches of so many samples fits."""
        try:
            self.step(size)
        except torch.OutOfMemoryError:
            return False
        return True

    def step(self, size: int) -> PeakTracker:
        """A step in micro-batches of so many samples, under the budget.

        Raises:
            torch.OutOfMemoryError: it needs more.
        """
        samples = len(self.batch[0])
        starts = list(range(0, samples, size))
        kept = [self.model, self.optimizer, *self.batch]
        try:
            with PeakTracker(*kept, budget=self.budget) as tracker:
                for start in dict.fromkeys([*starts[:2], starts[-1]]):
                    part = [t[start : start + size] for t in self.batch]
                    loss = self.loss(self.model, *part)
                    if size < samples:
                        loss = loss * (len(part[0]) / samples)
                    loss.backward()
                    del loss
                self.optimizer.step()
            return tracker
        finally:
            self.optimizer.zero_grad()

    def accelerated(self) -> list[int]:
        """What accelerate tries; the last runs."""
        from accelerate.utils import find_executable_batch_size

        tried = []

        @find_executable_batch_size(starting_batch_size=len(self.batch[0]))
        def train(batch_size):
            tried.append(batch_size)
            if not self.runs(batch_size):
                # as PyTorch words it, which accelerate reads
                raise torch.OutOfMemoryError("CUDA out of memory.")

        train()
        return tried


def _drawn(kind: str, rng: Random, scale: int, samples: int) -> tuple:
    """A random model of a kind, a batch and the loss."""
    if kind in ("mlp", "convnet"):
        width = scale * rng.choice([8, 16, 24])
        depth = rng.randint(2, 5)
        x = torch.rand(samples, 64)
        model = mlp(64, width, depth)
        if kind == "convnet":
            side = rng.choice([8, 12])
            x = torch.rand(samples, 1, side, side)
            model = convnet([width] * min(depth, 3), inputs=1)
        return model, (x, torch.randint(10, (samples,))), _classified
    head, heads = 8 * scale, rng.choice([2, 4])
    shape = {
        "vocabulary": rng.choice([64, 256, 1000]),
        "width": head * heads,
        "depth": rng.randint(1, 3),
        "heads": heads,
        "tied": rng.random() < 0.5,
    }
    tokens = scale * rng.choice([8, 16, 24])
    ids = torch.randint(shape["vocabulary"], (2, samples, tokens))
    if kind == "transformers":
        return _of_transformers(shape, tokens), tuple(ids), _next_of_output
    shape["fused"] = rng.random() < 0.7
    own = {"context": tokens} if kind == "gpt" else {"kv_heads": heads // 2}
    model = Transformer(family=kind, **shape, **own).build("cpu")
    return model, tuple(ids), _next_token


def _of_transformers(shape: dict, tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["width"],
            intermediate_size=3 * shape["width"],
            num_hidden_layers=shape["depth"],
            num_attention_heads=shape["heads"],
            max_position_embeddings=tokens,
            tie_word_embeddings=shape["tied"],
            use_cache=False,
        )
    )


def _classified(model, x, y):
    return F.cross_entropy(model(x), y)


def _next_token(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _next_of_output(model, x, y):
    return F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
