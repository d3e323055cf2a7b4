"""Networks written on paper: transformers, MLPs, convolutional nets."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from numbers import Integral
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from membudget.checks import (
    check_heads,
    check_positions,
    flag,
    listed,
    one_of,
    shown,
    whole,
)
from membudget.checks import device as checked_device
from membudget.ledger import operators as op
from membudget.ledger.adapters import (
    Adapter,
    check_matched,
    check_targets,
    packed_bytes,
)
from membudget.ledger.paper import Paper, PaperTensor
from membudget.measuring.storages import module_tensors
from membudget.models import GPT, Llama, MLPBlock

FAMILIES = ("gpt", "llama")
"""GPT-2's block and Llama's."""

MOST_BLOCKS = 1000
"""Each is written down."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a language model.

    Args:
        vocabulary: tokens.
        width: size of a token's vector, D.
        depth: blocks, at most 1 000.
        heads: attention heads, which divide the width.
        context: positions that are learned (``"gpt"``).
        hidden: width of the MLP; 4·D by default.
        kv_heads: heads of keys and values (``"llama"``), which divide the
            heads; as many as heads by default.
        family: ``"gpt"`` (LayerNorm, learned positions, GELU, biases) or
            ``"llama"`` (RMSNorm, rotary positions, gated SiLU, no biases).
        tied: whether the head shares the token embedding's weight.
        fused: whether attention is one operator.
        dropout: whether there is dropout (``"gpt"``).
    """

    vocabulary: int = 256
    width: int = 64
    depth: int = 2
    heads: int = 4
    context: int = 128
    hidden: int = cast("int", None)
    kv_heads: int = cast("int", None)
    family: str = "gpt"
    tied: bool = False
    fused: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        one_of(self.family, FAMILIES, "family of transformers")
        for name in ("tied", "fused", "dropout"):
            flag(getattr(self, name), name)
        for name in ("vocabulary", "width", "heads", "context"):
            self._whole(name)
        self._whole("depth", MOST_BLOCKS)
        defaults = {"hidden": 4 * self.width, "kv_heads": self.heads}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
            self._whole(name)
        paired = self.family == "llama"
        check_heads(self.width, self.heads, self.kv_heads, paired)
        if self.family == "gpt" and (
            self.kv_heads < self.heads or self.hidden != 4 * self.width
        ):
            raise ValueError(
                "the family gpt has as many heads of keys as of queries and "
                "an MLP of 4 × width: leave kv_heads and hidden out, or use "
                "the family llama"
            )
        if self.family == "llama" and self.dropout:
            raise ValueError("the family llama has no dropout: leave it out")

    def _whole(self, name: str, most: int | None = None) -> None:
        value = whole(getattr(self, name), name, most=most)
        object.__setattr__(self, name, value)

    @property
    def shared(self) -> int:
        """Width of the keys, and of the values, of a token."""
        return self.width // self.heads * self.kv_heads

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: 12·D² + 13·D for GPT-2's."""
        d, f = self.width, self.hidden
        if self.family == "gpt":
            return 4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d
        return 2 * d * d + 2 * d * self.shared + 3 * d * f + 2 * d

    @property
    def parameters(self) -> int:
        """Parameters of the model: V·D + blocks + norm (+ V·D, + T·D)."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        if self.family == "gpt":
            tables += self.context * self.width + self.width
        return tables + self.depth * self.block_parameters + self.width

    def build(self, device: torch.device | str = "meta") -> torch.nn.Module:
        """The course's model of this shape; on ``meta`` it takes no memory."""
        device = checked_device(device)
        meta = device.type == "meta"
        with device, _Uninitialised() if meta else nullcontext():
            if self.family == "gpt":
                return GPT(
                    self.vocabulary,
                    self.context,
                    self.width,
                    self.depth,
                    self.heads,
                    self.fused,
                    0.1 if self.dropout else 0.0,
                    self.tied,
                )
            return Llama(
                self.vocabulary,
                self.width,
                self.depth,
                self.heads,
                self.kv_heads,
                self.hidden,
                self.fused,
                self.tied,
            )

    def buffers_beside(self, itemsize: int) -> int:
        """Bytes of the buffers, of which there are none."""
        return 0

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

        Args:
            itemsize: bytes of a parameter.
            autocast: bytes of a number in matrix products, where autocast
                is on.
            others: as for :func:`predict`, which checks them.

        Raises:
            ValueError: more tokens than learned positions, blocks that do
                not exist or are named twice, attention to be kept that is
                not fused, patterns that match no weight, or an adapter's
                target or rank that no layer has.
        """
        if kept_attention and not self.fused:
            raise ValueError(
                "attention is to be kept, and here it is several operators: "
                "use fused=True, or no kept_attention"
            )
        if self.family == "gpt":
            check_positions(tokens, self.context)
        if adapter:
            check_targets(adapter, self.family)
        paper = Paper(autocast, lists, kernels)
        chosen = chosen_numbers(checkpointed, self.depth, "block")
        written = Written(
            self,
            paper,
            batch,
            tokens,
            itemsize,
            kept_attention,
            trained,
            adapter,
        )
        written.write(chosen, loss_chunks)
        check_matched(trained, written.names)
        return paper


class _Uninitialised(TorchFunctionMode):
    """Leaves the initial values out, which tensors on meta have not.

    PyTorch would draw them by code whose import takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@dataclass
class Written:
    """A transformer's step on paper."""

    shape: Any  # a Transformer, or what a subclass writes
    paper: Paper
    batch: int
    tokens: int
    itemsize: int
    kept: bool  # whether attention's results are
    trained: Sequence[str]
    adapter: Adapter | None
    names: list[str] = field(default_factory=list)  # of the weights

    def write(self, checkpointed: set[int], chunks: int | None) -> None:
        shape, paper = self.shape, self.paper
        ids = paper.input(self.batch * self.tokens, 8)
        targets = paper.input(self.batch * self.tokens, 8)
        table = self.weight(shape.vocabulary * shape.width, "token.weight")
        gpt = shape.family == "gpt"
        if gpt:
            x = self.gpt_start(table, ids)
            variables: tuple[PaperTensor, ...] = self.places, x
        else:
            size = shape.width // shape.heads
            self.turns = op.constant(paper, self.tokens * (size // 2), 8)
            x = op.embedding(paper, table, ids, shape.width)
            variables = (self.turns,)
        for index in range(shape.depth):
            start = len(paper.rows)
            with paper.inside(f"blocks.{index}"):
                x = self.gpt_block(x) if gpt else self.llama_block(x)
                if index in checkpointed:
                    paper.checkpoint(start)
        x = self.norm(x, "norm")
        paper.last.watches += variables
        head = table
        if not shape.tied:
            head = self.weight(table.elements, "head.weight")
        if chunks is not None:
            op.loss_in_chunks(
                paper, x, head, targets, shape.vocabulary, chunks
            )
            return
        with paper.inside("head"):
            logits = op.linear(paper, x, head, shape.vocabulary, folds=True)
        op.cross_entropy(paper, logits, targets)

    def weight(
        self, elements: int, name: str, packed: bool = False
    ) -> PaperTensor:
        name = self.named(name)
        self.names.append(name)
        trained = any(fnmatchcase(name, wanted) for wanted in self.trained)
        if packed:
            if trained:
                raise ValueError(
                    f"{name} lies in 4 bits, which have no gradient: train "
                    "the adapters alone, or what is no linear layer of a block"
                )
            return self.paper.parameter(packed_bytes(elements), 1, False)
        return self.paper.parameter(elements, self.itemsize, trained)

    def named(self, name: str) -> str:
        """The full name of a weight."""
        return ".".join([*self.paper.module, name])

    def norm(
        self, x: PaperTensor, name: str, *watches: PaperTensor
    ) -> PaperTensor:
        width = self.shape.width
        weight = self.weight(width, f"{name}.weight")
        if self.shape.family == "llama":
            if self.paper.kernels == "cuda":
                return op.fused_rms_norm(self.paper, x, weight)
            return op.rms_norm(self.paper, x, weight, watches)
        bias = self.weight(width, f"{name}.bias")
        return op.layer_norm(self.paper, x, weight, bias)

    added: ClassVar[bool] = False
    """Whether a linear layer is ``torch.addmm`` (``Conv1D``)."""

    def biased(self, name: str) -> bool:
        """Whether the linear layer of this name has a bias."""
        return self.shape.family == "gpt"

    def linear(
        self, x: PaperTensor, name: str, inputs: int, outputs: int
    ) -> PaperTensor:
        packed = bool(self.adapter and self.adapter.four_bits)
        with self.paper.inside(name):
            weight = self.weight(inputs * outputs, "weight", packed)
            bias = self.weight(outputs, "bias") if self.biased(name) else None
            if packed:
                size = inputs * outputs
                y = op.four_bits(self.paper, x, size, outputs, bias)
            else:
                how = {"folds": True, "added": self.added}
                y = op.linear(self.paper, x, weight, outputs, bias, **how)
            if self.adapter and self.adapter.at(name):
                own, sides = (weight, bias), (inputs, outputs)
                y = self.adapted(self.adapter, x, y, own, *sides)
        return y

    def adapted(
        self,
        adapter: Adapter,
        x: PaperTensor,
        y: PaperTensor,
        own: tuple[PaperTensor, PaperTensor | None],
        inputs: int,
        outputs: int,
    ) -> PaperTensor:
        rank = whole(adapter.rank, "rank", most=min(inputs, outputs))
        down, up = (
            self.paper.parameter(rank * width, adapter.itemsize)
            for width in (inputs, outputs)
        )
        if adapter.dora:
            if any(one is not None and one.trained for one in own):
                raise ValueError(
                    f"{'.'.join(self.paper.module)} is trained, and DoRA has "
                    "rules beside frozen layers alone: leave it out of "
                    "trained, or out of the targets"
                )
            lengths = self.paper.parameter(outputs, adapter.itemsize)
            weights, drop = (down, up, lengths), adapter.dropout
            return op.dora(self.paper, x, y, own, weights, rank, drop)
        return op.low_rank(
            self.paper,
            x,
            y,
            down,
            up,
            rank,
            adapter.dropout,
            adapter.four_bits,
        )

    def drop(self, x: PaperTensor) -> PaperTensor:
        return op.dropout(self.paper, x) if self.shape.dropout else x

    def attend(self, q, k, v) -> PaperTensor:
        shape = self.shape
        rows = q.elements * shape.heads // shape.width
        if shape.fused:
            y = op.fused_attention(self.paper, q, k, v, rows)
            self.paper.last.kept = self.kept
            return y
        y = op.unfused_attention(
            self.paper,
            q,
            k,
            v,
            scores=rows * self.tokens,
            tokens=self.tokens,
            times=shape.heads // shape.kv_heads,
            drop=shape.dropout,
            # q, k and v of GPT-2's block are parts of one tensor
            folds=1 in (self.batch, shape.heads)
            or (self.tokens == 1 and shape.family == "llama"),
        )
        if 1 in (shape.heads, self.tokens):
            return y
        return op.contiguous(self.paper, y)

    def gpt_start(self, table, ids) -> PaperTensor:
        paper, width = self.paper, self.shape.width
        self.places = op.constant(paper, self.tokens, 8)
        positions = self.weight(self.shape.context * width, "position.weight")
        with paper.inside("token"):
            x = op.embedding(paper, table, ids, width)
        with paper.inside("position"):
            y = op.embedding(paper, positions, self.places, width)
        return op.add(paper, x, y, broadcast=True)

    def gpt_block(self, x: PaperTensor) -> PaperTensor:
        paper, d, given = self.paper, self.shape.width, x
        qkv = self.linear(self.norm(x, "norm1"), "qkv", d, 3 * d)
        q, k, v = op.split(paper, qkv, (qkv.elements // 3,) * 3)
        attended = self.attend(q, k, v)
        y = self.linear(attended, "out", d, d)
        x = op.add(paper, x, self.drop(y), watches=(q, k, v, attended))
        up = self.linear(self.norm(x, "norm2"), "up", d, 4 * d)
        up = op.of_input(paper, up, "gelu")
        y = self.drop(self.linear(up, "down", 4 * d, d))
        return op.add(paper, x, y, watches=(given,))

    def llama_block(self, x: PaperTensor) -> PaperTensor:
        paper, shape, d = self.paper, self.shape, self.shape.width
        fused, given = shape.fused, x
        normed = self.norm(x, "norm1")
        q, k, v = (
            self.linear(normed, name, d, outputs)
            for name, outputs in (
                ("query", d),
                ("key", shape.shared),
                ("value", shape.shared),
            )
        )
        straight = q, k
        q, k = (
            op.rotate_pairs(
                paper, op.heads_of(paper, part), self.turns, fused, straight
            )
            for part in straight
        )
        if not fused:
            v = op.heads_of(paper, v)
        attended = self.attend(q, k, v)
        x = op.add(paper, x, self.linear(attended, "out", d, d))
        normed = self.norm(x, "norm2", normed)
        gate = self.linear(normed, "gate", d, shape.hidden)
        gate = op.of_input(paper, gate, "silu")
        up = op.multiply(
            paper, gate, self.linear(normed, "up", d, shape.hidden)
        )
        y = self.linear(up, "down", shape.hidden, d)
        held = given, q, k, v, attended, normed
        return op.add(paper, x, y, watches=held)


GPT2 = Transformer(50257, 768, 12, 12, 1024, tied=True)
"""GPT-2's published shape, 124 439 808 parameters (Radford et al. 2019)."""

_llama = partial(Transformer, family="llama", kv_heads=8)

LLAMA3_8B = _llama(128256, 4096, 32, 32, hidden=14336)
"""Llama 3's, 8 030 261 248 parameters (Grattafiori et al. 2024, arXiv
2407.21783, table 3)."""

PRESETS = {
    "GPT-2 124M": GPT2,
    "GPT-2 XL 1.5B": Transformer(50257, 1600, 48, 25, 1024, tied=True),
    "Llama 3.2 1B": _llama(128256, 2048, 16, 32, hidden=8192, tied=True),
    "Llama 2 7B": _llama(32000, 4096, 32, 32, hidden=11008, kv_heads=32),
    "Mistral 7B": _llama(32000, 4096, 32, 32, hidden=14336),
    "Llama 3 8B": LLAMA3_8B,
    "Llama 3 70B": _llama(128256, 8192, 80, 64, hidden=28672),
}
"""Well-known shapes."""


@dataclass(frozen=True)
class Chain:
    """A ``Sequential`` and the shape of one of its samples.

    Its loss is the cross-entropy of its outputs, one row for each sample,
    and its targets are whole numbers of 8 bytes.

    Args:
        model: modules one after the other, nested or not; on any device, in
            training mode, all parameters trained.
        sample: shape of one sample, without the batch.
        segments: under a checkpoint: for each the numbers of the model's
            children in it, one after the other; what is in none of them is
            not checkpointed.

    Raises:
        ValueError: segments that are not of children one after the other or
            that overlap, frozen parameters, parameters that several modules
            share or that are not in fp32.
    """

    model: nn.Sequential
    sample: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Sequential):
            raise TypeError(
                f"{type(self.model).__name__} is no Sequential: use one, or "
                "membudget.ledger.account for any other model"
            )
        sizes = listed(self.sample, "the sample", "sizes")
        sample = tuple(whole(size, "a size of the sample") for size in sizes)
        object.__setattr__(self, "sample", sample)
        segments = tuple(
            tuple(
                whole(child, "a number of a child", 0)
                for child in listed(part, "a segment", "children")
            )
            for part in listed(self.segments, "segments", "segments", 0)
        )
        object.__setattr__(self, "segments", segments)
        number = 0
        for part in segments:
            run = range(part[0], part[0] + len(part))
            if [*part] != [*run] or not number <= run.start < run.stop <= len(
                self.model
            ):
                raise ValueError(
                    f"the segment {part} is not of children one after the "
                    "other, overlaps or comes before the one before, or names "
                    "children that do not exist: use numbers such as (2, 3, "
                    f"4), of the children 0 to {len(self.model) - 1}"
                )
            number = run.stop
        named = self.model.named_modules(remove_duplicate=False)
        parameters = [p for _, module in named for p in _own(module)]
        if len({id(p) for p in parameters}) < len(parameters):
            raise ValueError(
                "several modules share a parameter, for which there is no "
                "rule: use membudget.ledger.account"
            )
        if any(p.dtype is not torch.float32 for p in parameters):
            raise ValueError(
                "some parameters are not in fp32: hand the model over in "
                "fp32, and say with predict's recipe how it is trained"
            )
        if not all(p.requires_grad for p in parameters):
            raise ValueError(
                "some parameters are frozen (requires_grad), for which there "
                "is no rule: use membudget.ledger.account"
            )

    def write(
        self,
        batch: int,
        *,
        itemsize: int = 4,
        autocast: int | None = None,
        lists: str = "cpu",
        kernels: str = "cpu",
        checkpointed: bool | int | Sequence[int] = False,
    ) -> Paper:
        """The forward pass and the loss, on paper.

        Args:
            others: as for :meth:`Transformer.write`.

        Raises:
            ValueError: a module that has no rule, or segments that do not
                exist or are named twice.
        """
        chosen = chosen_numbers(checkpointed, len(self.segments), "segment")
        paper, shape = Paper(autocast, lists, kernels), self.sample
        x = paper.input(batch * prod(shape), itemsize)
        targets = paper.input(batch, 8)
        parts = [self.segments[number] for number in chosen]
        starts, ends = ({part[end] for part in parts} for end in (0, -1))
        for number, child in enumerate(self.model):
            if number in starts:
                row = len(paper.rows)
            with paper.inside(str(number)):
                x, shape = _module(paper, child, x, batch, shape, itemsize)
            if number in ends:
                paper.checkpoint(row)
        if len(shape) != 1:
            raise ValueError(
                f"the model's output for a sample has the shape {shape}: let "
                "it be a row of logits, for example with nn.Flatten()"
            )
        op.cross_entropy(paper, x, targets)
        return paper


def chosen_numbers(
    checkpointed: bool | int | Sequence[int], count: int, unit: str
) -> set[int]:
    """The numbers of the blocks or segments that are checkpointed."""
    if isinstance(checkpointed, bool):
        return set(range(count * checkpointed))
    if isinstance(checkpointed, int | Integral):
        name = f"checkpointed, the number of {unit}s,"
        return set(range(whole(checkpointed, name, 0, count)))
    use = f"numbers of {unit}s, how many of the first, True or False"
    numbers = [
        whole(number, f"the number of a {unit}", 0)
        for number in listed(checkpointed, "checkpointed", use, 0)
    ]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"checkpointed is {shown(checkpointed)}: name each {unit} once"
        )
    if max(numbers, default=-1) >= count:
        raise ValueError(
            f"there is no {unit} {shown(max(numbers))} to checkpoint: there "
            f"are {count}, numbered from 0"
        )
    return set(numbers)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _module(
    paper: Paper,
    module: nn.Module,
    x: PaperTensor,
    batch: int,
    shape: tuple[int, ...],
    itemsize: int,
) -> tuple[PaperTensor, tuple[int, ...]]:
    """Write a module; its output and the shape of a sample of it."""
    if isinstance(module, nn.Sequential):
        given, start = x, len(paper.rows)
        for number, child in enumerate(module):
            with paper.inside(str(number)):
                x, shape = _module(paper, child, x, batch, shape, itemsize)
        if paper.rows[start:]:  # a variable of the outer one's holds it
            paper.last.watches += (given,)
        return x, shape
    if isinstance(module, MLPBlock):
        y = x
        for name, child in module.named_children():
            with paper.inside(name):
                y, shape = _module(paper, child, y, batch, shape, itemsize)
        return op.add(paper, x, y), shape
    name = type(module).__name__
    if type(module) not in _RULES:
        raise ValueError(
            f"there is no rule for {name}: use "
            f"{', '.join(kind.__name__ for kind in _RULES)}, or measure the "
            "model with membudget.ledger.account"
        )
    write, needs = _RULES[type(module)]
    for option, value in needs.items():
        found = getattr(module, option)
        found = found is not None if option == "bias" else found
        if found != value:
            raise ValueError(
                f"there is a rule for {name} with {option}={value} only, and "
                f"here it is {found}: change it, or measure the model with "
                "membudget.ledger.account"
            )
    weights = [paper.parameter(p.numel(), itemsize) for p in _own(module)]
    try:
        after = _shape(module, shape)
        return write(paper, module, x, batch, after, weights), after
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{name} does not take samples of the shape {shape}: {error}"
        ) from error


def _shape(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the output for a sample: the module runs on meta."""
    held = module_tensors(module)
    empty = {id(t): torch.empty(t.shape, device="meta") for t in held}
    bare = deepcopy(module, empty).eval()
    return tuple(bare(torch.empty((1, *shape), device="meta")).shape[1:])


# Rules: each writes a module whose output has the shape ``after`` a sample.


def _linear(paper, module, x, batch, after, weights):
    weight, bias = [*weights, None][:2]
    outputs, folds = module.out_features, len(after) > 1
    return op.linear(paper, x, weight, outputs, bias, folds)


def _convolution(paper, module, x, batch, after, weights):
    weight, *bias = weights
    return op.convolution(paper, x, weight, batch * prod(after), *bias)


def _max_pool(paper, module, x, batch, after, weights):
    return op.max_pool(paper, x, batch * prod(after))


def _average(paper, module, x, batch, after, weights):
    if after[1:] != (1, 1):
        raise ValueError(
            f"there is no rule for an average over parts, {after}: use "
            "AdaptiveAvgPool2d(1)"
        )
    return op.mean(paper, x, batch * prod(after))


def _flatten(paper, module, x, batch, after, weights):
    return x


def _plain(write: Callable) -> Callable:
    """A rule for a module that has but its input and its weights."""

    def rule(paper, module, x, batch, after, weights):
        return write(paper, x, *weights)

    return rule


_RULES: dict[type[nn.Module], tuple[Callable, dict]] = {
    nn.Linear: (_linear, {}),
    nn.Conv2d: (_convolution, {"padding_mode": "zeros"}),
    nn.BatchNorm2d: (
        _plain(op.batch_norm),
        {"affine": True, "track_running_stats": True, "training": True},
    ),
    nn.MaxPool2d: (_max_pool, {"return_indices": False}),
    nn.AdaptiveAvgPool2d: (_average, {}),
    nn.Flatten: (_flatten, {"start_dim": 1, "end_dim": -1}),
    nn.ReLU: (
        _plain(partial(op.of_output, name="relu")),
        {"inplace": False},
    ),
    nn.GELU: (_plain(partial(op.of_input, name="gelu")), {}),
    nn.LayerNorm: (
        _plain(op.layer_norm),
        {"elementwise_affine": True, "bias": True},
    ),
}
