"""A mixture's experts over ranks: bytes follow the routing."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from membudget.checks import instance, listed, number, whole
from membudget.parallelism.context import checked_group, place_in

MOST_ROWS, MOST_EXPERTS, MOST_WIDTH = 10**12, 10_000, 2**20
"""Of a routing, in a mixture, and of a layer."""

Counts = Sequence[Sequence[int]]
"""How many rows each rank has for each expert, ranks × experts."""


def capacity(
    tokens: int, experts: int, active: int = 1, factor: float = 1.0
) -> int:
    """The rows that an expert takes from a rank at most, rounded up.

    It is ``factor`` times its even share (Fedus et al. 2021, arXiv
    2101.03961, section 2.2, for ``active`` 1; Lepikhin et al. 2020, arXiv
    2006.16668, for 2).

    Args:
        tokens: of a rank.
        experts: of the mixture.
        active: experts that each token goes through.
        factor: above 0.
    """
    tokens = whole(tokens, "tokens", 1, MOST_ROWS)
    experts = whole(experts, "experts", 1, MOST_EXPERTS)
    active = whole(active, "active", 1, experts)
    factor = number(factor, "factor", most=experts, above=0)
    return ceil(factor * tokens * active / experts)


def received(counts: Counts, most: int | None = None) -> list[int]:
    """The rows that each rank computes.

    Rank r has the experts r · E/P to (r + 1) · E/P − 1.

    Args:
        counts: rows of each rank for each expert; as many ranks as rows,
            whose number divides that of the experts.
        most: rows that an expert takes from a rank, as :func:`capacity`; by
            default all.

    Raises:
        ValueError: ranks that do not divide the experts.
    """
    rows = _table(counts)
    limit = MOST_ROWS if most is None else whole(most, "most", 0)
    each = len(rows[0]) // len(rows)
    columns = [sum(min(n, limit) for n in c) for c in zip(*rows, strict=True)]
    return [sum(columns[i : i + each]) for i in range(0, len(columns), each)]


def dropped(counts: Counts, most: int) -> int:
    """The rows that no expert takes, of all ranks.

    Args:
        counts: as for :func:`received`.
        most: rows that an expert takes from a rank.
    """
    rows, most = _table(counts), whole(most, "most", 0)
    return sum(max(n - most, 0) for row in rows for n in row)


def row_bytes(width: int, hidden: int, itemsize: int = 2) -> int:
    """What a row leaves on the tape of the rank that computes it.

    The row and the four tensors of a gated MLP: (D + 4 F) · itemsize.
    """
    width = whole(width, "width", 1, MOST_ROWS)
    hidden = whole(hidden, "hidden", 1, MOST_ROWS)
    return (width + 4 * hidden) * whole(itemsize, "itemsize", 1, 8)


def _table(counts: Counts) -> list[list[int]]:
    rows = [
        [
            whole(n, "a count", 0, MOST_ROWS)
            for n in listed(row, "a rank's counts", "numbers")
        ]
        for row in listed(counts, "counts", "a list for each rank")
    ]
    ranks, experts = len(rows), len(rows[0])
    if any(len(row) != experts for row in rows):
        raise ValueError(
            "ranks have counts for different numbers of experts: use one for "
            "each expert on every rank"
        )
    if experts % ranks:
        raise ValueError(
            f"{experts} experts cannot be dealt out to {ranks} ranks: use a "
            "number of ranks that divides them"
        )
    return rows


class _Expert(nn.Module):
    """A gated MLP, as those of Llama's block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """A mixture of experts: each token goes through the best few.

    Args:
        width: numbers in and out.
        hidden: of each expert.
        experts: how many.
        active: that each token goes through; their weights add up to 1.
        factor: of :func:`capacity`; rows above it are left out, those of the
            last tokens. By default none is.

    Attributes:
        bias: a number for each expert that is added to its score for the
            choice alone (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
        counts: rows for each expert in the last forward pass, before any is
            left out.
    """

    bias: torch.Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        active: int = 1,
        factor: float | None = None,
    ) -> None:
        super().__init__()
        width = whole(width, "width", 1, MOST_WIDTH)
        hidden = whole(hidden, "hidden", 1, MOST_WIDTH)
        experts = whole(experts, "experts", 1, MOST_EXPERTS)
        self.active = whole(active, "active", 1, experts)
        self.factor = factor
        if factor is not None:
            self.factor = number(factor, "factor", most=experts, above=0)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            _Expert(width, hidden) for _ in range(experts)
        )
        self.register_buffer("bias", torch.zeros(experts))
        self.counts: list[int] = []
        self._run: Callable = partial(_together, self.experts)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of each row's experts, and which: rows × active."""
        if instance(x, torch.Tensor, "x", "a tensor").ndim != 2:
            raise ValueError(
                f"x has {x.ndim} dimensions: use rows × width, as "
                "x.flatten(0, 1)"
            )
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.bias).topk(self.active, -1).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each row's experts, weighed: rows × width, as x."""
        weights, chosen = self.route(x)
        order, counts = self._sorted(chosen.flatten(), len(x))
        source = order // self.active
        made = self._run(x[source], counts)
        made = made * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, source, made)

    def _sorted(
        self, chosen: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The choices in order of experts, and how many each expert has."""
        experts = len(self.bias)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=experts)
        self.counts = counts.tolist()
        if self.factor is None:
            return order, counts
        most = capacity(tokens, experts, self.active, self.factor)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(order), device=order.device)
        place -= first[chosen[order]]
        return order[place < most], counts.clamp(max=most)


def _together(
    experts: nn.ModuleList, rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """What the experts make of rows that lie in their order."""
    parts = rows.split(counts.tolist())
    return torch.cat([e(x) for e, x in zip(experts, parts, strict=True)])


class _Exchange(torch.autograd.Function):
    """Rows for other ranks against those of others for this one."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send: list[int],
        take: list[int],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.given = take, send, group
        arrives = rows.new_empty(sum(take), *rows.shape[1:])
        dist.all_to_all_single(
            arrives, rows.contiguous(), take, send, group=group
        )
        return arrives

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchange.apply(grad, *ctx.given), None, None, None


def expert_parallel(
    mixture: Mixture, group: dist.ProcessGroup | None = None
) -> None:
    """Leave each rank its share of the experts, in place.

    Rows travel to the ranks of their experts and back, by two all-to-alls in
    each direction. All ranks have to call the mixture together, each with
    rows of its own. An expert's gradient is the sum over all rows; that of
    the router is of this rank's alone.

    Args:
        mixture: the same one on each rank.
        group: the ranks; by default all, or this process alone where there
            is no group.

    Raises:
        ValueError: ranks that do not divide the experts.
    """
    instance(mixture, Mixture, "the mixture", "a Mixture")
    checked_group(group)
    rank, ranks = place_in(group)
    experts = len(mixture.bias)
    if experts % ranks or len(mixture.experts) != experts:
        raise ValueError(
            f"{len(mixture.experts)} of {experts} experts cannot be dealt out "
            f"to {ranks} ranks: use a whole mixture, and a number of ranks "
            "that divides its experts"
        )
    each = experts // ranks
    mixture.experts = mixture.experts[rank * each : (rank + 1) * each]
    if ranks > 1:
        mixture._run = partial(_apart, mixture.experts, group)


def _apart(
    experts: nn.ModuleList,
    group: dist.ProcessGroup | None,
    rows: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """What the experts of all ranks make of this rank's rows."""
    table = torch.empty_like(counts)
    dist.all_to_all_single(table, counts, group=group)
    table = table.view(-1, len(experts))  # ranks × experts of this one
    send = counts.view(table.shape).sum(1).tolist()
    take = table.sum(1).tolist()
    whose = torch.arange(len(experts)).repeat(len(table))
    order = whose.repeat_interleave(table.flatten()).argsort(stable=True)
    got = _Exchange.apply(rows, send, take, group)[order]
    made = _together(experts, got, table.sum(0))
    return _Exchange.apply(made[order.argsort()], take, send, group)


def balance_loss(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Switch's auxiliary loss, 1 where the experts' loads are even.

    Experts × the sum over experts of the share of choices times the mean
    score (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6). Choices
    have no gradient, mean scores have one.

    Args:
        scores: probabilities, rows × experts.
        chosen: experts of each row, rows × active.
    """
    instance(scores, torch.Tensor, "scores", "a tensor, rows × experts")
    instance(chosen, torch.Tensor, "chosen", "a tensor, rows × active")
    if scores.ndim != 2 or chosen.ndim != 2 or len(chosen) != len(scores):
        raise ValueError(
            f"scores are of {list(scores.shape)} and chosen of "
            f"{list(chosen.shape)}: use rows × experts and rows × active"
        )
    share = chosen.flatten().bincount(minlength=scores.shape[1])
    share = share / chosen.numel()
    return scores.shape[1] * (share * scores.mean(0)).sum()
