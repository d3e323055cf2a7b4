"""The exercises of chapter 8: when a copy hides, and hooks that move data."""

from collections.abc import Callable
from functools import partial
from math import ceil
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from membudget import models
from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import answer, doubles, flat, is_empty

# From which length on a copy hides


def tokens_to_hide(kept, width, flops, link):
    return max(0, ceil((kept * flops / link - 24 * width) / 4))


check_tokens_to_hide = Exercise(
    tokens_to_hide,
    cases=[
        given(kept=32, width=64, flops=500e12, link=50e9),
        given(kept=2, width=4096, flops=60e12, link=25e9),
        given(kept=32, width=1001, flops=7e12, link=3e9),
    ],
    observe=answer,
    mistakes="""
        max(0, ceil((kept * flops / link - 24 * width) / 4)) => ceil((kept * \
flops / link - 24 * width) / 4)
            a wide model hides the copy at any length: no number of tokens is
            below 0.
        24 * width) / 4 => 24 * width)
            attention's work is 4·T FLOPs a token and unit of width.
        - 24 * width =>
            the matrix products hide a part: 24·h FLOPs a token and unit of
            width.
        - 24 * width => - 12 * width
            a matrix product takes two FLOPs a weight and token: 12·h weights
            a unit of width are 24·h FLOPs.
        - 24 * width => - 24 * width**2
            both sides are divided by h once: h² became h.
        flops / link => link / flops
            the copy takes kept/B seconds a token and unit of width, which is
            kept·F/B FLOPs.
        ceil((kept * flops / link - 24 * width) / 4) => (kept * flops / link \
- 24 * width) / 4
            tokens are whole: round up.
    """,
    shown="From this length on even attention alone gives the copy time.",
)

# Hooks that move each storage once


def view_of(tensor):
    """What makes of a storage this view of it."""
    return (
        tensor.dtype,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )


def pack_once(tensor, left, stays, out):
    storage = tensor.untyped_storage()
    if storage in stays:
        return tensor.detach()
    if storage not in left:
        left[storage] = out(storage)
    return left[storage], view_of(tensor)


def _llama(depth: int) -> Case:
    def make() -> tuple:
        return (models.Llama(32, 16, depth, hidden=24),)

    return Case(f"a Llama of {depth} blocks", make)


def _packed(fn: Callable, args: tuple) -> Seen:
    """What leaves in a step under hooks that pack with ``fn``."""
    (model,) = args
    stays = {p.untyped_storage() for p in model.parameters()}
    left: WeakKeyDictionary = WeakKeyDictionary()
    sizes: list[int] = []
    packed: list[object] = []
    held: set[torch.UntypedStorage] = set()

    def out(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if not isinstance(storage, torch.UntypedStorage):
            raise Problem("`out` copies a storage: tensor.untyped_storage().")
        sizes.append(storage.nbytes())
        return storage.clone()

    def pack(tensor: torch.Tensor) -> object:
        packed.append(fn(tensor, left, stays, out))
        if isinstance(packed[-1], torch.Tensor):
            held.add(packed[-1].untyped_storage())
        return packed[-1]

    def unpack(what: object) -> torch.Tensor:
        if isinstance(what, torch.Tensor):
            return what
        if not isinstance(what, tuple) or len(what) != 2:
            raise Problem(
                "return the tensor where it stays, and else what `out` "
                "returned with `view_of(tensor)`."
            )
        host, (dtype, *view) = what
        return torch.empty(0, dtype=dtype).set_(host.clone(), *view)

    tokens = torch.arange(24).view(2, 12)
    with saved_tensors_hooks(pack, unpack):
        value = model(tokens).square().sum()
    if not sizes and all(map(is_empty, packed)):
        raise Problem
    value.backward()
    return Seen(
        {
            "gradient": flat([p.grad for p in model.parameters()]),
            "number of bytes that leave": doubles(sum(sizes)),
            "number of bytes that the graph holds on the device": doubles(
                sum(storage.nbytes() for storage in held - stays)
            ),
        }
    )


check_pack_once = Exercise(
    pack_once,
    cases=[_llama(1), _llama(3)],
    observe=_packed,
    mistakes="""
        if storage in stays: => if False:
            the weights leave, too, and they are on the device anyway: return
            a tensor whose storage is in `stays`.
        if storage not in left: => if True:
        or left[storage] = out(storage) => return out(storage), view_of(tensor)
            a storage that is saved twice leaves twice: note in `left` what
            `out` returned, and look there first.
        if storage not in left: => if True:
        if storage in stays: => if False:
            this is save_on_cpu: weights leave, too, and what is saved twice
            leaves twice.
        return left[storage], view_of(tensor) => return tensor.detach()
            nothing leaves for good: the graph still holds the tensor, and so
            does the device. Return what `out` returned, and the view.
        view_of(tensor) => view_of(tensor.new_empty(tensor.shape))
            a view begins somewhere in its storage, and may be turned: that
            is what `view_of(tensor)` notes.
    """,
    shown=(
        "Each storage leaves once, and the weights stay: what Offload moves."
    ),
)

# Hooks inside a checkpoint


def moved_inputs(blocks, x, hooks):
    with hooks():
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
    return x.sum()


def _blocks(depth: int) -> Case:
    def make() -> tuple:
        blocks = nn.ModuleList(models.Block(8, 2) for _ in range(depth))
        return blocks, torch.rand(2, 6, 8)

    return Case(f"{depth} blocks", make)


def _stepped(fn: Callable, args: tuple) -> Seen:
    """What hooks see of a step, and how often each block runs."""
    blocks, x = args
    x = x.requires_grad_()
    runs, seen = [0] * len(blocks), []
    counted = []
    for index, block in enumerate(blocks):

        def run(y: torch.Tensor, index: int = index, block=block):
            runs[index] += 1
            return block(y)

        counted.append(run)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.nbytes)
        return tensor.detach()

    hooks = partial(saved_tensors_hooks, pack, lambda tensor: tensor)
    value = fn(counted, x, hooks)
    if is_empty(value):
        raise Problem
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        raise Problem("your function returns no loss: return `x.sum()`.")
    value.backward()
    return Seen(
        {
            "gradient of x": x.grad,
            "list of runs, block by block,": doubles(runs),
            "number of bytes that the hooks see": doubles(sum(seen)),
        }
    )


check_moved_inputs = Exercise(
    moved_inputs,
    cases=[_blocks(3), _blocks(2)],
    observe=_stepped,
    mistakes="""
        checkpoint(block, x, use_reentrant=False) => block(x)
        or with hooks(): => if True:
        x = checkpoint(block, x, use_reentrant=False) => x = \
checkpoint(lambda y, block=block: _inside(hooks, block, y), x, \
use_reentrant=False)
        or x = checkpoint(block, x, use_reentrant=False) => x = \
checkpoint(lambda y, block=block: _inside(hooks, block, y), x, \
use_reentrant=False)
            no block runs again, and whole tapes leave: there are no
            checkpoints, or the hooks stand inside them and take the place of
            a checkpoint's own.
        with hooks(): => if True:
            the hooks are not entered: nothing leaves.
    """,
    shown=(
        "Outside the checkpoints the hooks see the blocks' inputs, and every "
        "block runs again."
    ),
)


def _inside(hooks: Callable, block: Callable, x: torch.Tensor) -> torch.Tensor:
    with hooks():
        return block(x)
