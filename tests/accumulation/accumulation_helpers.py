"""What the tests of accumulation share."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from membudget.accumulation import Accumulator


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


def run_window(accumulator, x, y, sizes, *, total=None, loss_fn=None):
    """One window over the samples, cut into these sizes, with its step."""
    reduction = accumulator.reduction
    loss_fn = loss_fn or (
        lambda output, label: F.cross_entropy(
            output, label, reduction=reduction
        )
    )
    parts = [(x[part], y[part]) for part in slices(sizes)]
    with accumulator.window(total) as window:
        for images, labels in window.over(parts):
            loss = loss_fn(accumulator.model(images), labels)
            window.backward(loss, count=len(images))
        return window.step()


def accumulated_gradient(model, x, y, sizes, **options):
    """The window's gradient, looked at before a step that is not taken."""
    window_options = {
        key: options.pop(key) for key in ("total", "loss_fn") if key in options
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = Accumulator(model, optimizer, **options)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            [p.grad.clone() for p in model.parameters() if p.requires_grad]
        )
    )
    report = run_window(accumulator, x, y, sizes, **window_options)
    (gradient,) = seen
    return gradient, report


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
    if isinstance(one, torch.Tensor):
        same = (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.contiguous().view(-1).view(torch.uint8).tolist()
            == other.contiguous().view(-1).view(torch.uint8).tolist()
        )
        return [] if same else [path]
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return [path]
        return [
            place
            for key in one
            for place in differences(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, (list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return [path]
        return [
            place
            for i, (a, b) in enumerate(zip(one, other, strict=True))
            for place in differences(a, b, f"{path}/{i}")
        ]
    return [] if one == other and type(one) is type(other) else [path]
