"""The models of the course, small enough for a laptop."""

from collections.abc import Callable, Sequence

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


def convnet(
    channels: Sequence[int] = (16, 32), inputs: int = 3, outputs: int = 10
) -> nn.Sequential:
    """A small convolutional net for pictures of any size.

    For each number of channels a 3 × 3 convolution, batch norm, ReLU and
    max pooling, which halves the picture; then the mean over the picture
    and a linear layer.

    Raises:
        ValueError: no channels.
    """
    if not channels:
        raise ValueError("channels is empty: use at least one number")
    layers: list[nn.Module] = []
    for number in channels:
        layers += [
            nn.Conv2d(inputs, number, 3, padding=1, bias=False),
            nn.BatchNorm2d(number),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        inputs = number
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, outputs),
    )


class MLPBlock(nn.Module):
    """A residual block without attention: norm, up, GELU, down, sum.

    Args:
        width: numbers in and out.
        ratio: of the hidden layer to the width.
    """

    def __init__(self, width: int, ratio: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, ratio * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(ratio * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gelu(self.up(self.norm(x))))


def mlp_blocks(
    width: int = 64, depth: int = 4, outputs: int = 10
) -> nn.Sequential:
    """Residual blocks, and a linear layer for the logits.

    ``mlp_blocks(1024, 32)`` is the network of the lab on mixed precision.

    Raises:
        ValueError: fewer than one block.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}: use at least 1 block")
    blocks = (MLPBlock(width) for _ in range(depth))
    return nn.Sequential(*blocks, nn.Linear(width, outputs))


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP.

    Args:
        width: size of a token's vector, a multiple of ``heads``.
        heads: attention heads.
        fused: whether attention is one operator; otherwise the matrix of
            scores, tokens × tokens for each head, is there.
        dropout: share of zeros after attention's softmax (not fused only)
            and before each of the two sums.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        fused: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _heads(width, heads)
        self.heads, self.fused, self.dropout = heads, fused, dropout
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
        if self.fused:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = attention(q, k, v, self._drop)
        attended = attended.transpose(1, 2).reshape(batch, tokens, width)
        x = x + self._drop(self.out(attended))
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if not self.dropout:
            return x
        return F.dropout(x, self.dropout, self.training)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    drop: Callable[[torch.Tensor], torch.Tensor] = lambda weights: weights,
) -> torch.Tensor:
    """Causal attention, operator by operator: softmax(q kᵀ / √d) v.

    Args:
        q, k, v: batch × heads × tokens × d.
        drop: applied to the weights, batch × heads × tokens × tokens.
    """
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    later = torch.ones(
        scores.shape[-2:], dtype=torch.bool, device=q.device
    ).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return drop(weights) @ v


def _heads(width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(
            f"width {width} is not a multiple of {heads} heads: use a number "
            "of heads that divides it"
        )


class GPT(nn.Module):
    """A small GPT over bytes or tokens.

    Args:
        vocabulary: number of tokens; 256 for bytes.
        context: the longest sequence.
        width: size of a token's vector, a multiple of ``heads``.
        depth: number of blocks.
        heads: attention heads in each block.
        fused, dropout: of each :class:`Block`.
        tied: whether the head's weight is the token embedding's.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 128,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        fused: bool = True,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, fused, dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token: batch × tokens × vocabulary.

        Args:
            tokens: integers, batch × tokens.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(place)
        return self.head(self.norm(self.blocks(x)))


class LlamaBlock(nn.Module):
    """A block as Llama's: RMSNorm, rotary positions, grouped-query attention
    and a gated MLP, all without biases (Touvron et al. 2023, arXiv
    2307.09288).

    Args:
        width: size of a token's vector, a multiple of ``heads``.
        heads: attention heads, a multiple of ``kv_heads``.
        kv_heads: heads of keys and values.
        hidden: width of the gated MLP.
        fused: as for :class:`Block`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        fused: bool = True,
    ) -> None:
        super().__init__()
        _heads(width, heads)
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"{heads} heads cannot share {kv_heads} heads of keys and "
                "values: use a number that divides the heads"
            )
        self.heads, self.kv_heads, self.fused = heads, kv_heads, fused
        shared = width // heads * kv_heads
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared, bias=False)
        self.value = nn.Linear(width, shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        normed = self.norm1(x)
        q, k, v = (
            part(normed).view(batch, tokens, heads, -1).transpose(1, 2)
            for part, heads in (
                (self.query, self.heads),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        q, k = rotate(q, turns), rotate(k, turns)
        attended = self._attention(q, k, v).transpose(1, 2)
        attended = attended.reshape(batch, tokens, width)
        x = x + self.out(attended)
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        grouped = self.kv_heads < self.heads
        if self.fused:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=grouped
            )
        if grouped:
            times = self.heads // self.kv_heads
            k = k.repeat_interleave(times, dim=1)
            v = v.repeat_interleave(times, dim=1)
        return attention(q, k, v)


def rotary(
    tokens: int, size: int, device: torch.device | None = None
) -> torch.Tensor:
    """The turns of each position, tokens × size / 2 complex numbers.

    Pair i of position t turns by t · 500 000^(−2i/size) (Su et al. 2021,
    arXiv 2104.09864, with the base of Llama 3).
    """
    pairs = torch.arange(0, size, 2, device=device) / size
    angles = torch.outer(
        torch.arange(tokens, device=device), 500_000.0**-pairs
    )
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x, … × tokens × size, with each pair of numbers turned."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Llama(nn.Module):
    """A language model of :class:`LlamaBlock`.

    Args:
        vocabulary: number of tokens.
        width, depth, heads, kv_heads, hidden, fused: of the blocks.
        tied: whether the head's weight is the token embedding's.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 176,
        fused: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, kv_heads, hidden, fused)
            for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight
        self.size = width // heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token: batch × tokens × vocabulary.

        Args:
            tokens: integers, batch × tokens.
        """
        turns = rotary(tokens.shape[1], self.size, tokens.device)
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))
