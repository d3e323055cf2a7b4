"""What the tests have to know of the offloading widget."""

from itertools import islice, product
from math import ceil, floor

from kind import Kind

from membudget.offloading import MACHINES
from membudget.widgets import Offloading, format_bytes
from membudget.widgets.offloading import KEPT, STEP
from tests.soak import SOAK


def controls(widget):
    return {
        "what": widget.what,
        "width": widget.width // STEP,
        "machine": widget.machine,
        "tokens": widget.tokens.bit_length() - 1,
        "busy": widget.busy,
        "full": widget.full,
    }


def printed(widget):
    found = {}
    for what in KEPT:
        run, block = widget.run(what), widget.block(what)
        copied = [end - start for _, _, start, end in run.link[:1]]
        found |= {
            f"{what}.forward": block.forward,
            f"{what}.copy": copied[0] if copied else 0,
            f"{what}.time": run.time,
            f"{what}.waited": run.waited,
            f"{what}.moved": block.kept * len(run.link) // 2,
            f"{what}.peak": run.peak,
            f"{what}.least": widget.least(what),
        }
    return found


def from_width(least):
    width = ceil(least - 1e-6)
    grouped = f"{width:,}".replace(",", "\u202f")
    return f"from a width of {grouped} on" if width else "at any width"


def said(widget):
    plain, run = widget.run("nothing"), widget.run()
    whole = format_bytes(plain.peak)
    if widget.what == "nothing":
        hides = [from_width(widget.least(what)) for what in list(KEPT)[1:]]
        return [f"the eight tapes take {whole} on the card", *hides]
    slower = 100 * (run.time / plain.time - 1)
    share = f"{floor(slower + 0.5)} %"
    if slower < 0.5:
        share = "less than 1 %" if slower > 1e-6 else "no"
    return [
        f"The copies {'stick out' if run.waited else 'hide'}",
        f"take {share} longer",
        f"keep {format_bytes(run.peak)} in place of {whole}",
        from_width(widget.least(widget.what)),
    ]


def cases():
    """A grid of states, with the package's numbers and words; in a soak all
    of it.
    """
    yield from islice(all_cases(), 0, None, 1 if SOAK else 7)


def all_cases():
    widget = Offloading()
    for machine, width, tokens, shares in product(
        MACHINES,
        (256, 768, 4096, 9984, 16384),
        (1024, 8192, 131072),
        ((40, 80), (100, 10), (10, 100), (43, 77)),
    ):
        widget.machine, widget.width, widget.tokens = machine, width, tokens
        widget.busy, widget.full = shares
        for widget.what in KEPT:
            run = widget.run()
            yield {
                "state": widget.state(),
                "numbers": printed(widget),
                "said": said(widget),
                "compute": run.compute,
                "link": run.link,
                "on_card": run.on_card,
            }


KIND = Kind(
    "offloading",
    Offloading,
    "Compute and copy",
    controls,
    printed,
    said,
    states=[
        {"what": what, "machine": machine, "width": width}
        for what, machine, width in product(
            KEPT, MACHINES, (256, 768, 4096, 10240, 16384)
        )
    ]
    + [
        {"what": what, "tokens": tokens, "busy": busy, "full": full}
        for what, tokens, busy, full in product(
            KEPT, (1024, 131072), (10, 100), (10, 100)
        )
    ],
    given=[
        {"what": "checkpoints", "width": 512, "machine": "A100 80 GB"},
        {"what": "nothing", "machine": "GH200"},
        {"width": 256, "machine": "T4", "busy": 100, "full": 10},
    ],
    tabs=("what", "width", "machine"),
    rest=("width", {"width": 5376}),
    spoken={"width": "4\u202f096, as Llama 3 8B: the copies stick out"},
    columns=("in the host’s memory", "nothing", "tapes", "checkpoints"),
    parts=6,
    crossed=True,
    moves=[
        (
            {},
            [
                {"what": what, "width": width, "machine": machine}
                for what, width, machine in product(
                    KEPT, (256, 4096, 10240, 16384), ("T4", "H100 80 GB")
                )
            ],
        )
    ],
)
