"""The exercises on a sequence that is cut over ranks."""

from collections.abc import Callable

import torch

from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import answer, doubles, returned

# Two blocks of keys, one softmax


def merge_blocks(one, one_sum, two, two_sum):
    both = torch.logaddexp(one_sum, two_sum)
    one = one * (one_sum - both).exp().unsqueeze(-1)
    two = two * (two_sum - both).exp().unsqueeze(-1)
    return one + two, both


def _blocks(told: str, first: float, second: float) -> Case:
    """Results of two blocks, whose scores lie around two numbers."""

    def make() -> tuple:
        one, two = torch.randn(2, 3, 4, 5, dtype=torch.float64)
        sums = torch.randn(2, 3, 4, dtype=torch.float64)
        return one, first + sums[0], two, second + sums[1]

    return Case(told, make)


def _merged(fn: Callable, args: tuple) -> Seen:
    result = returned(fn, fn(*args))
    if not isinstance(result, list | tuple) or len(result) != 2:
        raise Problem(
            "two tensors are needed: the result, and the logarithm of its sum."
        )
    out, total = result
    return Seen({"result": doubles(out), "logarithm": doubles(total)})


check_merge_blocks = Exercise(
    merge_blocks,
    cases=[
        _blocks("scores around 0", 0.0, 0.5),
        _blocks("a second block with larger scores", -2.0, 3.0),
        _blocks("scores around 1000", 1000.0, 1001.0),
        _blocks("a first block with scores around -1000", -1000.0, 2.0),
    ],
    observe=_merged,
    mistakes="""
        torch.logaddexp(one_sum, two_sum) => (one_sum.exp() + two_sum.exp())\
.log()
            the exponential of a large score overflows. torch.logaddexp
            takes the larger one out first.
        one * (one_sum - both).exp().unsqueeze(-1) => one / 2
        two * (two_sum - both).exp().unsqueeze(-1) => two / 2
            the blocks do not weigh the same: each counts by its share of the
            sum of exponentials.
        one * (one_sum - both).exp().unsqueeze(-1) => one
        two * (two_sum - both).exp().unsqueeze(-1) => two
            each result is divided by its own block's sum: weigh it by that
            block's share of both.
        one * (one_sum - both) => one * (two_sum - both)
        two * (two_sum - both) => two * (one_sum - both)
            the weights are the wrong way round.
        one * (one_sum - both).exp() => one * (one_sum / both)
        two * (two_sum - both).exp() => two * (two_sum / both)
            these are logarithms: a share is the exponential of their
            difference.
        one + two, both => one + two, one_sum + two_sum
            sums add, their logarithms do not: torch.logaddexp.
        return one + two, both => return one + two, torch.maximum(one_sum, \
two_sum)
            the larger logarithm is not that of the sum: torch.logaddexp.
    """,
    shown="The order of the blocks does not matter, nor how many there are.",
)

# Whose tokens are they?


def zigzag(tokens, ranks, rank):
    size = tokens // (2 * ranks)
    first, last = rank * size, (2 * ranks - 1 - rank) * size
    return [*range(first, first + size), *range(last, last + size)]


check_zigzag = Exercise(
    zigzag,
    cases=[
        given(tokens=24, ranks=4, rank=1),
        given(tokens=24, ranks=2, rank=0),
        given(tokens=8, ranks=4, rank=3),
        given(tokens=6, ranks=1, rank=0),
    ],
    observe=answer,
    mistakes="""
        2 * ranks - 1 - rank => 2 * ranks - rank
            pieces count from 0: the last one is 2 · ranks − 1.
        2 * ranks - 1 - rank => ranks + rank
            this is the r-th of the second half: the rank with the latest
            first piece has the latest second piece, too, and the most work.
        2 * ranks - 1 - rank => rank + 1
            two pieces side by side are one long piece, and the last rank has
            the most work.
        tokens // (2 * ranks) => tokens // ranks
            with one piece for each rank: zigzag has two.
        *range(first, first + size), => 
            the early piece is missing.
        , *range(last, last + size) =>
            the late piece is missing.
    """,
    shown="Each rank computes as many scores as any other.",
)
