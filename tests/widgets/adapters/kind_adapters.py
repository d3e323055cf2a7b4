"""What the tests have to know of the adapters widget."""

from functools import cache
from itertools import product

from kind import Kind

from membudget.ledger import predict
from membudget.ledger.walk import kept
from membudget.widgets import Adapters
from membudget.widgets import adapters_rows as rows

MIB = 2**20


def controls(widget):
    return {
        "train": widget.train,
        "bf16": widget.bf16,
        "dropout": widget.dropout,
        "four_bits": widget.four_bits,
        "checkpointed": widget.checkpointed,
    }


@cache
def step(switches):
    """The small Llama's, by the ledger."""
    return predict(rows.SHAPE, *rows.SIZES, recipe="bf16", **switches.options)


@cache
def of_block(switches, number=1):
    """Bytes that only the rows of one block save."""
    name = f"blocks.{number}"
    found = 0
    for tensor, savers in kept(rows.written(switches)):
        first = [getattr(row, "rows", [row])[0].name for row in savers]
        if all(
            f"{row} ".startswith((f"{name}.", f"{name} ")) for row in first
        ):
            found += tensor.bytes
    return found


def printed(widget):
    found = step(widget.switches)
    split = found.at_peak.split
    return {
        "block": of_block(widget.switches),
        "full": of_block(rows.Switches("all weights")),
        "saved": found.saved,
        "peak": found.peak,
        **{f"peak.{part}": split[part] for part in rows.PARTS},
        "large_saved": widget.step["large_saved"],
        "large_peak": sum(widget.step["large_peak"]),
    }


def mib(size):
    return f"{size / MIB:.1f} MiB"


def said(widget):
    found = step(widget.switches)
    return [
        f"One block keeps {mib(of_block(widget.switches))}",
        f"the whole step {mib(found.saved)}",
        f"peak is {mib(found.peak)}",
    ]


def moves():
    """What the controls can give, in turn; those of adapters stay as they
    are where there is none.
    """
    keys = "bf16", "dropout", "four_bits"
    for switches in rows.states():
        own = {key: getattr(switches, key) for key in keys}
        yield {
            "train": switches.train,
            **(own if switches.adapted else {}),
            "checkpointed": switches.checkpointed,
        }


def cases():
    """Every state, with the package's numbers."""
    widget = Adapters()
    for train, bf16, *more in product(rows.TRAINED, *[(False, True)] * 4):
        widget.train, widget.bf16 = train, bf16
        widget.dropout, widget.four_bits, widget.checkpointed = more
        yield {"state": widget.state(), "numbers": printed(widget)}


KIND = Kind(
    "adapters",
    Adapters,
    "What autograd keeps",
    controls,
    printed,
    said,
    states=list(moves()),
    given=[
        {"train": "LoRA, all layers"},
        {
            **{"train": "LoRA, query and value", "bf16": True},
            **{"checkpointed": True, "dropout": True, "four_bits": True},
        },
        {"train": "the embedding"},
    ],
    tabs=("train", "checkpointed"),
    rest=None,
    spoken={},
    columns=("one block keeps", "now", "full training"),
    parts=9,
    state=20_000,
    moves=[({}, list(moves()))],
)
