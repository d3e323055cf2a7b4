"""One training step under the tracker, without its memory."""

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import torch
from torch import nn

from membudget.checks import device as checked_device
from membudget.checks import flag, instance, module, plain_step, shown
from membudget.internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    fakes_taken_together,
    logging_nothing,
)
from membudget.measuring.fakes import (
    CONVERTED,
    SMALL,
    SPARSE,
    Fakes,
    is_small,
    is_whole,
    remember,
)
from membudget.measuring.step import Loss, only_tensors, trace_step
from membudget.measuring.storages import module_tensors
from membudget.measuring.tracker import COMPILED, PeakTracker
from membudget.measuring.units import format_bytes

Ran = TypeVar("Ran")

LOOKED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What PyTorch raises where a fake tensor's values are asked for."""

VALUES = (
    "{} needs the values of a tensor, which a dry run has not: hand integers "
    "over with their data, not on meta, and a slice of a large tensor as its "
    "clone(); use no .item() and no index by condition in the loss; choose "
    "an optimizer that does not look at values, such as AdamW, and an "
    "implementation of the model that does not (for the experts of "
    'transformers experts_implementation="batched_mm"); or measure a real '
    "step with trace_step"
)

NESTED = (
    "PyTorch's fake tensors know few operators on nested tensors: pad them "
    "(to_padded_tensor), or measure a real step with trace_step"
)

UNSURE = {
    "aten.mkldnn_rnn_layer": (
        "the workspace that oneDNN keeps for the backward pass of an LSTM "
        "depends on the processor"
    ),
    "aten._cudnn_rnn": (
        "the reserve space that cuDNN keeps for the backward pass of an RNN "
        "depends on the GPU"
    ),
}
"""Operators whose bytes a dry run does not know, and why."""


def unsure(tracker: PeakTracker) -> dict[str, str]:
    """Those operators of :data:`UNSURE` that ran, with the reason."""
    use = "a PeakTracker, as of dry_run"
    instance(tracker, PeakTracker, "tracker", use)
    ran = {operator.name for operator in tracker.operators}
    return {name: why for name, why in UNSURE.items() if name in ran}


def dry_run(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    keep_gradients: bool = False,
    inference: bool = False,
    device: torch.device | str | None = None,
    on: torch.device | str | None = None,
    estimate: bool = False,
) -> PeakTracker:
    """:func:`trace_step` without its memory: tensors without data.

    The model, the optimizer and the batch are left as they are. Copies of
    them as fake tensors (``torch._subclasses.FakeTensorMode``) take the same
    operators as on the model's device and give the same bytes, though
    nothing is allocated. So a step that does not fit can be measured; the
    batch may be on ``meta`` and never have been anywhere else. A model that
    is too large is built on ``meta``; say then ``on`` which device it is
    meant to be, because on ``meta`` itself attention is not fused.

    Integers and booleans whose storages take at most 16 MiB together keep
    their values, as models look at masks and positions; those on ``meta``
    have none. Hand a slice of a large tensor over as its ``clone()``. On a CPU
    the bytes are those of its kernels. On another device they are PyTorch's
    stand-ins', some of which are a few bytes per channel off.

    Args:
        on: the device that tensors on ``meta`` stand for.
        estimate: take operators of :data:`UNSURE`, too. The bytes are then
            too few where :func:`unsure` names an operator; check them by a
            real step.

    The others are those of :func:`trace_step`. Tensors that a module holds
    in a list or another structure of its own are not converted; a step that
    uses them is refused, and so are hooks on parameters.

    Raises:
        ValueError: as :func:`trace_step`, or a step that needs the values of
            tensors (``.item()``, an index by condition), or other tensors
            than the model's and the batch's, sparse tensors, an operator of
            :data:`UNSURE`, a module that is converted while it runs, or a
            device on which PyTorch does not run here.
        RuntimeError: something compiled is called, as :class:`PeakTracker`.
    """
    flag(estimate, "estimate")
    dry = Dry(model, *batch, optimizer=optimizer, on=on)
    tracker: PeakTracker = dry.trace(
        loss,
        *batch,
        micro_batch=micro_batch,
        keep_gradients=keep_gradients,
        inference=inference,
        device=device,
    )
    if not estimate:
        refuse_unsure(tracker)
    return tracker


class Dry:
    """A model and its optimizer without data, for steps of any size.

    Args:
        *batch: an example; decides with the model's tensors which of them
            are small enough to keep their values.
        others: as for :func:`dry_run`.
    """

    def __init__(
        self,
        model: nn.Module,
        *batch: torch.Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        on: torch.device | str | None = None,
    ) -> None:
        only_tensors(batch)
        module(model)
        if any(part._compiled_call_impl for part in model.modules()):
            raise RuntimeError(COMPILED)  # a copy is not compiled
        if optimizer is not None:
            plain_step(optimizer)
        if on is not None:
            on = checked_device(on, "on")
        self._held = held_tensors(model, optimizer)
        if any(t.is_nested for t in [*batch, *self._held]):
            raise ValueError(NESTED)
        if any(t.layout is not torch.strided for t in [*batch, *self._held]):
            raise ValueError(SPARSE)
        _without_attributes(model)
        self._device = next(
            (p.device for p in model.parameters()), torch.device("cpu")
        )
        if on is not None and self._device.type == "meta":
            self._device = on
        _runnable(self._device)
        for tensor in batch:
            no_large_mask(tensor, tensor.nbytes)
        if any(
            p._backward_hooks or p._post_accumulate_grad_hooks
            for p in model.parameters()
        ):
            raise ValueError(
                "the model's parameters have hooks, which a dry run does not "
                "copy: remove them, or measure a real step with trace_step"
            )
        self._fake = FakeTensorMode()
        kept = self._kept(batch)
        bases: dict = {}
        self._copies = {
            id(t): without_data(self._fake, t, on, bases)
            for t in self._held
            if id(t) not in kept
        }
        self._model, self._optimizer = copy.deepcopy(
            (model, optimizer), self._copies
        )

    def trace(
        self,
        loss: Loss,
        *batch: torch.Tensor,
        run: Callable[..., Ran] = trace_step,
        **how: object,
    ) -> Ran:
        """A step of the model, or something else, without data.

        Args:
            run: called as :func:`trace_step`, which it is by default; what
                it does to the model and the optimizer stays.
            how: further arguments.
        """
        kept = self._kept(batch)
        parts = [
            _moved(copy.deepcopy(t, self._copies), self._device)
            if id(t) in kept
            else _input(self._fake, t, self._device)
            for t in batch
        ]
        fakes = Fakes(self._fake)
        with self._fake, fakes, logging_nothing(), fakes_taken_together():
            try:
                return run(
                    self._model,
                    loss,
                    *parts,
                    optimizer=self._optimizer,
                    **how,
                )
            except Exception as error:
                if reason := self._reason(error, fakes):
                    raise ValueError(reason) from error
                raise

    def _reason(self, error: Exception, fakes: Fakes) -> str:
        """Why it does not run without data; empty for any other error."""
        said = str(error)
        if isinstance(error, LOOKED):
            return VALUES.format(said)
        if ".numpy() is not supported" in said:
            return VALUES.format(".numpy()")
        if isinstance(error, ValueError):
            return ""
        if fakes.nested:
            return f"{NESTED} (PyTorch says: {said})"
        if CONVERTED in said:
            return (
                "a module is converted while the model runs (Module.to), "
                "which a dry run cannot follow: convert it before, or "
                "measure with trace_step"
            )
        unknown = NotImplementedError, UnsupportedOperatorException
        if isinstance(error, unknown) or "fake impl" in said:
            # "fake impl" is missing from an operator of one's own
            return (
                f"{type(self._model).__name__} does not run without data: "
                f"{said}. Use operators that PyTorch knows on meta, or "
                "measure a real step with membudget.measuring.trace_step"
            )
        return ""

    def _kept(self, batch: tuple[torch.Tensor, ...]) -> set[int]:
        """Which tensors keep their values."""
        if self._device.type == "meta":
            return set()
        return _kept([*batch, *self._held])


def refuse_unsure(tracker: PeakTracker) -> None:
    """Refuse a step with operators of :data:`UNSURE`."""
    if unknown := unsure(tracker):
        reasons = "; ".join(f"{name}: {why}" for name, why in unknown.items())
        raise ValueError(
            f"a dry run does not know all bytes of {reasons}. Measure a real "
            "step with trace_step, or take an estimate that is too low "
            "(estimate=True)"
        )


def _without_attributes(model: nn.Module) -> None:
    """Refuse weights that are more than numbers, as those in 4 bits."""
    for name, weight in model.named_parameters():
        kind = type(weight)
        own = [key for key in vars(weight) if not key.startswith("_")]
        if own and kind.__module__.partition(".")[0] != "torch":
            raise ValueError(
                f"{name} is a {kind.__name__}, which keeps more than its "
                f"numbers ({shown(own)}), and a dry run copies these alone: "
                "measure a real step with trace_step, or hand over the model "
                "as it was before its weights were converted"
            )


def _runnable(device: torch.device) -> None:
    """Refuse a device for which this PyTorch has no operators."""
    known = ["cpu", "meta"]
    if here := torch.accelerator.current_accelerator(check_available=True):
        known.append(here.type)
    if device.type not in known:
        raise ValueError(
            f"the step is to run on {device}, and here PyTorch runs on "
            f'{", ".join(known)}: build the model on meta and say on="cpu" '
            "for the operators of a CPU, or use a PyTorch and a machine with "
            f"{device.type}"
        )


def held_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[torch.Tensor]:
    """The tensors of the model's modules and of the optimizer."""
    dicts = [vars(module) for module in model.modules()]
    if optimizer is not None:
        dicts += [*optimizer.param_groups, *optimizer.state.values()]
    others = [t for d in dicts for t in d.values() if torch.is_tensor(t)]
    return [*module_tensors(model), *others]


def no_large_mask(tensor: torch.Tensor, size: int) -> None:
    """Refuse a large mask of ones: models look whether it is one."""
    if (
        size > SMALL
        and not tensor.is_meta
        and not isinstance(tensor, FakeTensor)
        and is_whole(tensor)
        and (tensor == tensor.flatten()[0]).all()
    ):
        raise ValueError(
            f"integers of {format_bytes(size)} are all the same, as in a mask "
            "of ones that some models look at, and a dry run keeps the values "
            f"of at most {format_bytes(SMALL)}: leave the mask out, or ask "
            "for fewer samples"
        )


def _kept(held: list[torch.Tensor]) -> set[int]:
    """Which of them keep their values: the smallest, until it is enough."""
    found = {
        id(t): t.untyped_storage().nbytes()
        for t in held
        if is_small(t) and not isinstance(t, FakeTensor | nn.Parameter)
    }
    order = sorted(found, key=lambda key: found[key])
    total = accumulate(found[key] for key in order)
    return {k for k, used in zip(order, total, strict=True) if used <= SMALL}


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, with its strides."""
    if tensor.device == device or 0 in tensor.shape:
        return tensor.to(device)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    whole = tensor.as_strided((span,), (1,)).to(device)
    return whole.as_strided(tensor.shape, tensor.stride(), 0)


def without_data(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    on: torch.device | str | None,
    bases: dict[int, torch.Tensor],
) -> torch.Tensor:
    """The tensor without its data; a count keeps its value.

    Those on ``meta`` that share a storage share it ``on`` the device, too;
    ``bases`` has the storages made so far.
    """
    if on is not None and tensor.device.type == "meta":
        storage = tensor.untyped_storage()
        with mode:
            if storage._cdata not in bases:
                bases[storage._cdata] = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, device=on
                )
            made = (
                bases[storage._cdata]
                .view(tensor.dtype)
                .as_strided(
                    tensor.shape, tensor.stride(), tensor.storage_offset()
                )
                .detach()
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)
    count = tensor.ndim == 0 and not isinstance(tensor, nn.Parameter)
    if count and tensor.device.type == "cpu":
        known = getattr(tensor, "constant", tensor)  # of a fake tensor
        if known is not None:
            value = known.item()
            with mode:
                return torch.tensor(value, dtype=tensor.dtype)
    return mode.from_tensor(tensor)


def _input(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """A tensor of the batch without its data, on the device."""
    if tensor.device == device:
        made = mode.from_tensor(tensor)
    else:
        with mode:
            made = torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device=device,
                requires_grad=tensor.requires_grad,
            )
    remember(made, _number(tensor))
    return made


def _number(tensor: torch.Tensor) -> complex | None:
    """The number that fills a tensor's storage, as a mask of ones."""
    storage = tensor.untyped_storage()
    small = 0 < storage.nbytes() <= SMALL
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not small:
        return None
    values = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    values.set_(storage)
    return values[0].item() if (values == values[0]).all() else None
