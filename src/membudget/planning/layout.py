"""A layout of many cards: its axes, and what each rank holds."""

from dataclasses import dataclass

from membudget.checks import flag, instance, one_of, whole
from membudget.ledger import PLANNED, RECIPES, Transformer
from membudget.planning.plan import Job

PLAIN = ("GPipe", "1F1B")
"""Schedules with one stage a rank, whose bytes are exact."""

MOST_CARDS = 2**20


@dataclass(frozen=True)
class Layout:
    """How a job is spread over cards: the product of four axes.

    Args:
        tensor: ranks that share each block's heads and its MLP.
        sequence: whether they share the tokens of what lies between
            (sequence parallelism).
        pipeline: stages, one a rank, the blocks spread evenly.
        schedule: of the pipeline, one of :data:`PLAIN`.
        context: ranks that share the tokens of each sequence (ring
            attention).
        data: ranks that share the batch.
        sharded: whether they, and those of ``context``, share the states
            (FSDP2); otherwise each holds them all (DDP).
        micro_batch: sequences that run at once on a rank.
        checkpointed: whether each block is.
        recipe: one of :data:`membudget.ledger.RECIPES`.
        optimizer: one of :data:`membudget.ledger.PLANNED`.

    Raises:
        ValueError: sequence parallelism without tensor parallelism, or a
            recipe or a schedule without rules.
    """

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: str = "1F1B"
    context: int = 1
    data: int = 1
    sharded: bool = True
    micro_batch: int = 1
    checkpointed: bool = False
    recipe: str = "bf16"
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "data", "micro_batch"):
            value = whole(getattr(self, name), name, most=MOST_CARDS)
            object.__setattr__(self, name, value)
        for name in ("sequence", "sharded", "checkpointed"):
            flag(getattr(self, name), name)
        one_of(self.schedule, PLAIN, "schedule of a layout")
        one_of(self.recipe, RECIPES, "recipe")
        one_of(self.optimizer, PLANNED, "optimizer")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence parallelism shares tokens among the ranks of "
                "tensor parallelism, and tensor is 1: use tensor=2 or more, "
                "or sequence=False"
            )
        if RECIPES[self.recipe].autocast:
            raise ValueError(
                "a layout has no rules for autocast: use the recipe bf16, "
                "or master, which keeps an fp32 copy"
            )

    @property
    def cards(self) -> int:
        """How many it takes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def shards(self) -> int:
        """Ranks that share the states of one stage and one tensor rank."""
        return self.data * self.context if self.sharded else 1

    def micro_batches(self, job: Job) -> int:
        """In a step, of each rank.

        Raises:
            ValueError: what does not divide, more stages than blocks, or
                fewer micro-batches than the schedule needs.
        """
        network = check_network(job)
        if job.batch % (self.data * self.micro_batch):
            raise ValueError(
                f"{self.data} data ranks with micro-batches of "
                f"{self.micro_batch} do not divide the {job.batch} sequences "
                "of a step: use numbers whose product does"
            )
        many = job.batch // (self.data * self.micro_batch)
        for name, size in self._shared(network).items():
            if size % self.tensor:
                raise ValueError(
                    f"{self.tensor} tensor ranks do not divide {name} "
                    f"({size}): use a number of ranks that does"
                )
        if self.context > 1 and network.family == "gpt":
            raise ValueError(
                "a ring has rules for a Llama, whose positions are rotary: "
                "use context=1 for a GPT"
            )
        tokens = self.context * (self.tensor if self.sequence else 1)
        if job.tokens % tokens:
            raise ValueError(
                f"{tokens} ranks that share a sequence's tokens do not "
                f"divide its {job.tokens}: use context and tensor whose "
                "product does"
            )
        if self.pipeline > network.depth:
            raise ValueError(
                f"{self.pipeline} stages are more than the {network.depth} "
                "blocks, and each stage needs one: use fewer stages"
            )
        if self.pipeline > 1 and network.tied:
            raise ValueError(
                "the head is tied to the embedding, and the first and the "
                "last stage cannot share it: use pipeline=1"
            )
        if self.schedule == "1F1B" and many < self.pipeline:
            raise ValueError(
                f"1F1B with {self.pipeline} stages needs as many "
                f"micro-batches, and a rank has {many}: use fewer stages or "
                "data ranks, or smaller micro-batches"
            )
        return many

    def fault(self, job: Job) -> str | None:
        """Why it is none of the job's, or None."""
        try:
            self.micro_batches(job)
        except ValueError as error:
            return str(error)
        return None

    def _shared(self, network: Transformer) -> dict[str, int]:
        return {
            "the heads": network.heads,
            "the heads of keys": network.kv_heads,
            "the MLP's width": network.hidden,
        }

    def text(self) -> str:
        """In words, the axes that are more than one."""
        named = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "CP": self.context,
            "FSDP" if self.sharded else "DDP": self.data,
        }
        parts = [f"{name} {size}" for name, size in named.items() if size > 1]
        if self.sequence:
            parts[0] += " with SP"
        return ", ".join(parts) or "one card"


def check_network(job: Job) -> Transformer:
    """The job's network, for which there are rules."""
    instance(job, Job, "the job", "a planning.Job")
    network = job.network
    if not isinstance(network, Transformer):
        raise ValueError(
            "layouts have rules for the course's GPT and Llama: use a Job of "
            "a ledger.Transformer of the same shape"
        )
    if not network.fused or network.dropout:
        raise ValueError(
            "layouts have rules for fused attention without dropout: use "
            "fused=True and dropout=False"
        )
    return network
