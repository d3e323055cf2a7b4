"""The checkpoint by hand, against PyTorch's."""

import copy
from functools import partial

import pytest
import torch
from checkpointing_helpers import encoder, measure, same, step
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.checkpointing import checkpoint_by_hand, equal_segments
from membudget.models import Block, chain

by_torch = partial(checkpoint, use_reentrant=False)


class Run(nn.Module):
    """A chain whose segments run with a checkpoint function."""

    def __init__(self, net, sizes, function):
        super().__init__()
        self.net, self.sizes, self.function = net, sizes, function

    def forward(self, x):
        start = 0
        for size in self.sizes:
            x = self.function(self.net[start : start + size], x)
            start += size
        return x


NETS = {
    "dense": lambda: (chain(8, 6), torch.rand(5, 8)),
    "convolutional": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.GELU(),
        ),
        torch.rand(4, 3, 8, 8),
    ),
    "blocks": lambda: (
        nn.Sequential(*[Block(8, 2) for _ in range(6)]),
        torch.rand(2, 5, 8),
    ),
    "encoders": lambda: (
        nn.Sequential(*[encoder(8) for _ in range(6)]),
        torch.rand(2, 5, 8),
    ),
    "dropouts": lambda: (
        nn.Sequential(
            *(
                nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4))
                for _ in range(6)
            )
        ),
        torch.rand(5, 8),
    ),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("sizes", [(6,), (3, 3), (2, 2, 2), (4, 2)])
def test_the_same_numbers_as_pytorch_and_without(make, sizes):
    torch.manual_seed(0)
    net, x = make()
    found = [
        step(Run(net, sizes, function), x)
        for function in (
            lambda segment, x: segment(x),
            by_torch,
            checkpoint_by_hand,
        )
    ]
    plain = found[0]
    for y, grads in found:
        assert torch.equal(y, plain[0])
        assert same(grads, plain[1])
        assert all(g is not None and g.any() for g in grads)


def test_the_generator_stands_where_it_would():
    torch.manual_seed(0)
    net, x = NETS["dropouts"]()
    after = []
    for function in (by_torch, checkpoint_by_hand):
        step(Run(net, (3, 3), function), x)
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_the_gradient_of_the_input_is_the_same():
    net, x = NETS["blocks"]()
    grads = []
    for function in (by_torch, checkpoint_by_hand):
        leaf = x.clone().requires_grad_()
        Run(net, (2, 4), function)(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert leaf.grad.any()


def test_frozen_and_unused_parameters_have_no_gradient():
    class Spare(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.spare = nn.Parameter(torch.ones(2))

    torch.manual_seed(0)
    net = nn.Sequential(Spare(), nn.Linear(8, 8), Spare())
    net[1].requires_grad_(False)
    x, found = torch.rand(5, 8), []
    for function in (by_torch, checkpoint_by_hand):
        found.append(step(Run(net, (1, 2), function), x)[1])
    assert same(*found)
    assert [g is None for g in found[1]] == [
        *(False, False, True),
        *(True, True),
        *(False, False, True),
    ]


def test_a_frozen_segment_hands_the_gradient_down():
    net, x = chain(8, 3), torch.rand(5, 8)
    net[1].requires_grad_(False)
    grads = step(Run(net, (1, 1, 1), checkpoint_by_hand), x)[1]
    assert same(grads, step(net, x)[1])
    net.requires_grad_(False)
    y = Run(net, (3,), checkpoint_by_hand)(x)
    assert not y.requires_grad


# What it does less -------------------------------------------------------


def test_it_is_no_use_for_gradients_of_gradients():
    """They are refused, not wrong."""
    x = torch.rand(5, 8, requires_grad=True)
    y = checkpoint_by_hand(chain(8, 2), x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        slope.square().sum().backward()


def test_batch_norm_counts_twice():
    norm = nn.BatchNorm1d(8)
    step(Run(nn.Sequential(norm), (1,), checkpoint_by_hand), torch.rand(5, 8))
    assert norm.num_batches_tracked == 2


def test_autocast_is_not_restored():
    """So the gradients differ from PyTorch's."""
    torch.manual_seed(0)
    net, x = chain(8, 3), torch.rand(5, 8)
    found = []
    for function in (by_torch, checkpoint_by_hand):
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = Run(net, (3,), function)(x)
        y.float().square().sum().backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert not same(*found)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_recomputation_does_not_stop_early(count):
    """Each segment's last product runs again."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    x = torch.rand(5, 8)
    sizes = [len(s) for s in equal_segments(6, count)]
    _, ours, _ = measure(Run(net, sizes, checkpoint_by_hand), x)
    _, theirs, _ = measure(Run(net, sizes, by_torch), x)
    assert ours - theirs == count * 2 * 5 * 8 * 8


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_gradients_of_a_segment_are_alive_together(length):
    """Large layers, few samples: all of theirs, and not one layer's.

    So the peak is at the first layer and not at the last, and there all the
    other boundaries are gone again. With one layer what is left is its
    output, which nobody needs any more.
    """
    width, batch = 64, 1
    net, x = chain(width, length), torch.rand(batch, width)
    layer = sum(p.nbytes for p in net[0].parameters())
    ours, flops, _ = measure(Run(net, (length,), checkpoint_by_hand), x)
    theirs, theirs_flops, _ = measure(Run(net, (length,), by_torch), x)
    assert flops == theirs_flops
    more = (length - 1) * (layer - x.nbytes)
    assert ours - theirs == (more if length > 1 else x.nbytes)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_output_of_a_segment_is_alive_too(count):
    """Small layers, many samples: one boundary more than PyTorch."""
    net, x = chain(16, 6), torch.rand(64, 16)
    sizes = [len(s) for s in equal_segments(6, count)]
    ours = measure(Run(net, sizes, checkpoint_by_hand), x)[0]
    theirs = measure(Run(net, sizes, by_torch), x)[0]
    assert ours - theirs == x.nbytes


def test_a_copy_of_the_net_runs_as_well():
    torch.manual_seed(0)
    net, x = NETS["encoders"]()
    ours = Run(net, (3, 3), checkpoint_by_hand)
    assert same(step(copy.deepcopy(ours), x)[1], step(ours, x)[1])
