"""The solutions of chapter 8's pages against real losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.exercises.losses import chunks_for, padded_loss
from membudget.measuring import PeakTracker, witness

from .judging import accepts, edits, rejects
from .pages import namespace


@pytest.mark.parametrize("chunks", [1, 3, 4, 12, 50])
def test_the_loss_of_padded_tokens_is_the_plain_one(chunks):
    """With a chunk of padding alone, and more chunks than tokens, too."""
    torch.manual_seed(0)
    head = nn.Linear(4, 7, bias=False).double()
    rows = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (12,))
    labels[4:9] = -100
    wanted = rows, head.weight
    plain = F.cross_entropy(head(rows), labels)
    mine = padded_loss(head, rows, labels, chunks)
    torch.testing.assert_close(mine, plain, rtol=0, atol=1e-14)
    for found, right in zip(
        torch.autograd.grad(mine, wanted),
        torch.autograd.grad(plain, wanted),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-14)


def graphless(head, rows, labels, chunks):
    return F.cross_entropy(head(rows), labels).detach()


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("padded_loss", graphless, "a single number with a graph"),
        (
            "padded_loss",
            lambda head, rows, labels, chunks: F.cross_entropy(
                rows.detach() @ head.weight.T, labels
            ),
            "head and rows need a gradient each",
        ),
        ("chunks_for", lambda *args: 0, "is 0; 1 is right"),
        ("chunks_for", lambda *args: [1, 2], "one number is needed, or None"),
        *edits(
            {
                "chunks_for": """
                    return None => return 10**6
                        is 1000000; None is right
                    """
            }
        ),
    ],
)
def test_what_is_said(name, answer, words):
    rejects(name, answer, words)


def by_search(tokens, vocabulary, width, budget):
    for chunks in range(1, tokens + 1):
        rows = -(-tokens // chunks)
        need = 8 * rows * vocabulary + 4 * width * (vocabulary + tokens)
        if need <= budget:
            return chunks


def test_other_right_answers():
    accepts("chunks_for", by_search)


SHAPE = 96, 512, 32
"""Tokens, vocabulary, width."""


def peaks(chunks):
    """Of the page's own loss: the tracker's, and the allocator's."""
    tokens, vocabulary, width = SHAPE
    fused = namespace("chunks_for")["fused"]
    torch.manual_seed(0)
    W = torch.randn(vocabulary, width, requires_grad=True)
    x = torch.randn(tokens, width, requires_grad=True)
    y = torch.randint(vocabulary, (tokens,))

    def step():
        fused(x, W, y, chunks).backward()
        x.grad = W.grad = None

    with PeakTracker(x, W, y) as tracker:
        step()
    return tracker.peak - tracker.start, witness(step)


@pytest.mark.parametrize("chunks", [1, 2, 5, 7, 32, 96])
def test_so_many_chunks_fit_and_one_fewer_does_not(chunks):
    """A few numbers are beside the law: losses, and the targets' places."""
    tokens = SHAPE[0]
    room = 24 * -(-tokens // chunks) + 64
    peak, most = peaks(chunks)
    assert peak <= most <= peak + room
    found = chunks_for(*SHAPE, most)
    assert -(-tokens // found) == -(-tokens // chunks)
    assert found == chunks_for(*SHAPE, peak)
    assert chunks_for(*SHAPE, most - room) in (None, *range(found + 1, 97))
