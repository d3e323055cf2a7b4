"""An optimizer that steps in the backward pass, one parameter at a time."""

from math import inf
from weakref import WeakSet

import torch
from torch import nn

from membudget.checks import instance, number, plain_step
from membudget.stepping import parameters_of

_ATTACHED: WeakSet[torch.optim.Optimizer] = WeakSet()

ACCUMULATES = (
    "a second backward pass reaches a parameter that has stepped already. "
    "With micro-batches each would step by itself, which is another update "
    "than that of their sum: accumulate with the ordinary step. If this is "
    "the next step, call `optimizer.step()` after each backward pass: it "
    "marks the end"
)
CLIPS = (
    "max_norm = {} needs the norm of all gradients before the first "
    "parameter steps, and here most are gone by then: clip each gradient by "
    "itself in a hook, run a second backward pass as LOMO does, or take the "
    "ordinary step"
)
SCALES = (
    "a loss scale skips the step if any gradient overflows, which is known "
    "after the last gradient, and here most parameters have stepped by then: "
    "use bf16, which needs no scale, or take the ordinary step"
)
CLOSURE = (
    "a closure runs the backward pass inside the step, and here the step "
    "runs inside the backward pass: call backward() yourself, then "
    "`optimizer.step()` without a closure"
)
COUNTS = (
    "{} counts its steps once for all parameters of a group, so each "
    "parameter would count as a step: use an optimizer that keeps its state "
    "for each parameter, as those of torch.optim do, or the ordinary step"
)


def optimizer_in_backward(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> "SteppingInBackward":
    """Let each parameter step as soon as its gradient is complete.

    The gradient is freed at once. So those of one layer are alive, a weight's
    and its bias's, where the ordinary step holds all; and with ``foreach``
    one parameter's temporaries instead of all. It is the same optimizer: its
    groups, state, schedulers and ``state_dict`` stay, and every update is
    that of the ordinary step to the last bit. Keep ``optimizer.step()`` in
    the loop: it finds no gradients and marks the end of a step. ``foreach``
    and ``fused`` stay as they are and get one tensor at a time. A sparse
    gradient is stepped as by ``optimizer``. A parameter that is used twice
    steps once, after the sum; one without a gradient does not step.

    Source: PyTorch's tutorial "How to save memory by fusing the optimizer
    step into the backward pass".

    Args:
        optimizer: over parameters of one device, none with a gradient.
        max_norm: that of the loop; only None, or infinity, is possible.
        scaler: that of the loop; only None, or one that is off, is possible.

    Returns:
        A context manager, also with ``remove()``: the ordinary step is back
        after it.

    Raises:
        ValueError: LBFGS; no trained parameters, several devices, or
            gradients that are there already; ``max_norm`` or ``scaler``;
            an optimizer that steps in the backward pass already.
        RuntimeError: later, from a second backward pass before
            ``optimizer.step()``, from a closure, or from an optimizer that
            counts its steps for a whole group.

    Example:
        >>> with optimizer_in_backward(optimizer):
        ...     for x, y in batches:
        ...         loss_fn(model(x), y).backward()
        ...         optimizer.step()
    """
    _possible(max_norm, scaler)
    return SteppingInBackward(optimizer, _trained(optimizer))


class SteppingInBackward:
    """What :func:`optimizer_in_backward` returns."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]
    ) -> None:
        self._optimizer = optimizer
        self._stepped: set[int] = set()
        self._inside = False
        hook = optimizer.register_step_pre_hook(self._ends)
        self._handles = [hook]
        for p in trained:
            hook = p.register_post_accumulate_grad_hook(self._take)
            self._handles.append(hook)
        _ATTACHED.add(optimizer)

    def remove(self) -> None:
        """Take the hooks away; what was stepped stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _ATTACHED.discard(self._optimizer)

    def __enter__(self) -> "SteppingInBackward":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _take(self, parameter: nn.Parameter) -> None:
        """Step a parameter: no other has a gradient now."""
        if parameter.grad is None:  # a formula may return none
            return
        if id(parameter) in self._stepped:
            parameter.grad = None
            raise RuntimeError(ACCUMULATES)
        before = self._options()
        self._inside = True
        try:
            self._optimizer.step()
        finally:
            self._inside = False
            parameter.grad = None
        self._stepped.add(id(parameter))
        if list(map(id, self._options())) != list(map(id, before)):
            name = type(self._optimizer).__name__
            raise RuntimeError(COUNTS.format(name))

    def _options(self) -> list[object]:
        """The values of all groups, such as learning rates."""
        return [v for g in self._optimizer.param_groups for v in g.values()]

    def _ends(self, optimizer, args: tuple, kwargs: dict) -> None:
        """``optimizer.step()`` is called: by the hook, or by the loop."""
        if self._inside:
            return
        if any(value is not None for value in [*args[1:], *kwargs.values()]):
            raise RuntimeError(CLOSURE)
        self._stepped.clear()


def _possible(
    max_norm: float | None, scaler: torch.amp.GradScaler | None
) -> None:
    """Refuse what needs all gradients at once."""
    if max_norm is not None:
        number(max_norm, "max_norm", above=0, infinite=True)
        if max_norm != inf:
            raise ValueError(CLIPS.format(max_norm))
    if scaler is None:
        return
    use = "a torch.amp.GradScaler or None"
    if instance(scaler, torch.amp.GradScaler, "scaler", use).is_enabled():
        raise ValueError(SCALES)


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that can step one by one."""
    every = parameters_of(plain_step(optimizer))
    found = [p for p in every if p.requires_grad]
    if not found:
        raise ValueError(
            "the optimizer has no parameters that are trained "
            "(requires_grad): make it with those of the model"
        )
    if len({p.device for p in found}) > 1:
        raise ValueError(
            "the parameters are on several devices, where the backward pass "
            "runs in several threads: use one device, or the ordinary step"
        )
    if any(p.grad is not None for p in every):
        raise ValueError(
            "some parameters have a gradient already, which the first hook "
            "would step: call `optimizer.zero_grad()` before"
        )
    if optimizer in _ATTACHED:
        raise ValueError(
            f"this {type(optimizer).__name__} steps in the backward pass "
            "already: call remove() on what the first call returned"
        )
    return found
