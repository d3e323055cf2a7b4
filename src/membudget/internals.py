"""What the package uses of PyTorch beyond its public interface.

It stands here, so that a version that lacks a part of it says so at once.
What is about several processes stands in :mod:`membudget.sharding` and
:mod:`membudget.accumulation`.

Raises:
    ImportError: this PyTorch lacks something.
"""

# ruff: noqa: I001
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from functools import cache

import torch
from torch import nn

from membudget import TORCH


def _lacks(what: object) -> str:
    return (
        f"torch {torch.__version__} lacks what membudget needs of it "
        f"({what}): use torch {TORCH[0]} to {TORCH[1]}"
    )


try:
    from torch._C import (
        DispatchKey,
        _SetExcludeDispatchKeyGuard as key_excluded,
        _current_autograd_node as current_node,
        _dispatch_has_kernel as has_kernel,
        _dispatch_has_kernel_for_dispatch_key as has_kernel_for,
    )
    from torch._C._autograd import (
        _get_sequence_nr as next_node_number,
        _profiler_enabled as profiling,
        _top_saved_tensors_default_hooks as saved_tensor_hooks,
    )
    from torch._C._functorch import is_functorch_wrapped_tensor as transformed
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.optim.optimizer import (
        _foreach_supported_types as stepped_together,
    )
    from torch.utils._foreach_utils import (
        _foreach_supported_types as clipped_together,
    )
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes as without_modes,
    )
    from torch.utils._pytree import tree_map
except ImportError as error:
    raise ImportError(_lacks(error)) from error

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "current_node",
    "device_of",
    "fakes_taken_together",
    "has_kernel",
    "has_kernel_for",
    "in_its_parts",
    "is_composite",
    "logging_nothing",
    "metadata_unseen",
    "next_node_number",
    "no_dispatch",
    "nothing_compiled",
    "profiling",
    "saved_tensor_hooks",
    "transformed",
    "tree_map",
    "without_modes",
]

ATTRIBUTES = (
    (torch.Tensor, "_backward_hooks _base _indices _is_view _values _version"),
    (torch.Tensor, "_post_accumulate_grad_hooks"),
    (torch.UntypedStorage, "_cdata"),
    (torch.autograd.graph.Node, "_sequence_nr"),
    (torch.ops.aten.add.Tensor, "_op_dk _schema"),
    (nn.Module(), "_buffers _compiled_call_impl _modules _parameters"),
    (torch.amp.GradScaler("cpu"), "_scale"),
)
"""The private attributes that the package reads of PyTorch's objects."""

for _owner, _names in ATTRIBUTES:
    for _name in _names.split():
        if not hasattr(_owner, _name):
            raise ImportError(_lacks(_name))


def device_of(tensor: FakeTensor) -> torch.device:
    """A fake tensor's device, as PyTorch asks for it; nothing runs."""
    if isinstance(tensor, FakeTensor) and not (
        tensor.fake_mode.in_kernel_invocation
    ):
        return tensor.fake_device
    return torch.ops.prim.device.default(tensor)


_COMPOSITE = DispatchKey.CompositeImplicitAutograd


@cache
def is_composite(operator: OpOverload) -> bool:
    """Whether PyTorch writes an operator of its own in terms of others."""
    name, mine = operator.name(), operator.namespace == "aten"
    return mine and has_kernel_for(name, _COMPOSITE)


def in_its_parts(operator: OpOverload, args: tuple, kwargs: dict) -> object:
    """Run a composite operator that came whole, as in inference mode.

    Views of parameters know, as outside of a dispatch mode, that these are
    trained: products of matrices look at it.
    """
    with key_excluded(DispatchKey.ADInplaceOrView, False):
        return operator._op_dk(_COMPOSITE, *args, **kwargs)


@contextmanager
def fakes_taken_together() -> Iterator[None]:
    """Let optimizers and clipping treat fake tensors as they treat others.

    By default they take all tensors at once on a GPU (``foreach``), if these
    are of a type that is in a list.
    """
    lists = stepped_together, clipped_together
    added = [types for types in lists if FakeTensor not in types]
    for types in added:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in added:
            types.remove(FakeTensor)


@contextmanager
def logging_nothing() -> Iterator[None]:
    """PyTorch logs errors of fake tensors to stderr before it raises them."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def nothing_compiled(why: str) -> Iterator[None]:
    """Refuse what ``torch.compile`` made, modules and functions.

    Where a dispatch mode is on, the compiler leaves the call alone: it runs
    eagerly, now and for good. Every such call asks first which callback the
    compiler's stance allows. A stance that compiles nothing is no harm. The
    first use of the compiler in a process is not noticed inside the block.

    Args:
        why: of the error.

    Raises:
        RuntimeError: inside the block, at the call; or at once, if the
            compiler was imported and has no such question.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:  # never imported, so there is nothing compiled
        yield
        return
    question = "_callback_from_stance"
    if not hasattr(compiler, question):
        raise RuntimeError(_lacks(f"{compiler.__name__}.{question}"))
    allowed = compiler._callback_from_stance

    def refuse(callback):
        callback = allowed(callback)
        if callable(callback):
            raise RuntimeError(why)
        return callback

    compiler._callback_from_stance = refuse
    try:
        yield
    finally:
        compiler._callback_from_stance = allowed


@contextmanager
def metadata_unseen() -> Iterator[None]:
    """Keep from dispatch modes how DTensor works out what a result will be.

    It runs the operator with fake tensors for that, of its own making.

    Raises:
        RuntimeError: this PyTorch does it elsewhere.
    """
    planner = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if planner is None:  # never imported, so there is no DTensor
        yield
        return
    name = "_propagate_tensor_meta_non_cached"
    planner = planner.ShardingPropagator
    if not hasattr(planner, name):
        raise RuntimeError(_lacks(f"{planner.__name__}.{name}"))
    original = getattr(planner, name)

    def unseen(*args):
        with without_modes():
            return original(*args)

    setattr(planner, name, unseen)
    try:
        yield
    finally:
        setattr(planner, name, original)
