"""The models of the course, small enough for a laptop."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(
    inputs: int = 64, width: int = 256, depth: int = 4, outputs: int = 10
) -> nn.Sequential:
    """A multilayer perceptron: ``depth`` linear layers with ReLU between.

    The defaults take the 8 × 8 digits of :func:`membudget.data.digits`.

    Raises:
        ValueError: fewer than two layers.
    """
    if depth < 2:
        raise ValueError(f"depth is {depth}: use at least 2 linear layers")
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def chain(width: int = 64, depth: int = 16) -> nn.Sequential:
    """Equal stages, each a linear layer with its ReLU.

    What checkpointing is measured on. The defaults are for a laptop;
    ``chain(1024, 20)`` is the deep MLP of the lab.

    Raises:
        ValueError: fewer than one stage.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}: use at least 1 stage")
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, width), nn.ReLU())
            for _ in range(depth)
        )
    )


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP.

    Args:
        width: size of a token's vector, a multiple of ``heads``.
        heads: attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width {width} is not a multiple of {heads} heads"
            )
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT over bytes or tokens.

    Args:
        vocabulary: number of tokens; 256 for bytes.
        context: the longest sequence.
        width: size of a token's vector, a multiple of ``heads``.
        depth: number of blocks.
        heads: attention heads in each block.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 128,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token: batch × tokens × vocabulary.

        Args:
            tokens: integers, batch × tokens.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(place)
        return self.head(self.norm(self.blocks(x)))
