"""Language models as the library transformers builds and trains them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from membudget.checks import device as checked_device
from membudget.checks import flag, one_of, strings, whole
from membudget.ledger import operators as op
from membudget.ledger.adapters import (
    Adapter,
    check_matched,
    check_targets,
)
from membudget.ledger.networks import MOST_BLOCKS, Written, chosen_numbers
from membudget.ledger.paper import Paper, PaperTensor


@dataclass(frozen=True)
class CausalLM:
    """The shape of a ``…ForCausalLM`` of transformers: Llama's block.

    Its step is that of ``transformers.Trainer``:
    ``model(input_ids=x, labels=y, use_cache=False).loss``, with attention as
    one operator (``"sdpa"``) and no padding. (With the cache, which is on by
    default, the forward pass takes more under autocast: keys and values in
    fp32.) It is not the course's ``models.Llama``: RMSNorm and rotary
    positions are other operators, and the loss is in fp32.
    :func:`membudget.ledger.from_config` reads it from a ``config.json``.

    Args:
        vocabulary: tokens.
        width: size of a token's vector.
        depth: blocks, at most 1 000.
        heads: attention heads.
        kv_heads: heads of keys and values, which divide the heads.
        head_size: numbers of a head, even; heads × head_size need not be the
            width.
        hidden: width of the MLP.
        tied: whether the head shares the token embedding's weight.
        biases: names of the linear layers of a block that have one.
        normed: whether each head's query and key go through an RMSNorm.
        joined: whether query, key and value are one linear layer, and gate
            and up another (Phi-3).
        window: tokens that a token sees in the blocks with local attention:
            more than a sequence has; None where there are no such blocks.
    """

    vocabulary: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    tied: bool = False
    biases: Sequence[str] = ()
    normed: bool = False
    joined: bool = False
    window: int | None = None

    family: ClassVar[str] = "transformers"
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        names = "vocabulary", "width", "heads", "kv_heads", "hidden"
        for name in (*names, "head_size", "depth"):
            most = MOST_BLOCKS if name == "depth" else None
            value = whole(getattr(self, name), name, most=most)
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not share {self.kv_heads} heads of "
                "keys: use a kv_heads that divides the heads"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head_size is {self.head_size}: use an even number, whose "
                "halves rotary positions turn"
            )
        for name in ("tied", "normed", "joined"):
            flag(getattr(self, name), name)
        if self.joined and self.normed:
            raise ValueError(
                "there is no rule for joined queries and keys that are "
                "normed: use one of joined and normed"
            )
        biases = strings(self.biases, "biases", "names of linear layers", 0)
        for name in biases:
            one_of(name, self.linears, "linear layer of a block")
        object.__setattr__(self, "biases", biases)
        if self.window is not None:
            object.__setattr__(self, "window", whole(self.window, "window"))

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers."""
        d, f = self.width, self.hidden
        queries, keys = (
            heads * self.head_size for heads in (self.heads, self.kv_heads)
        )
        if self.joined:
            return {
                "qkv_proj": (d, queries + 2 * keys),
                "o_proj": (queries, d),
                "gate_up_proj": (d, 2 * f),
                "down_proj": (f, d),
            }
        return {
            "q_proj": (d, queries),
            "k_proj": (d, keys),
            "v_proj": (d, keys),
            "o_proj": (queries, d),
            "gate_proj": (d, f),
            "up_proj": (d, f),
            "down_proj": (f, d),
        }

    @property
    def block_parameters(self) -> int:
        """Parameters of a block."""
        linears = self.linears
        return (
            sum(inputs * outputs for inputs, outputs in linears.values())
            + sum(linears[name][1] for name in self.biases)
            + 2 * self.width
            + 2 * self.head_size * self.normed
        )

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return tables + self.depth * self.block_parameters + self.width

    @property
    def buffers(self) -> int:
        """Bytes of the buffers: twice the speeds of the rotary positions, in
        fp32 in a 16-bit model, too."""
        return 2 * 4 * (self.head_size // 2)

    def build(self, device: torch.device | str = "meta") -> torch.nn.Module:
        """The library's model of this shape; on ``meta`` it takes no memory.

        Raises:
            ModuleNotFoundError: transformers is not installed.
        """
        import transformers

        config = getattr(transformers, f"{self._named}Config")(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            intermediate_size=self.hidden,
            tie_word_embeddings=self.tied,
            attention_bias=len(self.biases) > 3,
            mlp_bias=len(self.biases) > 4,
            pad_token_id=None,
        )
        with checked_device(device):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32
            ).train()

    @property
    def _named(self) -> str:
        """The library's classes, as a shape can be told from others."""
        if self.joined:
            return "Phi3"
        if self.normed:
            return "Qwen3"
        return "Qwen2" if len(self.biases) == 3 else "Llama"

    def write(
        self,
        batch: int,
        tokens: int,
        *,
        itemsize: int = 4,
        autocast: int | None = None,
        lists: str = "cpu",
        kernels: str = "cpu",
        checkpointed: bool | int | Sequence[int] = False,
        loss_chunks: int | None = None,
        kept_attention: bool = False,
        trained: Sequence[str] = ("*",),
        adapter: Adapter | None = None,
    ) -> Paper:
        """The forward pass and the loss, on paper.

        The arguments are those of :meth:`membudget.ledger.Transformer.write`.

        Raises:
            ValueError: what ``Transformer.write`` refuses, as many tokens as
                the window or more, or a loss in chunks or attention to be
                kept, which transformers' own step has not.
        """
        self._check(tokens, loss_chunks, kept_attention)
        if adapter:
            check_targets(adapter, self.family, self.linears)
        paper = Paper(autocast, lists, kernels)
        chosen = chosen_numbers(checkpointed, self.depth, "block")
        written = _Written(
            self, paper, batch, tokens, itemsize, False, trained, adapter
        )
        written.write(chosen, None)
        check_matched(trained, written.names)
        return paper

    def _check(
        self, tokens: int, chunks: int | None, kept_attention: bool
    ) -> None:
        if chunks is not None or kept_attention:
            raise ValueError(
                "the step of transformers has no loss in chunks, and its "
                "checkpoints keep no attention: leave loss_chunks and "
                "kept_attention out"
            )
        if self.window is not None and tokens >= self.window:
            raise ValueError(
                f"{tokens} tokens do not fit into local attention of "
                f"{self.window}, for which transformers makes a mask that has "
                f"no rule: use at most {self.window - 1} tokens, or "
                "membudget.ledger.account"
            )


class _Written(Written):
    """A step of transformers on paper."""

    shape: CausalLM

    def __post_init__(self) -> None:
        self.scales: list[PaperTensor] = []  # weights of a block's norms
        self.first = 0  # of a block among the trained weights

    def write(self, checkpointed: set[int], chunks: int | None) -> None:
        shape, paper = self.shape, self.paper
        ids = paper.input(self.batch * self.tokens, 8)
        labels = paper.input(self.batch * self.tokens, 8)
        with paper.inside("model"):
            table = self.weight(
                shape.vocabulary * shape.width, "embed_tokens.weight"
            )
            with paper.inside("embed_tokens"):
                x = op.embedding(paper, table, ids, shape.width)
            if checkpointed:  # then the library asks for its gradient
                x.trained = True
            given = x
            self._positions(x.itemsize)
            for index in range(shape.depth):
                start = len(paper.rows)
                with paper.inside(f"layers.{index}"):
                    x = self.block(x)
                if index in checkpointed:
                    paper.checkpoint(start)
            x = self.norm(x, "norm")
        paper.last.watches += given, self.places, self.cos, self.sin
        self._loss(x, table, labels)

    def _positions(self, itemsize: int) -> None:
        """The places, and cosines and sines of each. What comes and goes
        before a block, the check for packed sequences, too, is less than what
        comes and goes in its first norm."""
        size = self.tokens * self.shape.head_size
        self.places = op.constant(self.paper, self.tokens, 8)
        self.cos = op.constant(self.paper, size, itemsize)
        self.sin = op.constant(self.paper, size, itemsize)

    def _loss(
        self, x: PaperTensor, table: PaperTensor, labels: PaperTensor
    ) -> None:
        """In fp32, of labels that are moved by one token."""
        paper, shape = self.paper, self.shape
        head = table
        if not shape.tied:
            head = self.weight(table.elements, "lm_head.weight")
        with paper.inside("lm_head"):
            logits = op.linear(paper, x, head, shape.vocabulary, folds=True)
        wide = op.cast(paper, logits, 4)
        padded = op.constant(paper, self.batch * (self.tokens + 1), 8)
        moved = padded
        if self.batch > 1:  # of one sequence they are a view
            moved = op.constant(paper, labels.elements, 8)
        op.cross_entropy(paper, wide, moved)
        paper.last.watches += x, logits, wide, padded, moved

    def biased(self, name: str) -> bool:
        return name in self.shape.biases

    def norm(
        self, x: PaperTensor, name: str, *watches: PaperTensor
    ) -> PaperTensor:
        size = self.shape.width
        if name in ("q_norm", "k_norm"):
            size = self.shape.head_size
        weight = self.weight(size, f"{name}.weight")
        self.scales.append(weight)
        with self.paper.inside(name):
            return op.cast_rms_norm(self.paper, x, weight)

    def step_last(self, weights: Sequence[PaperTensor]) -> None:
        """The optimizer comes to these after what was written so far.

        It takes weights in the order of the modules: norms stand behind the
        linear layers that follow on them, Phi-3's qkv behind o.
        """
        steps = self.paper.parameters[self.first :]
        late = [weight for weight in weights if weight in steps]
        others = [weight for weight in steps if weight not in late]
        self.paper.parameters[self.first :] = others + late

    def project(self, x: PaperTensor, name: str) -> PaperTensor:
        return self.linear(x, name, *self.shape.linears[name])

    def heads(self, x: PaperTensor, name: str, heads: int) -> PaperTensor:
        """Queries or keys by head, whose gradient has to be copied."""
        y = self.project(x, f"{name}_proj")
        y = self.apart(y, heads)
        return self.norm(y, f"{name}_norm") if self.shape.normed else y

    def apart(self, y: PaperTensor, heads: int) -> PaperTensor:
        if 1 in (heads, self.tokens):
            return y
        return op.heads_of(self.paper, y)

    def turned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        """Query, key and value by head, the first two turned."""
        paper, shape = self.paper, self.shape
        straight = (
            self.heads(x, "q", shape.heads),
            self.heads(x, "k", shape.kv_heads),
        )
        v = self.project(x, "v_proj")
        q, k = (
            op.rotate_halves(paper, part, self.cos, self.sin, straight)
            for part in straight
        )
        return q, k, v

    def turned_of_one(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        """The same, of a single linear layer.

        A part of each head may stay as it is; that part has no numbers, but
        is sliced off and joined again.
        """
        paper, shape = self.paper, self.shape
        qkv = self.project(x, "qkv_proj")
        size = self.batch * self.tokens * shape.head_size
        heads = shape.heads, shape.kv_heads, shape.kv_heads
        q, k, v = (op.piece(paper, qkv, size * count) for count in heads)
        q, k = self.apart(q, shape.heads), self.apart(k, shape.kv_heads)
        parts = [
            (op.alias(paper, part), op.piece(paper, part, 0))
            for part in (q, k)
        ]
        q, k = (
            op.with_nothing(
                paper,
                op.rotate_halves(paper, whole, self.cos, self.sin),
                nothing,
            )
            for whole, nothing in parts
        )
        return q, k, v

    def attention(self, x: PaperTensor) -> PaperTensor:
        paper, shape = self.paper, self.shape
        first = len(paper.parameters)
        q, k, v = self.turned_of_one(x) if shape.joined else self.turned(x)
        inputs = paper.parameters[first:]
        rows = self.batch * shape.heads * self.tokens
        low_q, low_k, low_v = op.lowered(paper, q, k, v)
        y = op.fused_attention(paper, low_q, low_k, low_v, rows)
        if shape.joined and 1 not in (shape.heads, self.tokens):
            y = op.contiguous(paper, y, copied=False)
        out = self.project(y, "o_proj")
        paper.last.watches += x, q, k, v, y
        self.step_last(inputs if shape.joined else self.scales[1:])
        return out

    def gated(self, x: PaperTensor) -> PaperTensor:
        paper = self.paper
        if self.shape.joined:
            both = self.project(x, "gate_up_proj")
            half = both.elements // 2
            gate, up = op.split(paper, both, (half, half))
            gate = op.of_input(paper, gate, "silu")
            return op.multiply(paper, up, gate)
        gate = op.of_input(paper, self.project(x, "gate_proj"), "silu")
        return op.multiply(paper, gate, self.project(x, "up_proj"))

    def block(self, x: PaperTensor) -> PaperTensor:
        paper, given = self.paper, x
        self.scales, self.first = [], len(paper.parameters)
        normed = self.norm(x, "input_layernorm")
        with paper.inside("self_attn"):
            attended = self.attention(normed)
        x = op.add(paper, x, attended)
        normed = self.norm(x, "post_attention_layernorm")
        with paper.inside("mlp"):
            y = self.project(self.gated(normed), "down_proj")
        paper.last.watches += (normed,)
        self.step_last([self.scales[0], self.scales[-1]])
        return op.add(paper, x, y, watches=(given, self.places))
