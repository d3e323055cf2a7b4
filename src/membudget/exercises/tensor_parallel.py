"""The first exercise of chapter 10: a rank's part of an MLP."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise
from membudget.exercises.guard import Problem
from membudget.exercises.observe import doubles, is_empty
from membudget.measuring import FlopCounter


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
