"""The package on models that the course did not write.

Each model of the zoo takes a training step, and what the package says of the
step is compared with what happens:

* the peak tracker with the profiler, which sees each request to the
  allocator;
* the ledger's dry run and ``SavedBytes`` with the tracker;
* ``Checkpointed`` blocks with plain ones, gradients to the last bit;
* the answer of ``largest_batch`` with real steps; one that was checked, by
  the allocator.

A difference is 0 or has a name, which is a reason; else the exit code is 1.
``--write`` writes ledger/zoo.json, without the bytes that depend on the
processor.
"""

import argparse
import os
import sys
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a chatty profiler

import torch
from published import versions, write
from torch import nn
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_models import OTHERS, zoo

from membudget.checkpointing import Checkpointed
from membudget.ledger import account, largest_batch
from membudget.ledger.zoo import TOOLS
from membudget.ledger.zoo import zoo as record
from membudget.measuring import SavedBytes, trace_step, witness
from membudget.measuring.step import Step

RECORD = Path(__file__).parents[1] / "src/membudget/ledger/zoo.json"
PHASES = "forward", "backward", "step"
SAMPLES = 3

NAMES = {
    "workspace": (
        "An operator allocates it and frees it within itself, which the "
        "profiler sees and the tracker does not. Proved: without these "
        "requests the profiler finds the tracker's bytes."
    ),
    "number": (
        "A Python number becomes a tensor of 8 bytes before the operator "
        "that it is for, and under the tracker it stays a number. Proved in "
        "the same way."
    ),
    "mode": (
        "Watching changes the step. Under any tracker CTC keeps its lengths. "
        "Proved: under a tracker that does nothing the profiler and "
        "SavedBytes find the same bytes."
    ),
    "values": (
        "The step depends on values, which a dry run has not: it refuses."
    ),
    "kernel": (
        "What a kernel keeps for the backward pass depends on the processor: "
        "the dry run refuses, and largest_batch is asked to check its answer."
    ),
    "unused": (
        "SavedBytes counts what was saved for results that nobody used, and "
        "that are gone when the forward pass is over."
    ),
}
"""Why a difference is not 0."""

DRY = "dry run", "largest_batch"
EXPECTED = {
    "Mixtral, eager": (DRY, "refused", "values"),
    "CTC": (DRY, "refused", "values"),
    "LSTM": (DRY[:1], "refused", "kernel"),
    "RWKV": (("SavedBytes",), "bytes", "unused"),
}
"""Names that nothing here proves: by a model's first words the tools, whether
they refuse or are some bytes off, and the name."""

SEARCHED = (
    *OTHERS,
    "BERT",
    "GPT-2",
    "Llama",
    "Gemma 2",
    "T5",
    "Mixtral",
    "Mixtral, eager",
    "Mamba",
    "LoRA on Llama",
)
"""Models on which ``largest_batch`` is tried, which takes the longest."""

CUT = (
    "Qwen2",
    "Qwen2-MoE",
    "Mixtral, eager",
    "RNN, bf16",
    "LSTM",
    "CTC, lengths in tensors",
    "mean square",
    "convolutions, group norm, autocast",
)
"""A few models that between them have most causes, for the tests."""


@dataclass
class Row:
    """What was found.

    Attributes:
        peak: of the tracker, in bytes.
        cells: what the table shows of each tool: a difference in bytes, in
            the phase where it is largest, or yes or no.
        held: for each tool that was tried whether it is right, or the name
            of its difference.
        notes: names of what the profiler alone sees, and what is wrong.
    """

    name: str
    peak: int = 0
    cells: dict[str, str] = field(default_factory=dict)
    held: dict[str, bool | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, tool, cell, held, why="wrong"):
        """Enter a tool's result; what is not right may be expected."""
        for start, (tools, how, name) in EXPECTED.items():
            if self.name.startswith(start) and tool in tools and not held:
                number = how == "bytes" and isinstance(cell, int)
                held = name if number or how == cell else False
        if not held:
            self.notes.append(f"**{tool}: {why}**")
        if isinstance(cell, int):
            cell = f"{cell:+}" if cell else "0"
        self.cells[tool], self.held[tool] = cell, held

    def failed(self, tool, error):
        """Enter an error; a ``ValueError`` is a refusal."""
        refused = isinstance(error, ValueError)
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.put(tool, "refused" if refused else "error", False, said)

    @property
    def wrong(self):
        """Whether there is something that is neither 0 nor named."""
        return not all(self.held.values())


def measure(name):
    """A model's row."""
    row, case = Row(name), zoo()[name]()
    torch.manual_seed(0)
    batch = case.batch(SAMPLES)
    # no rate: experts chosen by values are the same in each step
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0, foreach=False)
    tracker = trace_step(case.model, case.value, *batch, optimizer=optimizer)
    row.peak = tracker.peak
    beside_profiler(row, case, batch, optimizer, tracker)
    beside_dry_run(row, case, batch, optimizer, tracker)
    beside_saved(row, case, batch, tracker)
    if "padding" not in name:
        checkpointed(row, case, batch)
    if name in SEARCHED:
        largest(row, case, optimizer)
    return row


# The profiler --------------------------------------------------------------


def peaks(tracker):
    """The most bytes alive in each phase, on top of the start."""
    starts = [index for index, _ in tracker.marks] + [len(tracker.timeline)]
    line = tracker.timeline
    return [max(line[a:b]) - tracker.start for a, b in pairwise(starts)]


def beside_profiler(row, case, batch, optimizer, tracker):
    """Compare, and prove the names of what differs."""
    found = peaks(tracker)
    seen = {o.name.replace(".", "::") for o in tracker.operators}
    requests = profiled(case, batch, optimizer, seen)
    more = difference(most(requests), found)
    unseen = set()
    for name in ("workspace", "number"):
        if alone := inner(requests, name):
            row.notes.append(name)
            unseen |= alone
    held = most(requests, drop=unseen) == found
    if not held:
        with Idle():
            requests = profiled(case, batch, optimizer, seen)
        unseen = inner(requests, "workspace") | inner(requests, "number")
        held = "mode" if most(requests, drop=unseen) == found else False
    row.put("PeakTracker", more, held)


class Idle(TorchDispatchMode):
    """It watches, as the tracker does, and does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@dataclass
class Request:
    """Bytes that the allocator gives, or takes back where negative.

    Attributes:
        phase: one of :data:`PHASES`.
        operator: number of the operator that the tracker sees, if in one.
        bare: whether it is in no operator of PyTorch at all.
    """

    time: int
    phase: str
    operator: int | None
    bare: bool
    pointer: int
    bytes: int


def profiled(case, batch, optimizer, seen):
    """The requests of a step.

    Args:
        seen: names of the operators that a tracker sees.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        with _RecordFunctionFast("forward"):
            value = case.value(case.model, *batch)
        with _RecordFunctionFast("backward"):
            value.backward()
            del value
        with _RecordFunctionFast("step"):
            optimizer.step()
            case.model.zero_grad()
    requests = []

    def walk(event, phase, operator, bare):
        if event.tag == _EventType.Allocation:
            its = event.typed[1]
            requests.append(
                Request(
                    event.start_time_ns,
                    phase,
                    operator,
                    bare,
                    its.ptr,
                    its.alloc_size,
                )
            )
            return
        if phase is None and event.name in PHASES:
            phase = event.name
        elif operator is None and event.name in seen:
            operator = event.id
        for child in event.children:
            walk(child, phase, operator, bare and "aten::" not in event.name)

    for event in profiler.profiler.kineto_results.experimental_event_tree():
        walk(event, None, None, True)
    return sorted(requests, key=lambda request: request.time)


def inner(requests, kind):
    """Those that the tracker cannot see, as indices.

    Args:
        kind: ``"workspace"``, made and freed within one operator, or
            ``"number"``, outside of any.
    """
    found, born = set(), {}
    for index, request in enumerate(requests):
        if request.bytes > 0:
            born[request.pointer] = index
        elif request.pointer in born:
            first = born.pop(request.pointer)
            made = requests[first]
            within = made.operator is not None
            if {
                "workspace": within and made.operator == request.operator,
                "number": made.bare and made.bytes <= 8,
            }[kind]:
                found |= {first, index}
    return found


def most(requests, drop=()):
    """The most bytes alive in each phase."""
    live, found = 0, {}
    for index, request in enumerate(requests):
        before = live
        if index not in drop:
            live += request.bytes
        highest = found.get(request.phase, before)
        found[request.phase] = max(highest, live)
    return [found.get(phase, 0) for phase in PHASES]


def difference(ours, theirs):
    """In the phase where it is largest."""
    return max((a - b for a, b in zip(ours, theirs, strict=True)), key=abs)


# The package beside its tracker --------------------------------------------


def beside_dry_run(row, case, batch, optimizer, tracker):
    """Compare peaks, and what is alive at the peak by category."""
    try:
        ledger = account(case.model, case.value, *batch, optimizer=optimizer)
    except Exception as error:
        row.failed("dry run", error)
        return
    more = difference(peaks(ledger.tracker), peaks(tracker))
    row.put("dry run", more, not more and ledger.split == tracker.split())


def beside_saved(row, case, batch, tracker):
    """Compare with the activations when the forward pass is over."""
    (moment,) = (i for i, label in tracker.marks if label == "backward")
    held = tracker.split(moment - 1)["activations"]

    def beyond():
        with SavedBytes(case.model, *batch) as saved:
            value = case.value(case.model, *batch)
        return saved.total + value.untyped_storage().nbytes() - held

    more, right = beyond(), True
    if more:
        with Idle():
            right = False if beyond() else "mode"
    row.put("SavedBytes", more, right)


class Block(nn.Module):
    """A block with the further arguments that its model gives it."""

    def __init__(self, block, args, kwargs):
        super().__init__()
        self.block = block
        name = None if args else "hidden_states"
        self.x = args[0] if args else kwargs[name]
        self.args = args[1:]
        self.kwargs = {k: v for k, v in kwargs.items() if k != name}

    def forward(self, x):
        result = self.block(x, *self.args, **self.kwargs)
        return result if isinstance(result, torch.Tensor) else result[0]


def blocks_of(case, batch):
    """The model's longest part that runs block by block; may be empty."""
    calls, handles = {}, []
    lists = [
        [*m]
        for m in case.model.modules()
        if isinstance(m, nn.Sequential | nn.ModuleList) and len(m) > 1
    ]

    def seen(block, args, kwargs):
        calls.setdefault(block, (args, kwargs))

    for block in {b for blocks in lists for b in blocks}:
        handles.append(block.register_forward_pre_hook(seen, with_kwargs=True))
    for module in case.model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # a call would change the cache
    with torch.no_grad():
        case.value(case.model, *batch)
    for handle in handles:
        handle.remove()
    lists = [blocks for blocks in lists if all(b in calls for b in blocks)]
    blocks = max(lists, key=weight, default=[])
    return [Block(b, *calls[b]) for b in blocks]


def weight(blocks):
    return sum(p.numel() for block in blocks for p in block.parameters())


def checkpointed(row, case, batch):
    """Compare gradients; each block alone, and all of them as one."""
    blocks = blocks_of(case, batch)
    if not blocks:
        return
    plain = gradients(case, blocks, nn.Sequential(*blocks))
    every = [*range(len(blocks))]
    bitwise = all(
        same(plain, gradients(case, blocks, Checkpointed(*blocks, segments=s)))
        for s in ([[i] for i in every], [every])
    )
    row.put("Checkpointed", "yes" if bitwise else "no", bitwise)


def gradients(case, blocks, chain):
    """The gradients of parameters and input; dropout is on."""
    torch.manual_seed(1)
    x = blocks[0].x.detach().clone()
    x.requires_grad_(x.is_floating_point())
    chain.zero_grad()
    with case.region():
        value = chain(x).float().square().mean()
    value.backward()
    found = [x.grad, *(p.grad for p in chain.parameters())]
    chain.zero_grad()
    return found


def same(ours, theirs):
    return all(
        a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def largest(row, case, optimizer):
    """The answer has to fit a limit, and one sample more must not."""

    check = row.held["dry run"] == "kernel"

    def peak(samples):
        step = case.model, case.value, *case.batch(samples)
        tracker = trace_step(*step, optimizer=optimizer)
        if not check:
            return tracker.peak
        model, loss, *batch = step
        return tracker.start + witness(Step(model, loss, batch, optimizer))

    limit = peak(SAMPLES + 2) + 1000
    try:
        answer = largest_batch(
            case.model,
            case.value,
            *case.batch(SAMPLES),
            limit=limit,
            optimizer=optimizer,
            check=check,
        )
    except Exception as error:
        row.failed("largest_batch", error)
        return
    right = peak(answer) <= limit < peak(answer + 1)
    row.put("largest_batch", "yes" if right else "no", right)


# The table, and the record -------------------------------------------------


def recorded(row):
    """What is the same on every processor."""
    sure = not {"kernel", "values"} & {*row.held.values()}
    return {"name": row.name, "peak": row.peak if sure else None, **row.held}


def as_recorded(row):
    """Whether the record says the same; one of other versions may not."""
    known = {entry["name"]: entry for entry in record()["rows"]}
    if record()["versions"] != versions():
        return True
    return known.get(row.name) == recorded(row)


def line(row):
    names = [held for held in row.held.values() if isinstance(held, str)]
    said = "; ".join([*dict.fromkeys(names), *row.notes])
    cells = [row.cells.get(tool, "–") for tool in TOOLS]
    return [row.name, str(row.peak), *cells, said]


def show(cells):
    print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--write", action="store_true", help=RECORD.name)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    head = ["model", "peak (bytes)", *TOOLS, "names"]
    show(head)
    show(["---"] * len(head))
    rows, wrong = [], []
    for name in options.names or zoo():
        row = measure(name)
        if not options.write and not as_recorded(row):
            row.notes.append("**not as recorded**")
            wrong.append(name)
        elif row.wrong:
            wrong.append(name)
        rows.append(row)
        show(line(row))
    if options.write and not options.names and not wrong:
        found = {
            "versions": versions(),
            "names": NAMES,
            "rows": [recorded(row) for row in rows],
        }
        write(RECORD, found)
    sys.exit(f"{len(wrong)} of {len(rows)}: {wrong}" if wrong else None)


if __name__ == "__main__":
    main()
