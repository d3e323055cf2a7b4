"""The report on a script that ended out of memory."""

import ast
import copy
import linecache
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.command.census import Seen, look, optimizer_of
from membudget.command.watch import Call, Shape, Watch
from membudget.measuring.out_of_memory import (
    UNCHANGED,
    Fit,
    OutOfMemoryReport,
    Predictor,
    asked_bytes,
    forget,
    groups,
    is_out_of_memory,
    summary,
    wrapped,
)
from membudget.measuring.step import Loss
from membudget.measuring.tracker import Operator, by_category
from membudget.measuring.units import format_bytes

NONE = "no prediction of what would have fitted: {}"
OUTSIDE = "outside of a step"
"""The phase of what is neither forward, nor backward, nor optimizer."""


def ended_by(error: BaseException | None) -> BaseException | None:
    """The out-of-memory error by which a script ended, if it did."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None  # it was handled
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if is_out_of_memory(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def report_on(
    error: BaseException, watch: Watch, limit: int | None = None
) -> None:
    """Write to stderr who was alive, and what would have fitted.

    Args:
        error: the out-of-memory error; its frames are cleared.
        limit: bytes of data that the process could have, on a CPU.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    call = _calling(frames) or watch.call
    refused = isinstance(error, torch.OutOfMemoryError)
    seen = (refused and watch.seen) or look(_device_of(error), call, limit)
    work = _at_work(error.__traceback__, seen)
    asked, exact = asked_bytes(str(error))
    if seen.asked is not None:
        asked, exact = seen.asked, True
    live = by_category(seen.alive)
    report = OutOfMemoryReport(
        operator=work,
        asked=asked,
        exact=exact,
        live=live,
        others=max(0, seen.used - sum(live.values())),
        budget=seen.budget,
        largest=groups(seen.alive),
        samples=0,
        fits=(),
        notes=tuple(_notes(seen)),
    )
    rank = os.environ.get("RANK")
    _write("\n" + (f"rank {rank}: " if rank else "") + str(report))
    keeps = "transformers.trainer" not in map(_module, frames)
    model = None if call is None else call.model()
    optimizer = None if model is None else optimizer_of(model)
    del frames
    forget(error)
    if work.phase != OUTSIDE:
        _predict(report, seen, call, model, optimizer, keeps)


def _device_of(error: BaseException) -> torch.device:
    """Where memory ran out."""
    on_cpu = isinstance(error, MemoryError) or "CPUAllocator" in str(error)
    if on_cpu or not torch.cuda.is_initialized():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _write(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _notes(seen: Seen) -> Iterator[str]:
    if seen.device.type == "cuda":
        yield (
            f"Fragmentation: {format_bytes(seen.free)} are reserved by the "
            "allocator and not in use, in pieces of at most "
            f"{format_bytes(seen.largest_free)}. Where that is much, try "
            "PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    yield (
        "The others are what no tensor of Python's and no graph of "
        "autograd's holds: temporaries inside an operator or on their way "
        + (
            "back, and work space of libraries."
            if seen.device.type == "cuda"
            else "back, Python itself, and what its libraries have loaded."
        )
    )


# Where it ended


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _calling(frames: list[FrameType]) -> Call | None:
    """The call of the outermost module in which the error was raised."""
    for frame in frames:
        if frame.f_code.co_name == "_call_impl":
            seen = frame.f_locals
            return Call.of(seen["self"], seen["args"], seen["kwargs"])
    return None


def _at_work(trace: TracebackType | None, seen: Seen) -> Operator:
    """The operator that was refused: what the innermost line calls."""
    if seen.node.phase:
        return seen.node
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    phase, module = OUTSIDE, ""
    for frame in frames:
        own = frame.f_locals.get("self")
        name = frame.f_code.co_name
        if name == "_engine_run_backward":
            phase = "backward"
        elif isinstance(own, torch.optim.Optimizer) and "step" in name:
            phase = "optimizer"
        elif isinstance(own, nn.Module):
            module = seen.paths.get(id(own), type(own).__name__)
            if name == "_call_impl":
                again = phase in ("backward", "recomputation")
                phase = "recomputation" if again else "forward"
    called = "the backward pass" if phase == "backward" else _called(trace)
    return Operator(called, "" if phase == "optimizer" else module, phase)


def _called(trace: TracebackType | None) -> str:
    """The function that the innermost line of a traceback calls."""
    last = traceback.extract_tb(trace)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    one_line = last.end_lineno == last.lineno
    text = line[last.colno : last.end_colno if one_line else None]
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:  # it goes on in the next line
        return text.partition("(")[0].strip()
    return ast.unparse(tree.func if isinstance(tree, ast.Call) else tree)[:60]


# What would have fitted


def _predict(
    report: OutOfMemoryReport,
    seen: Seen,
    call: Call | None,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    keeps: bool,
) -> None:
    problem = _no_prediction(call, model)
    if problem or call is None or model is None:
        return _write(NONE.format(problem))
    _write("predicting what would have fitted (Ctrl+C ends it) …")
    leaves = [x.tensor() if isinstance(x, Shape) else x for x in call.leaves]
    leaves = [
        x.item() if torch.is_tensor(x) and not x.ndim else x for x in leaves
    ]
    batch = tuple(x for x in leaves if torch.is_tensor(x))
    room = seen.budget - report.others
    predictor = Predictor(model, batch, None, seen.device, room)
    fits: list[Fit] = []
    for change, change_to, stepper in _changes(model, optimizer, seen.device):
        loss = _loss(call, leaves, change_to, keeps)
        fits.append(replace(predictor, optimizer=stepper).fit(change, loss))
        if fits[0].problem:
            why = fits[0].problem.removeprefix("LookupError: ")
            return _write(NONE.format(why))
    samples = max(map(len, batch), default=0)
    found = tuple(fits)
    _write(replace(report, samples=samples, fits=found).predictions())
    for sentence in summary(found, samples):
        _write(wrapped(sentence))


def _no_prediction(call: Call | None, model: nn.Module | None) -> str:
    """Why none is made; empty if one is tried."""
    if call is None or model is None:
        return "no module with something to train was called"
    if (
        dist.is_available()
        and dist.is_initialized()
        and (dist.get_world_size() > 1)
    ):
        return (
            "the step is shared by several processes, and a dry run is of one"
        )
    plain = (Shape, bool, int, float, str, type(None), torch.dtype)
    for leaf in call.leaves:
        if not isinstance(leaf, plain):
            return f"the model is called with a {type(leaf).__name__}"
    return ""


def _changes(model, optimizer, device):
    """Each change: its name, what it does to the model, the optimizer.

    It has no states, as it may have failed while it made them; the step
    that is predicted makes them.
    """
    adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if optimizer is not None:
        optimizer = copy.copy(optimizer)
        optimizer.state = defaultdict(dict)
    yield UNCHANGED, None, optimizer
    if _blocks(model) and not any(
        getattr(m, "gradient_checkpointing", False) for m in model.modules()
    ):
        yield "checkpointed blocks", _checkpoint, optimizer
    if adam and not optimizer.param_groups[0].get("fused"):
        fused = copy.copy(optimizer)
        how = {"fused": True, "foreach": False}
        fused.param_groups = [{**g, **how} for g in optimizer.param_groups]
        yield "fused Adam", None, fused


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the model's longest stack."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    stacks.sort(key=len)
    return list(stacks[-1]) if stacks else []


def _checkpoint(model: nn.Module) -> None:
    for block in _blocks(model):
        block.forward = _Again(block.forward)


class _Again:
    """A forward pass that is checkpointed."""

    def __init__(self, forward) -> None:
        self.forward = forward

    def __call__(self, *args, **kwargs):
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            **kwargs,
        )


def _loss(call: Call, leaves: list, change, keeps: bool) -> Loss:
    """The model's own loss, called as the script has called the model."""
    done = []

    def loss(model: nn.Module, *batch: torch.Tensor) -> object:
        if change is not None and model not in done:
            done.append(model)
            change(model)
        parts = iter(batch)
        given = [next(parts) if torch.is_tensor(x) else x for x in leaves]
        args, kwargs = call.arguments(given)
        output = model(*args, **kwargs)
        scalar = torch.is_tensor(output) and output.numel() == 1
        value = output if scalar else getattr(output, "loss", None)
        if value is None:
            raise LookupError(
                "the script computes its loss outside of the model, whose "
                "output has none: see membudget.measuring.CatchOutOfMemory"
            )
        return output if keeps else value

    return loss
