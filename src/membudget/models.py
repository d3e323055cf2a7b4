"""The models of the course, small enough for a laptop."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.checks import (
    check_heads,
    check_positions,
    flag,
    function,
    instance,
    listed,
    number,
    whole,
)

__all__ = [
    "GPT",
    "Block",
    "Llama",
    "chain",
    "chunked_loss",
    "convnet",
    "mlp",
    "mlp_blocks",
]
MOST, MOST_LAYERS = 2**20, 1000
"""Of a size, and of layers or blocks."""


def mlp(
    inputs: int = 64, width: int = 256, depth: int = 4, outputs: int = 10
) -> nn.Sequential:
    """A multilayer perceptron: ``depth`` linear layers with ReLU between.

    The defaults take the 8 × 8 digits of :func:`membudget.data.digits`. It
    has two layers or more.
    """
    inputs, width = _size(inputs, "inputs"), _size(width, "width")
    depth, outputs = _layers(depth, 2), _size(outputs, "outputs")
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def chain(width: int = 64, depth: int = 16) -> nn.Sequential:
    """Equal stages, each a linear layer with its ReLU.

    What checkpointing is measured on. The defaults are for a laptop;
    ``chain(1024, 20)`` is the deep MLP of the lab.
    """
    width, depth = _size(width, "width"), _layers(depth)
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
    """
    inputs, outputs = _size(inputs, "inputs"), _size(outputs, "outputs")
    channels = [
        _size(count, "a number of channels")
        for count in listed(channels, "channels", "numbers")
    ]
    layers: list[nn.Module] = []
    for count in channels:
        layers += [
            nn.Conv2d(inputs, count, 3, padding=1, bias=False),
            nn.BatchNorm2d(count),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        inputs = count
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, outputs),
    )


class MLPBlock(nn.Module):
    """A residual block without attention: norm, up, GELU, down, sum.

    Args:
        width: numbers in and out; the hidden layer has four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gelu(self.up(self.norm(x))))


def mlp_blocks(
    width: int = 64, depth: int = 4, outputs: int = 10
) -> nn.Sequential:
    """Residual blocks, and a linear layer for the logits.

    ``mlp_blocks(1024, 32)`` is the network of the lab on mixed precision.
    """
    width, depth = _size(width, "width"), _layers(depth)
    outputs = _size(outputs, "outputs")
    blocks = (MLPBlock(width) for _ in range(depth))
    return nn.Sequential(*blocks, nn.Linear(width, outputs))


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP.

    Args:
        width: size of a token's vector, a multiple of ``heads``.
        heads: attention heads.
        fused: whether attention is one operator; otherwise the matrix of
            scores, tokens × tokens for each head, is there.
        dropout: share of zeros, from 0 to 1, after attention's softmax (not
            fused only) and before each of the two sums.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        fused: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width, heads = _heads(width, heads)
        self.heads, self.fused = heads, flag(fused, "fused")
        self.size = width // heads
        self.dropout = number(dropout, "dropout", 0, 1)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._transform(self._attend(x))

    def halves(self) -> tuple[nn.Module, nn.Module]:
        """Its attention and its MLP, each with its sum, as stages of their
        own: one after the other they are the block, with its parameters."""
        first = nn.ModuleList([self.norm1, self.qkv, self.out])
        second = nn.ModuleList([self.norm2, self.up, self.down])
        return _Half(first, self._attend), _Half(second, self._transform)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        _tensor(x, "x", 3)
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        if self.fused:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = attention(q, k, v, self._drop)
        attended = attended.transpose(1, 2).flatten(2)
        return x + self._drop(self.out(attended))

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if not self.dropout:
            return x
        return F.dropout(x, self.dropout, self.training)


class _Half(nn.Module):
    """One of a block's sums, with the modules whose parameters it has."""

    def __init__(self, parts: nn.ModuleList, run: Callable) -> None:
        super().__init__()
        self.parts, self._run = parts, run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x)


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


def _size(value: int, name: str) -> int:
    return whole(value, name, 1, MOST)


def _layers(depth: int, least: int = 1) -> int:
    return whole(depth, "depth", least, MOST_LAYERS)


def _tensor(x: torch.Tensor, name: str, ndim: int) -> torch.Tensor:
    """The tensor, if it has this many dimensions."""
    if instance(x, torch.Tensor, name, "a tensor").ndim != ndim:
        raise ValueError(
            f"{name} has {x.ndim} dimensions: use a tensor with {ndim}"
        )
    return x


def _heads(width: int, heads: int) -> tuple[int, int]:
    width, heads = _size(width, "width"), _size(heads, "heads")
    check_heads(width, heads)
    return width, heads


class _LanguageModel(nn.Module):
    """A ``head``, and as ``hidden`` what it reads."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token: batch × tokens × vocabulary.

        Args:
            tokens: integers, batch × tokens; of a GPT no more than positions.
        """
        return self.head(self.hidden(tokens))


class GPT(_LanguageModel):
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
        vocabulary = _size(vocabulary, "vocabulary")
        context, depth = _size(context, "context"), _layers(depth)
        width, heads = _heads(width, heads)
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, fused, dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if flag(tied, "tied"):
            self.head.weight = self.token.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head reads: batch × tokens × width."""
        _tensor(tokens, "tokens", 2)
        check_positions(tokens.shape[1], self.position.num_embeddings)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(place)
        return self.norm(self.blocks(x))


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
        self.heads, self.kv_heads, self.fused = heads, kv_heads, fused
        self.size = width // heads
        shared = self.size * kv_heads
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
        normed = self.norm1(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = rotate(q, turns), rotate(k, turns)
        attended = self._attention(q, k, v).transpose(1, 2)
        attended = attended.flatten(2)
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
    return turns_at(torch.arange(tokens, device=device), size)


def turns_at(places: torch.Tensor, size: int) -> torch.Tensor:
    """The turns of these positions, as :func:`rotary` has those of all."""
    pairs = torch.arange(0, size, 2, device=places.device) / size
    angles = torch.outer(places, 500_000.0**-pairs)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x, … × tokens × size, with each pair of numbers turned."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Llama(_LanguageModel):
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
        vocabulary, depth = _size(vocabulary, "vocabulary"), _layers(depth)
        width, heads = _size(width, "width"), _size(heads, "heads")
        kv_heads, hidden = _size(kv_heads, "kv_heads"), _size(hidden, "hidden")
        check_heads(width, heads, kv_heads, paired=True)
        flag(fused, "fused"), flag(tied, "tied")
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

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head reads: batch × tokens × width."""
        _tensor(tokens, "tokens", 2)
        turns = rotary(tokens.shape[1], self.size, tokens.device)
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return self.norm(x)


def chunked_loss(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunks: int,
) -> torch.Tensor:
    """The mean cross-entropy of all tokens, a part of the logits at a time.

    Each chunk's logits are forgotten and made again in the backward pass. So
    there are never more than those of one chunk. The chunks are those of
    ``torch.chunk``: the last may be shorter.

    Args:
        head: from rows of ``hidden`` to rows of logits.
        hidden: batch × tokens × width.
        targets: batch × tokens, whole numbers below the vocabulary. All of
            them count.
        chunks: into which the tokens are cut.

    Example:
        >>> hidden = model.hidden(tokens)
        >>> chunked_loss(model.head, hidden, targets, 8).backward()
    """
    function(head, "the head")
    _tensor(hidden, "hidden", 3), _tensor(targets, "targets", 2)
    if hidden.shape[:2] != targets.shape:
        raise ValueError(
            f"there are targets for {list(targets.shape)} tokens, and hidden "
            f"is of {list(hidden.shape[:2])}: use one target for each token"
        )
    chunks = whole(chunks, "chunks")
    rows, labels = hidden.flatten(0, 1), targets.flatten()
    size = -(-len(labels) // chunks)
    sums = (
        checkpoint(_summed_loss, head, *part, use_reentrant=False)
        for part in zip(rows.split(size), labels.split(size), strict=True)
    )
    return sum(sums) / len(labels)


def _summed_loss(head, rows, labels):
    logits = _tensor(head(rows), "what the head returned", 2)
    return F.cross_entropy(logits, labels, reduction="sum")
