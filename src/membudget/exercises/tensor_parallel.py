"""Exercises of chapter 10: a rank's part of an MLP, and how many ranks."""

from collections.abc import Callable
from math import ceil

import torch
import torch.nn.functional as F

from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import answer, doubles, is_empty
from membudget.measuring import FlopCounter

# A rank's part of an MLP


def mlp_of_rank(x, up, down, bias, rank, ranks):
    columns = up.chunk(ranks, dim=1)[rank]
    rows = down.chunk(ranks, dim=0)[rank]
    y = F.gelu(x @ columns) @ rows
    return y + bias if rank == 0 else y


def _mlp(ranks: int) -> Case:
    def make() -> tuple:
        shapes = (5, 6), (6, 24), (24, 6), (6,)
        return *(torch.rand(shape) - 0.5 for shape in shapes), ranks

    return Case(f"{ranks} ranks", make)


def _summed(fn: Callable, args: tuple) -> Seen:
    """What the ranks' terms add up to, and the work of each rank."""
    *tensors, ranks = args
    terms, work = [], []
    for rank in range(ranks):
        with FlopCounter() as counter:
            terms.append(fn(*tensors, rank, ranks))
        work.append(counter.total)
    if all(map(is_empty, terms)):
        raise Problem
    for term in terms:
        if not isinstance(term, torch.Tensor):
            raise Problem("return a tensor on each rank, one term of the sum.")
    return Seen(
        {
            "sum over the ranks": sum(terms),
            "list of FLOPs, rank by rank,": doubles(work),
        }
    )


check_mlp_of_rank = Exercise(
    mlp_of_rank,
    cases=[_mlp(2), _mlp(4), _mlp(1)],
    observe=_summed,
    mistakes="""
        return y + bias if rank == 0 else y => return y + bias
            each rank adds the bias, and the sum has it once for each of them:
            let one rank add it.
        return y + bias if rank == 0 else y => return y
            the bias is missing: one rank adds it.
        F.gelu(x @ columns) => (x @ columns)
            between the two products stands a GELU.
        y = F.gelu(x @ columns) @ rows => y = F.gelu(x @ up) @ down / ranks
            the sum is right, but each rank does the whole work: it takes its
            columns of `up` and its rows of `down` alone.
        columns = up.chunk(ranks, dim=1)[rank] => columns = \
up.chunk(ranks, dim=1)[0]
        or rows = down.chunk(ranks, dim=0)[rank] => rows = \
down.chunk(ranks, dim=0)[0]
            the ranks' columns and rows belong together: the hidden numbers
            of rank r meet the rows of rank r.
    """,
    shown="One sum over the ranks makes the layer whole, and it is an "
    "all-reduce.",
)

# From how many ranks on a block's tape fits


def fewest_ranks(most, sequence):
    whole = 2 if sequence else 4
    if most <= whole:
        return 0
    return ceil((16 - whole) / (most - whole))


check_fewest_ranks = Exercise(
    fewest_ranks,
    cases=[
        given(most=6, sequence=False),
        given(most=5.1, sequence=False),
        given(most=4, sequence=False),
        given(most=3, sequence=False),
        given(most=20, sequence=False),
        given(most=6, sequence=True),
        given(most=3.75, sequence=True),
        given(most=2, sequence=True),
    ],
    observe=answer,
    mistakes="""
        whole = 2 if sequence else 4 => whole = 0
        or (16 - whole) / (most - whole) => 16 / most
            ranks divide only a part. What stays whole, 4 units or 2, is on
            each: take it off the 16, and off what a rank may keep.
        (16 - whole) / (most - whole) => 16 / (most - whole)
            what stays whole is not divided: take it off the 16, too.
        whole = 2 if sequence else 4 => whole = 4
            with sequence parallelism the inputs of the norms are cut, too:
            2 units stay whole.
        whole = 2 if sequence else 4 => whole = 4 if sequence else 2
            sequence parallelism leaves fewer units whole, 2 and not 4.
        if most <= whole: => if most < whole:
        or if most <= whole: => if False:
            as many units as stay whole are never enough: return 0.
        ceil((16 - whole) / (most - whole)) => int((16 - whole) / (most - \
whole))
            ranks are whole: round up, as fewer keep too much.
    """,
    shown="What stays whole decides, and not the number of ranks.",
)
