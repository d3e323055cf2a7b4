"""The offloading widget: whether a copy hides behind the next block."""

from functools import partial
from math import ceil
from typing import Any

import traitlets

from membudget.checks import one_of, whole
from membudget.offloading import (
    BUSY,
    CHECKPOINT,
    FULL,
    MACHINES,
    TAPE,
    Block,
    Lanes,
    gpt_block,
    lanes,
    least_width,
    sustained,
)
from membudget.widgets.base import Checked, Widget, format_bytes

KEPT = {"nothing": TAPE, "tapes": TAPE, "checkpoints": CHECKPOINT}
"""What waits in the host's memory, and the bytes that a block keeps of it
for each token and unit of width."""

MODELS = {
    "GPT-2": 768,
    "Llama 3.2 1B": 2048,
    "Llama 3.2 3B": 3072,
    "Llama 3 8B": 4096,
    "Qwen3 32B": 5120,
    "Llama 3 70B": 8192,
    "GPT-3": 12288,
    "Llama 3 405B": 16384,
}
"""Widths, by the models' reports and configs. Their blocks are not all
GPT's; the widths are what is compared."""

COUNT = 8
"""Blocks in the row."""

STEP, WIDEST = 256, 16384
SHORTEST, LONGEST = 1024, 131072


def _width(value: Any, name: str) -> int:
    value = whole(value, name, STEP, WIDEST)
    if value % STEP:
        raise ValueError(f"{name} is {value}: use a multiple of {STEP}")
    return value


def _tokens(value: Any, name: str) -> int:
    value = whole(value, name, SHORTEST, LONGEST)
    if value & (value - 1):
        raise ValueError(f"{name} is {value}: use a power of two")
    return value


_share = partial(whole, least=10, most=100)


class Offloading(Widget):
    """Two lanes under a row of eight GPT blocks: compute, and the link.

    They show one micro-batch of one sequence, forward and backward
    (:func:`membudget.offloading.lanes`), and below them the bytes on the
    card; then from which width copies hide
    (:func:`membudget.offloading.least_width`).

    Args:
        what: what waits in the host's memory: one of :data:`KEPT`. With
            ``"checkpoints"`` each block is checkpointed.
        width: h, a multiple of 256 from 256 to 16 384.
        machine: one of :data:`membudget.offloading.MACHINES`.
        tokens: T of the sequence, a power of two from 1 024 to 131 072.
        busy: percent of the card's FLOP/s that are sustained, from 10.
        full: percent of the link's bytes/s, from 10.

    Attributes:
        tables: the machines, the models and the law's coefficients.

    Example:
        >>> Offloading("checkpoints", width=4096).run().waited
        0.0
    """

    name = "offloading"
    positional = ("what",)
    named = ("width", "machine", "tokens")

    what = traitlets.Enum(list(KEPT), "tapes").tag(sync=True)
    width = Checked(_width, 4096).tag(sync=True)
    machine = traitlets.Enum(list(MACHINES), "H100 80 GB").tag(sync=True)
    tokens = Checked(_tokens, 2048).tag(sync=True)
    busy = Checked(_share, round(100 * BUSY)).tag(sync=True)
    full = Checked(_share, round(100 * FULL)).tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, what: str = "tapes", **traits: Any) -> None:
        super().__init__(what=what, **traits)

    @traitlets.default("tables")
    def _tables(self) -> dict[str, Any]:
        return {
            "machines": [[name, *of] for name, of in MACHINES.items()],
            "models": [[name, width] for name, width in MODELS.items()],
            "kept": [[what, kept] for what, kept in KEPT.items()],
            "blocks": COUNT,
        }

    @property
    def speeds(self) -> tuple[float, float]:
        """F and B."""
        return sustained(self.machine, self.busy / 100, self.full / 100)

    def block(self, what: str) -> Block:
        """One of the row, where that waits: one of :data:`KEPT`."""
        one_of(what, KEPT, "choice")
        flops, _ = self.speeds
        again = what == "checkpoints"
        return gpt_block(self.width, self.tokens, flops, checkpointed=again)

    def run(self, what: str | None = None) -> Lanes:
        """The lanes, as chosen or of another of :data:`KEPT`."""
        what = self.what if what is None else what
        row = [self.block(what)] * COUNT
        return lanes(row, None if what == "nothing" else self.speeds[1])

    def least(self, what: str) -> float:
        """The width from which copies of that hide: one of :data:`KEPT`."""
        kept = KEPT[one_of(what, KEPT, "choice")]
        return least_width(kept, *self.speeds, self.tokens)

    def sentence(self) -> str:
        """Whether copies hide, and what stays on the card."""
        plain, run = self.run("nothing"), self.run()
        if self.what == "nothing":
            return (
                f"Eight blocks of width {self.width} keep their tapes, "
                f"{format_bytes(plain.peak)}, on the card."
            )
        slower = 100 * (run.time / plain.time - 1)
        share = f"{slower:.0f} %" if slower > 1e-6 else "no"
        how = "stick out" if run.waited else "hide"
        return (
            f"Eight blocks of width {self.width} on {self.machine}, with "
            f"{self.what} in the host's memory. The copies {how}: forward "
            f"and backward take {share} longer, and keep "
            f"{format_bytes(run.peak)} on the card in place of "
            f"{format_bytes(plain.peak)}. They hide from a width of "
            f"{ceil(self.least(self.what) - 1e-6)} on."
        )
