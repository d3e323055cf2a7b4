"""What the tests of checkpointing share: chains, and how they are measured."""

import torch
import torch.nn.functional as F
from torch import nn

from membudget.measuring import FlopCounter, PeakTracker
from membudget.models import Block

LOSS_AND_GRADIENT = 8
"""Bytes of the loss and its gradient, which the machine does not count."""


class Residual(nn.Module):
    """A small MLP around a residual."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Returns(nn.Module):
    """A stage that is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Counts(nn.Module):
    """Changes a buffer whenever it runs: in place, or another tensor."""

    def __init__(self, in_place=True):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        if self.in_place:
            self.runs.add_(1)
        else:
            self.runs = self.runs + 1
        return 2 * x


def encoder(width, norm_first=False, dropout=0.1):
    """PyTorch's transformer block, with its dropout."""
    return nn.TransformerEncoderLayer(
        width, 2, 2 * width, dropout, batch_first=True, norm_first=norm_first
    )


def measure(net, x, gradients=True):
    """A step under the peak tracker.

    Args:
        net: the model; the loss is the sum of its output.
        x: its input.
        gradients: whether they are there before.

    Returns:
        Bytes at the peak beyond what was there, FLOPs, and the tracker.
    """
    for p in net.parameters():
        made = gradients and p.requires_grad
        p.grad = torch.zeros_like(p) if made else None
    with PeakTracker(net, x) as tracker, FlopCounter() as flops:
        loss = net(x).sum()
        loss.backward()
    return tracker.peak - tracker.start, flops.total, tracker


def step(net, x, seed=7):
    """One forward and backward pass with these random numbers.

    Returns:
        The output and the gradients; None where there is none.
    """
    net.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    y = net(x)
    y.square().sum().backward()
    grads = [p.grad for p in net.parameters()]
    return y.detach(), [None if g is None else g.clone() for g in grads]


def same(one, other):
    """Whether two lists of tensors (or None) are equal to the last bit."""
    return len(one) == len(other) and all(
        a is b is None
        or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


# Random chains -----------------------------------------------------------


def random_segments(rng, length, start=0, depth=0):
    """Random segments, some of them within others."""
    result, place = [], start
    while place < start + length:
        if rng.random() < 0.5 or depth > 2:
            result.append(place)
            place += 1
            continue
        size = rng.randint(1, start + length - place)
        inner = random_segments(rng, size, place, depth + 1)
        result.append(inner)
        place += size
    return result


def convolution(width, other):
    return nn.Conv2d(width, other, 3, padding=1)


STAGES = {
    "vector": [
        nn.Linear,
        lambda width, other: nn.Sequential(nn.Linear(width, other), nn.ReLU()),
        lambda width, other: nn.Sequential(nn.Tanh(), nn.Linear(width, other)),
        lambda width, other: nn.Sequential(
            nn.Linear(width, other), nn.Dropout(0.3)
        ),
        lambda width, other: nn.GELU(),
        lambda width, other: nn.ReLU(),
        lambda width, other: nn.Identity(),
        lambda width, other: nn.Dropout(0.2),
        lambda width, other: nn.LayerNorm(width),
        lambda width, other: Residual(width),
    ],
    "picture": [
        lambda width, other: nn.Sequential(
            convolution(width, other), nn.ReLU()
        ),
        lambda width, other: nn.Sequential(
            convolution(width, other),
            nn.BatchNorm2d(other),
            nn.ReLU(inplace=True),
        ),
        lambda width, other: nn.BatchNorm2d(width),
        lambda width, other: nn.AvgPool2d(2, ceil_mode=True),
        lambda width, other: nn.MaxPool2d(2, ceil_mode=True),
        lambda width, other: nn.ReLU(),
    ],
    "sequence": [
        lambda width, other: Block(width, 2),
        lambda width, other: encoder(width),
        lambda width, other: encoder(width, norm_first=True),
        lambda width, other: nn.LayerNorm(width),
        nn.Linear,
        lambda width, other: nn.GELU(),
    ],
}
"""What makes a stage for an input of a width; ``other`` is another one."""


INPUTS = {
    "vector": lambda rng, width: torch.rand(rng.choice([3, 8, 64]), width),
    "picture": lambda rng, width: torch.rand(2, width, 16, 16),
    "sequence": lambda rng, width: torch.rand(3, rng.choice([5, 12]), width),
    "tokens": lambda rng, width: torch.randint(11, (3, 12)),
}


def random_chain(rng, kind):
    """A random chain and its input, one of :data:`INPUTS`.

    A picture may become a vector; the first stages may be frozen.
    """
    width = rng.choice([4, 8, 16])
    x = INPUTS[kind](rng, width)
    stages = nn.Sequential()

    def add(*makers):
        value = stages(x)
        width = value.shape[1 if kind == "picture" else -1]
        make = rng.choice(makers)
        stages.append(make(width, rng.choice([4, 8, 16, 24])))

    if kind == "tokens":
        stages.append(nn.Embedding(11, width))
        kind = "sequence"
    for _ in range(rng.randint(1, 7)):
        add(*STAGES[kind])
    if kind == "picture" and rng.random() < 0.5:
        stages.append(nn.Flatten())
        kind = "vector"
        for _ in range(rng.randint(0, 2)):
            add(*STAGES[kind])
    if rng.random() < 0.2:
        for stage in stages[: rng.randint(1, len(stages))]:
            stage.requires_grad_(False)
    if untrained(stages) == len(stages) or isinstance(
        stages[-1], nn.Flatten | nn.Identity
    ):
        add(convolution if kind == "picture" else nn.Linear)
    return stages, x


def untrained(net):
    """How many stages at the beginning have no gradient to compute."""
    for count, stage in enumerate(net):
        if any(p.requires_grad for p in stage.parameters()):
            return count
    return len(net)
