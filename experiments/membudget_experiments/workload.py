"""What the experiments train, and how its peak is predicted and measured."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from membudget import models
from membudget.measuring.device import read_memory, reset_peak
from membudget.measuring.flops import FlopCounter
from membudget.measuring.timing import time_calls

META = torch.device("meta")
MODELS = {"mlp": models.mlp, "gpt": models.GPT}


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer and its loss on random data.

    Args:
        model: a key of :data:`MODELS`.
        shape: the model's arguments.
        device: where it is trained; ``meta`` for a prediction.
        window: samples in one optimizer step.
    """

    model: str
    shape: dict[str, int]
    device: torch.device
    window: int

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and its Adam.

        ``foreach`` is what PyTorch uses on a GPU; said here, it is the same
        on every device.
        """
        with torch.device(self.device):
            network = MODELS[self.model](**self.shape)
        return network, torch.optim.Adam(network.parameters(), foreach=True)

    def loss(self, network: nn.Module, size: int) -> torch.Tensor:
        """The share of the window's mean loss of ``size`` new samples."""
        shape, options = self.shape, {"device": self.device}
        if self.model == "mlp":
            x = torch.rand(size, shape["inputs"], **options)
            y = torch.randint(shape["outputs"], (size,), **options)
        else:
            place = (size, shape["context"])
            x = torch.randint(shape["vocabulary"], place, **options)
            y = torch.randint(shape["vocabulary"], place, **options)
        logits = network(x).flatten(0, -2)
        loss = F.cross_entropy(logits, y.flatten(), reduction="sum")
        return loss / self.window

    def train(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        size: int,
    ) -> None:
        """One window in micro-batches of ``size`` samples."""
        for _ in range(self.window // size):
            self.loss(network, size).backward()
        optimizer.step()
        optimizer.zero_grad()

    def flops(self) -> int:
        """FLOPs of the matrix products of one sample, both passes.

        Attention counts in full, without its causal mask.
        """
        network, _ = self.build()
        with FlopCounter() as counter:
            self.loss(network, 1).backward()
        return counter.total


class FusedAttention(TorchFunctionMode):
    """On ``meta`` the attention kernel that a device would run.

    There PyTorch itself falls back on the unfused formula, whose tokens ×
    tokens matrix no device stores.

    Args:
        kind: ``cpu`` or ``cuda`` (in fp32 the memory-efficient kernel).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        if kwargs != {"is_causal": True}:
            raise NotImplementedError(f"attention with {kwargs}")
        if self.kind == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return kernel(*args, 0.0, True)[0]
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(*args, None, True, 0.0, True)[0]


def peak_bytes(
    call: Callable[[], object], device: torch.device, alive: int = 0
) -> dict[str, int | None]:
    """Peak bytes during a call: requested, allocated and reserved.

    On CUDA the allocator's own counters, for all that the process holds on
    the device. On a CPU, which has no such counters, the profiler's memory
    events: what was requested, temporaries inside an operator included.

    Args:
        call: what is measured.
        device: where it runs.
        alive: bytes that the call finds and keeps; a CPU's count begins
            there. (The profiler does not see them freed.)
    """
    if device.type == "cpu":
        return {
            "requested": alive + _profiled_peak(call),
            "allocated": None,
            "reserved": None,
        }
    torch.cuda.empty_cache()
    reset_peak(device)
    call()
    torch.cuda.synchronize(device)
    memory = read_memory(device)
    return {
        "requested": memory.peak_requested,
        "allocated": memory.peak_allocated,
        "reserved": memory.peak_reserved,
    }


def _profiled_peak(call: Callable[[], object]) -> int:
    """The most bytes that a CPU was asked for on top of what was there."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def workspace(work: Workload) -> int | None:
    """Bytes that libraries keep in the device's allocator; None on a CPU.

    cuBLAS takes its workspace at its first product and never gives it back,
    so a window of one sample runs first.
    """
    if work.device.type == "cpu":
        return None
    small = replace(work, window=1)
    small.train(*small.build(), 1)
    gc.collect()
    torch.cuda.empty_cache()
    return read_memory(work.device).allocated


def seconds(
    call: Callable[[], object],
    device: torch.device,
    warm_up: int,
    repeats: int,
    **options: bool,
) -> list[float]:
    """Seconds of each repeat (:func:`membudget.measuring.timing.time_calls`).

    To the nanosecond, which is what the clock resolves.
    """
    timing = time_calls(call, device, warm_up, repeats, **options)
    return [round(sample, 9) for sample in timing.samples]
