"""Context parallelism: one sequence over several ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from membudget.checks import instance, number, one_of, whole
from membudget.models import Llama, turns_at
from membudget.parallelism import _private

ORDERS = ("contiguous", "zigzag")
"""Which tokens a rank has: one piece of P, or pieces r and 2P − 1 − r of 2P.

Zigzag is that of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section
3.3.2) and of zhuzilin/ring-flash-attention.
"""

WAYS = ("ring", "all-gather", "all-to-all")
"""How a rank's queries meet the keys of others: key and value blocks go
round (Liu et al. 2023, arXiv 2310.01889), are gathered whole (Llama 3), or
tokens are exchanged for heads (Jacobs et al. 2023, arXiv 2309.14509)."""

MOST_RANKS, MOST_TOKENS = 10**6, 10**9
"""In a law, and in a sequence."""


def places(
    tokens: int, ranks: int, rank: int, order: str = "zigzag"
) -> torch.Tensor:
    """The positions of a rank's tokens, in ascending order.

    Args:
        tokens: of the whole sequence, a multiple of the pieces: one for each
            rank, two in zigzag.
        order: one of :data:`ORDERS`.

    Raises:
        ValueError: tokens that cannot be cut into so many pieces.
    """
    one_of(order, ORDERS, "order")
    tokens = whole(tokens, "tokens", 1, MOST_TOKENS)
    ranks = whole(ranks, "ranks", 1, MOST_RANKS)
    rank = whole(rank, "rank", 0, ranks - 1)
    zigzag = order == "zigzag"
    count = ranks * (1 + zigzag)
    if tokens % count:
        raise ValueError(
            f"{tokens} tokens cannot be cut into {count} pieces ({order} over "
            f"{ranks} ranks): use a multiple of {count}"
        )
    size = tokens // count
    pieces = [rank, count - 1 - rank] if zigzag else [rank]
    return torch.cat([torch.arange(size) + piece * size for piece in pieces])


def tiles(tokens: int, ranks: int, order: str = "zigzag") -> list[list[int]]:
    """How many scores a rank computes with each rank's keys.

    Row r are the queries of rank r, column s the keys of rank s. A query
    meets the keys that are not later than itself.
    """
    ranks = whole(ranks, "ranks", 1, 1024)
    own = [places(tokens, ranks, rank, order) for rank in range(ranks)]
    return [
        [int(torch.searchsorted(k, q, right=True).sum()) for k in own]
        for q in own
    ]


def context_buffers(ranks: int, kv: float = 1.0, way: str = "ring") -> float:
    """Keys and values of other ranks that a rank holds at most, in u.

    u is tokens × width × bytes of a number, of the whole sequence. In a ring
    one block is read while the next arrives.

    Args:
        kv: heads of keys and values for each query head, above 0, at most 1.
        way: ``"ring"`` or ``"all-gather"``, which holds those of all ranks.
    """
    ranks, kv = _law(ranks, kv)
    one_of(way, WAYS[:2], "way")
    others = ranks - 1
    return 2 * kv * (min(others, 2) if way == "ring" else others) / ranks


def context_traffic(
    ranks: int, kv: float = 1.0, way: str = "ring", itemsize: int = 4
) -> float:
    """What a rank sends for a block's attention in a step, in u.

    Forward: a ring and a gather send keys and values P − 1 times, an
    all-to-all sends queries, keys, values and the result. Backward: the
    first two send keys and values again and their gradients, which in a ring
    make one hop more to come home; an all-to-all sends the four gradients.
    A ring adds to the gradients at each hop, so :func:`ring_attention` sends
    those of 16 bits in fp32, as PyTorch's does.

    Args:
        kv: as for :func:`context_buffers`.
        way: one of :data:`WAYS`.
        itemsize: bytes of a number of keys and values, from 2 to 8.
    """
    ranks, kv = _law(ranks, kv)
    one_of(way, WAYS, "way")
    itemsize = whole(itemsize, "itemsize", 2, 8)
    others = ranks - 1
    if way == "all-to-all":
        return 2 * (2 + 2 * kv) * others / ranks**2
    gradients = float(others)
    if way == "ring" and others:
        gradients = ranks * max(4, itemsize) / itemsize
    return 2 * kv * (2 * others + gradients) / ranks


def _law(ranks: int, kv: float) -> tuple[int, float]:
    return (
        whole(ranks, "ranks", 1, MOST_RANKS),
        number(kv, "kv", most=1, above=0),
    )


class _Tile(NamedTuple):
    queries: slice
    keys: slice
    causal: bool


ALL = slice(None)


def _tile(rank: int, source: int, order: str, size: int) -> _Tile | None:
    """Which of a rank's rows meet which keys of a source; None for none."""
    if source == rank:
        return _Tile(ALL, ALL, True)
    if order == "zigzag":
        half = size // 2
        if source < rank:
            return _Tile(ALL, slice(half), False)
        return _Tile(slice(half, None), ALL, False)
    return _Tile(ALL, ALL, False) if source < rank else None


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank, of how many; without a group it is alone."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _pass_on(
    blocks: list[torch.Tensor], group: dist.ProcessGroup | None
) -> Callable[[], list[torch.Tensor]]:
    """Send blocks to the next rank; call the result for the last one's."""
    rank, ranks = place_in(group)
    arriving = [torch.empty_like(block) for block in blocks]
    ends = {"group": group}
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, b, group_peer=after, **ends) for b in blocks]
        + [
            dist.P2POp(dist.irecv, a, group_peer=before, **ends)
            for a in arriving
        ]
    )

    def wait() -> list[torch.Tensor]:
        while work:  # they hold what was sent
            work.pop().wait()
        return arriving

    return wait


def _merge(
    out: torch.Tensor,
    total: torch.Tensor,
    part: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Add a tile's result to those before; both are written over.

    Args:
        out, part: … × rows × size, each divided by its own softmax's sum.
        total, sums: the logarithms of these sums, … × rows.
    """
    both = torch.logaddexp(total, sums)
    out.mul_((total - both).exp_().unsqueeze(-1))
    out.add_(part.to(out.dtype).mul_((sums - both).exp_().unsqueeze(-1)))
    total.copy_(both)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        order: str,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.order, ctx.group = order, group
        rank, ranks = place_in(group)
        k, v = k.contiguous(), v.contiguous()
        out, total = _private.tile_attention(q, k, v, True)
        wide = out.to(total.dtype)
        held = [k, v]
        wait = _pass_on(held, group) if ranks > 1 else None
        for step in range(1, ranks):
            held = wait() if wait else held
            wait = _pass_on(held, group) if step < ranks - 1 else None
            tile = _tile(rank, (rank - step) % ranks, order, q.shape[-2])
            if tile is None:
                continue
            rows = tile.queries
            part, sums = _private.tile_attention(
                q[:, :, rows],
                held[0][:, :, tile.keys],
                held[1][:, :, tile.keys],
                tile.causal,
            )
            _merge(wide[:, :, rows], total[:, :, rows], part, sums)
            del part, sums
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, total = ctx.saved_tensors
        rank, ranks = place_in(ctx.group)
        held = [k, v]
        dq, *grads = (
            grad.to(total.dtype).contiguous()
            for grad in _private.tile_backward(dout, q, k, v, out, total, True)
        )
        for step in range(1, ranks):
            held = _pass_on(held, ctx.group)()
            grads = _pass_on(grads, ctx.group)()
            source = (rank - step) % ranks
            if tile := _tile(rank, source, ctx.order, q.shape[-2]):
                rows, keys = tile.queries, tile.keys
                parts = _private.tile_backward(
                    dout[:, :, rows],
                    q[:, :, rows],
                    held[0][:, :, keys],
                    held[1][:, :, keys],
                    out[:, :, rows],
                    total[:, :, rows],
                    tile.causal,
                )
                dq[:, :, rows] += parts[0]
                for grad, part in zip(grads, parts[1:], strict=True):
                    grad[:, :, keys] += part
        if ranks > 1:
            grads = _pass_on(grads, ctx.group)()  # home
        return dq.to(q.dtype), *(g.to(k.dtype) for g in grads), None, None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    order: str = "zigzag",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence whose tokens lie on several ranks.

    Keys and values go round, a block to the next rank at each step, while
    the one that is here meets the queries. The results are merged by the
    logarithms of their softmaxes' sums. The backward pass sends the blocks
    round again, with their gradients, which arrive at home in the end.
    Nothing of another rank stays on the tape.

    Args:
        q: batch × heads × this rank's tokens × size.
        k, v: the same, with fewer heads or as many.
        order: one of :data:`ORDERS`, in which :func:`places` cut the tokens.
        group: the ranks; by default all, or this process alone where there
            is no group.

    Returns:
        The result for this rank's queries, as q.

    Raises:
        ValueError: tensors that are not on a CPU, have other shapes, or an
            odd number of tokens in zigzag.
    """
    one_of(order, ORDERS, "order")
    _checked_heads(q, k, v)
    if order == "zigzag" and q.shape[-2] % 2:
        raise ValueError(
            f"a rank has {q.shape[-2]} tokens: in zigzag they are two pieces "
            "of one size, so use an even number"
        )
    return _Ring.apply(q, k, v, order, checked_group(group))


def checked_group(
    group: dist.ProcessGroup | None,
) -> dist.ProcessGroup | None:
    """The group, if it is one or None."""
    if group is None:
        return None
    use = "a process group (as mesh.get_group()), or None for all ranks"
    return instance(group, dist.ProcessGroup, "group", use)


def _checked_heads(*parts: torch.Tensor) -> None:
    for name, part in zip("qkv", parts, strict=True):
        instance(part, torch.Tensor, name, "a tensor")
        if part.ndim != 4:
            raise ValueError(
                f"{name} has {part.ndim} dimensions: use batch × heads × "
                "tokens × size"
            )
        if part.device.type != "cpu":
            raise ValueError(
                f"{name} is on {part.device}: ring_attention runs on a CPU. "
                "On GPUs use torch.distributed.tensor.experimental."
                "context_parallel"
            )
    q, k, v = parts
    shape = q.shape[0], k.shape[1], *q.shape[2:]
    if k.shape != shape or v.shape != shape or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q is of {list(q.shape)}, k of {list(k.shape)} and v of "
            f"{list(v.shape)}: use one batch, number of tokens and size, and "
            "heads of k and v that divide those of q"
        )


def context_parallel(
    model: Llama,
    order: str = "zigzag",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Let a model read this rank's part of each sequence, in place.

    It is then called with this rank's tokens, ``tokens[:, places(…)]``. Its
    attention is :func:`ring_attention`, its rotary positions are those in
    the whole sequence, and nothing else changes: weights are whole on each
    rank. The mean over ranks of a mean loss of parts is that of the whole,
    so gradients are averaged, as DDP and ``fully_shard`` do.

    Args:
        model: a fused one.
        order, group: of :func:`ring_attention`.

    Raises:
        ValueError: attention that is not fused.

    Example:
        >>> context_parallel(model)
        >>> mine = places(x.shape[1], ranks, rank)
        >>> F.cross_entropy(model(x[:, mine]).flatten(0, 1), y[:, mine].flatten())
    """  # noqa: E501
    use = "a membudget.models.Llama, whose positions are rotary"
    instance(model, Llama, "the model", use)
    one_of(order, ORDERS, "order")
    checked_group(group)
    if not all(block.fused for block in model.blocks):
        raise ValueError(
            "the model's attention is not fused: a matrix of all scores "
            "cannot go round. Use Llama(…, fused=True)"
        )
    for block in model.blocks:
        block._attention = partial(ring_attention, order=order, group=group)
    hidden = partial(_hidden, model, order, group)
    model.hidden = hidden  # type: ignore[method-assign]


def _hidden(
    model: Llama,
    order: str,
    group: dist.ProcessGroup | None,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """What the head reads, of this rank's tokens."""
    rank, ranks = place_in(group)
    mine = places(ranks * tokens.shape[1], ranks, rank, order)
    turns = turns_at(mine.to(tokens.device), model.size)
    x = model.token(tokens)
    for block in model.blocks:
        x = block(x, turns)
    return model.norm(x)
