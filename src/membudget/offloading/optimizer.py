"""An optimizer whose states stay in the host's memory."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from membudget.checks import function, instance, iterable, plain_step
from membudget.measuring.storages import is_wrapper

Result = TypeVar("Result")


def optimizer_on_host(
    parameters: ParamsT,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
) -> "HostOptimizer":
    """An optimizer that keeps its states in the host's memory.

    The device keeps the weights, in their type, and gradients until the
    step. The host keeps an fp32 copy of each weight, which it steps, and the
    optimizer's states: with Adam 12 bytes a parameter. ``step()`` copies each
    gradient out and lets go of it, steps on the host, and copies the new
    weights into the old ones, so micro-batches move nothing. During the step
    the host also holds the gradients, in fp32 and as they came.

    The updates are those of the same optimizer on the device, to the last
    bit, for fp32 weights; for others those of its fp32 copies
    (:class:`membudget.precision.MasterWeights`). A weight that was written to
    since the last step, as by ``model.load_state_dict``, is read anew; what
    is written through ``.data`` is not noticed.

    On CUDA what is copied lies in pinned memory. On a CPU the host's memory
    is made by another thread or is NumPy's, so that neither a tracker nor
    PyTorch's profiler counts it: it stands for the memory of another device.

    Source: Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 3.

    Args:
        parameters: that are trained, as an optimizer takes them: also groups.
        make: makes the host's optimizer from groups of fp32 copies.

    Raises:
        TypeError: arguments of a wrong kind.
        ValueError: frozen parameters, those on ``meta`` or in a DTensor;
            LBFGS, or an optimizer of other groups than it was given.

    Example:
        >>> optimizer = optimizer_on_host(model.parameters(), AdamW)
        >>> loss_fn(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.out, optimizer.back
    """
    what = "parameters or of groups of them"
    given = list(iterable(parameters, "parameters", what))
    if not given:
        raise ValueError("parameters is empty: use those of a model")
    use = f"a list of {what}"
    for one in given:
        instance(one, torch.Tensor | dict | tuple, "one of parameters", use)
    return HostOptimizer(given, function(make, "make"))


class Pair(NamedTuple):
    """A weight on the device, and its copy on the host."""

    weight: nn.Parameter
    copy: torch.Tensor


class HostOptimizer(torch.optim.Optimizer):
    """What :func:`optimizer_on_host` returns.

    Its groups hold the device's parameters, and their options are those of
    the host's optimizer: schedulers, gradient scalers and ``zero_grad`` act
    on them. ``state_dict`` is the host's, with the fp32 copies of weights in
    16 bits; an ordinary optimizer's can be loaded, too.

    Attributes:
        host: the optimizer of the copies; its states are the states.
        out: bytes of gradients that were copied to the host.
        back: bytes of weights that were copied to the device.
    """

    def __init__(self, parameters: ParamsT, make: Callable) -> None:
        self.out = self.back = 0
        self._pairs: list[Pair] = []
        self._versions: dict[int, int] = {}
        super().__init__(parameters, {})
        for group in self.param_groups:
            self._check(group["params"])
        groups = [self._copied(group) for group in self.param_groups]
        self.host = plain_step(elsewhere(make, groups))
        if not _same(groups, self.host.param_groups):
            raise ValueError(
                "what make returned has other parameters than it was given: "
                "hand its argument to the optimizer, as in "
                "lambda groups: AdamW(groups, lr=1e-4)"
            )
        self.defaults = self.host.defaults
        self._adopt()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer; the copies go to the host's."""
        super().add_param_group(param_group)
        if hasattr(self, "host"):
            group = self.param_groups[-1]
            self._check(group["params"])
            self.host.add_param_group(self._copied(group))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """Gradients leave, the host steps, the new weights come back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, theirs in self._groups():
            theirs.update(_options(mine))
        pairs = [pair for pair in self._pairs if pair.weight.grad is not None]
        self._reread(pairs)
        weights = [weight for weight, _ in pairs]
        desks = elsewhere(lambda: list(map(desk, weights)))
        for weight, place in zip(weights, desks, strict=True):
            self._leave(weight, place)
        _wait(weights)
        elsewhere(self._step, pairs, desks)
        for weight, place in zip(weights, desks, strict=True):
            weight.copy_(place, non_blocking=True)
            self.back += place.nbytes
            self._versions[id(weight)] = weight._version
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The host's; ``masters`` are the copies of weights in 16 bits."""
        for mine, theirs in self._groups():
            theirs.update(_options(mine))
        masters = {
            index: copy
            for index, (weight, copy) in enumerate(self._pairs)
            if weight.dtype != copy.dtype
        }
        return {**self.host.state_dict(), "masters": masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, or an ordinary optimizer's.

        Without ``masters`` the copies are the weights as they are.

        Raises:
            ValueError: it is of other parameters.
        """
        elsewhere(self.host.load_state_dict, state_dict)
        for index, master in state_dict.get("masters", {}).items():
            elsewhere(self._pairs[index].copy.copy_, master)
        self._adopt()

    # What runs on the host

    def _step(self, pairs: list[Pair], desks: list[torch.Tensor]) -> None:
        """Of each desk's gradient make the new weight."""
        for (_, copy), place in zip(pairs, desks, strict=True):
            copy.grad = place.to(copy.dtype)
        self.host.step()
        for (_, copy), place in zip(pairs, desks, strict=True):
            copy.grad = None
            place.copy_(copy)

    # Between the two

    def _leave(self, weight: nn.Parameter, place: torch.Tensor) -> None:
        """Copy the weight's gradient out, and let go of it."""
        gradient = weight.grad
        if gradient is None or gradient.layout is not torch.strided:
            raise RuntimeError(
                "a gradient is sparse: use sparse=False, or give the "
                "parameter an optimizer of its own on the device"
            )
        place.copy_(gradient, non_blocking=True)
        weight.grad = None
        self.out += place.nbytes

    def _reread(self, pairs: list[Pair]) -> None:
        """What was written to since the last step, copy anew."""
        for weight, copy in pairs:
            if self._versions[id(weight)] != weight._version:
                place = elsewhere(desk, weight)
                place.copy_(weight)
                elsewhere(_take, copy, place)
                self.out += place.nbytes

    # The groups

    def _copied(self, group: dict[str, Any]) -> dict[str, Any]:
        pairs = [self._pair(weight) for weight in group["params"]]
        self._pairs += pairs
        return {**group, "params": [copy for _, copy in pairs]}

    def _pair(self, weight: nn.Parameter) -> Pair:
        wide = torch.promote_types(weight.dtype, torch.float32)
        copy = elsewhere(memory, weight.shape, wide)
        copy.copy_(weight.detach())
        self._versions[id(weight)] = weight._version
        return Pair(weight, copy)

    def _check(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if not parameter.requires_grad:
                raise ValueError(
                    "a parameter is frozen and would take host memory for "
                    "nothing: hand over those with requires_grad"
                )
            kind = parameter.device.type
            if kind not in ("cpu", "cuda") or is_wrapper(type(parameter)):
                raise ValueError(
                    f"a parameter is a {type(parameter).__name__} on {kind}: "
                    "use plain ones on the CPU or on CUDA (FSDP2 has "
                    "CPUOffloadPolicy)"
                )

    def _groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self.param_groups, self.host.param_groups, strict=True)

    def _adopt(self) -> None:
        for mine, theirs in self._groups():
            mine.update(_options(theirs))


def elsewhere(call: Callable[..., Result], *args: Any) -> Result:
    """Call it in a thread of its own, which no tracker or profiler sees.

    Dispatch modes and PyTorch's profiler are a thread's own.
    """
    with ThreadPoolExecutor(1) as host:
        return host.submit(call, *args).result()


def memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """NumPy's, which no profiler sees when it is given back."""
    numbers = np.empty(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(numbers).view(dtype).view(shape)


def desk(weight: torch.Tensor) -> torch.Tensor:
    """Where a gradient arrives and a new weight leaves: pinned for CUDA's."""
    shape, dtype = weight.shape, weight.dtype
    if weight.is_cuda:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return memory(shape, dtype)


def _wait(weights: list[nn.Parameter]) -> None:
    """Until what was copied is there."""
    for device in {weight.device for weight in weights if weight.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _take(copy: torch.Tensor, weight: torch.Tensor) -> None:
    """What is no longer the copy's rounded value."""
    changed = weight != copy.to(weight.dtype)
    copy[changed] = weight[changed].to(copy.dtype)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in group if key != "params"}


def _same(groups: list[dict], others: list[dict]) -> bool:
    one, other = (
        [[id(p) for p in group["params"]] for group in many]
        for many in (groups, others)
    )
    return one == other
