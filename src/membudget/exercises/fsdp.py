"""The exercise of the lab on FSDP: bytes of a rank, from shapes."""

from collections.abc import Sequence
from math import prod

from membudget.exercises.core import Case, Exercise, variants
from membudget.exercises.observe import calls
from membudget.sharding import Unit, rank_states, rows

Shapes = Sequence[tuple[int, ...]]


def _right(shapes: Shapes, ranks: int, rank: int) -> tuple[int, int, int]:
    held = rank_states([Unit("", tuple(shapes))], ranks, rank)
    return held.parameters, held.gradients, held.optimizer


def _shard_bytes(
    shapes: Shapes,
    ranks: int,
    rank: int,
    padded: str = "pg",
    moments: int = 2,
    counter: int = 4,
    size: int = 4,
    whole: str = "",
    flat: bool = False,
    mean: bool = False,
) -> tuple[float, float, float]:
    """The bytes, with one thing or another wrong.

    Args:
        shapes, ranks, rank: of the exercise.
        padded: which parts have padding, of ``"pgo"``.
        moments, counter: numbers per parameter and bytes per tensor of Adam.
        size: bytes of a number.
        whole: which parts are not cut.
        flat: whether all numbers of a tensor are cut, instead of its rows.
        mean: whether everything is divided by the ranks, without rounding.
    """

    def numbers(part: str) -> float:
        total = 0.0
        for shape in shapes:
            length, each = (
                (prod(shape), 1) if flat else (shape[0], prod(shape[1:]))
            )
            if part in whole:
                count: float = length
            elif mean:
                count = length / ranks
            else:
                first = 0 if part in padded else rank
                count = rows(length, ranks, first)
            total += count * each
        return total

    return (
        size * numbers("p"),
        size * numbers("g"),
        moments * size * numbers("o") + counter * len(shapes),
    )


def _case(shapes: Shapes, ranks: int) -> Case:
    return Case(
        f"all ranks with shapes = {list(shapes)}, ranks = {ranks}",
        lambda: tuple((list(shapes), ranks, rank) for rank in range(ranks)),
    )


check_shard_bytes = Exercise(
    signature="shard_bytes(shapes, ranks, rank)",
    cases=[
        _case([(10, 8), (10,), (3, 10), (3,)], 4),
        _case([(16, 3, 3, 3), (16,), (1, 5)], 3),
        _case([(64, 64), (64,)], 4),
        _case([(7, 2)], 1),
        _case([], 2),
    ],
    observe=calls(
        lambda shapes, ranks, rank: f"answer for rank {rank} of {ranks}"
    ),
    solution=_right,
    mistakes=variants(
        _shard_bytes,
        [
            (
                "only the rank's own rows are counted for parameters and "
                "gradients: they are stored with padding, as many rows as "
                "rank 0 has.",
                {"padded": ""},
            ),
            (
                "gradients are stored with padding, as the parameters are.",
                {"padded": "p"},
            ),
            (
                "Adam's moments have no padding: they have the rank's own "
                "rows.",
                {"padded": "pgo"},
            ),
            (
                "padding and own rows are the wrong way round: parameters "
                "and gradients are padded, Adam's moments are not.",
                {"padded": "o"},
            ),
            (
                "Adam also counts its steps: 4 bytes for each parameter "
                "tensor, on every rank.",
                {"counter": 0},
            ),
            (
                "the counter of steps has 4 bytes for each tensor, not 8.",
                {"counter": 8},
            ),
            (
                "Adam keeps two numbers for each parameter, here there is "
                "one.",
                {"moments": 1},
            ),
            (
                "Adam keeps two numbers for each parameter; an fp32 copy is "
                "there only if the parameters themselves have 16 bits.",
                {"moments": 3},
            ),
            (
                "these are numbers, not bytes: in fp32 each takes 4.",
                {"size": 1},
            ),
            ("a number in fp32 takes 4 bytes, not 2.", {"size": 2}),
            (
                "parameters and gradients are cut, too: this is ZeRO-1.",
                {"whole": "pg"},
            ),
            (
                "the parameters are cut, too, between the steps.",
                {"whole": "p"},
            ),
            (
                "FSDP2 cuts along the first dimension: whole rows, not "
                "single numbers.",
                {"flat": True},
            ),
            (
                "the whole is divided by the ranks: rows are not, they are "
                "cut into whole ones, and rounded up.",
                {"mean": True},
            ),
        ],
    ),
    shown=(
        "That is what rank_states computes and what a real rank holds. It "
        "says nothing of what is gathered, nor of activations."
    ),
    tolerance=1e-12,
)
