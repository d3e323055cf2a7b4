"""What the tests of precision share."""

import math
import re
import sys
from types import ModuleType

import torch
from torch import nn


def says(text):
    """The whole message, literally."""
    return f"^{re.escape(text)}$"


def begins(text):
    """The beginning of a message, literally."""
    return f"^{re.escape(text)}"


def same(one, other):
    """Equal numbers with equal signs, or both NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other and math.copysign(1, one) == math.copysign(1, other)


def equal(one, other):
    """Nested tensors, dicts and lists are the same in every bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.contiguous().view(-1).view(torch.uint8).tolist()
            == other.contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            equal(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def classifier(seed=0, inputs=6, width=16, outputs=5):
    """A small smooth model in fp32."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


def samples(count, seed=0, inputs=6, outputs=5):
    """Inputs and labels for :func:`classifier`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator)
    y = torch.randint(outputs, (count,), generator=generator)
    return x, y


def pytorch_lists():
    """PyTorch's own lists of what its tests of autocast call.

    Their module imports ``common_utils``, which needs ``expecttest``; the
    one name that it takes from there stands in for it.
    """
    name = "torch.testing._internal.common_utils"
    stand_in = ModuleType(name)
    stand_in.TEST_WITH_ROCM, stand_in.TestCase = False, object
    before = sys.modules.get(name)
    sys.modules[name] = stand_in
    try:
        from torch.testing._internal import autocast_test_lists as lists
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
    cpu = torch.device("cpu")
    return {
        "cpu": lists.AutocastCPUTestLists(cpu),
        "cuda": lists.AutocastTestLists(cpu),
    }
