"""Pipelines: a model's blocks over several ranks, and what each one holds."""

from itertools import pairwise

import torch
from torch import nn

from membudget.checks import instance, whole
from membudget.models import GPT, Llama, rotary


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
