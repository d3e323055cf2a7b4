"""What the ranks of the tests of context parallelism do."""

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from membudget import models
from membudget.measuring import PeakTracker
from membudget.parallelism import context_parallel, places, ring_attention

WIDTH, TOKENS = 64, 128


def placed() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def heads(dtype=torch.float64, batch=2, kv=2):
    torch.manual_seed(0)
    q, dout = torch.randn(2, batch, 4, 32, 8, dtype=dtype)
    return q, *torch.randn(2, batch, kv, 32, 8, dtype=dtype), dout


def by_hand(q, k, v):
    """Whole attention, with its matrix of scores."""
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    return models.attention(q, k, v)


def farthest(order: str, kv: int) -> float:
    """From whole attention, of the result and of the three gradients."""
    rank, ranks = placed()
    *parts, dout = heads(kv=kv)
    mine = places(32, ranks, rank, order)
    wholes = [x.clone().requires_grad_() for x in parts]
    own = [x[:, :, mine].clone().requires_grad_() for x in parts]
    whole = by_hand(*wholes)
    whole.backward(dout)
    out = ring_attention(*own, order)
    out.backward(dout[:, :, mine])
    pairs = [(whole.detach()[:, :, mine], out.detach())]
    pairs += [
        (w.grad[:, :, mine], o.grad) for w, o in zip(wholes, own, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


def model_and_batch(dtype=torch.float64):
    torch.manual_seed(1)
    model = models.Llama(64, WIDTH, 2, 4, 2, 176).to(dtype)
    return model, *torch.randint(64, (2, 1, TOKENS))


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def whole_step(order: str) -> tuple[float, float]:
    """How far loss and gradient of the ranks are from one process's."""
    rank, ranks = placed()
    model, x, y = model_and_batch()
    loss = loss_of(model, x, y)
    loss.backward()
    expected = gradient(model)
    model.zero_grad()
    context_parallel(model, order)
    mine = places(TOKENS, ranks, rank, order)
    part = loss_of(model, x[:, mine], y[:, mine])
    part.backward()
    found, mean = gradient(model) / ranks, part.detach() / ranks
    dist.all_reduce(found)
    dist.all_reduce(mean)
    return (
        float((mean - loss.detach()).abs()),
        float((found - expected).abs().max()),
    )


def step_bytes(order: str) -> tuple[int, int]:
    """After the forward pass and at the peak, above what was there."""
    rank, ranks = placed()
    model, x, y = model_and_batch(torch.float32)
    context_parallel(model, order)
    mine = places(TOKENS, ranks, rank, order)
    x, y = x[:, mine], y[:, mine]
    with PeakTracker(model, x, y) as tracker:
        loss = loss_of(model, x, y)
        tracker.mark("forward")
        loss.backward()
    (after, _), *_ = tracker.marks
    return (
        tracker.timeline[after - 1] - tracker.start,
        tracker.peak - tracker.start,
    )


def attention_alone(
    order: str, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """In u of this width: what is held of others, and what is sent."""
    rank, ranks = placed()
    q, k, v, dout = heads(dtype, batch=1)
    mine = places(32, ranks, rank, order)
    own = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    dout, sent = dout[:, :, mine].clone(), 0
    real = dist.batch_isend_irecv

    def counting(work):
        nonlocal sent
        sent += sum(w.tensor.nbytes for w in work if w.op is dist.isend)
        return real(work)

    with (
        mock.patch.object(dist, "batch_isend_irecv", counting),
        PeakTracker(*own) as tracker,
    ):
        out = ring_attention(*own, order)
        held = max(_arrived(tracker))
        out.backward(dout)
    return {"held": held / q.nbytes, "sent": sent / q.nbytes}


def _arrived(tracker):
    """Bytes of received blocks after each operator."""
    for moment in range(len(tracker.operators)):
        yield sum(
            a.bytes
            for a in tracker.allocations
            if a.alive(moment) and a.operator.name == "aten.empty_like"
        )
