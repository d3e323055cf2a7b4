"""Pipelines: a model's blocks over several ranks, and what each one holds."""

from itertools import pairwise

import torch
from torch import nn

from membudget.checks import instance, whole
from membudget.models import GPT, Llama, rotary
from membudget.parallelism.tables import V_SHAPED, checked


class Stage(nn.Module):
    """Some of a language model's blocks, with what stands at its ends.

    The modules are the model's own, under its names: ``blocks.3.up.weight``
    is that everywhere. The first stage takes tokens and the last one makes
    logits; between them goes batch × tokens × width.

    Args:
        model: the whole.
        blocks: the numbers of the blocks.
    """

    def __init__(self, model: GPT | Llama, blocks: range) -> None:
        super().__init__()
        self.size = model.size if isinstance(model, Llama) else None
        if blocks.start == 0:
            self.token = model.token
            if isinstance(model, GPT):
                self.position = model.position
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        if blocks.stop == len(model.blocks):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, rest = self._embedded(x), self._turns(x)
        for block in self.blocks.values():
            x = block(x, *rest)
        return self.head(self.norm(x)) if hasattr(self, "head") else x

    def _embedded(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "token"):
            return x
        if not hasattr(self, "position"):
            return self.token(x)
        place = torch.arange(x.shape[1], device=x.device)
        return self.token(x) + self.position(place)

    def _turns(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What Llama's blocks need beside x; each stage makes its own."""
        if self.size is None:
            return ()
        return (rotary(x.shape[1], self.size, x.device),)


def cut(model: GPT | Llama, stages: int) -> list[nn.Module]:
    """The model in stages: one after the other they are the model.

    The blocks are spread evenly; the first stages have one more where they
    do not divide. The stages share the model's modules and keep the names
    of its parameters, so that a checkpoint of the model fits each of them.

    Args:
        model: a :class:`membudget.models.GPT` or ``Llama``.
        stages: as many as blocks at most.

    Raises:
        ValueError: more stages than blocks, or a tied embedding, which the
            first and the last stage would share.
    """
    use = "a GPT or a Llama of membudget.models"
    instance(model, GPT | Llama, "the model", use)
    stages, depth = whole(stages, "stages"), len(model.blocks)
    if stages > depth:
        raise ValueError(
            f"{stages} stages are more than the {depth} blocks: each stage "
            "needs one, so use fewer stages or a deeper model"
        )
    if stages > 1 and model.head.weight is model.token.weight:
        raise ValueError(
            "the head is tied to the token embedding, and the first and the "
            "last stage cannot share a parameter: use tied=False"
        )
    return [Stage(model, part) for part in spread(depth, stages)]


def spread(blocks: int, stages: int) -> list[range]:
    """The numbers of each stage's blocks; the first may have one more."""
    each, more = divmod(blocks, stages)
    starts = [i * each + min(i, more) for i in range(stages + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def stages_of(schedule: str, ranks: int, rank: int, chunks: int) -> list[int]:
    """The numbers of a rank's stages."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * chunks, ranks))


def in_flight(
    schedule: str,
    ranks: int,
    micro_batches: int,
    rank: int,
    chunks: int | None = None,
) -> float:
    """Most tapes that a rank holds, of all its stages for one micro-batch.

    With M micro-batches, P ranks, V chunks and R = M // max(1, M // P)
    micro-batches in a round, R = P if they divide:

    * GPipe (Huang et al. 2019, arXiv 1811.06965) and LoopedBFS
      (Lamy-Poirier 2023, arXiv 2211.05953): M;
    * 1F1B (Narayanan et al. 2020, arXiv 2006.09503): min(P − r, M);
    * Interleaved1F1B (Narayanan et al. 2021, arXiv 2104.04473; its memory
      in Korthikanti et al. 2023, arXiv 2205.05198):
      min(M, ((V − 1) R + 2 (P − r) − 1) / V);
    * InterleavedZeroBubble: min(M, ((V − 1) R + P) / V);
    * ZBVZeroBubble (Qi et al. 2024, arXiv 2401.10241, section 6): P, and less
      of fewer than 2 P micro-batches: min(P, M, (M + 1 + r) / 2);
    * DualPipeV (the halved DualPipe of DeepSeek-AI 2024, arXiv 2412.19437):
      P + 1/2.

    The last three are counted in PyTorch's tables. A tape is there until
    the part of the backward pass for the weights has ended.

    Args:
        schedule, ranks, micro_batches, chunks: as for :func:`table`.
        rank: from 0.

    Raises:
        ValueError: numbers that the schedule cannot have.
    """
    p, m, v = checked(schedule, ranks, micro_batches, chunks)
    r = whole(rank, "rank", 0, p - 1)
    around = (v - 1) * (m // max(1, m // p))
    counts: dict[str, float] = {
        "1F1B": p - r,
        "Interleaved1F1B": (around + 2 * (p - r) - 1) / v,
        "InterleavedZeroBubble": (around + p) / v,
        "ZBVZeroBubble": min(p, (m + 1 + r) / 2),
        "DualPipeV": p + 0.5,
    }
    return float(min(m, counts.get(schedule, m)))


def bubble(
    schedule: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> float:
    """Share of the time in which a rank does nothing.

    The forward pass and both parts of the backward pass take equally long,
    and messages no time. With M micro-batches, P ranks and V chunks:

    * GPipe, 1F1B: (P − 1) / (M + P − 1);
    * LoopedBFS, Interleaved1F1B: (P − 1) / (V M + P − 1);
    * InterleavedZeroBubble, ZBVZeroBubble, DualPipeV:
      (P − 1) / (3 V M + P − 1).

    Sources as for :func:`in_flight`; the last is counted in PyTorch's tables.

    Args:
        schedule, ranks, micro_batches, chunks: as for :func:`table`.

    Raises:
        ValueError: numbers that the schedule cannot have, or too few
            micro-batches for the law: with several chunks less than P, or
            of ZBVZeroBubble less than (3 P − 1) / 2.
    """
    p, m, v = checked(schedule, ranks, micro_batches, chunks)
    least = 1 if v == 1 else p
    if schedule == "ZBVZeroBubble":  # 4 P − 2 − 2 M idle, if more
        least = -(-(3 * p - 1) // 2)
    if m < least:
        raise ValueError(
            f"{m} micro-batches are too few for the law: on {p} ranks "
            f"{schedule} needs {least} or more; replay(table(...)) counts "
            "the bubble of fewer"
        )
    split = "ZeroBubble" in schedule or schedule == "DualPipeV"
    return (p - 1) / ((3 if split else 1) * v * m + p - 1)
