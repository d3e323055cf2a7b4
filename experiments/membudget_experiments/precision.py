"""Experiments on precision."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import takewhile
from math import isfinite, log, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from membudget import models
from membudget.ledger import Chain, Transformer, predict
from membudget.measuring import FlopCounter, PeakTracker, SavedBytes, dry_run
from membudget.measuring.device import read_memory
from membudget.measuring.out_of_memory import is_out_of_memory
from membudget.precision import FORMATS, ScaleTrace, support, tf32
from membudget_experiments.checkpointing import attention_of
from membudget_experiments.definition import experiment
from membudget_experiments.ledger import Recomputed
from membudget_experiments.sizes import (
    BF16_ACCUMULATION,
    MIXED_PRECISION,
)
from membudget_experiments.workload import (
    META,
    peak_bytes,
    seconds,
)


@experiment(
    sizes=MIXED_PRECISION,
    units={
        "network": "which of the networks",
        "scenario": "plain, autocast, checkpointed or both",
        "format": "of the matrix products",
        "support": "native, emulated or absent on the device",
        "requested": "bytes, peak of a step, less what was there before",
        "allocated": "bytes, the same after the allocator's rounding",
        "live_before": "bytes requested and alive before there was a model",
        "saved": "bytes that a forward pass saves for backward",
        "seconds": "s for a step, each repeat",
        "losses": "loss in each step, as far as it is finite",
        "loss": "loss after the steps",
        "scale": "loss scale after the steps",
        "skipped": "steps that were skipped after an overflow",
    },
    over="runs",
    compares={"requested": "dry_run", "saved": "saved"},
)
def mixed_precision(
    device: torch.device,
    *,
    networks: dict[str, dict],
    runs: list[list[str]],
    steps: int,
    rate: float,
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Peak, saved bytes, time and loss of four scenarios in four formats.

    The scenarios are with and without autocast, each with and without
    checkpoints (:data:`SCENARIOS`). ``runs`` are a network, a scenario and
    a format: ``fp32``; ``tf32`` for its matrix products
    (:func:`membudget.precision.tf32`), where no byte changes; ``bf16``; or
    ``fp16`` with ``torch.amp.GradScaler``. The optimizer is Adam with the
    learning rate ``rate``, on all parameters at once (``foreach``).

    At size ``large`` the network ``mlp`` has 32 residual blocks of width
    1 024, each under a checkpoint, and 16 × 1 024 rows in one batch. In fp32
    a block saves ten times the width for each row (its input, the normed
    input, four times the width before and after GELU), so 32 blocks save
    32 · 10 · 1 024 · 4 bytes = 1.25 MiB for a row, 20 GiB for all. On a T4
    with 15 GiB this cannot be, so it has a quarter of the rows there: 5 GiB,
    beside 3 GiB for the 268.7 million parameters and Adam's states and what
    the backward pass needs at the peak: 8.1 GiB. At size ``tiny`` there are
    as many rows for each unit of the width, 16.

    Predicted for each run, before anything is measured: the peak by
    :func:`membudget.ledger.predict` (``ledger``, ``phase``: the rules of a
    CPU with the operator lists of the device's autocast), and that of a run
    without data on the device (``dry_run``); the bytes saved for backward by
    both (``ledger_saved``, ``saved``); and the FLOPs of the matrix products
    of a step, recomputation included. How many FLOPs a device does in a
    second is not predicted, so the seconds are not. Neither prediction holds
    the loss scale, a few numbers.

    Measured are, of one and the same training: the losses of ``steps``
    steps, each with the same batch, and the loss after them; the loss scale
    then, and how often a step was skipped; the peak of the next step as in
    ``step_peaks``; the bytes that a forward pass saves
    (:class:`membudget.measuring.SavedBytes`); and the time of the steps that
    follow. The initial weights and the batch are the same in all runs of a
    network. On a GPU ``warm_up`` models are trained first and thrown away,
    for libraries take their workspaces then. ``support`` says what the
    device makes of the format; where that is ``absent``, and where there is
    too little memory, what would be measured is None. So are the allocator's
    two numbers on a CPU, and scale and skipped steps without a scaler.
    """
    cases = [Case(name, networks[name], *rest) for name, *rest in runs]
    yield {
        "runs": [{**_names(case), **_predict(case, device)} for case in cases]
    }
    for case in cases:
        found = _measure(case, device, steps, rate, warm_up, repeats)
        yield {
            **_names(case),
            "support": support(case.format, device),
            **found,
        }


@experiment(
    sizes=BF16_ACCUMULATION,
    units={
        "kind": "fresh micro-batches, or the same again and again",
        "micro_batches": "how many were accumulated",
        "bf16": "relative error, bf16 model, summed in bf16",
        "fp32_sum": "relative error, bf16 model, summed in fp32",
        "autocast": "relative error, fp32 model under autocast",
        "summing": "relative error of the bf16 sum of its own terms",
        "summing_fp32": "relative error of the fp32 sum of the same terms",
    },
    over="runs",
)
def bf16_accumulation(
    device: torch.device,
    *,
    shape: dict[str, int],
    size: int,
    runs: list[list],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """Error of a gradient that is accumulated in bf16, in fp32, by autocast.

    ``runs`` are a kind and a number k of micro-batches, rising within the
    kind: ``fresh`` ones, or the ``same`` one k times. All models have the
    same weights and see the same numbers, which bf16 holds exactly, so they
    differ in arithmetic alone. Errors are ‖gradient − reference‖ /
    ‖reference‖ over all parameters; the reference is an fp64 model, and for
    the two of *summing* the exact sum of the bf16 model's own gradients.
    These two leave out how exact each gradient is.
    It needs a device that multiplies in bf16
    (:func:`membudget.precision.support`).

    What is predicted is that error of summing, from the format alone. With
    the unit roundoff u (half the spacing at 1; 2⁻⁸ in bf16) the k − 1
    roundings of a sum S_k of terms g_j cost at most

        |error| ≤ (k − 1) · u · Σ |g_j| + O(u²)        (``bound``)

    (Higham 2002, Accuracy and Stability of Numerical Algorithms, section
    4.2). The sizes of roundings are far below that. The rest is derived
    here. A number m · 2^e, 1 ≤ m < 2, has the spacing 2u · 2^e, and a
    rounding error that may be anything in ± half of it has the mean square
    (2u · 2^e)² / 12 = S² · u² / (3m²). Where gradients have no preferred
    scale, m has the density 1 / (m ln 2) (Higham, section 2.7), so the mean
    of 1/m² is 3 / (8 ln 2), and a rounding has the root mean square c · |S|
    with c = u / √(8 ln 2) = 0.425 u. Independent roundings add up in
    squares (Higham, section 2.8): (c/|S_k|)² · Σ_{j=2…k} S_j². Fresh
    gradients that are noise have E S_j² ∝ j, those without noise S_j ∝ j:

        noise:  c · √(Σ j / k)  ≈ c · √(k/2)     (``noise``)
        signal: c · √(Σ j²) / k ≈ c · √(k/3)     (``signal``)

    Equal terms are no random walk: each addition in a binade errs by the
    same amount, and from k = 1/u to 2/u = 256 to 512 on a term is at most
    half a spacing, and lost for good. Their error follows by adding each
    bf16 number from 1 to 2 to itself (:func:`equal_terms`), the root of the
    mean square over m with the same density (``equal``).

    So ``fresh`` is expected at ``noise`` and ``signal``, and above them
    where the terms are so much alike and the sum so large that roundings are
    no longer independent; ``same`` at ``equal``. In fp32, where u = 2⁻²⁴,
    ``noise`` is 65 536 times less (``noise_fp32``). That is an upper
    estimate: fp32 holds a sum of bf16 numbers exactly while it is less than
    2²⁴ times the last digit of its smallest term.
    """
    yield {
        "accumulated": [
            {"kind": kind, "micro_batches": count, **_law(count)}
            for kind, count in runs
        ]
    }
    for kind in dict.fromkeys(kind for kind, _ in runs):
        counts = [count for other, count in runs if other == kind]
        yield from _accumulate(device, shape, size, kind, counts)


# The four scenarios: what is trained ---------------------------------------

SCENARIOS: dict[str, dict] = {
    "plain": {},
    "autocast": {"autocast": True},
    "checkpointed": {"checkpointed": True},
    "both": {"autocast": True, "checkpointed": True},
}
"""Whether the forward pass is under autocast, and every block under a
checkpoint."""

SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network, a scenario and a format.

    Args:
        name: of the network.
        shape: its model (``mlp_blocks`` or ``gpt``) with the model's
            arguments, and the ``batch``: rows, or sequences of as many
            tokens as the context has.
        scenario: a key of :data:`SCENARIOS`.
        format: ``bf16`` or ``fp16`` under autocast, else ``fp32`` or
            ``tf32``.

    Raises:
        ValueError: a scenario that there is not, or a format that it does
            not take.
    """

    name: str
    shape: dict
    scenario: str
    format: str

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ValueError(
                f"no scenario is {self.scenario!r}: use one of "
                f"{', '.join(SCENARIOS)}"
            )
        allowed = ("bf16", "fp16") if self.autocast else ("fp32", "tf32")
        if self.format not in allowed:
            raise ValueError(
                f"{self.scenario} in {self.format}: use {' or '.join(allowed)}"
            )

    @property
    def autocast(self) -> bool:
        """Whether the forward pass is under autocast."""
        return SCENARIOS[self.scenario].get("autocast", False)

    @property
    def checkpointed(self) -> bool:
        """Whether every block is checkpointed."""
        return SCENARIOS[self.scenario].get("checkpointed", False)

    @property
    def paper(self) -> Transformer | Chain:
        """The network as the ledger takes it."""
        if self.shape["model"] == "gpt":
            return Transformer(**self._arguments)
        blocks = tuple((i,) for i in range(self.shape["depth"]))
        return Chain(self._chain(META), (self.shape["width"],), blocks)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of a sequence; none for rows."""
        gpt = self.shape["model"] == "gpt"
        return (self.shape["context"],) if gpt else ()

    @property
    def _arguments(self) -> dict:
        """The model's own."""
        others = ("model", "batch")
        return {k: v for k, v in self.shape.items() if k not in others}

    def _chain(self, device: torch.device) -> nn.Sequential:
        with torch.device(device):
            return models.mlp_blocks(**self._arguments, outputs=CLASSES)

    def build(self, device: torch.device) -> nn.Module:
        """A new network in fp32, its blocks checkpointed if they are.

        Args:
            device: may be ``meta``.
        """
        gpt = self.shape["model"] == "gpt"
        network = self.paper.build(device) if gpt else self._chain(device)
        if self.checkpointed:
            blocks = network.blocks if gpt else network
            for index in range(self.shape["depth"]):
                blocks[index] = Recomputed(blocks[index])
        return network

    def data(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """A random batch and targets that can be learned.

        The class of a row is the place of the largest of its first numbers;
        the target of a token is the token before it, that of the first the
        sequence's last.
        """
        batch = self.shape["batch"]
        if self.shape["model"] == "gpt":
            place = (batch, *self.tokens)
            x = torch.randint(self.shape["vocabulary"], place, device=device)
            return x, x.roll(1, 1)
        x = torch.randn(batch, self.shape["width"], device=device)
        return x, x[:, :CLASSES].argmax(1)

    def loss(
        self, network: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """The mean cross-entropy, under autocast if that is the scenario."""
        with self._precision(x.device):
            logits = network(x).flatten(0, -2)
            return F.cross_entropy(logits, y.flatten())

    def _precision(self, device: torch.device) -> AbstractContextManager:
        if not self.autocast:
            return nullcontext()
        return torch.autocast(device.type, FORMATS[self.format].dtype)


class Training(NamedTuple):
    """What a step needs.

    Attributes:
        scaler: for fp16 alone.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    x: torch.Tensor
    y: torch.Tensor


def start(case: Case, device: torch.device, rate: float) -> Training:
    """A new training, from the seed that all have."""
    with seeded(device):
        network, batch = case.build(device), case.data(device)
    optimizer = _adam(network, rate)
    scaler = None
    if case.format == "fp16":
        scaler = torch.amp.GradScaler(device.type)
    return Training(network, optimizer, scaler, *batch)


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Random numbers from the seed; afterwards they go on as before."""
    there = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(there):
        torch.manual_seed(SEED)
        yield


def _adam(network: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=rate, foreach=True)


def train(
    case: Case, training: Training, losses: list[float] | None = None
) -> None:
    """One step.

    Args:
        losses: where the loss is noted, which waits for the device.
    """
    network, optimizer, scaler, *batch = training
    value = case.loss(network, *batch)
    if losses is not None:
        losses.append(value.item())
    if scaler is None:
        value.backward()
        del value
        optimizer.step()
    else:
        scaler.scale(value).backward()
        del value
        scaler.step(optimizer)
        scaler.update()
    network.zero_grad()


# The four scenarios: prediction and measurement ----------------------------


def _names(case: Case) -> dict:
    return {
        "network": case.name,
        "scenario": case.scenario,
        "format": case.format,
    }


def _predict(case: Case, device: torch.device) -> dict:
    """Peak and saved bytes, by the ledger and by a dry run; FLOPs."""
    ledger = predict(
        case.paper,
        case.shape["batch"],
        *case.tokens,
        recipe="autocast" if case.autocast else "fp32",
        lists=device.type,
        checkpointed=case.checkpointed,
        foreach=True,
    )
    saved: list[int] = []

    def loss(network: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        if saved:
            return case.loss(network, *batch)
        with SavedBytes(network, *batch) as found:  # before the tracked step
            value = case.loss(network, *batch)
        saved.append(found.total)
        return value

    network = case.build(META)
    run = dry_run(
        network,
        loss,
        *case.data(META),
        optimizer=_adam(network, 1.0),
        device=device,
        on=device,
    )
    return {
        "ledger": ledger.peak,
        "phase": ledger.at_peak.phase,
        "dry_run": run.peak,
        "ledger_saved": ledger.saved - LOSS,
        "saved": saved[0],
        "flops": _flops(case, device),
    }


LOSS = 4
"""Bytes of the loss, which the ledger counts among what a forward pass
leaves; autograd does not save it."""


def _flops(case: Case, device: torch.device) -> int:
    """Of the matrix products of a step, whatever their format."""
    formats = {"autocast": "plain", "both": "checkpointed"}
    scenario = formats.get(case.scenario, case.scenario)
    case = replace(case, scenario=scenario, format="fp32")
    with attention_of(device.type), FlopCounter() as flops:
        case.loss(case.build(META), *case.data(META)).backward()
    return flops.total


MEASURED = (
    "requested",
    "allocated",
    "live_before",
    "saved",
    "seconds",
    "losses",
    "loss",
    "scale",
    "skipped",
)


def _measure(
    case: Case,
    device: torch.device,
    steps: int,
    rate: float,
    warm_up: int,
    repeats: int,
) -> dict:
    """One training; None where there is no such format or no memory."""
    nothing = dict.fromkeys(MEASURED)
    if support(case.format, device) == "absent":
        return nothing
    try:
        with tf32(device) if case.format == "tf32" else nullcontext():
            return _trained(case, device, steps, rate, warm_up, repeats)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
    return nothing


def _trained(
    case: Case,
    device: torch.device,
    steps: int,
    rate: float,
    warm_up: int,
    repeats: int,
) -> dict:
    """What is measured, with a new network."""
    gpu = device.type != "cpu"
    if gpu:
        _clear(device)
        for _ in range(warm_up):
            train(case, start(case, device, rate))
        _clear(device)
        before = read_memory(device)
    training = start(case, device, rate)
    learned = _learn(case, training, steps)
    if gpu:
        peak = peak_bytes(lambda: train(case, training), device)
        memory = {
            "requested": peak["requested"] - before.requested,
            "allocated": peak["allocated"] - before.allocated,
            "live_before": before.requested,
        }
    else:
        memory = {
            "requested": _tracked(case, training),
            "allocated": None,
            "live_before": None,
        }
    return {
        **memory,
        "saved": _saved(case, training),
        "seconds": seconds(
            lambda: train(case, training), device, warm_up, repeats
        ),
        **learned,
    }


def _clear(device: torch.device) -> None:
    """Free what nobody holds, the allocator's cache included."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _learn(case: Case, training: Training, steps: int) -> dict:
    """The first steps, which also make Adam's states."""
    losses: list[float] = []
    scaler = training.scaler
    with ScaleTrace(scaler) if scaler else nullcontext() as trace:
        for _ in range(steps):
            train(case, training, losses)
    with torch.no_grad():
        after = case.loss(training.network, training.x, training.y).item()
    return {
        "losses": [*takewhile(isfinite, losses)] or None,
        "loss": after if isfinite(after) else None,
        "scale": scaler and scaler.get_scale(),
        "skipped": scaler and sum(trace.overflows),
    }


def _tracked(case: Case, training: Training) -> int:
    """On a CPU: the peak that the tracker counts."""
    network, optimizer, _, *batch = training
    with PeakTracker(network, optimizer, *batch) as run:
        train(case, training)
    return run.peak


def _saved(case: Case, training: Training) -> int:
    """Bytes that a forward pass saves for backward."""
    network, _, _, *batch = training
    with SavedBytes(network, *batch) as saved:
        case.loss(network, *batch)
    return saved.total


# Accumulation in bf16 ------------------------------------------------------


def _law(count: int) -> dict:
    """What is predicted of the error of summing."""
    return {
        "noise": rounding_law(count),
        "signal": rounding_law(count, noise=False),
        "equal": equal_terms(count),
        "noise_fp32": rounding_law(count, "fp32"),
        "bound": (count - 1) * FORMATS["bf16"].epsilon / 2,
    }


def rounding_law(
    count: int, format: str = "bf16", noise: bool = True
) -> float:
    """Relative error of a sum, as a random walk of its roundings.

    Args:
        count: terms, k.
        format: of the sum.
        noise: whether the terms are independent of each other, about zero;
            otherwise they have one sign and roughly one size.

    Returns:
        c · √(Σ_{j=2…k} j / k) or c · √(Σ_{j=2…k} j²) / k, where c is the
        unit roundoff divided by √(8 ln 2); derived in
        :func:`bf16_accumulation`.
    """
    c = FORMATS[format].epsilon / 2 / sqrt(8 * log(2))
    steps = range(2, count + 1)
    if noise:
        return c * sqrt(sum(steps) / count)
    return c * sqrt(sum(j * j for j in steps)) / count


def equal_terms(count: int, format: str = "bf16") -> float:
    """Relative error of a sum of equal terms.

    Each of the format's numbers m from 1 to 2 is added to itself, rounded
    every time. The root of the mean square has the weights 1/m.
    """
    kind = FORMATS[format]
    weights = squares = 0.0
    for fraction in range(2**kind.fraction_bits):
        term = total = 1 + fraction * kind.epsilon
        for _ in range(count - 1):
            if (more := kind.round(total + term)) == total:
                break  # and so it stays
            total = more
        weights += 1 / term
        squares += (total / (count * term) - 1) ** 2 / term
    return sqrt(squares / weights)


def _accumulate(
    device: torch.device,
    shape: dict[str, int],
    size: int,
    kind: str,
    counts: list[int],
) -> Iterator[dict]:
    """Accumulate gradients; a sample at each of the counts, which rise."""
    with seeded(device), torch.device(device):
        half = models.mlp_blocks(**shape, outputs=CLASSES).bfloat16()
        generator = torch.Generator(device).manual_seed(SEED)
    mixed, exact = deepcopy(half).float(), deepcopy(half).double()
    sums = {
        dtype: [torch.zeros_like(p, dtype=dtype) for p in half.parameters()]
        for dtype in (torch.float32, torch.float64)
    }
    for index, parameter in enumerate(half.parameters()):
        parameter.register_hook(_adder(*(s[index] for s in sums.values())))
    batch = None
    for count in range(1, max(counts) + 1):
        if batch is None or kind == "fresh":
            batch = _rows(shape["width"], size, device, generator)
        _backward(half, *batch)
        _backward(exact, *batch)
        with torch.autocast(device.type, torch.bfloat16):
            value = F.cross_entropy(mixed(batch[0].float()), batch[1])
        value.backward()
        if count in counts:
            reference, own = _gradients(exact), _gradients(half)
            yield {
                "kind": kind,
                "micro_batches": count,
                "bf16": distance(own, reference),
                "fp32_sum": distance(sums[torch.float32], reference),
                "autocast": distance(_gradients(mixed), reference),
                "summing": distance(own, sums[torch.float64]),
                "summing_fp32": distance(
                    sums[torch.float32], sums[torch.float64]
                ),
            }


def _adder(*sums: torch.Tensor):
    """A hook that adds a gradient to sums before PyTorch adds it to its own.

    Nothing of the gradient is kept.
    """

    def add(gradient: torch.Tensor) -> None:
        for total in sums:
            total += gradient

    return add


def _rows(
    width: int, size: int, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in bf16, and classes that can be learned from them."""
    x = torch.randn(size, width, device=device, generator=generator)
    return x.bfloat16(), x[:, :CLASSES].argmax(1)


def _backward(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add the gradient of a micro-batch; the loss is in fp32 at least."""
    dtype = next(network.parameters()).dtype
    logits = network(x.to(dtype))
    if dtype == torch.bfloat16:
        logits = logits.float()
    F.cross_entropy(logits, y).backward()


def _gradients(network: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in network.parameters()]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """‖ours − theirs‖ / ‖theirs‖, all tensors as one, in fp64."""
    pairs = zip(ours, theirs, strict=True)
    apart = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return (
        (apart / sum(b.double().square().sum() for b in theirs)).sqrt().item()
    )
