"""One training step under the tracker, with its memory or without."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from membudget.measuring.tracker import PeakTracker

Loss = Callable[..., torch.Tensor]
"""``loss(model, *batch)``: the mean loss of a batch, as a scalar tensor."""


def trace_step(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    device: torch.device | str | None = None,
    budget: int | None = None,
) -> PeakTracker:
    """Track one training step: forward, backward, optimizer step.

    A step that is not tracked comes first and makes the optimizer's states;
    both change the model as training steps do. Gradients are None before and
    after. The marks say where ``"forward"``, ``"backward"`` and ``"step"``
    begin.

    Args:
        model: a model with trained parameters.
        loss: called as ``loss(model, *batch)``.
        *batch: tensors with the samples along their first dimension; alive
            during the whole step.
        optimizer: steps where it is given.
        micro_batch: samples that run at once; the batch is cut, and the
            gradients are summed with the micro-batches' shares as weights.
        device: count only what is on it, as :class:`PeakTracker`.
        budget: bytes, as for :class:`PeakTracker`.

    Raises:
        ValueError: a model without trained parameters, a loss that is not a
            scalar tensor with a graph, a micro-batch that is not a positive
            whole number, or a batch that cannot be cut into micro-batches.
        TypeError: something else than tensors in the batch.
        torch.OutOfMemoryError: the budget does not suffice.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameters that are trained "
            "(requires_grad): hand over the model whose step is to be "
            "measured"
        )
    _only_tensors(batch)
    samples = size = 1  # as one, however many they are
    if micro_batch is not None:
        samples, size = _samples(batch), _positive(micro_batch)

    def step(mark: Callable[[str], None]) -> None:
        for start in range(0, samples, size):
            part = batch
            if size < samples:
                part = tuple(t[start : start + size] for t in batch)
            mark("forward")
            value = _checked(loss(model, *part))
            mark("backward")
            if size < samples:
                value = value * (len(part[0]) / samples)
            value.backward()
            del value
        if optimizer is not None:
            mark("step")
            optimizer.step()
        model.zero_grad()

    model.zero_grad()
    try:
        step(lambda label: None)
        existing = [model, *([optimizer] if optimizer else []), *batch]
        with PeakTracker(*existing, device=device, budget=budget) as tracker:
            step(tracker.mark)
    finally:
        model.zero_grad()
    return tracker


def dry_run(
    model: nn.Module,
    loss: Loss,
    *batch: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    device: torch.device | str | None = None,
    on: torch.device | str | None = None,
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

    The others are those of :func:`trace_step`. Tensors that a module holds
    in a list or another structure of its own are not converted; a step that
    uses them is refused. Hooks on parameters are not copied.

    Raises:
        ValueError: as :func:`trace_step`, or a step that needs the values of
            tensors (``.item()``, an index by condition), or other tensors
            than the model's and the batch's.
    """
    _only_tensors(batch)
    device_of_model = next(
        (p.device for p in model.parameters()), torch.device("cpu")
    )
    if on is not None and device_of_model.type == "meta":
        device_of_model = torch.device(on)
    fake = FakeTensorMode()
    memo = {id(t): _fake(fake, t, on) for t in _held(model, optimizer)}
    model, optimizer = copy.deepcopy((model, optimizer), memo)
    with fake:
        batch = tuple(_input(fake, t, device_of_model) for t in batch)
        try:
            return trace_step(
                model,
                loss,
                *batch,
                optimizer=optimizer,
                micro_batch=micro_batch,
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


def _only_tensors(batch: tuple) -> None:
    for item in batch:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"the batch holds {type(item).__name__}: hand over tensors, "
                "and leave the rest to the loss function"
            )


def _samples(batch: tuple[torch.Tensor, ...]) -> int:
    """How many samples the batch has."""
    counts = {len(t) if t.ndim else 0 for t in batch}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"the batch's tensors have the shapes "
            f"{[tuple(t.shape) for t in batch]}: to cut it into "
            "micro-batches, use tensors with the same number of samples, at "
            "least 1, along the first dimension"
        )
    return counts.pop()


def _positive(micro_batch: int) -> int:
    if not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(
            f"micro_batch is {micro_batch!r}: use a positive whole number"
        )
    return micro_batch


def _checked(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"the loss function returned {value!r}: return the loss, a "
            "scalar tensor"
        )
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"the loss has the shape {tuple(value.shape)} and "
            f"requires_grad={value.requires_grad}: return a scalar that was "
            "computed from the model's parameters"
        )
    return value
