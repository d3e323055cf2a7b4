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


def random_chain(rng):
    """A random chain and its input.

    Vectors, pictures (which may become vectors), sequences, or tokens; the
    first stages may be frozen.
    """
    kind = rng.choice(["vector", "picture", "sequence", "tokens"])
    width = rng.choice([4, 8, 16])
    build = _Stages(rng, width)
    length = rng.randint(1, 7)
    if kind == "vector":
        x = torch.rand(rng.choice([3, 8, 64]), width)
        stages = [build.vector() for _ in range(length)]
    elif kind == "picture":
        x = torch.rand(2, width, 16, 16)
        stages = [build.picture() for _ in range(length)]
        if rng.random() < 0.5:
            stages.append(build.flatten())
            stages += [build.vector() for _ in range(rng.randint(0, 2))]
    elif kind == "sequence":
        x = torch.rand(3, rng.choice([5, 12]), width)
        stages = [build.sequence() for _ in range(length)]
    else:
        x = torch.randint(11, (3, 12))
        stages = [nn.Embedding(11, width)]
        stages += [build.sequence() for _ in range(length)]
    if rng.random() < 0.2:
        for stage in stages[: rng.randint(1, len(stages))]:
            stage.requires_grad_(False)
    trained = any(p.requires_grad for s in stages for p in s.parameters())
    if not trained or isinstance(stages[-1], nn.Flatten | nn.Identity):
        picture = kind == "picture" and not build.flat
        stages.append(build.trained(picture))
    return nn.Sequential(*stages), x


def untrained(net):
    """How many stages at the beginning have no gradient to compute."""
    for count, stage in enumerate(net):
        if any(p.requires_grad for p in stage.parameters()):
            return count
    return len(net)


class _Stages:
    """Makes random stages that fit each other."""

    def __init__(self, rng, width):
        self.rng, self.width, self.size, self.flat = rng, width, 16, False

    def _other(self):
        before, self.width = self.width, self.rng.choice([4, 8, 16, 24])
        return before, self.width

    def vector(self):
        make = self.rng.choice(
            [
                lambda: nn.Linear(*self._other()),
                lambda: nn.Sequential(nn.Linear(*self._other()), nn.ReLU()),
                lambda: nn.Sequential(nn.Tanh(), nn.Linear(*self._other())),
                lambda: nn.Sequential(
                    nn.Linear(*self._other()), nn.Dropout(0.3)
                ),
                nn.GELU,
                nn.ReLU,
                nn.Identity,
                lambda: nn.Dropout(0.2),
                lambda: nn.LayerNorm(self.width),
                lambda: Residual(self.width),
            ]
        )
        return make()

    def picture(self):
        def normalised():
            _, width = channels = self._other()
            return nn.Sequential(
                nn.Conv2d(*channels, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )

        def pool():
            if self.size < 4:
                return nn.Identity()
            self.size //= 2
            return self.rng.choice([nn.AvgPool2d, nn.MaxPool2d])(2)

        make = self.rng.choice(
            [
                lambda: nn.Sequential(
                    nn.Conv2d(*self._other(), 3, padding=1), nn.ReLU()
                ),
                normalised,
                lambda: nn.BatchNorm2d(self.width),
                pool,
                nn.ReLU,
            ]
        )
        return make()

    def flatten(self):
        self.width *= self.size**2
        self.flat = True
        return nn.Flatten()

    def trained(self, picture):
        if picture:
            return nn.Conv2d(self.width, 4, 3, padding=1)
        return nn.Linear(self.width, 4)

    def sequence(self):
        make = self.rng.choice(
            [
                lambda: Block(self.width, 2),
                lambda: encoder(self.width),
                lambda: encoder(self.width, norm_first=True),
                lambda: nn.LayerNorm(self.width),
                lambda: nn.Linear(*self._other()),
                nn.GELU,
            ]
        )
        return make()
