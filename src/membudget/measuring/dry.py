"""One training step under the tracker, without its memory."""

import copy

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from membudget.checks import device as checked_device
from membudget.checks import module, stepper
from membudget.measuring.step import Loss, only_tensors, trace_step
from membudget.measuring.tracker import COMPILED, PeakTracker

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
    operators as on the model's device and give the same bytes, though none
    is allocated. So a step that does not fit can be measured; the batch may
    be on ``meta`` and never have been anywhere else. Other operators than in
    a real step may stand between those that allocate. A model that is too
    large is built on ``meta``; say then ``on`` which device it is meant to
    be, because on ``meta`` itself attention is not fused.

    Three differences are known. Some losses (``F.mse_loss``,
    ``smooth_l1_loss``, ``binary_cross_entropy``) keep their scalar in a
    storage for one number per element, which the dry run does not see. And
    batch norm under autocast keeps mean and 1/σ of each channel in fp32,
    which the dry run takes for 16 bits: 4 bytes less for each channel. Where
    its input needs no gradient, the dry run makes one all the same.

    Args:
        on: the device that tensors on ``meta`` stand for.
        estimate: take operators of :data:`UNSURE`, too. The bytes are then
            too few where :func:`unsure` names an operator; check them by a
            real step.

    The others are those of :func:`trace_step`. Tensors that a module holds
    in a list or another structure of its own are not converted; a step that
    uses them is refused. Hooks on parameters are not copied.

    Raises:
        ValueError: as :func:`trace_step`, or a step that needs the values of
            tensors (``.item()``, an index by condition), or other tensors
            than the model's and the batch's, or an operator of
            :data:`UNSURE`.
        RuntimeError: something compiled is called, as :class:`PeakTracker`.
    """
    only_tensors(batch)
    module(model)
    if any(part._compiled_call_impl for part in model.modules()):
        raise RuntimeError(COMPILED)  # a copy is not compiled
    if optimizer is not None:
        stepper(optimizer)
    if on is not None:
        on = checked_device(on, "on")
    device_of_model = next(
        (p.device for p in model.parameters()), torch.device("cpu")
    )
    if on is not None and device_of_model.type == "meta":
        device_of_model = on
    fake = FakeTensorMode()
    memo = {id(t): _fake(fake, t, on) for t in _held(model, optimizer)}
    model, optimizer = copy.deepcopy((model, optimizer), memo)
    with fake:
        batch = tuple(_input(fake, t, device_of_model) for t in batch)
        try:
            tracker = trace_step(
                model,
                loss,
                *batch,
                optimizer=optimizer,
                micro_batch=micro_batch,
                keep_gradients=keep_gradients,
                inference=inference,
                device=device,
            )
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedFakeTensorException,
        ) as error:
            raise ValueError(
                f"{error} needs the values of a tensor, which a dry run has "
                "not: use no .item() and no index by condition in the loss, "
                "or measure with trace_step"
            ) from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise ValueError(
                "the loss uses a tensor that is neither the model's nor the "
                "batch's: make it a buffer, or hand it over in the batch"
            ) from error
    if not estimate and (unknown := unsure(tracker)):
        reasons = "; ".join(f"{name}: {why}" for name, why in unknown.items())
        raise ValueError(
            f"a dry run does not know all bytes of {reasons}. Measure a real "
            "step with trace_step, or take an estimate that is too low "
            "(estimate=True)"
        )
    return tracker


def _held(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[torch.Tensor]:
    """The tensors of the model's modules and of the optimizer."""
    dicts = [vars(module) for module in model.modules()]
    if optimizer is not None:
        dicts += [*optimizer.param_groups, *optimizer.state.values()]
    others = [t for d in dicts for t in d.values() if torch.is_tensor(t)]
    return [*model.parameters(), *model.buffers(), *others]


def _fake(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    on: torch.device | str | None = None,
) -> torch.Tensor:
    """The tensor without its data; a count keeps its value."""
    if on is not None and tensor.device.type == "meta":
        with mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=on
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
        return mode.from_tensor(tensor)
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=device,
        requires_grad=tensor.requires_grad,
    )
