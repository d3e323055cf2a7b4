"""The sizes and times of a real chain, for the tape machine."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.checkpointing.running import run_stage, stages_of
from membudget.checkpointing.tape import Stage
from membudget.checks import flag, instance
from membudget.internals import FakeTensor, FakeTensorMode
from membudget.measuring import FlopCounter, PeakTracker, unsure
from membudget.measuring.dry import held_tensors, without_data
from membudget.measuring.fakes import Fakes


def profile(
    *stages: nn.Module, x: torch.Tensor, gradients: bool = True
) -> list[Stage]:
    """Measure each stage of a chain, one at a time.

    Every stage runs a few times, forward and backward, under the peak
    tracker and the FLOP counter; the loss is the ``sum()`` of the last one's
    output. Parameters, their gradients, buffers and random number generators
    are afterwards as they were.

    What the tape machine makes of it is the peak of a real step but for the
    loss and its gradient. It counts too much by one bias gradient at most
    where a tape was recomputed, which PyTorch frees before; for a segment of
    frozen stages before everything that is trained, which PyTorch neither
    keeps nor recomputes; for one that ends in a view, before which PyTorch
    stops; and for a chain that ends in a view, where the gradient of
    ``sum()`` stays a single number.

    Args:
        *stages: as for :class:`membudget.checkpointing.Checkpointed`.
        x: the input of the first stage; one that requires a gradient, as
            behind an embedding, gets it. On ``meta``, as the stages, nothing
            is allocated: fake tensors take a CPU's operators, and a stage's
            two runs are compared by their shapes alone.
        gradients: whether the parameters have their gradients when the step
            begins (accumulation, or ``zero_grad(set_to_none=False)``).
            Otherwise the backward pass of a stage makes them, and they stay.

    Returns:
        One :class:`membudget.checkpointing.Stage` for each; bytes, and FLOPs
        of matrix products and convolutions as time.

    Raises:
        ValueError: a stage that computes something else when it runs again on
            the same input with the same random numbers; stages that share a
            trained parameter; a last stage whose output depends on nothing
            that is trained; on ``meta``, an operator of
            :data:`membudget.measuring.UNSURE`.
        TypeError: a stage that returns something else than a tensor.
        RuntimeError: a stage that changes its input in place.
    """
    modules = stages_of(*stages)
    instance(x, torch.Tensor, "x", "a tensor"), flag(gradients, "gradients")
    _nothing_shared(modules)
    result: list[Stage] = []
    with ExitStack() as around:
        if x.is_meta:
            fake = FakeTensorMode()
            modules, x = _fakes(fake, modules, x)
            around.enter_context(fake)
            around.enter_context(Fakes(fake))
        around.enter_context(_left_alone(modules))
        value = x.detach().requires_grad_(x.requires_grad)
        for index, module in enumerate(modules):
            last = index == len(modules) - 1
            measured = _Measured(module, index, value, gradients, last)
            result.append(measured.stage())
            value = measured.output
    return result


def _nothing_shared(modules: list[nn.Module]) -> None:
    """Refuse parameters whose gradients several stages add up."""
    owner: dict[nn.Parameter, int] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            first = owner.setdefault(parameter, index)
            if first != index and parameter.requires_grad:
                raise ValueError(
                    f"stages {first} and {index} share the parameter {name}, "
                    "whose gradients are added up, and here each stage is "
                    "measured alone: give each its own, or measure the whole "
                    "step with PeakTracker"
                )


def _fakes(
    mode: FakeTensorMode, modules: list[nn.Module], x: torch.Tensor
) -> tuple[list[nn.Module], torch.Tensor]:
    """Copies of them on a CPU, without data."""
    outer = nn.ModuleList(modules)
    bases: dict[int, torch.Tensor] = {}
    fakes = {
        id(tensor): without_data(mode, tensor, "cpu", bases)
        for tensor in [*held_tensors(outer), x]
    }
    return list(copy.deepcopy(outer, fakes)), fakes[id(x)]


@contextmanager
def _left_alone(modules: list[nn.Module]) -> Iterator[None]:
    """Everything is afterwards as it was before."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for outer in modules
        for module in outer.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    parameters = [p for m in modules for p in m.parameters()]
    grads = [p.grad for p in parameters]
    devices = range(torch.cuda.device_count() * torch.cuda.is_initialized())
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        for module, name, buffer, value in buffers:
            buffer.copy_(value)
            module._buffers[name] = buffer  # a run may have put another
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


class _Measured:
    """One stage on one input."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        x: torch.Tensor,
        gradients: bool,
        last: bool,
    ) -> None:
        self.module, self.index, self.x = module, index, x
        self.gradients, self.last = gradients, last
        self.name = f"stage {index} ({type(module).__name__})"
        with torch.no_grad():
            value = x.detach().clone()
            before = value._version
            output = self._run(value)
            if value._version != before:
                raise RuntimeError(
                    f"{self.name} changes its input in place, so a segment "
                    "that begins with it could not be recomputed: let it "
                    "make a new tensor (inplace=False), or make one stage of "
                    "it and the one before"
                )
            if not _same(output, self._run(x.detach().clone())):
                raise ValueError(
                    f"{self.name} computes something else when it runs again "
                    "on the same input with the same random numbers, so it "
                    "cannot be recomputed: use PyTorch's default generators, "
                    "and no state that a run changes"
                )
        self.view = _storage(output) == _storage(value)
        self.trained = x.requires_grad or any(
            p.requires_grad for p in module.parameters()
        )
        self.output = output.detach().requires_grad_(self.trained)
        if last and not self.trained:
            raise ValueError(
                "nothing in the chain is trained (requires_grad): there is "
                "no backward pass to measure"
            )

    def _run(self, value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return run_stage(self.module, self.index, value)

    def stage(self) -> Stage:
        """What was measured, as a stage."""
        output = 0 if self.view else self.output.untyped_storage().nbytes()
        gradient = self.output.nbytes if self.trained else 0
        plain, again = self._pass(forget=False), self._pass(forget=True)
        tape = plain["after_forward"]
        # a view adds no bytes: what it holds is its input
        holds_output = plain["holds_output"] and not self.view
        return Stage(
            output=output,
            gradient=gradient,
            inner=plain["saved"] - output * holds_output,
            holds_input=bool(plain["holds_input"]),
            holds_output=bool(holds_output),
            forward_workspace=again["forward"] - output,
            record_workspace=plain["forward"] - max(tape, output),
            recompute_workspace=again["recomputation"] - max(tape, output),
            backward_workspace=plain["backward"] - plain["saved"],
            again_workspace=again["backward"] - plain["saved"],
            gradients=plain["left"],
            time=plain["forward_time"],
            backward_time=plain["backward_time"],
            recompute_time=again["backward_time"] - plain["backward_time"],
            name=self.name,
        )

    def _pass(self, forget: bool) -> dict[str, int]:
        """Forward and backward; bytes on top of the input, and FLOPs.

        Args:
            forget: whether the stage is checkpointed.
        """
        for parameter in self.module.parameters():
            made = self.gradients and parameter.requires_grad
            parameter.grad = torch.zeros_like(parameter) if made else None
        leaf = self.x.detach().requires_grad_(self.x.requires_grad)
        arriving = 0 if self.last else self.output.nbytes
        seen = {}
        with (
            PeakTracker(self.module, leaf) as tracker,
            FlopCounter() as flops,
        ):
            value = leaf.clone()  # autograd itself would hold a leaf
            base = tracker.live
            tracker.recent_peak()
            if forget:
                y = checkpoint(self._run, value, use_reentrant=False)
            else:
                y = self._run(value)
            seen["forward"] = tracker.recent_peak() - base
            seen["after_forward"] = tracker.live - base
            seen["forward_time"] = flops.total
            loss = y.sum() if self.last else _Seed.apply(y)
            del y
            held, scalar = tracker.live, loss.nbytes
            seen["saved"] = held - base - scalar
            seen["holds_output"] = seen["saved"] == seen["after_forward"]
            del value
            seen["holds_input"] = tracker.live == held
            base -= held - tracker.live  # the input, where nothing holds it
            tracker.recent_peak()
            before = len(tracker.timeline)
            if self.trained:
                loss.backward()
            base += 2 * scalar + arriving  # the loss, its gradient, y's
            seen["backward"] = seen["recomputation"] = 0
            for live, operator in zip(
                tracker.timeline[before:],
                tracker.operators[before:],
                strict=True,
            ):
                phase = operator.phase
                seen[phase] = max(seen[phase], live - base)
            seen["backward_time"] = flops.total - seen["forward_time"]
        unknown = unsure(tracker)
        if unknown and isinstance(self.x, FakeTensor):
            raise ValueError(
                f"{self.name} uses what is known of no tensor without data "
                f"({'; '.join(unknown.values())}): profile it on a real "
                "device, not on meta"
            )
        seen["left"] = 0
        if not self.gradients:
            grads = [p.grad for p in self.module.parameters()]
            seen["left"] = sum(g.nbytes for g in grads if g is not None)
        return seen


class _Seed(torch.autograd.Function):
    """A loss that holds nothing and sends back a gradient as large as y."""

    @staticmethod
    def forward(ctx, y: torch.Tensor) -> torch.Tensor:
        ctx.like = y.shape, y.dtype, y.device
        return torch.zeros((), dtype=torch.float32, device=y.device)

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> torch.Tensor:
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, FakeTensor):
        return one.shape == other.shape
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=0, atol=0, equal_nan=True
    )
