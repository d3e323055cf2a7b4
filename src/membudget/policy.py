"""A vision-language-action policy, small enough for a laptop.

It reads a picture, an instruction and the gripper's own state, and plans a
chunk of actions, as ACT (Zhao et al. 2023, arXiv 2304.13705) and Octo (2024,
arXiv 2405.12213) do at size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget import tabletop
from membudget.checks import check_heads, instance, module, whole

MOST, MOST_LAYERS = 2**14, 1000
"""Of the width, and of blocks."""


class _Block(nn.Module):
    """A pre-norm transformer block in which all tokens see each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        nn.init.normal_(self.qkv.weight, std=width**-0.5)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Tokens to tokens, n × tokens × width; ``mask`` is added to the
        scores, n × 1 × 1 × tokens."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, 2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """Patches, words and senses in, a chunk of actions out.

    Args:
        width: size of a token's vector, a multiple of ``heads``.
        depth: transformer blocks.
        heads: attention heads.
        patch: pixels along a side of a patch; it divides 64.

    Attributes:
        checkpointed: how many blocks, the first ones, keep nothing but their
            input and run again in the backward pass; 0 at first.
    """

    def __init__(
        self, width: int = 64, depth: int = 3, heads: int = 4, patch: int = 8
    ) -> None:
        super().__init__()
        width, heads = whole(width, "width", 1, MOST), whole(heads, "heads")
        depth = whole(depth, "depth", 1, MOST_LAYERS)
        self.patch = whole(patch, "patch", 1, tabletop.SIDE)
        check_heads(width, heads)
        if tabletop.SIDE % patch:
            raise ValueError(
                f"patches of {patch} pixels do not divide a picture of "
                f"{tabletop.SIDE}: use a power of two"
            )
        self.patches = nn.Linear(3 * patch**2, width)
        self.words = nn.Embedding(len(tabletop.VOCABULARY), width)
        self.asked = nn.Linear(width, width)
        self.senses = nn.Linear(4, width)
        others = [torch.randn(n, width) / 4 for n in (1, tabletop.WORDS)]
        places = _waves(tabletop.SIDE // patch)
        places = places @ torch.randn(places.shape[1], width) / 4
        self.place = nn.Parameter(torch.cat([others[0], places, others[1]]))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3 * tabletop.CHUNK)
        self.checkpointed = 0

    def forward(
        self,
        pictures: torch.Tensor,
        words: torch.Tensor,
        senses: torch.Tensor,
    ) -> torch.Tensor:
        """Plans: n × :data:`~membudget.tabletop.CHUNK` × 3; moves as shares
        of the reach, and the logit of a closed gripper.

        Args:
            pictures, words, senses: as of :func:`membudget.tabletop.examples`.
        """
        _tensors(pictures=(pictures, 4), words=(words, 2), senses=(senses, 2))
        size = self.patch
        pixels = pictures.to(senses) / 32 - 7  # about 0 where the table is
        squares = pixels.unfold(2, size, size).unfold(3, size, size)
        squares = squares.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        spoken, padding = self.words(words), words == 0
        heard = (spoken * ~padding[..., None]).sum(1) / (~padding).sum(1, True)
        first = self.senses(senses) + heard
        looked = self.patches(squares) * (1 + self.asked(heard)[:, None])
        tokens = [first[:, None], looked, spoken]
        x = torch.cat(tokens, 1) + self.place
        padding = F.pad(padding, (x.shape[1] - words.shape[1], 0))
        mask = torch.zeros_like(padding, dtype=senses.dtype)
        mask = mask.masked_fill(padding, -torch.inf)[:, None, None]
        for number, block in enumerate(self.blocks):
            if number < self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        plan = self.head(self.norm(x[:, 0]))
        return plan.unflatten(1, (tabletop.CHUNK, 3))


def _waves(count: int) -> torch.Tensor:
    """Where each of count × count patches is, count² × 14: x and y from -1
    to 1, and waves of them; what the positions are learned from."""
    line = (2 * torch.arange(count) + 1) / count - 1
    place = torch.stack(torch.meshgrid(line, line, indexing="xy"), 2)
    place = place.flatten(0, 1)
    turns = torch.cat([place * torch.pi * k / 2 for k in (1, 2, 4)], 1)
    return torch.cat([place, turns.sin(), turns.cos()], 1)


def errors(
    plans: torch.Tensor, actions: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """The error of each action, n × :data:`~membudget.tabletop.CHUNK`.

    The distance along x and along y, as shares of the reach, and the cross
    entropy of the gripper; 0 where the action is not real.
    """
    _tensors(plans=(plans, 3), actions=(actions, 3), real=(real, 2))
    away = (plans[..., :2].float() - actions[..., :2]).abs().sum(2)
    logit, close = plans[..., 2].float(), actions[..., 2]
    grip = F.binary_cross_entropy_with_logits(logit, close, reduction="none")
    return (away + grip) * real


def loss(policy: Policy, *batch: torch.Tensor) -> torch.Tensor:
    """The mean error over the real actions of a batch.

    Args:
        policy: from pictures, words and senses to plans.
        *batch: of :func:`membudget.tabletop.examples`.
    """
    module(policy, "the policy")
    if len(batch) != 5:
        raise ValueError(
            f"the batch has {len(batch)} parts: use the five of "
            "tabletop.examples"
        )
    pictures, words, senses, actions, real = batch
    plans = policy(pictures, words, senses)
    return errors(plans, actions, real).sum() / real.sum()


def planner(
    policy: Policy,
) -> Callable[[tabletop.Scenes], torch.Tensor]:
    """The policy as :func:`membudget.tabletop.rollout` wants it: from scenes
    to whole numbers, n × :data:`~membudget.tabletop.CHUNK` × 3."""
    here = next(module(policy, "the policy").parameters())

    @torch.no_grad()
    def plan(scenes: tabletop.Scenes) -> torch.Tensor:
        seen = tabletop.render(scenes), scenes.words, tabletop.senses(scenes)
        plans = policy(*(t.to(here.device) for t in seen)).cpu()
        places = (plans[..., :2] * (tabletop.SIDE // 2)).round()
        moves = places.diff(dim=1, prepend=torch.zeros(len(places), 1, 2))
        return torch.cat([moves, plans[..., 2:] > 0], 2).long()

    return plan


def _tensors(**parts: tuple[torch.Tensor, int]) -> None:
    """Refuse anything but a tensor with this many dimensions."""
    for name, (tensor, ndim) in parts.items():
        instance(tensor, torch.Tensor, name, f"a tensor, {ndim} dimensions")
        if tensor.ndim != ndim:
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions: use a tensor with "
                f"{ndim}"
            )
