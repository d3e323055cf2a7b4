"""What is trained, and one way to train it."""

from dataclasses import dataclass
from typing import cast

from membudget.checks import check_positions, flag, instance, one_of, whole
from membudget.ledger import (
    OPTIMIZERS,
    PLANNED,
    RECIPES,
    Adapter,
    CausalLM,
    Transformer,
)
from membudget.ledger.adapters import (
    check_targets,
    checked_adapter,
    stepped_recipe,
)
from membudget.ledger.host import check_host
from membudget.ledger.paper import LISTS
from membudget.planning import code, hub
from membudget.planning.trainer import arguments

STAGES = ("ddp", "zero-2", "zero-3")
"""What PyTorch has of :data:`membudget.sharding.STAGES`: DDP and FSDP2."""

HOST = ("offloaded", "optimizer_on_host")
"""What of a plan puts something in the host's memory."""

WORDS = {
    "master": "bf16 with an fp32 copy",
    "master-fp32-gradients": "bf16 with an fp32 copy and fp32 gradients",
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "adam": "Adam",
    "adam-8bit": "8-bit Adam",
    "lion-8bit": "8-bit Lion",
}
"""For recipes and optimizers whose names alone do not say it."""

MOST = 2**20
"""Of tokens in a sequence, and of sequences."""


Network = Transformer | CausalLM
"""Whose shape a :class:`Job` has."""

JOBS = "a Job or an OwnJob"
"""What is trained, in messages."""


class TrainedJob:
    """What is trained: a :class:`Job` or an :class:`OwnJob`.

    Attributes:
        batch: samples of an optimizer step, over all ranks.
        samples: what a sample is called.
    """

    batch: int
    samples = "samples"

    @property
    def depth(self) -> int:
        """Blocks that can be checkpointed."""
        raise NotImplementedError

    @property
    def told(self) -> str:
        """The step's batch, in words."""
        raise NotImplementedError

    def _refuse(self, plan: "Plan") -> None:
        """Refuse what this job cannot do."""

    def _program(self, plan: "Plan", share: int) -> str:
        """The program of a plan."""
        raise NotImplementedError


@dataclass(frozen=True)
class Job(TrainedJob):
    """What is trained.

    Args:
        network: its shape; a :class:`membudget.ledger.CausalLM` trains as
            in ``transformers.Trainer``.
        tokens: of a sequence, up to 2²⁰, and no more than learned positions.
        batch: sequences of an optimizer step, over all ranks, up to 2²⁰.
        device: whose rules count (:func:`membudget.ledger.rules`),
            ``"cuda"`` or ``"cpu"``.
    """

    network: Network
    tokens: int
    batch: int
    device: str = "cuda"

    def __post_init__(self) -> None:
        use = "a ledger.Transformer or a ledger.CausalLM"
        instance(self.network, Network, "the network", use)
        for name in ("tokens", "batch"):
            value = whole(getattr(self, name), name, most=MOST)
            object.__setattr__(self, name, value)
        network = self.network
        if isinstance(network, Transformer) and network.family == "gpt":
            check_positions(self.tokens, network.context)
        one_of(self.device, LISTS, "device of a job")

    samples = "sequences"

    @property
    def depth(self) -> int:
        """Blocks of the network."""
        return self.network.depth

    @property
    def told(self) -> str:
        """The step's batch, in words."""
        return f"{self.batch} sequences of {self.tokens} tokens"

    def _refuse(self, plan: "Plan") -> None:
        """Refuse attention to be kept that is not fused, targets of an
        adapter that do not exist, and what has no rule for transformers."""
        check_adapter(plan.adapter, self.network)
        if self.hub and (
            plan.loss_chunks or plan.kept_attention or plan.ranks > 1
        ):
            raise ValueError(
                "a model of transformers has its whole loss at once, its "
                "checkpoints keep no attention, and there are no rules for "
                "several ranks: use none of loss_chunks, kept_attention, ranks"
            )
        if plan.kept_attention and not self.network.fused:
            raise ValueError(
                "the plan keeps attention, which is several operators in this "
                "network: use fused=True, or kept_attention=False"
            )

    @property
    def hub(self) -> bool:
        """Whether its model is one of the library transformers."""
        return isinstance(self.network, CausalLM)

    def _program(self, plan: "Plan", share: int) -> str:
        written = hub if self.hub else code
        return written.write(self, plan, share)


def check_adapter(adapter: Adapter | None, network: Network) -> None:
    """Refuse targets that are no linear layers of a block."""
    if adapter:
        hub = isinstance(network, CausalLM)
        names = cast("CausalLM", network).linears if hub else None
        check_targets(adapter, network.family, names)


def as_job(job: TrainedJob) -> Job:
    """The job, which is none of the reader's own."""
    return cast("Job", job)


@dataclass(frozen=True)
class Plan:
    """One way to train a job.

    FSDP2 reduces the gradients of each micro-batch, DDP those of the last.

    Args:
        micro_batch: sequences that run at once on a rank; the last
            micro-batch may have fewer.
        checkpointed: how many blocks, the first ones, are checkpointed, each
            by itself.
        loss_chunks: into which the tokens are cut for the head and the loss;
            None for the plain loss.
        recipe: one of :data:`membudget.ledger.RECIPES`. FSDP2 keeps the
            numbers that the optimizer steps, gathers them in the dtype of
            the model, and reduces in that of the gradients.
        optimizer: one of :data:`membudget.ledger.PLANNED`.
        stage: one of :data:`STAGES`; on one rank ``"ddp"`` is a plain loop.
        ranks: that share the batch equally.
        kept_attention: whether checkpointed blocks keep the results of fused
            attention (selective recomputation).
        fused: whether one kernel does Adam's step (``fused=True``);
            otherwise it is PyTorch's own choice, on a GPU all parameters at
            once (``foreach``).
        adapter: LoRA in the blocks, which alone is trained; None to train
            all weights.
        offloaded: whether what a micro-batch saves, of checkpoints their
            inputs, waits in the host's memory
            (:class:`membudget.offloading.Offload`).
        optimizer_on_host: whether the optimizer steps there, where its
            states are (:func:`membudget.offloading.optimizer_on_host`).

    Raises:
        ValueError: 8-bit states or an adapter with FSDP2, gradients summed in
            fp32 beside DDP's, DoRA, an adapter that a recipe cannot have,
            something on the host beside several ranks, or an optimizer there
            that has no rule.
    """

    micro_batch: int
    checkpointed: int = 0
    loss_chunks: int | None = None
    recipe: str = "fp32"
    optimizer: str = "adam"
    stage: str = "ddp"
    ranks: int = 1
    kept_attention: bool = False
    fused: bool = True
    adapter: Adapter | None = None
    offloaded: bool = False
    optimizer_on_host: bool = False

    def __post_init__(self) -> None:
        numbers = {"micro_batch": 1, "checkpointed": 0, "ranks": 1}
        if self.loss_chunks is not None:
            numbers["loss_chunks"] = 1
        for name, least in numbers.items():
            value = whole(getattr(self, name), name, least)
            object.__setattr__(self, name, value)
        for name in ("kept_attention", "fused", *HOST):
            flag(getattr(self, name), name)
        one_of(self.recipe, RECIPES, "recipe")
        one_of(self.optimizer, PLANNED, "optimizer")
        one_of(self.stage, STAGES, "stage of a plan")
        if self.stage != "ddp" and OPTIMIZERS[self.optimizer].block:
            raise ValueError(
                "the room has no rules for 8-bit states in FSDP2's shards: "
                'use another optimizer, or stage="ddp"'
            )
        checked_adapter(self.adapter, self.recipe, None)
        if self.adapter and self.adapter.dora:
            raise ValueError(
                "a plan counts what a step does, and has no rules for what "
                "DoRA does: use dora=False, or ledger.predict for its bytes"
            )
        if self.stage != "ddp" and self.adapter:
            raise ValueError(
                "the room has no rules for adapters beside FSDP2's shards: "
                'use stage="ddp", or adapter=None'
            )
        on_host = self.offloaded or self.optimizer_on_host
        if on_host and (self.stage != "ddp" or self.ranks > 1):
            raise ValueError(
                "the room has rules for the host's memory beside one rank "
                f"alone: leave {' and '.join(HOST)} out, or use ranks=1"
            )
        if self.optimizer_on_host:
            stepped = stepped_recipe(self.recipe, self.adapter)
            check_host(stepped, self.optimizer)
        ddp = self.stage == "ddp" and self.ranks > 1
        if ddp and self.recipe == "master-fp32-gradients":
            raise ValueError(
                "DDP's buckets keep the gradients in the dtype of the model: "
                'use recipe="master", or stage="zero-2", which sums in fp32'
            )

    def share(self, job: TrainedJob) -> int:
        """Sequences of each rank.

        Raises:
            ValueError: ranks that do not divide the batch, more checkpointed
                blocks than there are, a larger micro-batch than the share,
                attention to be kept that is not fused, or what an ``OwnJob``
                has of its own.
        """
        instance(job, TrainedJob, "the job", JOBS)
        job._refuse(self)
        share = share_of(job, self.ranks)
        if self.checkpointed > job.depth:
            raise ValueError(
                f"{self.checkpointed} blocks are to be checkpointed, and the "
                f"network has {job.depth}: use at most that many"
            )
        if self.micro_batch > share:
            raise ValueError(
                f"micro_batch is {self.micro_batch}, and a rank has {share} "
                f"of the {job.batch} {job.samples}: use at most that many"
            )
        return share

    def text(self, job: TrainedJob) -> str:
        """In words."""
        share, depth = self.share(job), job.depth
        full, rest = divmod(share, self.micro_batch)
        parts = [
            f"{full} × {self.micro_batch} {job.samples}"
            + (f" and a last micro-batch of {rest}" if rest else "")
        ]
        if self.checkpointed == depth:
            parts.append("every block checkpointed")
        elif self.checkpointed:
            parts.append(f"{self.checkpointed} of {depth} blocks checkpointed")
        if self.checkpointed and self.kept_attention:
            parts.append("their attention kept")
        if self.loss_chunks is not None:
            parts.append(f"the loss in {self.loss_chunks} chunks")
        if isinstance(job, Job):  # else they are the model's own
            parts.append(WORDS.get(self.recipe, self.recipe))
            plain = self.optimizer == "adam" and not self.fused
            way = ", not fused" if plain else ""
            parts.append(f"{WORDS[self.optimizer]}{way}")
        if self.adapter:
            parts.append(self.adapter.told)
        if self.offloaded:
            parts.append("what is saved offloaded")
        if self.optimizer_on_host:
            parts.append("the optimizer on the host")
        if self.ranks > 1 or self.stage != "ddp":
            parts.append(f"{self.stage} on {self.ranks} ranks")
        return ", ".join(parts)

    def code(self, job: TrainedJob) -> str:
        """A program in plain PyTorch that trains the job so.

        Its model and its loss in chunks are the course's
        (:mod:`membudget.models`), or its model is one of transformers; its
        tokens are random. ``torchrun`` starts it on several ranks. Of an
        ``OwnJob`` it is the loop alone, with :func:`membudget.planning.step`.
        """
        share = self.share(job)
        return job._program(self, share)

    def trainer(self, job: TrainedJob) -> dict[str, object]:
        """The plan as arguments of Hugging Face's Trainer.

        It takes the loss from the model, and clips the gradients. It shards
        block by block. Of a model of transformers the dtype and the adapter
        are those of the model that it is given, as in :meth:`code`.

        Returns:
            Keyword arguments of ``transformers.TrainingArguments``, from
            version 5 on.

        Raises:
            ValueError: as :meth:`share`, or a plan that the Trainer has no
                arguments for.
        """
        share = self.share(job)
        return arguments(job, self, share)


def checked(job: TrainedJob, plan: Plan) -> int:
    """Sequences of each rank, if the plan is one of the job's."""
    return instance(plan, Plan, "the plan", "a planning.Plan").share(job)


def share_of(job: TrainedJob, ranks: int) -> int:
    """Sequences of each rank; they can be shared equally."""
    if ranks > job.batch or job.batch % ranks:
        why = "more than" if ranks > job.batch else "no divisor of"
        raise ValueError(
            f"{ranks} ranks are {why} the {job.batch} {job.samples} of a "
            "step: use a number of ranks that divides the batch"
        )
    return job.batch // ranks
