"""Bytes per parameter: recipes of precision, and optimizers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from membudget.checks import flag, listed, one_of, whole


@dataclass(frozen=True)
class Recipe:
    """In which precision what is kept.

    Attributes:
        parameters: bytes of a parameter as the model uses it.
        gradients: bytes of a summed gradient.
        master: bytes of the fp32 copy that the optimizer steps, 0 without.
        autocast: bytes of a number in matrix products, where that is not
            the parameters'; None without autocast.
        text: in words.
    """

    parameters: int
    gradients: int
    master: int
    autocast: int | None
    text: str

    @property
    def stepped(self) -> int:
        """Bytes of a parameter as the optimizer sees it."""
        return self.master or self.parameters


RECIPES = {
    "fp32": Recipe(4, 4, 0, None, "everything in fp32"),
    "autocast": Recipe(
        4, 4, 0, 2, "fp32 parameters, matrix products in 16 bits"
    ),
    "bf16": Recipe(2, 2, 0, None, "everything in bf16"),
    "master": Recipe(2, 2, 4, None, "bf16 model, fp32 copy for the optimizer"),
    "master-fp32-gradients": Recipe(
        2,
        4,
        4,
        None,
        "bf16 model, fp32 copy, gradients summed in fp32",
    ),
}
"""The recipes by name.

``"master"`` is the recipe of Micikevicius et al. (2018, arXiv 1710.03740) as
ZeRO counts it, 2 + 2 + 12 bytes (Rajbhandari et al. 2020, arXiv 1910.02054,
section 3.1); with fp32 gradients it is Megatron-LM's, 2 + 4 + 12.
"""


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps for each parameter.

    Attributes:
        numbers: how many.
        itemsize: bytes of each; None for those of the parameter it steps.
        block: numbers that share one scale of 4 bytes; 0 without.
        counts: whether it counts its steps, in 4 bytes for each tensor.
        text: in words.
    """

    numbers: int
    itemsize: int | None
    block: int
    counts: bool
    text: str


OPTIMIZERS = {
    "sgd": Optimizer(0, None, 0, False, "SGD"),
    "momentum": Optimizer(1, None, 0, False, "SGD with momentum"),
    "adam": Optimizer(2, None, 0, True, "Adam, AdamW"),
    "adam-8bit": Optimizer(2, 1, 256, False, "Adam with 8-bit states"),
}
"""The optimizers by name.

``"adam-8bit"`` keeps its states as bitsandbytes does: in bytes, with a scale
for every block of 256, two tables of 256 numbers that all parameters share,
and in fp32 for tensors of fewer than 4 096 numbers (Dettmers et al. 2022,
arXiv 2110.02861).
"""

SMALL = 4096
"""Numbers in a tensor, below which 8-bit states stay in fp32."""


@dataclass(frozen=True)
class States:
    """Bytes that are there through every step, however small the batch.

    Attributes:
        parameters: of the model.
        gradients: of all trained parameters.
        optimizer: states, and the fp32 copy where the recipe has one.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def bytes_per_parameter(
    recipe: str = "fp32", optimizer: str = "adam"
) -> States:
    """The rule of thumb: whole bytes per parameter.

    It leaves out what does not grow with each parameter: Adam's counter of
    4 bytes per tensor, and the scales of 8-bit states (2/64 bytes per
    parameter).
    """
    r, o = _named(recipe, optimizer)
    kept = o.numbers * (o.itemsize or r.stepped)
    return States(r.parameters, r.gradients, r.master + kept)


def states(
    model: nn.Module | Sequence[int],
    recipe: str = "fp32",
    optimizer: str = "adam",
) -> States:
    """Bytes of parameters, gradients and optimizer states, to the byte.

    Args:
        model: on any device, ``meta`` included; its parameters count once
            each, in the dtype of the recipe, and so do frozen ones, which
            have neither gradients nor states. Buffers are not counted. Or
            the numbers of elements of the parameters.
        recipe: one of :data:`RECIPES`.
        optimizer: one of :data:`OPTIMIZERS`.
    """
    r, _ = _named(recipe, optimizer)
    if isinstance(model, nn.Module):
        everything = [p.numel() for p in model.parameters()]
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
    else:
        what = "sizes of parameters, or a torch.nn.Module"
        everything = trained = _sizes(model, what)
    return States(
        parameters=r.parameters * sum(everything),
        gradients=r.gradients * sum(trained),
        optimizer=optimizer_bytes(trained, recipe, optimizer),
    )


def _named(recipe: str, optimizer: str) -> tuple[Recipe, Optimizer]:
    one_of(recipe, RECIPES, "recipe")
    one_of(optimizer, OPTIMIZERS, "optimizer")
    return RECIPES[recipe], OPTIMIZERS[optimizer]


def _sizes(
    sizes: Sequence[int], what: str = "sizes of parameters"
) -> list[int]:
    """Numbers of elements, which may be 0."""
    return [
        whole(size, "the size of a parameter", 0)
        for size in listed(sizes, "sizes", what, 0)
    ]


def optimizer_bytes(sizes: Sequence[int], recipe: str, optimizer: str) -> int:
    """Bytes an optimizer keeps for parameters of these sizes."""
    r, o = _named(recipe, optimizer)
    sizes = _sizes(sizes)
    total = r.master * sum(sizes) + 4 * o.counts * len(sizes)
    if not o.block:
        return total + o.numbers * r.stepped * sum(sizes)
    large = [n for n in sizes if n >= SMALL]
    for n in sizes:
        if n < SMALL:
            total += o.numbers * 4 * n
        else:
            total += o.numbers * (n + 4 * -(-n // o.block))
    return total + (2 * 256 * 4 if large else 0)


def update_workspace(
    sizes: Sequence[int],
    recipe: str = "fp32",
    optimizer: str = "adam",
    foreach: bool = False,
    fused: bool = False,
) -> list[int]:
    """Bytes that the optimizer's step allocates, at each of its moments.

    PyTorch's Adam makes √v and the denominator √v / √(1 − β₂ᵗ) + ε of each
    parameter. One by one (``foreach=False``, its way on a CPU) both are
    there at once, together with the denominator of the parameter before.
    All at once (``foreach=True``, its way on a GPU) the roots of all
    parameters are there: 4 bytes per fp32 parameter more. Fused
    (``fused=True``, never PyTorch's own choice) one kernel makes neither.
    With a master copy the gradients of all parameters are first copied to
    fp32, where they are not there in fp32. SGD and 8-bit Adam make nothing.

    Raises:
        ValueError: an optimizer both ``foreach`` and ``fused``.
    """
    r, _ = _named(recipe, optimizer)
    flag(foreach, "foreach"), flag(fused, "fused")
    if foreach and fused:
        raise ValueError(
            "foreach and fused are two ways of one step: use one of them"
        )
    sizes, copies = _sizes(sizes), 0
    if r.master and r.gradients < r.master:
        copies = r.master * sum(sizes)
    moments = [0]
    if optimizer == "adam" and not fused:
        item, before = r.stepped, 0
        if foreach:
            moments = [item * sum(sizes)]
        else:
            for n in sizes:
                moments.append(before + 2 * item * n)
                before = item * n
    return [copies + size for size in moments]
