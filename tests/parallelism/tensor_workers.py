"""What ranks of tensor parallelism run; the fake group's rank, too."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from membudget.measuring import PeakTracker
from membudget.parallelism import tensor_parallel
from membudget.sharding import CommunicationCounter


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def cut(shape, sequence, gathers):
    """The model that is cut, and the whole one of the same weights."""
    torch.manual_seed(0)
    whole, model = shape.build("cpu"), shape.build("cpu")
    model.load_state_dict(whole.state_dict())
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    tensor_parallel(model, mesh, sequence, gathers)
    return model, whole


def apart(shape, sequence, gathers):
    """How far loss and gradients are from the whole model's, in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        model, whole = cut(shape, sequence, gathers)
        tokens = torch.arange(64).view(2, 32) * 7 % 61
        losses = loss_of(model, tokens), loss_of(whole, tokens)
        for value in losses:
            value.backward()
        worst = (losses[0] - losses[1]).abs().item()
        pairs = zip(whole.named_parameters(), model.parameters(), strict=True)
        for (name, p), own in pairs:
            grad = own.grad
            if hasattr(grad, "full_tensor"):
                grad = grad.full_tensor()
            expected = p.grad
            if "qkv" in name:  # its rows are sorted by ranks
                rows = expected.unflatten(0, (3, dist.get_world_size(), -1))
                expected = rows.transpose(0, 1).reshape(p.shape)
            worst = max(worst, (grad - expected).abs().max().item())
        return worst
    finally:
        torch.set_default_dtype(torch.float32)


def bytes_of(shape, sequence, gathers):
    """A rank's peak, what it keeps for backward, and its traffic."""
    model, _ = cut(shape, sequence, gathers)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    loss_of(model, tokens).backward()
    with PeakTracker(model, tokens) as tracker, CommunicationCounter() as sent:
        value = loss_of(model, tokens)
        kept = tracker.live - tracker.start
        value.backward()
    return tracker.peak - tracker.start, kept, sent.traffic
