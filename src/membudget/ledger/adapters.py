"""What is trained of a model: adapters beside its weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from membudget.checks import flag, instance, shown, strings, whole

TARGETS = {
    "gpt": ("qkv", "out", "up", "down"),
    "llama": ("query", "key", "value", "out", "gate", "up", "down"),
    "transformers": (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ),
}
"""The linear layers of a block, by family of transformers."""


@dataclass(frozen=True)
class Adapter:
    """LoRA: beside a linear layer two thin ones, which alone are trained.

    ``y = W x + up(down(dropout(x))) · scale`` with rank · (inputs + outputs)
    weights (Hu et al. 2021, arXiv 2106.09685, section 4.1). DoRA then gives
    each row of the sum W + up · down · scale a trained length (Liu et al.
    2024, arXiv 2402.09353, equation 5).

    Args:
        targets: names of the linear layers that have one
            (:data:`TARGETS`), in each block.
        rank: outputs of the first and inputs of the second.
        itemsize: bytes of a number of the adapter: 4, ``peft``'s default for
            a model in 16 bits, too, or 2.
        dropout: whether there is dropout before the first.
        four_bits: whether the frozen linear layers of the blocks lie in NF4
            with scales in 8 bits (QLoRA, Dettmers et al. 2023,
            arXiv 2305.14314), as bitsandbytes has them.
        dora: whether it is DoRA, as ``peft`` computes it.

    Raises:
        TypeError, ValueError: one of them is not as said, or DoRA over 4
            bits, for which there are no rules.
    """

    targets: Sequence[str]
    rank: int = 8
    itemsize: int = 4
    dropout: bool = False
    four_bits: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole(self.rank, "rank"))
        itemsize = whole(self.itemsize, "itemsize")
        if itemsize not in (2, 4):
            raise ValueError(
                f"itemsize is {shown(itemsize)}: use 4 (fp32) or 2 (bf16)"
            )
        for name in ("dropout", "four_bits", "dora"):
            flag(getattr(self, name), name)
        if self.dora and self.four_bits:
            raise ValueError(
                "the ledger has no rules for DoRA over 4 bits: use "
                "four_bits=False, or dora=False"
            )
        names = strings(self.targets, "targets", "names of linear layers")
        object.__setattr__(self, "targets", names)

    def at(self, name: str) -> bool:
        """Whether the linear layer of this name has one: it ends in a
        target, as ``peft`` has it."""
        return any(f".{name}".endswith(f".{part}") for part in self.targets)

    @property
    def told(self) -> str:
        """In words."""
        layers = ", ".join(self.targets)
        if set(self.targets) in map(set, TARGETS.values()):
            layers = "all linear layers"
        base = " over 4 bits" if self.four_bits else ""
        kind = "DoRA" if self.dora else "LoRA"
        return f"{kind} of rank {self.rank} in {layers}{base}"


def packed_bytes(weights: int) -> int:
    """Bytes of so many weights of a layer in NF4, as bitsandbytes keeps them.

    Two codes in a byte, a byte of scale for each 64 weights, 4 bytes for each
    256 scales and 4 for their mean; and the layer's tables of levels, 16 of
    the codes and 256 of the scales, in fp32.
    """
    scales = -(-weights // 64)
    return -(-weights // 2) + scales + 4 * (-(-scales // 256) + 1 + 16 + 256)


def checked_trained(
    trained: Sequence[str] | None, adapter: Adapter | None
) -> tuple[str, ...]:
    """Patterns of the names of the weights that are trained."""
    if trained is None:
        return ("*",) if adapter is None else ()
    return strings(trained, "trained", "names or patterns of them", 0)


def checked_adapter(
    adapter: Adapter | None, recipe: str, trained: Sequence[str] | None
) -> Adapter | None:
    """The adapter, if a recipe can have it."""
    if adapter is None:
        return None
    instance(adapter, Adapter, "the adapter", "an Adapter")
    if recipe.startswith("master"):
        raise ValueError(
            "an adapter is trained as it is, and its model has no fp32 copy: "
            'use the recipe "bf16" with an adapter of 4 bytes'
        )
    if adapter.four_bits and recipe == "autocast":
        raise ValueError(
            "beside 4 bits bitsandbytes computes in one dtype, whatever "
            'autocast is: use the recipe "bf16" or "fp32"'
        )
    base = 2 if recipe == "bf16" else 4
    if adapter.itemsize < base or (trained and adapter.itemsize > base):
        raise ValueError(
            f"the adapter has {adapter.itemsize} bytes for a number, and "
            f"weights that are trained beside it or cast to it {base}: use "
            f"an adapter of {base} bytes"
        )
    return adapter


def stepped_recipe(recipe: str, adapter: Adapter | None) -> str:
    """The recipe by which the weights are stepped that are trained: that of
    the adapter, whose dtype may be another than the model's."""
    wide = adapter is not None and adapter.itemsize == 4
    return "fp32" if recipe == "bf16" and wide else recipe


def check_targets(
    adapter: Adapter, family: str, names: Iterable[str] | None = None
) -> None:
    """Refuse names that no linear layer of a block has.

    Args:
        names: those of the layers; by default the family's.
    """
    names = list(TARGETS[family] if names is None else names)
    unknown = [
        part
        for part in adapter.targets
        if not any(f".{name}".endswith(f".{part}") for name in names)
    ]
    if unknown:
        raise ValueError(
            f"a block has no linear layer {shown(unknown[0])}: use "
            f"{', '.join(names)}"
        )


def check_matched(trained: Sequence[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no weight."""
    for wanted in trained:
        if not any(fnmatchcase(name, wanted) for name in names):
            raise ValueError(
                f"no weight is named {shown(wanted)}: use names such as "
                f"{names[0]} or {names[-1]}, with * for any part"
            )
