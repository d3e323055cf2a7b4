"""Who is alive on a device, found without having watched: a census.

Python's garbage collector knows the modules, the optimizers and the tensors
that Python can reach. Autograd's graph leads from these to what it saved.
"""

import gc
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from membudget.checks import told
from membudget.command._private import snapshot_of
from membudget.command.watch import Call, Shape
from membudget.internals import current_node
from membudget.measuring.device import read_memory
from membudget.measuring.modules import block_of
from membudget.measuring.monitor import process_limit
from membudget.measuring.snapshot import summarise
from membudget.measuring.storages import (
    optimizer_tensors,
    storages,
    tensors,
)
from membudget.measuring.tracker import BEFORE, Allocation, Operator
from membudget.stepping import parameters_of

VIEWS = re.compile(
    r"(Unsafe)?(View|T|Transpose|Permute|Expand|Unsqueeze|"
    r"Squeeze|Slice|Select|Alias|AsStrided|Split\w*)Backward"
)
PASSED = re.compile(r"(T|Transpose|Permute|View|Expand|ToCopy)Backward")
"""Nodes between a parameter and what is computed with it."""


@dataclass(frozen=True)
class Seen:
    """What was alive on a device, in bytes.

    Attributes:
        device: which.
        alive: what the census found.
        used: in use, by whatever.
        budget: what can be in use.
        free: reserved by CUDA's allocator and not in use.
        largest_free: the largest piece of that.
        asked: what was refused, if the allocator's history tells.
        node: the operator of autograd's node at work, and its module.
        paths: of each module its path in the outermost one, by ``id``.
    """

    device: torch.device
    alive: list[Allocation]
    used: int
    budget: int
    free: int
    largest_free: int
    asked: int | None
    node: Operator
    paths: dict[int, str]


def look(
    device: torch.device, call: Call | None, limit: int | None = None
) -> Seen:
    """Take the census of a device now.

    Args:
        call: its arguments are inputs.
        limit: bytes of data that the process may have, on a CPU.
    """
    people = _People(device, call)
    node = people.node_at_work()
    if device.type == "cuda":
        index = device.index or 0
        snapshot, refused = snapshot_of(index)
        cached = summarise(snapshot, index, largest=0)
        return Seen(
            device,
            people.alive,
            told(read_memory(device).requested),
            process_limit(device),
            cached.free,
            cached.largest_free,
            refused,
            node,
            people.paths,
        )
    used = told(read_memory(device).process) if limit is None else data_size()
    budget = process_limit(device) if limit is None else limit
    return Seen(
        device, people.alive, used, budget, 0, 0, None, node, people.paths
    )


def data_size() -> int:
    """Bytes of the process that RLIMIT_DATA counts, on Linux."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


class _People:
    """The census of a device.

    Attributes:
        alive: each storage once, in the first category that claims it.
        paths: of each module, by ``id``.
    """

    def __init__(self, device: torch.device, call: Call | None) -> None:
        self.device, self.alive = device, list[Allocation]()
        self.paths: dict[int, str] = {}
        self._known: set[int] = set()
        self._owners: dict[int, str] = {}  # the module of each parameter
        self._marks: list[tuple[int, str]] = []
        things = gc.get_objects()
        modules = _instances(things, nn.Module)
        mine = _instances(things, torch.Tensor)
        self._name(modules)
        for module in modules:
            self._held(module)
        for optimizer in _instances(things, torch.optim.Optimizer):
            for tensor in optimizer_tensors(optimizer):
                self._add(tensor, "optimizer", BEFORE)
        for leaf in call.leaves if call else ():
            if isinstance(leaf, Shape) and leaf.alive is not None:
                self._add(leaf.alive, "inputs", BEFORE)
        self._graph(mine)
        for tensor in mine:
            kind = "temporaries" if tensor.grad_fn is None else "activations"
            self._add(tensor, kind, self._maker(tensor))

    def _add(
        self, tensor: torch.Tensor, category: str, operator: Operator
    ) -> None:
        try:
            found = storages(tensor)
        except (NotImplementedError, RuntimeError):
            return  # it has none, as a tensor of vmap
        for storage in found:
            here = storage.device.type == self.device.type and (
                storage.device.index in (None, self.device.index)
            )
            if here and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.alive.append(
                    Allocation(storage.nbytes(), -1, category, operator)
                )

    # Modules

    def _name(self, modules: list[nn.Module]) -> None:
        inner = {id(m) for one in modules for m in one._modules.values()}
        for module in modules:
            if id(module) not in inner:
                for path, part in module.named_modules():
                    self.paths[id(part)] = path or type(part).__name__

    def _held(self, module: nn.Module) -> None:
        path = self.paths.get(id(module), "")
        of = Operator("", block_of(path), "")
        for tensor in module._parameters.values():
            if tensor is not None:
                self._owners[id(tensor)] = path
                self._add(tensor, "parameters", of)
                if tensor.grad is not None:
                    self._add(tensor.grad, "gradients", of)
        for tensor in module._buffers.values():
            if tensor is not None:
                self._add(tensor, "parameters", of)

    # Autograd's graph

    def _graph(self, mine: list[torch.Tensor]) -> None:
        nodes = _reachable([t.grad_fn for t in mine if t.grad_fn is not None])
        for node in nodes:
            path = self._parameter_of(node)
            if path is not None:
                self._marks.append((node._sequence_nr(), path))
        self._marks.sort()
        for node in nodes:
            for tensor in _saved(node):
                self._add(tensor, "activations", self._maker(tensor, node))

    def _parameter_of(self, node: Any) -> str | None:
        """The path of the module whose parameter the node computes with."""
        for below, _ in node.next_functions:
            while below is not None and PASSED.match(below.name()):
                below = below.next_functions[0][0]
            owner = getattr(below, "variable", None)
            if id(owner) in self._owners:
                return self._owners[id(owner)]
        return None

    def _maker(self, tensor: torch.Tensor, node: Any = None) -> Operator:
        """What made a tensor; ``node`` saved it, if its own is unknown."""
        node = tensor.grad_fn or node
        while node is not None and VIEWS.match(node.name()):
            below = node.next_functions[0][0]
            if below is None or hasattr(below, "variable"):
                break
            node = below
        return BEFORE if node is None else self._operator(node, "forward")

    def _operator(self, node: Any, phase: str) -> Operator:
        """The operator whose node it is, in its module.

        That of a node without parameters is what the modules have in common
        that were at work before and after it; without both it has no name.
        """
        name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        path = self._parameter_of(node)
        at = bisect_right(self._marks, (node._sequence_nr(), "\uffff"))
        if path is None and 0 < at < len(self._marks):
            path = _common([of for _, of in self._marks[at - 1 : at + 1]])
        return Operator(name, path or "", phase)

    def node_at_work(self) -> Operator:
        """That of autograd's thread, in which an observer is called."""
        node = current_node()
        return BEFORE if node is None else self._operator(node, "backward")


def _instances(things: list[Any], kind: type) -> list[Any]:
    """Those of a class; asking them themselves would wake lazy ones."""
    return [thing for thing in things if issubclass(type(thing), kind)]


def _common(paths: list[str]) -> str:
    """What their beginnings have in common."""
    parts = zip(*(path.split(".") for path in paths), strict=False)
    same = takewhile(lambda names: len(set(names)) == 1, parts)
    return ".".join(names[0] for names in same)


def _reachable(nodes: list[Any]) -> list[Any]:
    """The nodes of the graph below these."""
    found = dict.fromkeys(nodes)
    waiting = list(found)
    while waiting:
        for below, _ in waiting.pop().next_functions:
            if below is not None and below not in found:
                found[below] = None
                waiting.append(below)
    return list(found)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """What a node keeps, as it is: packed by a hook, it is not unpacked."""
    for name in dir(type(node)):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
                held = saved if isinstance(saved, list | tuple) else [saved]
                yield from tensors([one.data for one in held if one])
            except RuntimeError:  # freed by now
                continue


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    """The one that trains the model's parameters, not one around it."""
    kind = torch.optim.Optimizer
    mine = {id(p) for p in model.parameters()}
    for one in _instances(gc.get_objects(), kind):
        wraps = isinstance(getattr(one, "optimizer", None), kind)
        if not wraps and mine & set(map(id, parameters_of(one))):
            return one
    return None
