"""An optimizer's step in the host's memory."""

from dataclasses import dataclass
from math import prod

from torch import nn

from membudget.checks import one_of
from membudget.ledger.optimizers import OPTIMIZERS, PLANNED, Sizes, shapes_of
from membudget.ledger.recipes import RECIPES, optimizer_bytes

COPY = 4
"""Bytes of a parameter's copy on the host: fp32, whatever the model's."""


@dataclass(frozen=True)
class HostStep:
    """Bytes of an optimizer's step on the host.

    Attributes:
        kept: there through every step: the fp32 copy, and the states.
        out: of gradients that leave the device in a step.
        back: of weights that come back.
        touched: that the step reads and writes in the host's memory at
            least, beside what the link writes and reads there.
    """

    kept: int
    out: int
    back: int
    touched: int


def host_step(
    model: nn.Module | Sizes, recipe: str = "master", optimizer: str = "adam"
) -> HostStep:
    """What an optimizer does whose states are on the host.

    The device keeps weights, and gradients until the step, in the dtype of
    the model. With Adam the host keeps 12 bytes a parameter: an fp32 copy
    and two moments. In a step it reads the gradient, reads and writes these,
    and writes the weight that goes back: of a 16-bit model 2 + 2 · 12 + 2 =
    28 bytes a parameter. In fp32 they are 28, too: the gradient has 4, and
    the copy is the weight. Each happens once a step, however many
    micro-batches there are. (Ren et al. 2021, ZeRO-Offload, arXiv
    2101.06840, section 3; the count is ours.)

    Args:
        model: its trained parameters count; or their shapes or sizes.
        recipe: one of :data:`RECIPES` for which there is a rule.
        optimizer: of :data:`PLANNED` one in fp32.

    Raises:
        ValueError: a recipe or an optimizer for which there is no rule.
    """
    check_host(recipe, optimizer)
    if isinstance(model, nn.Module):
        model = [p.numel() for p in model.parameters() if p.requires_grad]
    count = sum(map(prod, shapes_of(model)))
    size = RECIPES[recipe].parameters
    stepped = COPY * (1 + OPTIMIZERS[optimizer].numbers)
    written = size if size < COPY else 0
    return HostStep(
        optimizer_bytes(model, "master", optimizer),
        size * count,
        size * count,
        (size + 2 * stepped + written) * count,
    )


def check_host(recipe: str, optimizer: str) -> None:
    """Refuse what has no rule for states on the host."""
    one_of(recipe, RECIPES, "recipe"), one_of(optimizer, PLANNED, "optimizer")
    if optimizer.endswith("8bit"):
        raise ValueError(
            f"{optimizer!r} steps on a GPU, and not on the host: use 'adam', "
            "'momentum' or 'sgd' there"
        )
    kind = RECIPES[recipe]
    if kind.stepped < COPY or kind.gradients > kind.parameters:
        raise ValueError(
            f"there is no rule for the recipe {recipe!r} with the optimizer "
            "on the host, which steps an fp32 copy and takes gradients in the "
            "dtype of the model: use 'master', 'fp32' or 'autocast'"
        )
