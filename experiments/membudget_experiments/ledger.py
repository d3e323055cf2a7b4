"""Experiments on the ledger."""

import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget import models
from membudget.ledger import Chain, Transformer, predict, rules
from membudget.measuring import dry_run, trace_step
from membudget.measuring.device import read_memory
from membudget.measuring.out_of_memory import is_out_of_memory
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import STEP_PEAKS
from membudget_experiments.workload import META, peak_bytes


@experiment(
    sizes=STEP_PEAKS,
    units={
        "network": "which of the networks",
        "method": "which of the methods",
        "batch": "samples, or sequences",
        "requested": "bytes, peak of a step, less what was there before",
        "allocated": "bytes, the same after the allocator's rounding",
        "live_before": "bytes requested and alive before there was a model",
    },
    over="runs",
    compares={"requested": "dry_run"},
)
def step_peaks(
    device: torch.device,
    *,
    networks: dict[str, dict],
    half: str,
    runs: list[list],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """The peak of a whole training step: by the ledger, and measured.

    ``runs`` are a network, a method (:data:`METHODS`) and a batch; ``half``
    is the 16-bit dtype. The step is that of
    :func:`membudget.measuring.trace_step` with Adam, which works on all
    parameters at once (``foreach``), on every device.

    Two predictions. ``ledger`` is :func:`membudget.ledger.predict` by the
    device's :func:`membudget.ledger.rules`, with the ``phase`` of the peak.
    ``dry_run`` runs the step without data on the device, so with the device's
    own operators, and counts what would be on it: of Adam on a GPU not the
    step counts, which stay on the CPU.

    Measured are requested bytes, before the allocator rounds them. On a CPU
    ``requested`` is the :class:`membudget.measuring.PeakTracker`'s peak of a
    real step. On a GPU it is the peak of the allocator's own counter
    ``requested_bytes``, less ``live_before``: what was requested and alive
    before the model was built, the workspaces that libraries keep. For them
    to be there, ``warm_up`` models are trained first and thrown away. This
    peak also holds what an operator asks for and frees before it returns,
    which no prediction knows. ``allocated`` is the counter
    ``allocated_bytes``, less its own value from before. A CPU has neither of
    these two, and a run that finds no memory has none of the three: None.
    """
    cases = [Case(name, networks[name], *rest, half) for name, *rest in runs]
    yield {
        "peak": [{**_names(case), **_predict(case, device)} for case in cases]
    }
    for case in cases:
        yield {**_names(case), **_measure(case, device, warm_up)}


# What is trained -----------------------------------------------------------

METHODS: dict[str, dict] = {
    "plain": {},
    "accumulated": {"parts": 4},
    "checkpointed": {"checkpointed": True},
    "autocast": {"recipe": "autocast"},
    "16-bit": {"recipe": "bf16"},
    "combined": {"parts": 2, "checkpointed": True, "recipe": "autocast"},
}
"""What differs from a plain step in fp32: the micro-batches that the batch
is cut into, whether segments are checkpointed (blocks of a transformer, four
modules of a chain), and the recipe. The 16 bits of the recipe ``bf16`` are
those of any dtype that has as many."""


@dataclass(frozen=True)
class Case:
    """A network, a method and a batch.

    Args:
        name: of the network.
        shape: its model (``mlp``, ``convnet``, ``gpt`` or ``llama``) with
            the model's arguments; further the ``side`` of the convolutional
            net's pictures, or the ``tokens`` of a sequence.
        method: a key of :data:`METHODS`.
        batch: samples, or sequences.
        half: name of the 16-bit dtype.
    """

    name: str
    shape: dict
    method: str
    batch: int
    half: str

    @property
    def micro_batch(self) -> int:
        """Samples that run at once."""
        return self.batch // METHODS[self.method].get("parts", 1)

    @property
    def recipe(self) -> str:
        """One of :data:`membudget.ledger.RECIPES`."""
        return METHODS[self.method].get("recipe", "fp32")

    @property
    def checkpointed(self) -> bool:
        """Whether segments are checkpointed."""
        return METHODS[self.method].get("checkpointed", False)

    @property
    def sample(self) -> tuple[int, ...]:
        """Shape of a sample; of a sequence its tokens."""
        if "tokens" in self.shape:
            return (self.shape["tokens"],)
        if "side" in self.shape:
            return (3, self.shape["side"], self.shape["side"])
        return (self.shape["inputs"],)

    @property
    def paper(self) -> Transformer | Chain:
        """The network as the ledger takes it."""
        kind = self.shape["model"]
        if kind not in CHAINS:
            return Transformer(family=kind, **self._arguments)
        chain = self._chain(META)
        fours = range(0, len(chain) - 3, 4)
        segments = tuple(tuple(range(i, i + 4)) for i in fours)
        return Chain(chain, self.sample, segments)

    @property
    def _arguments(self) -> dict:
        """The model's own."""
        others = ("model", "side", "tokens")
        return {k: v for k, v in self.shape.items() if k not in others}

    def _chain(self, device: torch.device) -> nn.Sequential:
        with torch.device(device):
            return CHAINS[self.shape["model"]](**self._arguments)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and of what is no token."""
        return getattr(torch, self.half if self.recipe == "bf16" else "float")

    def build(self, device: torch.device) -> nn.Module:
        """A new network in its dtype, its segments checkpointed if they are.

        Args:
            device: may be ``meta``.
        """
        paper = self.paper
        if isinstance(paper, Transformer):
            network = paper.build(device)
            if self.checkpointed:
                for index, block in enumerate(network.blocks):
                    network.blocks[index] = Recomputed(block)
        else:
            network = self._chain(device)
            if self.checkpointed:
                parts = [network[p[0] : p[-1] + 1] for p in paper.segments]
                rest = network[4 * len(parts) :]
                network = nn.Sequential(*map(Recomputed, parts), *rest)
        return network.to(self.dtype)

    def data(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """A random batch and its targets."""
        shape, options = (self.batch, *self.sample), {"device": device}
        if "tokens" in self.shape:
            x, y = (
                torch.randint(self.shape["vocabulary"], shape, **options)
                for _ in range(2)
            )
            return x, y
        x = torch.rand(shape, dtype=self.dtype, **options)
        return x, torch.randint(10, shape[:1], **options)

    def loss(
        self, network: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """The mean cross-entropy, under autocast if that is the recipe."""
        with torch.autocast(
            x.device.type,
            getattr(torch, self.half),
            enabled=self.recipe == "autocast",
        ):
            logits = network(x).flatten(0, -2)
            return F.cross_entropy(logits, y.flatten())


CHAINS = {"mlp": models.mlp, "convnet": models.convnet}


class Recomputed(nn.Module):
    """A module under a checkpoint.

    No random state is stashed: dropout drops other numbers the second time,
    which changes gradients and no size.
    """

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            self.inside, *inputs, use_reentrant=False, preserve_rng_state=False
        )


def _adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), foreach=True)


def train(
    case: Case,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """The step of :func:`membudget.measuring.trace_step`, untracked."""
    size = case.micro_batch
    for start in range(0, case.batch, size):
        part = x, y
        if size < case.batch:
            part = x[start : start + size], y[start : start + size]
        value = case.loss(network, *part)
        if size < case.batch:
            value = value * (size / case.batch)
        value.backward()
        del value
    optimizer.step()
    network.zero_grad()


# Prediction and measurement ------------------------------------------------


def _names(case: Case) -> dict:
    return {
        "network": case.name,
        "method": case.method,
        "batch": case.batch,
    }


def _predict(case: Case, device: torch.device) -> dict:
    """The peak by the ledger, and by a dry run on the device."""
    network = case.build(META)
    ledger = predict(
        case.paper,
        case.batch,
        *(case.sample if "tokens" in case.shape else ()),
        recipe=case.recipe,
        micro_batch=case.micro_batch,
        checkpointed=case.checkpointed,
        **rules(case.paper, device.type) | {"foreach": True},
        buffers=sum(buffer.nbytes for buffer in network.buffers()),
    )
    run = dry_run(
        network,
        case.loss,
        *case.data(META),
        optimizer=_adam(network),
        micro_batch=case.micro_batch,
        device=device,
        on=device,
    )
    return {
        "ledger": ledger.peak,
        "phase": ledger.at_peak.phase,
        "dry_run": run.peak,
    }


def _measure(case: Case, device: torch.device, warm_up: int) -> dict:
    """The peak of a real step; None where there is too little memory."""
    try:
        if device.type == "cpu":
            return _tracked(case, device)
        for _ in range(warm_up):
            _counted(case, device)
        return _counted(case, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
    return dict.fromkeys(("requested", "allocated", "live_before"))


def _tracked(case: Case, device: torch.device) -> dict:
    """On a CPU: what the tracker counts."""
    network = case.build(device)
    run = trace_step(
        network,
        case.loss,
        *case.data(device),
        optimizer=_adam(network),
        micro_batch=case.micro_batch,
    )
    return {"requested": run.peak, "allocated": None, "live_before": None}


def _counted(case: Case, device: torch.device) -> dict:
    """On a GPU: what its allocator counts, for a new network."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = read_memory(device)
    network = case.build(device)
    optimizer, batch = _adam(network), case.data(device)
    train(case, network, optimizer, *batch)  # makes Adam's states
    peak = peak_bytes(lambda: train(case, network, optimizer, *batch), device)
    return {
        "requested": peak["requested"] - before.requested,
        "allocated": peak["allocated"] - before.allocated,
        "live_before": before.requested,
    }
