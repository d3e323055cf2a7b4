"""Which module is at work."""

import re
import weakref
from collections.abc import Callable
from contextlib import ExitStack

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from membudget.checks import told
from membudget.internals import saved_tensor_hooks

OUTSIDE = ""
"""The name of what runs outside of every module."""

CHECKPOINT = "torch.utils.checkpoint"
"""The module of PyTorch's that checkpoints."""


class ModuleStack:
    """The names of the modules whose forward pass is running.

    The outermost module goes by its class, those inside it by their path in
    it: ``"GPT"``, ``"blocks"``, ``"blocks.0"``, ``"blocks.0.up"``. While the
    ``with`` block runs, public hooks on all modules keep the stack; they
    look at the calls and change nothing.

    Args:
        *models: outermost modules that are known from the start. A part of
            one keeps its path when it is called alone, as checkpointing does.
        called: is called with the positional arguments of each outermost
            module.

    Attributes:
        names: the running modules' names, the outermost first.
    """

    def __init__(
        self,
        *models: nn.Module,
        called: Callable[[tuple], None] = lambda args: None,
    ) -> None:
        self.names: list[str] = []
        self._called = called
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = (
            weakref.WeakKeyDictionary()
        )
        self._outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: ExitStack | None = None  # while the block runs
        for model in models:
            self._know(model)

    @property
    def name(self) -> str:
        """The innermost running module, or :data:`OUTSIDE`."""
        return self.names[-1] if self.names else OUTSIDE

    def __enter__(self) -> "ModuleStack":
        if self._hooks is not None:
            raise RuntimeError(
                "this stack is kept already: use another one inside"
            )
        self._hooks = ExitStack()
        for handle in (
            register_module_forward_pre_hook(self.begin),
            register_module_forward_hook(self._end, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        told(self._hooks).close()
        self._hooks = None
        self.names.clear()

    def _know(self, model: nn.Module) -> None:
        self._outermost.add(model)
        for path, module in model.named_modules():
            self._paths[module] = path or type(model).__name__

    def begin(self, module: nn.Module, args: tuple) -> None:
        """A call of the module begins."""
        if module not in self._paths and not self.names:
            self._know(module)
        if module in self._outermost and not self.names:
            self._called(args)
        self.names.append(self._paths.get(module, type(module).__name__))

    def _end(self, module: nn.Module, args: tuple, result: object) -> None:
        if self.names:  # empty where the block began inside this module
            self.names.pop()


def block_of(path: str) -> str:
    """The path of the block of a stack that a module is in, or its own."""
    found = re.match(r".*?\b\d+(?=\.|$)", path)
    return found[0] if found else path


def hooked_by_checkpoint() -> bool:
    """Whether the hooks on saved tensors are those of a checkpoint."""
    hooks = saved_tensor_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", None) == CHECKPOINT
