"""Exercises on pipelines: their bubble, their order, their loss."""

import torch

from membudget.exercises.compare import Seen
from membudget.exercises.core import Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import answer, found

# The fewest micro-batches for a small bubble


def fewest_micro_batches(ranks, below):
    m = 1
    while (ranks - 1) / (m + ranks - 1) >= below:
        m += 1
    return m


check_fewest_micro_batches = Exercise(
    fewest_micro_batches,
    cases=[
        given(ranks=4, below=0.1),
        given(ranks=8, below=0.2),
        given(ranks=2, below=0.5),
    ],
    observe=answer,
    mistakes="""
        >= below => > below
            with this many the bubble is exactly the bound, and it should be
            below.
        (m + ranks - 1) => m
            the bubble is a share of the whole step, idle time included:
            M + P − 1.
        (ranks - 1) / (m + ranks - 1) => ranks / (m + ranks)
            the last rank waits for P − 1 others, not for P.
    """,
    shown="About 9 (P − 1), so twice the ranks need twice the micro-batches.",
)

# 1F1B, written by the reader


def one_by_one(ranks, micro_batches, rank):
    ahead = min(ranks - rank - 1, micro_batches)
    row = [f"F{m}" for m in range(ahead)]
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            row.append(f"F{m + ahead}")
        row.append(f"B{m}")
    return row


def order(fn, args):
    """The passes of a rank in their order, as numbers."""
    row = found(fn, fn(*args), list, 'a list such as ["F0", "B0"]')
    return Seen({"the order": torch.tensor(list(map(_code, row)))}, said=_said)


def _code(text):
    """Of "F3" 6, of "B3" 7."""
    known = isinstance(text, str) and text[:1] in ("F", "B")
    if not known or not text[1:].isdecimal():
        raise Problem(
            f'your list has {text!r}: use "F0" for the forward pass of '
            'micro-batch 0 and "B0" for its backward pass.'
        )
    return 2.0 * int(text[1:]) + (text[0] == "B")


def _said(codes):
    return " ".join(f"{'FB'[int(c) % 2]}{int(c) // 2}" for c in codes)


check_one_by_one = Exercise(
    one_by_one,
    cases=[
        given(ranks=6, micro_batches=9, rank=2),
        given(ranks=4, micro_batches=8, rank=0),
        given(ranks=4, micro_batches=8, rank=3),
        given(ranks=4, micro_batches=4, rank=0),
    ],
    observe=order,
    mistakes="""
        ranks - rank - 1 => ranks - rank
            this rank holds one micro-batch too many: P − r are in flight when
            the first backward pass begins, the last forward pass included.
        ranks - rank - 1 => ranks - 1
            every rank runs ahead as far as rank 0. The nearer to the loss,
            the sooner the first gradient comes.
        ranks - rank - 1 => rank
            the wrong way round: rank 0 is the farthest from the loss, so it
            runs ahead most.
        min(ranks - rank - 1, micro_batches) => micro_batches
            all forward passes come first: this is GPipe.
        min(ranks - rank - 1, micro_batches) => 0
            only the last rank has its first gradient right after its first
            forward pass; the others would wait forever.
        m + ahead < micro_batches => True
            there are forward passes of micro-batches that do not exist.
    """,
    shown="Rank r holds at most P − r micro-batches.",
    two=False,
)

# Whose logits are they?


def step_loss(by_rank, labels):
    means = next(row for row in by_rank if row)
    total = sum(mean * n for mean, n in zip(means, labels, strict=True))
    return total / sum(labels)


check_step_loss = Exercise(
    step_loss,
    cases=[
        given(by_rank=[[2.0, 5.0], [], []], labels=[10, 30]),
        given(by_rank=[[], [], [4.0, 1.0]], labels=[7, 1]),
        given(by_rank=[[], [3.0, 2.0, 1.0]], labels=[8, 8, 8]),
    ],
    observe=answer,
    mistakes="""
        next(row for row in by_rank if row) => by_rank[-1]
        or next(row for row in by_rank if row) => by_rank[0]
            the losses are where the last stage is. That is the last rank, but
            in a V rank 0: ask who has some.
        mean * n => mean
            each mean counts once, however many labels it is of.
        total / sum(labels) => sum(means) / len(means)
            this is a mean of means: a micro-batch with few labels counts as
            much as one with many.
        sum(labels) => len(labels)
            the sum of all losses is over all labels, not over the
            micro-batches.
    """,
    shown="One rank knows it; the others get it by a broadcast.",
)
