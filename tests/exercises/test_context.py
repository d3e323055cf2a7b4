"""The solutions on context parallelism, against whole attention and masks."""

import torch

from membudget.exercises.context import merge_blocks, zigzag


def test_blocks_merged_in_any_order_are_the_whole_softmax():
    scores = 50 * torch.randn(6, 12, dtype=torch.float64)
    values = torch.randn(12, 3, dtype=torch.float64)
    parts = [
        (scores[:, at].softmax(-1) @ values[at], scores[:, at].logsumexp(-1))
        for at in (slice(7, 12), slice(0, 2), slice(2, 7))
    ]
    out, total = parts[0]
    for part in parts[1:]:
        out, total = merge_blocks(out, total, *part)
    assert (out - scores.softmax(-1) @ values).abs().max() <= 1e-12
    assert (total - scores.logsumexp(-1)).abs().max() <= 1e-12


def test_each_token_has_one_rank_and_each_rank_as_many_scores():
    for ranks in (1, 2, 4, 5):
        tokens = 6 * ranks
        parts = [zigzag(tokens, ranks, rank) for rank in range(ranks)]
        assert sorted(p for part in parts for p in part) == [*range(tokens)]
        assert len({sum(place + 1 for place in part) for part in parts}) == 1
