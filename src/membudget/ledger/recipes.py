"""Bytes per parameter: recipes of precision, and optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import nn

from membudget.checks import flag, one_of, whole
from membudget.ledger.optimizers import (
    OPTIMIZERS,
    Optimizer,
    Sizes,
    kept_bytes,
    shapes_of,
)


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

    Raises:
        ValueError: an optimizer whose states depend on shapes.
    """
    r, o = _named(recipe, optimizer)
    if o.shaped:
        raise ValueError(
            f"what {optimizer!r} keeps depends on the parameters' shapes, so "
            "that no number per parameter says it: use ledger.states with "
            "the model"
        )
    kept = o.numbers * (o.itemsize or r.stepped)
    return States(r.parameters, r.gradients, r.master + kept)


def states(
    model: nn.Module | Sizes,
    recipe: str = "fp32",
    optimizer: str = "adam",
    rank: int | None = None,
) -> States:
    """Bytes of parameters, gradients and optimizer states, to the byte.

    Args:
        model: on any device, ``meta`` included; its parameters count once
            each, in the dtype of the recipe, and so do frozen ones, which
            have neither gradients nor states. Buffers are not counted. Or
            the shapes of the parameters, or their numbers of elements.
        recipe: one of :data:`RECIPES`.
        optimizer: one of :data:`OPTIMIZERS`.
        rank: of GaLore's and APOLLO's projection; None for the others.

    Raises:
        ValueError: a rank missing, or one too many; sizes without shapes
            for an optimizer that looks at shapes.
    """
    r, _ = _named(recipe, optimizer)
    if isinstance(model, nn.Module):
        parameters = list(model.parameters())
        everything = [tuple(p.shape) for p in parameters]
        trained = [tuple(p.shape) for p in parameters if p.requires_grad]
    else:
        what = "shapes or sizes of parameters, or a torch.nn.Module"
        everything = shapes_of(model, what)
        _needs(model, optimizer)
        trained = everything
    return States(
        parameters=r.parameters * sum(map(prod, everything)),
        gradients=r.gradients * sum(map(prod, trained)),
        optimizer=optimizer_bytes(trained, recipe, optimizer, rank),
    )


def _named(recipe: str, optimizer: str) -> tuple[Recipe, Optimizer]:
    one_of(recipe, RECIPES, "recipe")
    one_of(optimizer, OPTIMIZERS, "optimizer")
    return RECIPES[recipe], OPTIMIZERS[optimizer]


def _needs(sizes: Sizes, optimizer: str) -> None:
    """Refuse bare sizes where an optimizer looks at shapes."""
    bare = [size for size in sizes if not isinstance(size, tuple | list)]
    if bare and OPTIMIZERS[optimizer].shaped:
        raise ValueError(
            f"what {optimizer!r} keeps depends on shapes, and {bare[0]} is a "
            "size: use shapes, such as (4096, 1024), or (4096,) for a vector"
        )


def _rank(optimizer: str, rank: int | None) -> int:
    """The rank, checked; 0 for an optimizer without."""
    if OPTIMIZERS[optimizer].ranked == (rank is not None):
        return 0 if rank is None else whole(rank, "rank")
    if rank is None:
        raise ValueError(
            f"{optimizer!r} projects the gradients to a rank: name one, such "
            "as rank=128"
        )
    raise ValueError(
        f"{optimizer!r} has no rank: leave it out, or use 'galore' or 'apollo'"
    )


def optimizer_bytes(
    sizes: Sizes, recipe: str, optimizer: str, rank: int | None = None
) -> int:
    """Bytes an optimizer keeps for parameters of these sizes or shapes.

    Args:
        sizes: numbers of elements, or shapes; :data:`OPTIMIZERS` says whose
            bytes depend on shapes.
        recipe: one of :data:`RECIPES`; its fp32 copy counts.
        optimizer: one of :data:`OPTIMIZERS`.
        rank: of GaLore's and APOLLO's projection; None for the others.

    Raises:
        ValueError: as :func:`states` does.
    """
    r, _ = _named(recipe, optimizer)
    shapes, rank = shapes_of(sizes), _rank(optimizer, rank)
    _needs(sizes, optimizer)
    copy = r.master * sum(map(prod, shapes))
    return copy + kept_bytes(shapes, optimizer, r.stepped, rank)


def update_workspace(
    sizes: Sizes,
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
    fp32, where they are not there in fp32. SGD and the 8-bit optimizers make
    nothing. Lion's, as lion-pytorch steps, makes two tensors of one
    parameter at a time, whatever the flags.

    Raises:
        ValueError: an optimizer both ``foreach`` and ``fused``, or one for
            whose step there is no rule.
    """
    r, _ = _named(recipe, optimizer)
    flag(foreach, "foreach"), flag(fused, "fused")
    if foreach and fused:
        raise ValueError(
            "foreach and fused are two ways of one step: use one of them"
        )
    if optimizer not in STEPS:
        raise ValueError(
            f"there is no rule for what the step of {optimizer!r} allocates: "
            "ledger.states gives its states, and ledger.account runs the step "
            "without data, or measuring.trace_step with"
        )
    counts, copies = list(map(prod, shapes_of(sizes))), 0
    if r.master and r.gradients < r.master:
        copies = r.master * sum(counts)
    steps = STEPS[optimizer](r.stepped, counts, foreach, fused)
    return [copies + size for size in steps]


def _nothing(item: int, sizes: list[int], *way: bool) -> list[int]:
    return [0]


def _adam(
    item: int, sizes: list[int], foreach: bool, fused: bool
) -> list[int]:
    if fused:
        return [0]
    if foreach:
        return [item * sum(sizes)]
    pairs = pairwise([0, *sizes])
    return [0, *(item * (before + 2 * n) for before, n in pairs)]


def _lion(item: int, sizes: list[int], *way: bool) -> list[int]:
    return [0, *(2 * item * n for n in sizes)]


STEPS: dict[str, Callable[..., list[int]]] = {
    "sgd": _nothing,
    "momentum": _nothing,
    "adam": _adam,
    "adam-8bit": _nothing,
    "amsgrad": _adam,
    "lion": _lion,
    "lion-8bit": _nothing,
}
"""For which optimizers' steps there is a rule."""
