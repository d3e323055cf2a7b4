"""The blocks of transformers' language models, on paper.

Each class writes the step of the models that share a block, as the library
writes their code. What it needs to know stands in the shape, a
:class:`membudget.ledger.CausalLM`.
"""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

from membudget.ledger import operators as op
from membudget.ledger.networks import Written
from membudget.ledger.paper import PaperTensor


class Block(Written):
    """Llama's block, and what all have: a table, blocks, a head, a loss."""

    table: ClassVar = "embed_tokens"
    last: ClassVar = "norm"  # of the model's modules
    base: ClassVar = "model", "layers"  # the library's names of these
    rotary: ClassVar = True
    copies: ClassVar = False  # queries lie by head, and so does the result
    rms_norm = staticmethod(op.cast_rms_norm)
    activation: ClassVar = "silu"

    scales: list[PaperTensor]  # weights of a block's norms
    inner: list[PaperTensor]  # those of its queries and keys
    first: int  # of a block among the trained weights
    index: int  # of a block
    mask: PaperTensor  # of local attention

    @staticmethod
    def linears(shape: Any) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers."""
        d, f = shape.width, shape.hidden
        queries, keys = (
            heads * shape.head_size for heads in (shape.heads, shape.kv_heads)
        )
        return {
            "q_proj": (d, queries),
            "k_proj": (d, keys),
            "v_proj": (d, keys),
            "o_proj": (queries, d),
            "gate_proj": (d, f),
            "up_proj": (d, f),
            "down_proj": (f, d),
        }

    @classmethod
    def buffers(cls, shape: Any, itemsize: int) -> int:
        """Bytes of the buffers: twice the speeds of the rotary positions of
        each kind of block, in fp32 in a 16-bit model, too."""
        speeds = (shape.turned_size + 1) // 2 * len(cls.kinds(shape))
        return 2 * 4 * speeds * cls.rotary

    @classmethod
    def kinds(cls, shape: Any) -> list[bool]:
        """Of blocks, by their rotary positions; which is one."""
        return [False]

    def named(self, name: str) -> str:
        """The library's name of a weight."""
        model, layers = self.base
        name = re.sub(
            r"^model\.layers\b", f"model.{layers}", super().named(name)
        )
        return re.sub(r"^model\b", model, name)

    # The model around the blocks

    def write(self, checkpointed: set[int], chunks: int | None) -> None:
        shape, paper = self.shape, self.paper
        ids = paper.input(self.batch * self.tokens, 8)
        labels = paper.input(self.batch * self.tokens, 8)
        with paper.inside("model"):
            with paper.inside(self.table):
                table = self.weight(shape.vocabulary * shape.width, "weight")
                x = op.embedding(paper, table, ids, shape.width)
                x = self.embedded(x)
            if checkpointed and not x.trained:
                x = op.leaf(paper, x)  # the library asks for its gradient
            x, *variables = self.positioned(x)
            for index in range(shape.depth):
                start, self.index, given = len(paper.rows), index, x
                with paper.inside(f"layers.{index}"):
                    x = self.block(x)
                if index in checkpointed:
                    paper.checkpoint(start, (given,))
            x = self.norm(x, self.last)
        paper.last.watches += *variables, self.places
        self.loss(x, table, labels)

    def embedded(self, x: PaperTensor) -> PaperTensor:
        """What the module returns whose table x was read from."""
        return x

    def positioned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        """What the first block is given, and what variables of the model
        hold: cosines and sines.

        What comes and goes before a block, the check for packed sequences,
        too, is less than what comes and goes in its first norm.
        """
        self.places = op.constant(self.paper, self.tokens, 8)
        masks = self.local_mask()
        self.cos, self.sin = self.turn(x.itemsize)
        return x, x, self.cos, self.sin, *masks

    @property
    def masked(self) -> bool:
        """Whether a sequence is longer than local attention reaches."""
        window = self.shape.window
        return window is not None and self.tokens >= window

    def local_mask(self) -> tuple[PaperTensor, ...]:
        """The mask of local blocks, if they need one: a byte a number."""
        blocks = range(self.shape.depth)
        if not self.masked or not any(map(self.shape.is_local, blocks)):
            return ()
        self.mask = op.constant(self.paper, self.tokens**2, 1)
        return (self.mask,)

    def turn(self, itemsize: int) -> tuple[PaperTensor, PaperTensor]:
        """Cosines and sines of the places."""
        size = self.tokens * self.shape.turned_size
        cos = op.constant(self.paper, size, itemsize)
        return cos, op.constant(self.paper, size, itemsize)

    def loss(
        self, x: PaperTensor, table: PaperTensor, labels: PaperTensor
    ) -> None:
        """In fp32, of labels that are moved by one token."""
        paper, shape = self.paper, self.shape
        head = table
        if not shape.tied:
            head = self.weight(table.elements, "lm_head.weight")
        with paper.inside("lm_head"):
            logits = op.linear(paper, x, head, shape.vocabulary, folds=True)
        logits = self.capped(logits)
        wide = op.cast(paper, logits, 4)
        padded = op.constant(paper, self.batch * (self.tokens + 1), 8)
        moved = padded
        if self.batch > 1:  # of one sequence they are a view
            moved = op.constant(paper, labels.elements, 8)
        op.cross_entropy(paper, wide, moved)
        paper.last.watches += x, logits, wide, padded, moved

    def capped(self, logits: PaperTensor) -> PaperTensor:
        """What the loss is of."""
        return logits

    # Modules

    def biased(self, name: str) -> bool:
        return name in self.shape.biases

    def norm(
        self, x: PaperTensor, name: str, *watches: PaperTensor
    ) -> PaperTensor:
        weight = self.weight(self.norm_size(name), f"{name}.weight")
        inner = name in ("q_norm", "k_norm")
        (self.inner if inner else self.scales).append(weight)
        with self.paper.inside(name):
            return self.rms_norm(self.paper, x, weight)

    def norm_size(self, name: str) -> int:
        """Numbers of a norm's weight."""
        inner = name in ("q_norm", "k_norm")
        return self.shape.head_size if inner else self.shape.width

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

    # The block

    def begin(self) -> None:
        self.scales, self.inner = [], []
        self.first = len(self.paper.parameters)

    def heads(self, x: PaperTensor, name: str, heads: int) -> PaperTensor:
        """Queries or keys by head, whose gradient has to be copied."""
        return self.apart(self.project(x, f"{name}_proj"), heads)

    def apart(self, y: PaperTensor, heads: int) -> PaperTensor:
        if 1 in (heads, self.tokens):
            return y
        return op.heads_of(self.paper, y)

    def turned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        """Query, key and value by head, the first two turned."""
        shape = self.shape
        straight = (
            self.heads(x, "q", shape.heads),
            self.heads(x, "k", shape.kv_heads),
        )
        v = self.project(x, "v_proj")
        return *self.rotated(*self.level(*straight)), v

    def rotated(
        self, *straight: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        """Query and key, turned."""
        q, k = (
            op.rotate_halves(self.paper, part, self.cos, self.sin, straight)
            for part in straight
        )
        return q, k

    def level(
        self, q: PaperTensor, k: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        """Query and key before they are turned."""
        return q, k

    def attend(self, q, k, v) -> PaperTensor:
        """With a mask, or for heads that are wider than its kernels take,
        the library repeats keys and values for the queries that share them."""
        paper, shape = self.paper, self.shape
        rows = self.batch * shape.heads * self.tokens
        masked = self.masked and shape.is_local(self.index)
        times = shape.heads // shape.kv_heads
        repeats = times > 1 and (masked or shape.head_size > 256)
        if repeats:
            v = self.apart(v, shape.kv_heads)
            copied = shape.kv_heads > 1
            k = op.repeat(paper, k, times, copied)
            v = op.repeat(paper, v, times, copied)
        low_q, low_k, low_v = op.lowered(paper, q, k, v)
        masks = []
        if masked:
            size = self.batch * self.tokens**2
            masks = [op.addend(paper, self.mask, size, low_q.itemsize)]
        y = op.fused_attention(paper, low_q, low_k, low_v, rows, *masks)
        paper.last.watches += k, v
        if self.copies and 1 not in (shape.heads, self.tokens):
            y = op.contiguous(paper, y, copied=False)
            paper.last.watches += k, v
        return y

    def attention(self, x: PaperTensor) -> PaperTensor:
        q, k, v = self.turned(x)
        y = self.attend(q, k, v)
        out = self.project(y, "o_proj")
        self.paper.last.watches += x, q, k, v, y
        self.step_last(self.inner)
        return out

    def gated(self, x: PaperTensor) -> PaperTensor:
        paper = self.paper
        gate = self.project(x, "gate_proj")
        gate = op.of_input(paper, gate, self.activation)
        return op.multiply(paper, gate, self.project(x, "up_proj"))

    def block(self, x: PaperTensor) -> PaperTensor:
        paper, given = self.paper, x
        self.begin()
        first = self.norm(x, "input_layernorm")
        with paper.inside("self_attn"):
            attended = self.attention(first)
        x = op.add(paper, x, attended)
        normed = self.norm(x, "post_attention_layernorm")
        with paper.inside("mlp"):
            y = self.project(self.gated(normed), "down_proj")
        paper.last.watches += (normed,)
        self.step_last(self.scales)
        held = self.held(given, first, attended)
        return op.add(paper, x, y, watches=(*held, self.places))

    def held(self, *made: PaperTensor) -> tuple[PaperTensor, ...]:
        """Of what a block was given, its normed input and attention's result,
        what its variables hold to its end."""
        return made[:1]


class _GPT2(Block):
    """Learned positions, LayerNorm, biases, and dropout.

    Query, key and value are one linear layer. Linear layers are ``Conv1D``,
    whose weights lie the other way round.
    """

    table = "wte"
    last = "ln_f"
    base = "transformer", "h"
    rotary = False
    added = True

    @staticmethod
    def linears(shape: Any) -> dict[str, tuple[int, int]]:
        d, f = shape.width, shape.hidden
        return {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, f),
            "mlp.c_proj": (f, d),
        }

    def positioned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        paper, shape = self.paper, self.shape
        self.places = op.constant(paper, self.tokens, 8)
        with paper.inside("wpe"):
            learned = self.weight(shape.context * shape.width, "weight")
            y = op.embedding(paper, learned, self.places, shape.width)
        total = op.add(paper, x, y, broadcast=self.batch > 1)
        return self.dropped(total, "embedding"), x, y

    def dropped(self, x: PaperTensor, where: str) -> PaperTensor:
        dropped = where in self.shape.dropouts
        return op.dropout(self.paper, x) if dropped else x

    def biased(self, name: str) -> bool:
        return True

    def norm(
        self, x: PaperTensor, name: str, *watches: PaperTensor
    ) -> PaperTensor:
        with self.paper.inside(name):
            weight, bias = (
                self.weight(self.shape.width, part)
                for part in ("weight", "bias")
            )
            return op.layer_norm(self.paper, x, weight, bias)

    def attention(self, x: PaperTensor) -> PaperTensor:
        paper = self.paper
        part = self.batch * self.tokens * self.shape.width
        qkv = self.project(x, "attn.c_attn")
        q, k, v = op.split(paper, qkv, (part,) * 3)
        with paper.inside("attn"):
            y = self.attend(q, k, v)
        out = self.dropped(self.project(y, "attn.c_proj"), "residual")
        paper.last.watches += x, q, k, v
        return out

    def attend(self, q, k, v) -> PaperTensor:
        drops = "attention" in self.shape.dropouts
        if not drops or self.paper.kernels == "cuda":
            return super().attend(q, k, v)
        heads = self.shape.heads
        y = op.dropped_attention(
            self.paper,
            *op.lowered(self.paper, q, k, v),
            scores=self.batch * heads * self.tokens**2,
            tokens=self.tokens,
            folds=1 in (self.batch, heads),
        )
        return y if 1 in (heads, self.tokens) else op.contiguous(self.paper, y)

    def mlp(self, x: PaperTensor) -> PaperTensor:
        up = self.project(x, "mlp.c_fc")
        with self.paper.inside("mlp.act"):
            up = op.new_gelu(self.paper, up)
        return self.dropped(self.project(up, "mlp.c_proj"), "residual")

    def block(self, x: PaperTensor) -> PaperTensor:
        paper, given = self.paper, x
        attended = self.attention(self.norm(x, "ln_1"))
        x = op.add(paper, attended, x)
        normed = self.norm(x, "ln_2")
        y = self.mlp(normed)
        held = given, attended, normed, self.places
        return op.add(paper, x, y, watches=held)


class _Qwen3(Block):
    """Each head's query and key go through an RMSNorm."""

    def heads(self, x: PaperTensor, name: str, heads: int) -> PaperTensor:
        return self.norm(super().heads(x, name, heads), f"{name}_norm")


class _Olmo2(Block):
    """Norms after attention and MLP, and of whole queries and keys; rotary
    positions in fp32."""

    rms_norm = staticmethod(op.wide_rms_norm)

    def turn(self, itemsize: int) -> tuple[PaperTensor, PaperTensor]:
        return super().turn(4)

    def norm_size(self, name: str) -> int:
        heads = {"q_norm": self.shape.heads, "k_norm": self.shape.kv_heads}
        if name not in heads:
            return self.shape.width
        return heads[name] * self.shape.head_size

    def heads(self, x: PaperTensor, name: str, heads: int) -> PaperTensor:
        y = self.norm(self.project(x, f"{name}_proj"), f"{name}_norm")
        return self.apart(y, heads)

    def rotated(
        self, *straight: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        wide = super().rotated(*straight)
        q, k = (
            op.cast(self.paper, w, t.itemsize, (*wide, *straight))
            for w, t in zip(wide, straight, strict=True)
        )
        return q, k

    def block(self, x: PaperTensor) -> PaperTensor:
        paper, given = self.paper, x
        self.begin()
        with paper.inside("self_attn"):
            attended = self.attention(x)
        attended = self.norm(attended, "post_attention_layernorm")
        x = op.add(paper, x, attended)
        with paper.inside("mlp"):
            y = self.project(self.gated(x), "down_proj")
        y = self.norm(y, "post_feedforward_layernorm")
        self.step_last(self.scales)
        return op.add(paper, x, y, watches=(given, self.places))


class _Gemma(Block):
    """Norms before and after attention and MLP; GELU; a scaled embedding."""

    rms_norm = staticmethod(op.shifted_rms_norm)
    activation = "gelu"

    @classmethod
    def buffers(cls, shape: Any, itemsize: int) -> int:
        """Those of the positions, and the scale of the embedding."""
        return super().buffers(shape, itemsize) + itemsize

    def embedded(self, x: PaperTensor) -> PaperTensor:
        return op.scale(self.paper, x)

    def block(self, x: PaperTensor) -> PaperTensor:
        paper, given = self.paper, x
        self.begin()
        normed = self.norm(x, "input_layernorm")
        with paper.inside("self_attn"):
            attended = self.attention(normed)
        attended = self.norm(attended, "post_attention_layernorm")
        x = op.add(paper, x, attended)
        normed = self.norm(x, "pre_feedforward_layernorm")
        with paper.inside("mlp"):
            y = self.project(self.gated(normed), "down_proj")
        paper.last.watches += (normed,)
        y = self.norm(y, "post_feedforward_layernorm")
        self.step_last(self.scales)
        return op.add(paper, x, y, watches=(given, self.places))


class _Gemma2(_Gemma):
    """Scores and logits are capped, so attention is several operators, and
    each kind of block has a mask."""

    weights: PaperTensor  # of a block's attention, which it returns

    def positioned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        self.places = op.constant(self.paper, self.tokens, 8)
        size = self.batch * self.tokens**2
        self.masks = [
            op.constant(self.paper, size, x.itemsize) for _ in range(2)
        ]
        self.cos, self.sin = self.turn(x.itemsize)
        return x, x, self.cos, self.sin, *self.masks

    def attend(self, q, k, v) -> PaperTensor:
        paper, shape = self.paper, self.shape
        self.weights, y = op.capped_attention(
            paper,
            q,
            k,
            self.apart(v, shape.kv_heads),
            self.mask,
            scores=self.batch * shape.heads * self.tokens**2,
            kv_heads=shape.kv_heads,
            times=shape.heads // shape.kv_heads,
            batch=self.batch,
            copies=1 not in (shape.heads, self.tokens),
        )
        return y

    def block(self, x: PaperTensor) -> PaperTensor:
        self.mask = self.masks[self.shape.is_local(self.index)]
        y = super().block(x)
        self.paper.last.watches += (self.weights,)
        return y

    def capped(self, logits: PaperTensor) -> PaperTensor:
        return op.cap(self.paper, logits)


class _Gemma3(_Gemma):
    """Queries and keys go through norms, and local blocks have rotary
    positions of another speed."""

    @classmethod
    def kinds(cls, shape: Any) -> list[bool]:
        """Whether there are local blocks, and others."""
        return sorted({shape.is_local(index) for index in range(shape.depth)})

    def positioned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        self.places = op.constant(self.paper, self.tokens, 8)
        masks = self.local_mask()
        kinds = self.kinds(self.shape)
        self.speeds = {kind: self.turn(x.itemsize) for kind in kinds}
        return x, x, *chain(*self.speeds.values()), *masks

    def level(
        self, q: PaperTensor, k: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        return self.norm(q, "q_norm"), self.norm(k, "k_norm")

    def block(self, x: PaperTensor) -> PaperTensor:
        self.cos, self.sin = self.speeds[self.shape.is_local(self.index)]
        return super().block(x)


class _Phi3(Block):
    """Query, key and value are one linear layer, gate and up another."""

    copies = True

    @staticmethod
    def linears(shape: Any) -> dict[str, tuple[int, int]]:
        d, f = shape.width, shape.hidden
        queries, keys = (
            heads * shape.head_size for heads in (shape.heads, shape.kv_heads)
        )
        return {
            "qkv_proj": (d, queries + 2 * keys),
            "o_proj": (queries, d),
            "gate_up_proj": (d, 2 * f),
            "down_proj": (f, d),
        }

    def turned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        paper, shape = self.paper, self.shape
        qkv = self.project(x, "qkv_proj")
        size = self.batch * self.tokens * shape.head_size
        heads = shape.heads, shape.kv_heads, shape.kv_heads
        q, k, v = (op.piece(paper, qkv, size * count) for count in heads)
        q, k = self.apart(q, shape.heads), self.apart(k, shape.kv_heads)
        return *self.rotated(q, k), v

    def rotated(
        self, *straight: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        """A part of each head stays as it is. Where it has no numbers, it is
        sliced off and joined again all the same."""
        paper = self.paper
        parts = [self.parts(x) for x in straight]
        q, k = (
            op.joined(
                paper,
                op.rotate_halves(paper, turned, self.cos, self.sin),
                still,
            )
            for turned, still in parts
        )
        return q, k

    def parts(self, x: PaperTensor) -> tuple[PaperTensor, PaperTensor]:
        """What is turned of each head, and what is not."""
        count = x.elements // self.shape.head_size * self.shape.turned_size
        if count == x.elements:
            turned = op.alias(self.paper, x)
        else:
            turned = op.piece(self.paper, x, count)
        return turned, op.piece(self.paper, x, x.elements - count)

    def attention(self, x: PaperTensor) -> PaperTensor:
        paper, first = self.paper, len(self.paper.parameters)
        q, k, v = self.turned(x)
        inputs = paper.parameters[first:]
        y = self.attend(q, k, v)
        out = self.project(y, "o_proj")
        paper.last.watches += x, q, k, v, y
        self.step_last(inputs if "qkv_proj" in self.shape.linears else [])
        return out

    def gated(self, x: PaperTensor) -> PaperTensor:
        paper = self.paper
        both = self.project(x, "gate_up_proj")
        half = both.elements // 2
        gate, up = op.split(paper, both, (half, half))
        gate = op.of_input(paper, gate, "silu")
        return op.multiply(paper, up, gate)


class _StableLM(_Phi3):
    """LayerNorm, and three linear layers for query, key and value."""

    linears = staticmethod(Block.linears)
    gated = Block.gated

    before: tuple[PaperTensor, ...]  # of query and key, while attention runs

    def turned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        return Block.turned(self, x)

    def rotated(
        self, *straight: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        q, k, *turned = self.joined(*straight)
        self.before = *straight, *turned
        return q, k

    def attention(self, x: PaperTensor) -> PaperTensor:
        out = super().attention(x)
        self.paper.last.watches += self.before
        return out

    def joined(self, *straight: PaperTensor) -> list[PaperTensor]:
        """Query and key, and the parts of them that were turned."""
        parts = [self.parts(x) for x in straight]
        turned = [
            op.rotate_halves(self.paper, part, self.cos, self.sin)
            for part, _ in parts
        ]
        whole = [
            op.joined(self.paper, part, still)
            for part, (_, still) in zip(turned, parts, strict=True)
        ]
        return whole + turned

    def norm(
        self, x: PaperTensor, name: str, *watches: PaperTensor
    ) -> PaperTensor:
        weight, bias = (
            self.weight(self.shape.width, f"{name}.{part}")
            for part in ("weight", "bias")
        )
        self.scales += weight, bias
        with self.paper.inside(name):
            return op.layer_norm(self.paper, x, weight, bias)

    def held(self, *made: PaperTensor) -> tuple[PaperTensor, ...]:
        return made


class _GPTNeoX(_StableLM):
    """Attention and MLP beside each other; query, key and value of a head
    are one linear layer's."""

    table = "embed_in"
    last = "final_layer_norm"
    base = "gpt_neox", "layers"

    @staticmethod
    def linears(shape: Any) -> dict[str, tuple[int, int]]:
        d, f = shape.width, shape.hidden
        return {
            "attention.query_key_value": (d, 3 * d),
            "attention.dense": (d, d),
            "mlp.dense_h_to_4h": (d, f),
            "mlp.dense_4h_to_h": (f, d),
        }

    def turned(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        qkv = self.project(x, "attention.query_key_value")
        apart = self.apart(qkv, self.shape.heads)
        part = qkv.elements // 3
        q, k, v = op.split(self.paper, apart, (part,) * 3)
        return *self.rotated(q, k), v

    def rotated(
        self, *straight: PaperTensor
    ) -> tuple[PaperTensor, PaperTensor]:
        q, k, *_ = self.joined(*straight)
        return q, k

    def attention(self, x: PaperTensor) -> PaperTensor:
        q, k, v = self.turned(x)
        y = self.attend(q, k, v)
        out = self.project(y, "attention.dense")
        self.paper.last.watches += x, q, k, v, y
        return out

    def mlp(self, x: PaperTensor) -> PaperTensor:
        up = self.project(x, "mlp.dense_h_to_4h")
        with self.paper.inside("mlp.act"):
            up = op.of_input(self.paper, up, "gelu")
        y = self.project(up, "mlp.dense_4h_to_h")
        self.paper.last.watches += (x,)
        return y

    def block(self, x: PaperTensor) -> PaperTensor:
        paper = self.paper
        self.begin()
        attended = self.attention(self.norm(x, "input_layernorm"))
        y = self.mlp(self.norm(x, "post_attention_layernorm"))
        steps = paper.parameters[self.first :]
        self.step_last([w for w in steps if w not in self.scales])
        total = op.add(paper, y, attended)
        held = x, attended, y, self.places
        return op.add(paper, total, x, watches=held)


class _Mixtral(Block):
    """A mixture of experts in place of the MLP, which the library runs as
    grouped matrix products.

    Each token goes through the same number of experts, so that the step
    takes the same memory however the router spreads them.
    """

    normalized: ClassVar = True  # whether a token's weights add up to 1
    narrow: ClassVar = False  # whether they take the dtype of the logits

    @staticmethod
    def linears(shape: Any) -> dict[str, tuple[int, int]]:
        return dict(list(Block.linears(shape).items())[:4])

    def routed(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        """What the router returns: logits, weights and experts."""
        paper, shape = self.paper, self.shape
        with paper.inside("gate"):
            weight = self.weight(shape.experts * shape.width, "weight")
            logits = op.linear(paper, x, weight, shape.experts)
            tokens = self.batch * self.tokens
            scores, places = op.routed(
                paper, logits, tokens, shape.active, self.normalized
            )
            if self.narrow:
                scores = op.cast(paper, scores, logits.itemsize)
        return logits, scores, places

    def matrices(self) -> tuple[PaperTensor, PaperTensor]:
        """The weights of all experts."""
        shape = self.shape
        size = shape.experts * shape.width * shape.hidden
        return self.weight(2 * size, "gate_up_proj"), self.weight(
            size, "down_proj"
        )

    def expert(
        self, x: PaperTensor, weights: Sequence[PaperTensor], ends: PaperTensor
    ) -> PaperTensor:
        """The gated MLP, of rows in order of their experts."""
        paper, (first, last) = self.paper, weights
        inner = x.elements // self.shape.width * self.shape.hidden
        both = op.grouped(paper, x, first, ends, 2 * inner)
        gate, up = op.split(paper, both, (inner, inner))
        gate = op.of_input(paper, gate, self.activation)
        y = op.multiply(paper, gate, up)
        return op.grouped(paper, y, last, ends, x.elements)

    def mixed(
        self, x: PaperTensor, scores: PaperTensor, places: PaperTensor
    ) -> PaperTensor:
        """Each token's experts, weighed and added up."""
        paper, shape, rows = self.paper, self.shape, scores.elements
        experts, order, source = (
            op.constant(paper, rows, 8) for _ in range(3)
        )
        chosen = op.take(paper, x, source, rows * shape.width)
        weights = op.take(paper, scores, order, rows)
        counts = [
            op.constant(paper, size, 4)
            for size in (rows, shape.experts, shape.experts)
        ]
        made = self.expert(chosen, self.matrices(), counts[-1])
        y = op.weigh(paper, made, weights)
        back = op.constant(paper, rows, 8)
        paper.last.watches += (y,)
        op.constant(paper, rows, 8)
        y = op.take(paper, y, back, y.elements)
        out = op.sum_of(paper, y, x.elements)
        held = experts, order, chosen, weights, *counts, made, back, y, places
        paper.last.watches += held
        narrow = op.cast(paper, out, x.itemsize)
        paper.last.watches += held
        return narrow

    def mlp(self, x: PaperTensor) -> PaperTensor:
        """The router, and the experts."""
        logits, scores, places = self.routed(x)
        with self.paper.inside("experts"):
            y = self.mixed(x, scores, places)
        self.paper.last.watches += x, logits, scores
        return y

    def block(self, x: PaperTensor) -> PaperTensor:
        paper, given = self.paper, x
        self.begin()
        normed = self.norm(x, "input_layernorm")
        with paper.inside("self_attn"):
            attended = self.attention(normed)
        x = op.add(paper, x, attended)
        normed = self.norm(x, "post_attention_layernorm")
        with paper.inside("mlp"):
            y = self.mlp(normed)
        self.step_last(self.scales)
        return op.add(paper, x, y, watches=(given, self.places))


class _OLMoE(_Mixtral):
    """Queries and keys go through norms as wholes, and a token's weights do
    not add up to 1."""

    normalized = False
    narrow = True
    norm_size = _Olmo2.norm_size
    heads = _Olmo2.heads


class _Qwen3MoE(_Mixtral):
    """Each head's query and key go through an RMSNorm."""

    narrow = True

    def heads(self, x: PaperTensor, name: str, heads: int) -> PaperTensor:
        return self.norm(super().heads(x, name, heads), f"{name}_norm")

    def routed(self, x: PaperTensor) -> tuple[PaperTensor, ...]:
        self.router = len(self.paper.parameters)
        return super().routed(x)

    def mlp(self, x: PaperTensor) -> PaperTensor:
        """The router's weight stands behind those of the experts."""
        y = super().mlp(x)
        steps = self.paper.parameters
        self.step_last(steps[self.router : self.router + 1])
        return y


BLOCKS: dict[str, type[Block]] = {
    "gemma2": _Gemma2,
    "gemma3": _Gemma3,
    "gpt2": _GPT2,
    "gpt_neox": _GPTNeoX,
    "llama": Block,
    "mixtral": _Mixtral,
    "olmo2": _Olmo2,
    "olmoe": _OLMoE,
    "phi3": _Phi3,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3MoE,
    "stablelm": _StableLM,
}
"""By name, the block of a family or of several."""
