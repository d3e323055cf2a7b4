"""What is remembered of a script while it runs: next to nothing.

Each call of an outermost module is noticed by public hooks that are gone
while it runs, so that the modules inside it have none. Where CUDA's allocator
gives up, what is alive is counted at once, because the exception frees some
of it on its way.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from membudget.command._private import (
    in_backward,
    on_cuda,
    tree_flatten,
    tree_unflatten,
)


class Shape:
    """A tensor that may be gone: its shape, and where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.device = tensor.device

    @property
    def alive(self) -> torch.Tensor | None:
        """Itself, if it is still there."""
        return self._tensor()

    def tensor(self) -> torch.Tensor:
        """Itself, or one like it: of ones, or on meta if it is of floats.

        Models look at the values of whole numbers, as in a mask.
        """
        if self.alive is not None:
            return self.alive.detach()
        if self.shape and self.dtype.is_floating_point:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.ones(self.shape, dtype=self.dtype)


@dataclass
class Call:
    """A call of an outermost module, without its data.

    Attributes:
        model: a weak reference to the module.
        leaves: its arguments; of a tensor, the :class:`Shape`.
        form: how the leaves make up ``(args, kwargs)``.
    """

    model: weakref.ref[nn.Module]
    leaves: list[Any]
    form: Any

    @classmethod
    def of(cls, model: nn.Module, args: tuple, kwargs: dict) -> "Call":
        leaves, form = tree_flatten((args, kwargs))
        shapes = [Shape(x) if torch.is_tensor(x) else x for x in leaves]
        return cls(weakref.ref(model), shapes, form)

    def arguments(self, leaves: list[Any]) -> tuple[tuple, dict]:
        """The arguments, made up of these leaves."""
        return tree_unflatten(leaves, self.form)


class Watch:
    """Watches the script from when it has imported torch.

    Attributes:
        call: the last call that a backward pass may follow, of a module with
            something to train; None before the first.
        seen: what ``look`` saw when CUDA's allocator last gave up.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self.seen: Any = None
        self._hook = register_module_forward_pre_hook(self._begins)
        on_cuda(self._refused)

    def _begins(self, module: nn.Module, args: tuple) -> None:
        self._hook.remove()

        def ends(*_: object) -> None:
            end.remove()
            self._hook.remove()  # of another thread
            self._hook = register_module_forward_pre_hook(self._begins)

        end = module.register_forward_hook(ends, always_call=True)
        trained = (p for p in module.parameters() if p.requires_grad)
        if (
            torch.is_grad_enabled()
            and not in_backward()
            and any(True for _ in trained)
        ):
            kwargs = sys._getframe(1).f_locals.get("kwargs", {})
            self.call = Call.of(module, args, kwargs)
            self.training(module, args)

    def training(self, module: nn.Module, args: tuple) -> None:
        """A call that a backward pass may follow begins: :attr:`call`."""

    def end(self) -> None:
        """The script has ended."""
        self._hook.remove()

    def _refused(self, device: int, asked: int, total: int, free: int) -> None:
        from membudget.command.census import look

        self.seen = None
        self.seen = look(torch.device("cuda", device), self.call)
