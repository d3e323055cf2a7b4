"""The tracker beside the allocator, over PyTorch's own list of operators.

``op_db`` is the list that PyTorch tests its operators with: several hundred,
each with inputs to try it on. Each input takes a forward and a backward pass,
and three numbers are compared, in bytes above the start: the allocator's peak
while nobody watches, the tracker's, and the dry run's. The inputs are
enlarged, so that tensors count and not their number.

A difference has one of the names of :data:`NAMES`, or the exit code is 1.
``--write`` writes ledger/operators.json.
"""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a chatty profiler

import torch
from published import versions, write
from torch import nn
from torch.testing import _utils as testing_utils
from torch.utils._pytree import tree_flatten, tree_unflatten
from zoo import Idle, inner, most, profiled

from membudget.ledger.zoo import operators as record
from membudget.measuring import dry_run, trace_step

# PyTorch's tests forbid what its users may do: to set a backend's flags.
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal import common_methods_invocations as listed

RECORD = Path(__file__).parents[1] / "src/membudget/ledger/operators.json"
SCALE, SAMPLES, LARGEST = 6, 5, 3_000_000
SMALL = 64  # bytes: a few numbers that a kernel makes into tensors
SIZES = {"XS": 3, "S": 5, "M": 10, "L": 20}

NAMES = {
    "equal": "to the byte, but for Python numbers that become tensors",
    "work space": (
        "an operator takes memory and gives it back before it returns, which "
        "the allocator sees and no tracker of operators. Proved: without "
        "these requests the three numbers are equal"
    ),
    "formula": (
        "under any dispatch mode PyTorch takes another formula, which does "
        "not look at values: a product's gradient is then the one for inputs "
        "with zeros. Proved: under a mode that does nothing the allocator "
        "finds the tracker's bytes"
    ),
    "refused": "the step depends on values, or on a layout, and is refused",
}
"""What a row can be; the dry run alone may be refused."""

EXPECTED = {
    "cumprod": "formula",
    "masked.cumprod": "formula",
    "linalg.vander": "formula",  # a product of powers
    "fft.hfft2": "work space",
    "masked.median": "work space",
}
"""Names that nothing here proves, as both causes meet in one step."""

CUT = (
    "gather",
    "max.reduction_with_dim",
    "nn.functional.binary_cross_entropy_with_logits",
    "kthvalue",
    "prod",
    "nn.functional.conv2d",
    "clamp",
    "nn.functional.ctc_loss",
    "softmax",
)
"""A few operators that between them have all names, for the tests."""


@dataclass
class Row:
    """An operator.

    Attributes:
        tracker: one of :data:`NAMES`: of the tracker beside the allocator.
        dry_run: of the dry run beside the tracker: ``"equal"``,
            ``"refused"``, or ``"wrong"``.
        off: the allocator's peak by the tracker's, where they differ most.
    """

    name: str
    tracker: str = "equal"
    dry_run: str = "equal"
    off: float = 1.0
    notes: list[str] = field(default_factory=list)


class Case:
    """A step of one operator on one of its inputs, as the zoo has it.

    What is trained of the input are the model's parameters, in order; what is
    not, the batch.
    """

    def __init__(self, operator: object, sample: object) -> None:
        given = sample.input, sample.args, sample.kwargs
        leaves, self.tree = tree_flatten(given)
        self.operator, self.leaves = operator, leaves
        tensors = [t for t in leaves if torch.is_tensor(t)]
        self.model = nn.ParameterList(
            nn.Parameter(t.detach().clone())
            for t in tensors
            if t.requires_grad
        )
        self.batch = [t for t in tensors if not t.requires_grad]

    def value(self, model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        """The sum of what can be trained, each number times 1.5.

        So its gradient is a tensor as large, as the next layer's would be.
        """
        trained, given = iter(model), iter(batch)
        leaves = [
            t
            if not torch.is_tensor(t)
            else next(trained if t.requires_grad else given)
            for t in self.leaves
        ]
        first, args, kwargs = tree_unflatten(leaves, self.tree)
        results, _ = tree_flatten(self.operator(first, *args, **kwargs))
        parts = [
            ((t.abs() if t.is_complex() else t) * 1.5).sum()
            for t in results
            if torch.is_tensor(t) and t.requires_grad
        ]
        return sum(parts[1:], start=parts[0])


def enlarged() -> None:
    """Let the inputs be larger, and PyTorch not save its random numbers."""
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("torch.testing._internal."):
            for size, before in SIZES.items():
                if vars(module).get(size) == before:
                    setattr(module, size, before * SCALE)
    testing_utils.freeze_rng_state = contextlib.nullcontext


def operators() -> dict[str, object]:
    """Those with a gradient in fp32 on a CPU, by their names."""
    return {
        ".".join(filter(None, (o.name, o.variant_test_name))): o
        for o in listed.op_db
        if o.supports_autograd
        and torch.float32 in o.supported_backward_dtypes("cpu")
    }


def cases(operator: object) -> Iterator[Case]:
    """The first inputs of an operator that are dense and not too large."""
    torch.manual_seed(0)
    samples = operator.sample_inputs("cpu", torch.float32, requires_grad=True)
    for sample in islice(samples, 4 * SAMPLES):
        leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [t for t in leaves if torch.is_tensor(t)]
        if any(t.layout is not torch.strided for t in tensors):
            continue
        if sum(t.numel() for t in tensors) <= LARGEST:
            yield Case(operator.op, sample)


def measure(name: str, operator: object) -> Row:
    """An operator's row."""
    row, found = Row(name), []
    with contextlib.suppress(RuntimeError):  # an input larger than memory
        found += islice(filter(runs, cases(operator)), SAMPLES)
    for case in found:
        compare(row, case)
    if not found:
        row.tracker = row.dry_run = "refused"
        row.notes.append("no dense input with a gradient")
    return row


def runs(case: Case) -> bool:
    """Whether it has a gradient; some inputs are made to fail."""
    with contextlib.suppress(Exception):
        case.value(case.model, *case.batch).backward()
        case.model.zero_grad()
        return True
    return False


def compare(row: Row, case: Case) -> None:
    """Enter what one input shows."""
    what = case.model, case.value, *case.batch
    torch.manual_seed(1)
    tracker = trace_step(*what)
    above = tracker.peak - tracker.start
    beside_allocator(row, case, tracker, above)
    try:
        dry = dry_run(*what)
    except ValueError as error:
        row.dry_run = "refused"
        row.notes.append(str(error)[:60])
    else:
        if dry.peak - dry.start != above:
            row.dry_run = "wrong"
            row.notes.append(f"dry run {dry.peak - dry.start}, not {above}")


def beside_allocator(row: Row, case: Case, tracker: object, above: int):
    """Compare with the allocator's requests, and name what differs."""
    seen = {o.name.replace(".", "::") for o in tracker.operators}
    seen |= {f"{name}_" for name in seen}
    requests = requests_of(case, seen)
    numbers = inner(requests, "number")
    peak = max(most(requests, drop=numbers))
    if peak == above or abs(peak - above) <= SMALL:
        return
    row.off = max(row.off, peak / above, key=lambda off: abs(off - 1))
    space = numbers | inner(requests, "workspace")
    if max(most(requests, drop=space)) == above:
        found = "work space"
    else:
        with Idle():
            requests = requests_of(case, seen)
        space = inner(requests, "number") | inner(requests, "workspace")
        idle = max(most(requests, drop=space)) == above
        found = "formula" if idle else EXPECTED.get(row.name, "wrong")
        if found == "wrong":
            row.notes.append(f"allocator {peak}, tracker {above}")
    if row.tracker in ("equal", "work space"):
        row.tracker = found


def requests_of(case: Case, seen: set[str]) -> list:
    nobody = SimpleNamespace(step=lambda: None)
    for _ in range(2):
        torch.manual_seed(1)
        found = profiled(case, case.batch, nobody, seen)
    return found


def recorded(row: Row) -> dict:
    """What is the same on every processor, and how far off it was here."""
    return {
        "name": row.name,
        "tracker": row.tracker,
        "dry run": row.dry_run,
        "off": round(row.off, 2),
    }


def differs(row: Row) -> bool:
    return (row.tracker, row.dry_run) != ("equal", "equal")


def is_wrong(row: Row) -> bool:
    return "wrong" in (row.tracker, row.dry_run)


def as_recorded(row: Row) -> bool:
    """Whether the record says the same; one of another PyTorch may not.

    What a kernel takes for itself depends on the processor.
    """
    if record()["versions"]["torch"] != versions()["torch"]:
        return True
    known = {entry["name"]: entry for entry in record()["rows"]}
    its = known.get(row.name, recorded(Row(row.name)))
    found = {row.tracker, its["tracker"]}
    same = len(found) == 1 or found == {"equal", "work space"}
    return same and row.dry_run == its["dry run"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="operators; all by default")
    parser.add_argument("--write", action="store_true", help=RECORD.name)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    enlarged()
    rows, wrong = [], []
    for name, operator in operators().items():
        if options.names and name not in options.names:
            continue
        row = measure(name, operator)
        rows.append(row)
        if is_wrong(row) or not (options.write or as_recorded(row)):
            wrong.append(name)
        print(recorded(row), *row.notes[:2], flush=True)
    if options.write and not options.names and not wrong:
        found = {
            "versions": {"torch": versions()["torch"]},
            "names": NAMES,
            "tried": len(rows),
            "rows": [recorded(row) for row in rows if differs(row)],
        }
        write(RECORD, found)
    sys.exit(f"{len(wrong)} of {len(rows)}: {wrong}" if wrong else None)


if __name__ == "__main__":
    main()
