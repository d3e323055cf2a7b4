"""What is remembered of a script: shapes, and nothing while modules run."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from membudget.command.watch import Call, Shape, Watch


def any_hook():
    """Whether a call of any module is slowed by hooks on all."""
    return bool(hooks._has_any_global_hook())


class Inner(nn.Module):
    """Notes what slows it down."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2)), []

    def forward(self, x):
        own = len(self._forward_hooks) + len(self._forward_pre_hooks)
        modes = len(_get_current_dispatch_mode_stack())
        self.seen.append((own, any_hook(), modes))
        return x * self.weight


@pytest.fixture
def watch():
    watch = Watch()
    yield watch
    watch.end()
    assert not any_hook()


def test_nothing_is_on_inside_the_outermost_module(watch):
    inner = Inner()
    model = nn.Sequential(inner, inner)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        assert any_hook() and not model._forward_hooks
    assert inner.seen == 4 * [(0, False, 0)]


def test_it_is_there_again_after_an_error(watch):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    assert watch.call.leaves[0].shape == (3, 5)
    assert any_hook() and not model._forward_hooks
    model(torch.ones(4, 2))
    assert watch.call.leaves[0].shape == (4, 2)


class Asked(nn.Linear):
    def forward(self, x, *, labels=None, cache=None):
        return super().forward(x["ids"])


def test_the_call_is_remembered_without_its_data(watch):
    model = Asked(2, 2)
    x = torch.ones(3, 2)
    mask = torch.ones(3, 2, dtype=torch.bool)
    alive = weakref.ref(x)
    model({"ids": x}, labels=mask, cache="none")
    assert watch.call.model() is model
    args, kwargs = watch.call.arguments(watch.call.leaves)
    assert args[0]["ids"].alive is x and kwargs["cache"] == "none"
    del args, x
    gc.collect()
    assert alive() is None
    args, kwargs = watch.call.arguments(watch.call.leaves)
    gone = args[0]["ids"].tensor()
    assert gone.is_meta and gone.shape == (3, 2)
    assert kwargs["labels"].tensor().data_ptr() == mask.data_ptr()
    del mask
    assert kwargs["labels"].tensor().tolist() == 3 * [[True, True]]


def test_calls_without_a_backward_pass_are_not_remembered(watch):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    frozen(torch.ones(1, 2)), nn.ReLU()(torch.ones(1, 2))
    with torch.no_grad():
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert watch.call is None


def test_what_a_checkpoint_computes_again_is_not_the_model(watch):
    inner = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(inner, x, use_reentrant=False).sum()
    watch.call = None
    loss.backward()
    assert watch.call is None


def test_a_number_that_is_gone_is_one():
    shape = Shape(torch.tensor(0.5))
    gc.collect()
    assert shape.alive is None and shape.tensor().item() == 1
    assert Call.of(nn.ReLU(), (2, None), {}).leaves == [2, None]
