"""What the tests of accumulation share."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.accumulation import Accumulator


def refused(error, message):
    """This error with this message, literally and whole."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def classifier(seed=0, inputs=6, width=7, outputs=5, dtype=torch.float64):
    """A small smooth model: no gradient of it is exactly zero."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )
    return model.to(dtype)


def samples(count, seed=0, inputs=6, outputs=5, dtype=torch.float64):
    """Inputs and labels for :func:`classifier`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(outputs, (count,), generator=generator)
    return x.to(dtype), y


def slices(sizes):
    """Consecutive slices of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]


def gradients(model):
    """Copies of the gradients; None stays None."""
    return [
        None if p.grad is None else p.grad.detach().clone()
        for p in model.parameters()
    ]


def flat(tensors):
    """All numbers in one fp64 vector."""
    return torch.cat([t.detach().double().flatten() for t in tensors])


def relative(ours, theirs):
    """Norm of the difference, relative to the norm of ``theirs``."""
    ours, theirs = flat(ours), flat(theirs)
    return ((ours - theirs).norm() / theirs.norm()).item()


def whole_gradient(model, x, y, loss_fn=F.cross_entropy):
    """The gradient of the whole batch's mean loss; ``param.grad`` is left."""
    loss = loss_fn(model(x), y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters))


def losses_of(model, x, y, sizes, loss_fn=F.cross_entropy):
    """The loss of each micro-batch, when it is its turn, and its count."""
    for part in slices(sizes):
        yield loss_fn(model(x[part]), y[part]), len(y[part])


def run_window(accumulator, x, y, sizes, *, total=None, loss_fn=None):
    """One window over the samples, cut into these sizes, with its step."""
    reduction = accumulator.reduction
    loss_fn = loss_fn or partial(F.cross_entropy, reduction=reduction)
    parts = [(x[part], y[part]) for part in slices(sizes)]
    with accumulator.window(total) as window:
        for images, labels in window.over(parts):
            loss = loss_fn(accumulator.model(images), labels)
            window.backward(loss, count=len(images))
        return window.step()


def accumulated(model, losses, total=None, **options):
    """Gradients and report of a window that leaves the model as it is.

    ``losses`` yields the loss of each micro-batch and its count.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Accumulator(model, optimizer, **options).window(total) as window:
        for loss, count in losses:
            window.backward(loss, count)
        window.finish()
        found = gradients(model)
        return found, window.step()


def everything(model, optimizer, scaler=None):
    """A copy of all that a window can change."""
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "random": torch.get_rng_state(),
        }
    )


def differences(one, other, path=""):
    """Where two nested structures differ in any bit."""
    if type(one) is not type(other):
        return [path]
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        same = alike and torch.equal(*map(bits, (one, other)))
    elif isinstance(one, (dict, list, tuple)):
        if not isinstance(one, dict):
            one, other = dict(enumerate(one)), dict(enumerate(other))
        if one.keys() == other.keys():
            return [
                place
                for key in one
                for place in differences(one[key], other[key], f"{path}/{key}")
            ]
        same = False
    else:
        same = one == other
    return [] if same else [path]


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)
