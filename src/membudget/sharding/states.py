"""Model states per rank, on paper: DDP and the stages of ZeRO."""

from dataclasses import dataclass

from membudget.checks import flag, one_of, whole
from membudget.ledger import RECIPES, States, bytes_per_parameter


@dataclass(frozen=True)
class ZeroStage:
    """What is split among the ranks.

    Attributes:
        parameters, gradients, optimizer: whether each of these is.
        gathers: how often each micro-batch gathers the parameters.
        text: in words.
    """

    parameters: bool
    gradients: bool
    optimizer: bool
    gathers: int
    text: str


STAGES = {
    "ddp": ZeroStage(False, False, False, 0, "everything on every rank"),
    "zero-1": ZeroStage(False, False, True, 0, "optimizer states are split"),
    "zero-2": ZeroStage(False, True, True, 0, "gradients are split, too"),
    "zero-3": ZeroStage(True, True, True, 2, "parameters are split, too"),
}
"""The stages by name (Rajbhandari et al. 2020, arXiv 1910.02054, fig. 1)."""


def zero_states(
    parameters: int,
    ranks: int,
    stage: str = "zero-3",
    recipe: str = "master",
    optimizer: str = "adam",
    *,
    waiting: bool = False,
) -> States:
    """Bytes of the model states on each rank, as the ZeRO paper counts.

    Each split part is its whole divided by the ranks, rounded up to a byte.
    Neither activations nor gathered parameters nor buffers are in it. With
    ``recipe="master"`` these are the paper's 16 Ψ, 4 Ψ + 12 Ψ/N,
    2 Ψ + 14 Ψ/N and 16 Ψ/N (Rajbhandari et al. 2020, section 5).

    Args:
        parameters: how many numbers the model has, Ψ.
        ranks: N.
        stage: one of :data:`STAGES`.
        recipe: one of :data:`membudget.ledger.RECIPES`. The fp32 copy of
            ``"master"`` counts as optimizer state.
        optimizer: one of :data:`membudget.ledger.OPTIMIZERS` whose bytes do
            not depend on shapes.
        waiting: whether micro-batches wait for a later one to reduce their
            gradients; these are whole on every rank until then.
    """
    parameters = whole(parameters, "parameters")
    ranks = whole(ranks, "ranks")
    flag(waiting, "waiting")
    split = STAGES[one_of(stage, STAGES, "stage")]
    each = bytes_per_parameter(recipe, optimizer)

    def share(size: int, is_split: bool) -> int:
        return -(-parameters * size // (ranks if is_split else 1))

    return States(
        share(each.parameters, split.parameters),
        share(each.gradients, split.gradients and not waiting),
        share(each.optimizer, split.optimizer),
    )


def zero_traffic(
    parameters: int,
    stage: str = "zero-3",
    recipe: str = "master",
    *,
    ranks: int | None = None,
    gathered: int | None = None,
    reduced: int | None = None,
    accumulation_steps: int = 1,
    synchronise_last: bool = False,
) -> int:
    """Bytes that each rank sends in an optimizer step.

    An all-reduce sends 2 Ψ numbers, a reduce-scatter and an all-gather Ψ
    each, all of them times (N − 1)/N, which is nearly 1 (Rajbhandari et al.
    2020, section 7). DDP all-reduces the gradients of each micro-batch; the
    stages of ZeRO reduce-scatter them. ZeRO-1 and -2 gather the new
    parameters after the optimizer's step, ZeRO-3 gathers the parameters in
    each forward and each backward pass. With one micro-batch that makes 2 Ψ
    for the first three and 3 Ψ for ZeRO-3.

    Args:
        parameters: Ψ.
        stage: one of :data:`STAGES`.
        recipe: says how many bytes a parameter and a gradient have.
        ranks: N; by default so large that (N − 1)/N is 1.
        gathered: bytes of a parameter that ZeRO-3 gathers to compute with,
            ``param_dtype`` of ``MixedPrecisionPolicy``; by default as it is
            kept. New parameters, which stay, are sent as they are kept.
        reduced: bytes of a gradient on its way, ``reduce_dtype``; by default
            as it is kept.
        accumulation_steps: micro-batches in the step.
        synchronise_last: whether the gradients are reduced with the last
            micro-batch only; see ``waiting`` of :func:`zero_states` for what
            that costs.
    """
    parameters = whole(parameters, "parameters")
    accumulation_steps = whole(accumulation_steps, "accumulation_steps")
    flag(synchronise_last, "synchronise_last")
    kind = STAGES[one_of(stage, STAGES, "stage")]
    r = RECIPES[one_of(recipe, RECIPES, "recipe")]
    gathered = (
        r.parameters if gathered is None else whole(gathered, "gathered")
    )
    reduced = r.gradients if reduced is None else whole(reduced, "reduced")
    reductions = 1 if synchronise_last else accumulation_steps
    moved = kind.gathers * accumulation_steps * gathered
    if kind.optimizer and not kind.parameters:
        moved = r.parameters  # the new ones
    moved += reductions * (1 if kind.optimizer else 2) * reduced
    size = parameters * moved
    if ranks is None:
        return size
    ranks = whole(ranks, "ranks")
    return size * (ranks - 1) // ranks
