"""The exercises on offloading, and on losses in pieces."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.exercises.compare import Seen, numbers
from membudget.exercises.core import Case, Exercise
from membudget.exercises.guard import Problem
from membudget.exercises.observe import doubles, flat, found, returned

# A loss in pieces, of padded tokens


def padded_loss(head, rows, labels, chunks):
    def summed(rows, labels):
        return F.cross_entropy(head(rows), labels, reduction="sum")

    parts = zip(rows.chunk(chunks), labels.chunk(chunks), strict=True)
    sums = [checkpoint(summed, *part, use_reentrant=False) for part in parts]
    return sum(sums) / (labels != -100).sum()


def _padded(chunks: int, *counts: int) -> Case:
    """Chunks of five tokens; so many in each are no padding."""

    def make() -> tuple:
        head = nn.Linear(4, 7, bias=False).double()
        rows = torch.randn(5 * len(counts), 4, dtype=torch.float64)
        labels = torch.randint(7, (len(counts), 5))
        padding = torch.arange(5) >= torch.tensor(counts)[:, None]
        labels = labels.masked_fill(padding, -100).flatten()
        return head, rows.requires_grad_(), labels, chunks

    told = ", ".join(map(str, counts))
    return Case(
        f"{5 * len(counts)} tokens in {chunks} chunks; of each five these "
        f"many are no padding: {told}",
        make,
    )


KEPT = (
    "no chunk's logits are made again in the backward pass, so the "
    "log-probabilities of all chunks are kept: checkpoint each chunk."
)
WHOLE = "the head reads more rows at once than a chunk has."


def _in_pieces(fn: Callable, args: tuple) -> Seen:
    """A loss and its gradients, and how many rows the head reads at once."""
    head, rows, labels, chunks = args
    read: list[int] = []
    head.register_forward_pre_hook(lambda _, given: read.append(len(given[0])))
    loss = found(fn, fn(*args), torch.Tensor, "a tensor")
    if loss.ndim or not loss.requires_grad:
        raise Problem(
            "the loss is a single number with a graph: sum the chunks' losses."
        )
    forward = len(read)
    loss.backward()
    if head.weight.grad is None or rows.grad is None:
        raise Problem("head and rows need a gradient each: keep the graph.")
    seen = Seen(
        {
            "loss": doubles(loss),
            "gradient": flat([head.weight.grad, rows.grad]),
        }
    )
    if len(read) == forward:
        seen.hint = KEPT
    elif max(read) > -(-len(labels) // chunks):
        seen.hint = WHOLE
    return seen


SUM = ', reduction="sum"'
COUNT = "/ (labels != -100).sum()"

check_padded_loss = Exercise(
    padded_loss,
    cases=[
        _padded(3, 5, 2, 1),
        _padded(3, 4, 0, 3),
        _padded(1, 2, 5),
        _padded(4, 5, 5, 5, 5),
    ],
    observe=_in_pieces,
    mistakes=f"""
        {SUM} =>
        {COUNT} => / len(sums)
            this is the mean of the chunks' means: a token among much padding
            weighs more than others, and a chunk of padding alone is 0/0. Add
            the sums, and divide once.
        {SUM} =>
        {COUNT} => * len(labels) / len(sums) / (labels != -100).sum()
            the chunks' means are weighted by all of their tokens: padding
            does not count.
        {COUNT} => / len(labels)
            the sum is divided by all tokens: padding (-100) does not count.
        {COUNT} => / len(sums)
            the sum is divided by the number of chunks: divide it by the
            tokens that are no padding.
        {COUNT} =>
            the sum is not divided by the tokens that are no padding.
        checkpoint(summed, *part, use_reentrant=False) => summed(*part)
            {KEPT}
        .chunk(chunks), labels.chunk(chunks), => .chunk(1), labels.chunk(1),
            {WHOLE}
        """,
    shown=(
        "It is the mean over all tokens that are no padding, however they "
        "are cut."
    ),
)

# The fewest chunks that fit


def chunks_for(tokens, vocabulary, width, budget):
    floor = 4 * width * (vocabulary + tokens)
    rows = (budget - floor) // (2 * 4 * vocabulary)
    if rows < 1:
        return None
    return -(-tokens // rows)


NONE = -1
"""Stands for None among the answers."""


def _budgets(tokens: int, vocabulary: int, width: int, *spare: int) -> Case:
    """Budgets, given as rows of logits that fit above the floor, in bytes."""
    floor = 4 * width * (vocabulary + tokens)
    calls = tuple((tokens, vocabulary, width, floor + more) for more in spare)
    told = f"tokens = {tokens}, vocabulary = {vocabulary}, width = {width}"
    return Case(told, lambda: calls)


def _said(count: torch.Tensor) -> str:
    return "None" if count.item() == NONE else numbers(count)


def _counted(fn: Callable, args: tuple) -> Seen:
    """The number of chunks, or None, for each of several budgets."""
    results = [fn(*call) for call in args]
    returned(fn, next((r for r in results if r is not None), None))
    parts = {
        f"number of chunks for a budget of {budget} bytes": doubles(
            NONE if result is None else result
        )
        for (*_, budget), result in zip(args, results, strict=True)
    }
    if any(part.ndim for part in parts.values()):
        raise Problem("one number is needed, or None.")
    return Seen(parts, said=_said)


LOGITS = "2 * 4 * vocabulary"
_ROW = 2 * 4 * 1000
"""Bytes of a row of logits and of one of log-probabilities."""

check_chunks_for = Exercise(
    chunks_for,
    cases=[
        _budgets(
            300,
            1000,
            20,
            300 * _ROW,
            299 * _ROW,
            7 * _ROW,
            2 * _ROW - 1,
            _ROW,
            _ROW - 1,
            0,
            -9000,
        ),
        _budgets(2048, 8192, 256, 2**27, 2**26, 2**20, 2**16, 2**15),
        _budgets(5, 1000, 20, 9 * _ROW, 3 * _ROW, 2 * _ROW),
    ],
    observe=_counted,
    mistakes=f"""
        {LOGITS} => 4 * vocabulary
            a chunk has two tensors of its logits' size at once, the logits
            and their log-probabilities.
        {LOGITS} => 3 * 4 * vocabulary
            three tensors of the logits' size are the plain loss's: in
            `Fused` two are alive at once.
        {LOGITS} => 2 * vocabulary
            the logits are in fp32, 4 bytes each.
        -(-tokens // rows) => tokens // rows
            rounded down there is a chunk too few, and each is too large:
            round up.
        -(-tokens // rows) => tokens // rows + 1
            this is one too many where the rows divide the tokens: round up.
        -(-tokens // rows) => rows
            this is how many rows fit at once, not how many chunks it takes.
        if rows < 1: => if False:
        or if rows < 1: => if rows < 0:
            where not even one row fits, no number of chunks does: return
            None.
        if rows < 1: => if rows <= 1:
            chunks of one row are the smallest, and they are allowed.
        4 * width * (vocabulary + tokens) => 0
            the gradients of the head and of the rows are there in whole,
            however small the chunks are.
        (vocabulary + tokens) => vocabulary
            the gradient of the rows is missing: tokens × width numbers.
        (vocabulary + tokens) => tokens
            the gradient of the head is missing: vocabulary × width numbers.
        floor = 4 * => floor = 2 *
            the gradients are in fp32, 4 bytes each.
    """,
    shown="Measured, this many chunks fit, and one fewer does not.",
)
