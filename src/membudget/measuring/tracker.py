"""The peak tracker: every tensor storage from its birth to its death."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple, TypeGuard

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from membudget.checks import device as checked_device
from membudget.checks import instance, shown, told, whole
from membudget.internals import (
    OpOverload,
    TorchDispatchMode,
    current_node,
    device_of,
    in_its_parts,
    is_composite,
    metadata_unseen,
    next_node_number,
    nothing_compiled,
    transformed,
)
from membudget.measuring.modules import (
    OUTSIDE,
    ModuleStack,
    hooked_by_checkpoint,
)
from membudget.measuring.storages import (
    is_wrapper,
    module_tensors,
    optimizer_tensors,
    storages,
    tensors,
)
from membudget.measuring.units import format_bytes

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
)
"""What a storage can be; ``"optimizer"`` are the optimizer's states."""

PHASES = ("forward", "backward", "recomputation", "optimizer")
"""When an operator can run."""


class Operator(NamedTuple):
    """An operator that ran: its name, the module at work, the phase.

    In the backward pass the module is the one whose forward pass made the
    autograd node at work; :data:`OUTSIDE` where there is none.
    """

    name: str
    module: str
    phase: str


COMPILED = (
    "something compiled was called (torch.compile), and the tracker sees "
    "single operators only, which need other memory than what the compiler "
    "makes of them: hand over the model and the loss as they were before, or "
    "measure the compiled step on its device"
)
"""Why nothing compiled may run under the tracker."""

_ADD, _CLONE = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default
_ZEROS = {"aten.zeros", "aten.new_zeros", "aten.zeros_like"}
_COPIES = {_ADD, _CLONE}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}
_IN_PLACE = {
    "ClampBackward": ("logical_and", "logical_or"),
    "BinaryCrossEntropy": ("sub", "mul"),
}
"""Nodes of autograd, and operators that write over what the node has made."""
_EMPTY = torch.ops.aten.empty.memory_format
_NO_MEMORY = torch.ops.aten._efficientzerotensor.default
_DEVICE = torch.ops.prim.device.default

BEFORE = Operator("", OUTSIDE, "")
"""What made the storages that were alive before the block."""


@dataclass(eq=False, slots=True)
class Allocation:
    """A storage, from birth to death.

    Attributes:
        bytes: its size.
        birth: index of the operator that made it; -1 for before the block.
        category: one of :data:`CATEGORIES`.
        operator: what made it.
        death: index of the first operator after which it is gone; None while
            it is alive.
    """

    bytes: int
    birth: int
    category: str
    operator: Operator
    death: int | None = None

    def alive(self, moment: int) -> bool:
        """Whether it is alive after the operator with this index."""
        moment = whole(moment, "the moment", None)
        return self.birth <= moment and (
            self.death is None or moment < self.death
        )


def by_category(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Bytes of each category."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for a in allocations:
        sums[a.category] += a.bytes
    return sums


class PeakTracker(TorchDispatchMode):
    """Count the bytes of every tensor storage that is alive, and their peak.

    Inside the ``with`` block each operator's new storages are added, once
    each, and subtracted when the last tensor that uses them is gone. Views
    share a storage and count once. It counts requested bytes, on any device
    and for ``meta`` and fake tensors (enter the tracker inside
    ``FakeTensorMode``); an allocator rounds each request up. Under a dispatch
    mode PyTorch writes out of place where else it would write over what it
    has just made; such results are counted in place. What an operator
    allocates and frees within itself is not seen, nor is ``torch.empty(0)``,
    which some versions' checkpoints call, and some gradients take another
    formula: ``tools/operators.py`` compares with :func:`witness`, and its
    record names each difference. On ``meta`` attention is not fused; fake
    tensors take the operators of their device.

    Args:
        *existing: what is alive before the block and belongs to the account.
            A module stands for its parameters, buffers and gradients, an
            optimizer for its states, a tensor for itself. Other tensors from
            outside the block, and views of them, are not counted.
        device: count only what is on this device; by default on all.
        budget: bytes that may be alive; an operator that needs more raises
            ``torch.OutOfMemoryError``, as a device of that size would.

    Attributes:
        start: bytes of ``existing``.
        live: bytes alive now.
        peak: the most bytes alive after any operator, ``start`` included.
        timeline: bytes alive after each operator, in order.
        operators: the operators, in the same order.
        allocations: every storage that was ever counted, in order of birth.
        marks: ``(index, label)`` pairs set by :meth:`mark`.
        events: every ``("allocate" or "free", number, bytes)`` in order; the
            number is the index in ``allocations``.
        current: the operator at work, or the last one.

    The category of a storage:

    * *parameters*: tensors of class ``Parameter`` in ``existing``, and the
      buffers of its modules;
    * *gradients*: what is or becomes the ``grad`` of such a parameter;
    * *optimizer*: states of any optimizer that steps in the block, or is in
      ``existing``;
    * *inputs*: other tensors in ``existing``, and what the outermost module
      is called with, unless it was computed from something trained;
    * *activations*: made outside of the backward pass and the optimizer's
      step, and still there when a backward pass begins or the block ends:
      what autograd saved, and what a variable holds;
    * *temporaries*: everything else, the gradients on their way back through
      the layers included.

    It is settled when the block ends, and holds for the storage's whole life.

    Example:
        >>> with PeakTracker(model, optimizer, x, y) as tracker:
        ...     F.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> tracker.peak - tracker.start
        >>> tracker.at_peak()[0].operator

    Raises:
        ValueError: a budget below ``start``.
        RuntimeError: entered while it runs. Afterwards it may be entered
            again, and goes on counting. Or something compiled is called in
            the block (``torch.compile``): PyTorch would run it operator by
            operator there, which needs other memory.
        NotImplementedError: a tensor without storages that can be counted
            (``mkldnn``).
    """

    def __init__(
        self,
        *existing: nn.Module | torch.optim.Optimizer | torch.Tensor,
        device: torch.device | str | None = None,
        budget: int | None = None,
    ) -> None:
        super().__init__()
        self.device = None if device is None else checked_device(device)
        self.live = 0
        self.timeline: list[int] = []
        self.operators: list[Operator] = []
        self.allocations: list[Allocation] = []
        self.marks: list[tuple[int, str]] = []
        self.events: list[tuple[str, int, int]] = []
        self.current = BEFORE
        self._read = 0  # of the timeline, by recent_peak
        self._wrapped: object = None  # asked of a subclass, not yet inside
        self.budget: int | None = None
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._undecided: list[Allocation] = []
        self._node, self._since = -1, 0  # at work, and since which operator
        self._products: list[int] = []  # numbers, and the call that made them
        self._call: tuple[int, int] | None = None
        # Of the last operator: what was spared, the first new number, and
        # the event of that.
        self._spare: tuple[list[int], int, int] | None = None
        self._stepping: object = None  # the optimizer that steps
        self._step_in: object = None  # the autograd node that steps
        models = [m for m in existing if isinstance(m, nn.Module)]
        self._modules = ModuleStack(*models, called=self._called)
        self._made_in: dict[int, str] = {}  # autograd node -> module
        self._hooks: ExitStack | None = None  # while the block runs
        for tensor, category in _flatten(existing):
            self._existing(tensor, category)
        self._find_gradients()
        self.start = self.peak = self.live
        if budget is not None:
            self._set_budget(budget)

    def _set_budget(self, budget: int) -> None:
        budget = whole(budget, "budget")
        if budget < self.start:
            raise ValueError(
                f"the budget is {format_bytes(budget)}, and what exists "
                f"already takes {format_bytes(self.start)}: use a larger "
                "budget or a smaller model"
            )
        self.budget = budget

    # What was measured

    def mark(self, label: str) -> None:
        """Remember that ``label`` begins at the next operator."""
        instance(label, str, "the label", "a string")
        self._find_gradients()
        self.marks.append((len(self.timeline), label))

    def inside(self, module: nn.Module, args: tuple) -> None:
        """The block has begun inside a call of this module with ``args``."""
        self._modules.begin(module, args)

    def recent_peak(self) -> int:
        """The most bytes alive since the last call of this method."""
        self._settle()
        recent = self.timeline[self._read :]
        self._read = len(self.timeline)
        return max(recent, default=self.live)

    @property
    def peak_moment(self) -> int:
        """Index of the first operator with the peak; -1: before them all."""
        if self.peak == self.start:
            return -1
        return self.timeline.index(self.peak)

    def at(self, moment: int) -> list[Allocation]:
        """What is alive after an operator, the largest first.

        Args:
            moment: the operator's index; -1 is before the first.

        Raises:
            IndexError: no such operator.
        """
        moment = whole(moment, "the moment", None)
        if not -1 <= moment < len(self.timeline):
            raise IndexError(
                f"there is no operator {shown(moment)}: use -1 … "
                f"{len(self.timeline) - 1}"
            )
        alive = [a for a in self.allocations if a.alive(moment)]
        return sorted(alive, key=lambda a: -a.bytes)

    def at_peak(self) -> list[Allocation]:
        """What is alive at the peak, the largest first."""
        return self.at(self.peak_moment)

    def split(self, moment: int | None = None) -> dict[str, int]:
        """Bytes of each category after an operator; by default at the peak.

        Raises:
            IndexError: no such operator.
        """
        return by_category(
            self.at_peak() if moment is None else self.at(moment)
        )

    def timelines(self) -> dict[str, list[int]]:
        """Bytes of each category after each operator."""
        ends = len(self.timeline)
        changes = {c: [0] * (ends + 1) for c in CATEGORIES}
        for a in self.allocations:
            changes[a.category][max(a.birth, 0)] += a.bytes
            changes[a.category][ends if a.death is None else a.death] -= (
                a.bytes
            )
        return {c: list(accumulate(v[:-1])) for c, v in changes.items()}

    # The account

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        allocation = Allocation(
            storage.nbytes(), len(self.timeline), category, self.current
        )
        if self.current is BEFORE:
            allocation.birth = -1
        elif self.current.phase in ("forward", "recomputation"):
            self._undecided.append(allocation)
        key, number = storage._cdata, len(self.allocations)
        end = partial(self._freed, key, number)
        self._alive[key] = number, weakref.ref(storage, end)
        self.allocations.append(allocation)
        self._count("allocate", number, allocation.bytes)

    def _freed(self, key: int, number: int, _: weakref.ref) -> None:
        if self._alive.get(key, (-1,))[0] == number:
            del self._alive[key]
            self._end(number)

    def _end(self, number: int) -> None:
        allocation = self.allocations[number]
        allocation.death = len(self.timeline)
        self._count("free", number, allocation.bytes)

    def _count(self, kind: str, number: int, size: int) -> None:
        self.events.append((kind, number, size))
        self.live += size if kind == "allocate" else -size

    def _counts(self, tensor: torch.Tensor | torch.UntypedStorage) -> bool:
        """Whether it is on the device."""
        if self.device is None:
            return True
        mine, its = self.device, tensor.device
        return mine.type == its.type and mine.index in (None, its.index or 0)

    def _held(self, tree: object) -> list[torch.UntypedStorage]:
        """The storages of the tensors on the device."""
        found: list[torch.UntypedStorage] = []
        for tensor in tensors(tree):
            if self._counts(tensor):
                found += storages(tensor)
        return found

    def _existing(self, tensor: torch.Tensor, category: str) -> None:
        for storage in storages(tensor) if self._counts(tensor) else ():
            if storage._cdata not in self._alive:
                self._add(storage, category)
        if isinstance(tensor, nn.Parameter):
            self._parameters.append(weakref.ref(tensor))

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Its index in ``allocations``; -1 if it is not counted."""
        return self._alive.get(storage._cdata, (-1,))[0]

    def _label(
        self,
        tensor: torch.Tensor,
        category: str,
        before: tuple[str, ...] = CATEGORIES,
    ) -> None:
        """Give its storages a category, if theirs is one of ``before``."""
        numbers = [self._number(storage) for storage in storages(tensor)]
        for number in numbers:
            if number >= 0 and self.allocations[number].category in before:
                self.allocations[number].category = category

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # a formula may return none
            self._label(parameter.grad, "gradients")

    def _find_gradients(self) -> None:
        for ref in self._parameters:
            parameter = ref()
            if parameter is not None:
                self._accumulated(parameter)

    def _decide(self) -> None:
        """What is alive of the forward pass now was made to stay."""
        for a in self._undecided:
            if a.death is None and a.category == "temporaries":
                a.category = "activations"
        self._undecided.clear()

    # What runs in the block

    def __enter__(self) -> "PeakTracker":
        if self._hooks is not None:
            raise RuntimeError(
                "this tracker is running already: use another one inside"
            )
        # The last node from before the block is none of its modules'.
        self._made_in[_last_node()] = OUTSIDE
        with ExitStack() as hooks:
            hooks.enter_context(self._modules)
            for handle in (
                register_optimizer_step_pre_hook(self._step_begins),
                register_optimizer_step_post_hook(self._step_ends),
            ):
                hooks.callback(handle.remove)
            for ref in self._parameters:
                parameter = ref()
                if parameter is not None and parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(
                        self._accumulated
                    )
                    hooks.callback(handle.remove)
                    # Ours first: the others may drop the gradient.
                    them = parameter._post_accumulate_grad_hooks
                    for key in [k for k in them if k != handle.id]:
                        them[key] = them.pop(key)
            hooks.enter_context(_resizing(self._resize))
            hooks.enter_context(nothing_compiled(COMPILED))
            hooks.enter_context(metadata_unseen())
            super().__enter__()
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        told(self._hooks).close()
        self._hooks = None
        self._find_gradients()
        self._decide()
        self._made_in.clear()
        self._stepping = self._step_in = None
        self._settle()

    def _called(self, args: tuple) -> None:
        """The outermost module was called with ``args``."""
        if current_node() is not None:
            return  # a recomputation: these are activations
        for tensor in tensors(args):
            # What vmap and its like hand over has no storage of its own.
            if tensor.grad_fn is None and not transformed(tensor):
                self._label(tensor, "inputs", before=("temporaries",))

    def _step_begins(self, optimizer, args, kwargs) -> None:
        self._find_gradients()
        if self._stepping is None:  # not one inside another
            self._stepping, self._step_in = optimizer, current_node()

    def _step_ends(self, optimizer, args, kwargs) -> None:
        for tensor in optimizer_tensors(optimizer):
            self._label(tensor, "optimizer")
        if self._stepping is optimizer:
            self._stepping = self._step_in = None

    def _operator(self, name: str) -> Operator:
        """The operator that runs now."""
        modules = self._modules
        node = current_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node:
            self._node, self._since = number, len(self.timeline)
        if self._stepping and node is self._step_in and not modules.names:
            return Operator(name, OUTSIDE, "optimizer")
        if node is not None and not _recomputes(node):
            made_in = self._made_in.get(number, OUTSIDE)
            return Operator(name, modules.name or made_in, "backward")
        # The last node that the forward pass made is this operator's.
        self._made_in.setdefault(_last_node(), modules.name)
        phase = "forward" if node is None else "recomputation"
        return Operator(name, modules.name, phase)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:  # a fake tensor is asked; nothing runs
            return device_of(*args)
        if any(map(is_wrapper, types)):
            self._wrapped = func
            return NotImplemented  # it asks again for the tensors inside
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            # It comes whole, with what its parts allocate and free unseen.
            with _entered(self):
                return in_its_parts(func, args, kwargs)
        if func is _NO_MEMORY or (func is _EMPTY and 0 in args[0]):
            return func(*args, **kwargs)
        self._settle()
        self.current = self._operator(_name(func))
        before = len(self.allocations)
        overwritten = _has_twin(func) and self._overwritten(func, *args)
        spared = self._spared(func, *args) if func in _COPIES else []
        if func is self._wrapped:  # of subclasses PyTorch does not do so
            self._wrapped, spared = None, []
        changing = self._held((args, kwargs)) if _changes(func) else []
        sizes = [storage.nbytes() for storage in changing]
        result = func(*args, **kwargs)
        self._remeasure(changing, sizes)
        new = [s for s in self._held(result) if s._cdata not in self._alive]
        if new and func is not torch.ops.aten.lift_fresh.default:
            # Not so what is a view of an argument from outside; but
            # torch.tensor(...) hands its new tensor over to lift_fresh.
            given = changing or self._held((args, kwargs))
            known = {s._cdata for s in given}
            new = [s for s in new if s._cdata not in known]
            del given
        for storage in new:
            if storage._cdata not in self._alive:
                self._add(storage, "temporaries")
        del changing, new
        made = len(self.allocations) > before
        if overwritten and made:
            self._overwrite(overwritten)
            spared = []
        if func in _PRODUCTS and made and self.current.phase != "backward":
            self._remember_product(before)
        if spared and len(self.allocations) == before + len(spared):
            self._spare = spared, before, len(self.events) - len(spared)
        self._done(before)
        return result

    def _overwritten(
        self, func: OpOverload, first: object, *rest
    ) -> torch.UntypedStorage | None:
        """What PyTorch would write the result into, were there no mode.

        Under any dispatch mode its own code writes out of place where it has
        just made a tensor (``isTensorSubclassLike``).
        """
        if not _is_whole(first):
            return None
        storage = first.untyped_storage()
        number = self._number(storage)
        if number < 0:
            return None
        if self.current.phase != "backward":  # a bias, onto a call's product
            own = func is _ADD and number in self._products
            return storage if own and self._call == _call() else None
        made = self.allocations[number]
        if torch.is_grad_enabled() or made.birth < self._since:
            return None  # the node at work has not made it
        own = made.operator.name in _ZEROS or _in_place(func, made)
        return storage if own else None

    def _overwrite(self, storage: torch.UntypedStorage) -> None:
        """The newest allocation took the place of this storage."""
        number, _ = self._alive[storage._cdata]
        if self.allocations[number].bytes == self.allocations[-1].bytes:
            del self._alive[storage._cdata]
            self._end(number)
            self.events[-2:] = reversed(self.events[-2:])

    def _spared(self, func: object, first: torch.Tensor, *rest) -> list[int]:
        """The numbers of what autograd would write its result into.

        Were it not for the dispatch mode, it would add up what arrives at a
        tensor with several readers in place, and keep a sparse gradient
        without a copy of it. It adds after a node has run; the node may add
        tensors of its own making while it works.
        """
        node = current_node()
        if self.current.phase != "backward" or torch.is_grad_enabled():
            return []
        numbers = [self._number(storage) for storage in storages(first)]
        if -1 in numbers:
            return []
        if func is _CLONE:
            return numbers if _handed_on(first, node) else []
        if not _is_whole(first) or not isinstance(rest[0], torch.Tensor):
            return []
        later = self.allocations[numbers[0]].birth < self._since
        return numbers if later or _reaches_one_twice(node) else []

    def _remember_product(self, number: int) -> None:
        if self._call != (call := _call()):
            self._call, self._products = call, []
        self._products.append(number)

    def _settle(self) -> None:
        """What took the place of something is counted in its place.

        It did if nothing else held that: then it is freed by now. Without the
        tracker both would never have been there.

        Raises:
            torch.OutOfMemoryError: as :meth:`_done`.
        """
        if self._spare is None:
            return
        (numbers, new, event), self._spare = self._spare, None
        moment = len(self.timeline) - 1
        for number, other in zip(numbers, self.allocations[new:], strict=True):
            old = self.allocations[number]
            if old.death == moment + 1 and old.bytes == other.bytes:
                old.death = moment
                self.timeline[moment] -= old.bytes
                freed = ("free", number, old.bytes)
                del self.events[self.events.index(freed, event)]
                self.events.insert(event, freed)
        self._check(new, self.timeline[moment])

    def _done(self, before: int) -> None:
        """The operator at work has run and added to ``before`` allocations.

        Raises:
            torch.OutOfMemoryError: it needed more than the budget.
        """
        if self.current.phase == "backward" and self.allocations[before:]:
            self._decide()
        if self._spare is None:  # it waits until it is settled
            self._check(before, self.live)
        self.operators.append(self.current)
        self.timeline.append(self.live)

    def _check(self, before: int, live: int) -> None:
        asked = self.allocations[before:]
        if asked and self.budget is not None and live > self.budget:
            size = sum(a.bytes for a in asked)
            raise torch.OutOfMemoryError(
                f"Tried to allocate {format_bytes(size)} ({size} bytes) in "
                f"{self.current.name}; {format_bytes(live - size)} of "
                f"the budget of {format_bytes(self.budget)} were in use."
            )
        self.peak = max(self.peak, live)

    def _remeasure(
        self, storages: list[torch.UntypedStorage], sizes: list[int]
    ) -> None:
        """Notice storages whose size has changed: one ends, one begins.

        One from outside counts if it grew.
        """
        for storage, before in zip(storages, sizes, strict=True):
            number, size = self._number(storage), storage.nbytes()
            if number >= 0:
                old = self.allocations[number]
                if size != old.bytes:
                    self._end(number)
                    self._add(storage, old.category)
            elif size > before:
                self._add(storage, "temporaries")

    def _resize(self, storage: torch.UntypedStorage, before: int) -> None:
        """``storage.resize_`` was called; it is no operator."""
        if storage._cdata in self._alive or self._counts(storage):
            self._settle()
            self.current = self._operator("storage.resize_")
            known = len(self.allocations)
            self._remeasure([storage], [before])
            self._done(known)


@contextmanager
def _entered(mode: TorchDispatchMode) -> Iterator[None]:
    """The mode, which is set aside while it handles an operator."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


@contextmanager
def _resizing(
    seen: Callable[[torch.UntypedStorage, int], None],
) -> Iterator[None]:
    """Call ``seen`` after each ``UntypedStorage.resize_`` in the block.

    FSDP frees and refills its shards so. The method is no operator; PyTorch's
    ``MemTracker`` replaces it in the same way.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        before = storage.nbytes()
        result = original(storage, size)
        seen(storage, before)
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


def _flatten(existing: tuple) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors with their category, and gradients with the parameters'."""
    for thing in existing:
        if isinstance(thing, nn.Module):
            for tensor in module_tensors(thing):
                yield tensor, "parameters"
                if tensor.grad is not None:
                    yield tensor.grad, "gradients"
        elif isinstance(thing, torch.optim.Optimizer):
            for tensor in optimizer_tensors(thing):
                yield tensor, "optimizer"
        elif isinstance(thing, nn.Parameter):
            yield thing, "parameters"
        elif isinstance(thing, torch.Tensor):
            yield thing, "inputs"
        else:
            raise TypeError(
                f"cannot count {type(thing).__name__}: hand over modules, "
                "optimizers and tensors (unpack lists with *)"
            )


def _last_node() -> int:
    """The number of the newest autograd node."""
    return next_node_number() - 1


def _recomputes(node: torch.autograd.graph.Node) -> bool:
    """Whether a forward pass runs again inside this node's backward.

    Grad mode alone does not tell: it is on in ``create_graph`` and may be off
    inside a checkpoint. Checkpoints recompute in a ``Function`` of their own
    (reentrant, or the reader's) or under a hook on saved tensors.
    """
    if node.name() == "CheckpointFunctionBackward":
        return True
    if isinstance(node, BackwardCFunction) and torch.is_grad_enabled():
        return True
    return hooked_by_checkpoint()


@cache
def _changes(func: OpOverload) -> bool:
    """Whether an operator changes an argument, and may change its size."""
    return func._schema.is_mutable


@cache
def _has_twin(func: OpOverload) -> bool:
    """Whether PyTorch has the operator in place, too."""
    twin = f"{func.overloadpacket.__name__}_"
    return func.namespace == "aten" and hasattr(torch.ops.aten, twin)


def _is_whole(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether a dense tensor fills its storage and is no view."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and not tensor._is_view()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _in_place(func: OpOverload, made: Allocation) -> bool:
    """Whether the node at work writes over what it has made so."""
    name, node = func.overloadpacket.__name__, current_node().name()
    return made.operator.name != "aten.neg" and any(
        node.startswith(its) and name in names
        for its, names in _IN_PLACE.items()
    )


def _handed_on(
    gradient: torch.Tensor, node: torch.autograd.graph.Node
) -> bool:
    """Whether autograd keeps a sparse gradient without a copy of it."""
    return (
        gradient.layout is torch.sparse_coo
        and node.name() == "torch::autograd::AccumulateGrad"
        and gradient._indices().is_contiguous()
        and gradient._values().is_contiguous()
    )


def _reaches_one_twice(node: torch.autograd.graph.Node) -> bool:
    """Whether autograd adds up two of the node's own results."""
    edges = [edge for edge in node.next_functions if edge[0]]
    return len(set(edges)) < len(edges)


def _call() -> tuple[int, int]:
    """The call in Python at work, by its frame and instruction."""
    frame = sys._getframe(1)
    while frame.f_back and (
        str(frame.f_globals.get("__name__")).startswith((__name__, "torch._"))
        or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    return id(frame), frame.f_lasti


@cache
def _name(func: object) -> str:
    """``aten.mm.default`` and ``aten.sum.dim_IntList`` without overload."""
    return str(func).rpartition(".")[0]
