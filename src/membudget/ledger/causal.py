"""Language models as the library transformers builds and trains them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from membudget.checks import (
    check_positions,
    flag,
    installed,
    instance,
    listed,
    number,
    one_of,
    strings,
    whole,
)
from membudget.checks import device as checked_device
from membudget.ledger.adapters import (
    Adapter,
    check_matched,
    check_targets,
)
from membudget.ledger.blocks import BLOCKS, Block
from membudget.ledger.networks import MOST_BLOCKS, chosen_numbers
from membudget.ledger.paper import Paper

DROPOUTS = "embedding", "attention", "residual"
"""Where GPT-2 has dropout: after the positions, on the weights of attention,
and at the end of attention and MLP."""


@dataclass(frozen=True)
class CausalLM:
    """The shape of a ``…ForCausalLM`` of transformers.

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
        block: whose block, one of :data:`membudget.ledger.blocks.BLOCKS`.
        window: tokens that a token sees in the blocks with local attention,
            at least 2; None where there are no such blocks.
        local: whether a block's attention is local, of the first blocks; the
            others repeat them.
        turned: share of a head that rotary positions turn (Phi-4-mini).
        context: positions that are learned (GPT-2).
        dropouts: where numbers are dropped in training, of
            :data:`DROPOUTS` (GPT-2).
        experts: of a block, if it is a mixture, each of this hidden width.
        active: experts that each token goes through, at most all.
        config: the config that it was read from, which :meth:`build` needs.
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
    block: str = "llama"
    window: int | None = None
    local: Sequence[bool] = (True,)
    turned: float = 1.0
    context: int | None = None
    dropouts: Sequence[str] = ()
    experts: int = 1
    active: int = 1
    config: Mapping[str, Any] | None = field(
        default=None, compare=False, repr=False
    )

    family: ClassVar[str] = "transformers"
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        names = "vocabulary", "width", "heads", "kv_heads", "hidden"
        for name in (*names, "head_size", "depth", "experts", "active"):
            most = {"depth": MOST_BLOCKS, "active": self.experts}.get(name)
            value = whole(getattr(self, name), name, most=most)
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not share {self.kv_heads} heads of "
                "keys: use a kv_heads that divides the heads"
            )
        turned = number(self.turned, "turned", 0, 1)
        object.__setattr__(self, "turned", turned)
        size = self.turned_size
        if (size % 2 or not size) and BLOCKS[self.block].rotary:
            raise ValueError(
                f"rotary positions turn {size} numbers of a head: use a "
                "head_size and a share turned that make an even number"
            )
        flag(self.tied, "tied")
        one_of(self.block, BLOCKS, "block")
        biases = strings(self.biases, "biases", "names of linear layers", 0)
        for name in biases:
            one_of(name, self.linears, "linear layer of a block")
        object.__setattr__(self, "biases", biases)
        for name, least in (("window", 2), ("context", 1)):
            if getattr(self, name) is not None:
                value = whole(getattr(self, name), name, least)
                object.__setattr__(self, name, value)
        local = tuple(
            flag(value, "local, of a block,")
            for value in listed(self.local, "local", "True and False")
        )
        object.__setattr__(self, "local", local)
        dropouts = strings(self.dropouts, "dropouts", "places of dropout", 0)
        for name in dropouts:
            one_of(name, DROPOUTS, "place of dropout")
        object.__setattr__(self, "dropouts", dropouts)
        if self.config is not None:
            use = "the content of a config.json, or None"
            instance(self.config, Mapping, "config", use)

    @property
    def turned_size(self) -> int:
        """Numbers of a head that rotary positions turn."""
        if self.turned == 1:
            return self.head_size
        return int(self.head_size * self.turned)

    def is_local(self, index: int) -> bool:
        """Whether this block's attention is local."""
        local = self.local[index % len(self.local)]
        return local and self.window is not None

    def alike(self, tokens: int) -> bool:
        """Whether sequences of this length make all blocks alike."""
        within = self.window is None or tokens < self.window
        return within or len(set(self.local)) == 1

    @property
    def layers(self) -> str:
        """The library's name of the list of blocks: ``"model.layers"``."""
        return ".".join(BLOCKS[self.block].base)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers."""
        return BLOCKS[self.block].linears(self)

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of a block."""
        return self._weights(2) - self._weights(1)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self._weights(1) + (self.depth - 1) * self.block_parameters

    def _weights(self, depth: int) -> int:
        """Numbers in the weights of so many blocks, the table and the head."""
        paper = Paper()
        written = replace(self, depth=depth)._on(paper, 1, 1)
        written.write(set(), None)
        return sum(weight.elements for weight in paper.parameters)

    def buffers_beside(self, itemsize: int) -> int:
        """Bytes of the buffers, beside weights of ``itemsize`` bytes."""
        return BLOCKS[self.block].buffers(self, itemsize)

    def build(self, device: torch.device | str = "meta") -> torch.nn.Module:
        """The library's model of this shape; on ``meta`` it takes no memory.

        Raises:
            ModuleNotFoundError: transformers is not installed.
            ValueError: the shape was read from no config, or more than its
                depth was changed since.
        """
        device = checked_device(device)
        use = "use the shape that membudget.ledger.from_config returns"
        if self.config is None:
            raise ValueError(f"the shape was read from no config: {use}")
        transformers: Any = installed("transformers", "a model of the hub")
        entries = dict(self.config)
        kinds = entries.pop("layer_types", None)
        config = transformers.AutoConfig.for_model(**entries)
        config.num_hidden_layers = self.depth
        if kinds:
            times = -(-self.depth // len(kinds))
            config.layer_types = (list(kinds) * times)[: self.depth]
        with device:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32
            )
        if sum(p.numel() for p in model.parameters()) != self.parameters:
            raise ValueError(
                f"the shape is no longer that of its config: {use}"
            )
        return model.train()

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
            ValueError: what ``Transformer.write`` refuses, or a loss in
                chunks or attention to be kept, which transformers' own step
                has not.
        """
        self._check(loss_chunks, kept_attention)
        if self.context is not None:
            check_positions(tokens, self.context)
        if adapter:
            check_targets(adapter, self.family, self.linears)
        paper = Paper(autocast, lists, kernels)
        chosen = chosen_numbers(checkpointed, self.depth, "block")
        written = self._on(paper, batch, tokens, itemsize, trained, adapter)
        written.write(chosen, None)
        check_matched(trained, written.names)
        return paper

    def _on(
        self,
        paper: Paper,
        batch: int,
        tokens: int,
        itemsize: int = 4,
        trained: Sequence[str] = ("*",),
        adapter: Adapter | None = None,
    ) -> Block:
        return BLOCKS[self.block](
            self, paper, batch, tokens, itemsize, False, trained, adapter
        )

    def _check(self, chunks: int | None, kept_attention: bool) -> None:
        if chunks is not None or kept_attention:
            raise ValueError(
                "the step of transformers has no loss in chunks, and its "
                "checkpoints keep no attention: leave loss_chunks and "
                "kept_attention out"
            )
