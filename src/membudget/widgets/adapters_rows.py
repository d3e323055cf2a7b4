"""What the adapters widget sends to the page: what one block keeps, and what
the step needs, for every state of its switches.

All of it is the ledger's: the tiles are the tensors that its rows save
(:func:`membudget.ledger.walk.kept`), the rest is
:func:`membudget.ledger.predict`'s. It stands in ``adapters.json``, because to
walk through Llama 3 8B so often takes seconds;
``python -m membudget.widgets.adapters_rows`` writes it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from membudget.ledger import (
    LLAMA3_8B,
    TARGETS,
    Adapter,
    Prediction,
    Transformer,
    predict,
    rules,
)
from membudget.ledger.paper import Paper, PaperTensor, Row, Segment
from membudget.ledger.walk import kept
from membudget.widgets.base import later

FILE = Path(__file__).with_name("adapters.json")

SHAPE = Transformer(2048, 256, 8, 8, kv_heads=4, hidden=704, family="llama")
"""The small Llama of chapter 7."""

SIZES = (4, 256)
"""Its batch: sequences, and tokens of each."""

TOKENS = prod(SIZES)
"""Of the whole batch."""

LARGE = (1, 4096)
"""The batch of Llama 3 8B."""

ON_GPU = rules(LLAMA3_8B, "cuda") | {"foreach": False, "fused": True}
"""How its step runs, as in the chapter."""

TRAINED: dict[str, dict[str, Any]] = {
    later("all weights"): {"trained": ("*",)},
    later("LoRA, all layers"): {"targets": TARGETS["llama"]},
    later("LoRA, query and value"): {"targets": ("query", "value")},
    later("the embedding"): {"trained": ("token.weight",)},
}
"""What is trained, by the widget's words: weights, or adapters' layers."""

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
)
"""The categories of what is alive, from left to right."""

AFTER = {
    "": "norm1",
    "value": "attention",
    "out": "norm2",
    "gate": "product",
    "up": "product",
}
"""The box of rows that no linear layer writes, by the box before them."""

NAMES = {
    "norm1": (later("input"), "1/rms", later("normalised")),
    "attention": ("q", "k", "v", later("result"), later("sums")),
    "norm2": ("input", "1/rms", "normalised"),
    "product": ("gate", "SiLU(gate)", "up"),
}
"""What these boxes save, in the order of their rows."""


@dataclass(frozen=True)
class Switches:
    """A state of the switches; without an adapter all but ``checkpointed``
    are off.
    """

    train: str
    bf16: bool = False
    dropout: bool = False
    four_bits: bool = False
    checkpointed: bool = False

    @property
    def adapted(self) -> bool:
        """Whether there are adapters."""
        return "targets" in TRAINED[self.train]

    @property
    def options(self) -> dict[str, Any]:
        """Those of :func:`membudget.ledger.predict`."""
        options = {"checkpointed": self.checkpointed}
        if not self.adapted:
            return options | TRAINED[self.train]
        itemsize = 2 if self.bf16 else 4
        targets = TRAINED[self.train]["targets"]
        adapter = Adapter(
            *(targets, 8, itemsize), self.dropout, self.four_bits
        )
        return options | {"adapter": adapter}


def states() -> Iterator[Switches]:
    """Every state."""
    for train, *of_adapters, on in product(TRAINED, *[(False, True)] * 4):
        switches = Switches(train, *of_adapters, checkpointed=on)
        if switches.adapted or not any(of_adapters):
            yield switches


def written(switches: Switches) -> Paper:
    """The small Llama's forward pass, on paper."""
    options = {"trained": (), **switches.options}
    return SHAPE.write(*SIZES, itemsize=2, **options)


def tiles(switches: Switches, block: int = 1) -> list[list]:
    """The tensors that autograd keeps of a block of the small Llama.

    The first block keeps less where no weight below it is trained.

    Returns:
        Of each tensor the boxes of the block that save it, in one text, its
        name, its numbers for each token, and bytes of a number.
    """
    paper = written(switches)
    box_of = _boxes(paper.rows, f"blocks.{block}")
    names = {box: iter(words) for box, words in NAMES.items()}
    found = []
    for tensor, rows in kept(paper):
        boxes = dict.fromkeys(box_of.get(id(row), "") for row in rows)
        if "" not in boxes:
            first, *_ = boxes
            name = next(names[first]) if first in names else _x(tensor, rows)
            numbers = tensor.elements // TOKENS
            found.append([" ".join(boxes), name, numbers, tensor.itemsize])
    return found


def _boxes(rows: list[Row | Segment], block: str) -> dict[int, str]:
    """The box of each row of a block; of a checkpointed one, its own."""
    box, found = "", {}
    for row in rows:
        first = row.rows[0] if isinstance(row, Segment) else row
        module, _, _ = first.name.partition(" ")
        if module == block or module.startswith(f"{block}."):
            inner = module.removeprefix(block).strip(".")
            box = inner or AFTER.get(box, box)
            found[id(row)] = "block" if isinstance(row, Segment) else box
    return found


def _x(tensor: PaperTensor, rows: list[Row | Segment]) -> str:
    """What a linear layer, its adapter or a checkpoint saves."""
    if any(isinstance(row, Row) and "dropout" in row.name for row in rows):
        return later("mask")
    return "x" if tensor.elements >= SHAPE.width * TOKENS else "A x"


def step(switches: Switches) -> dict[str, Any]:
    """What a step needs in a state: of the small Llama and of Llama 3 8B
    bytes that are kept, and bytes of each of :data:`PARTS` at the peak.
    """
    small = predict(SHAPE, *SIZES, recipe="bf16", **switches.options)
    large = predict(
        *(LLAMA3_8B, *LARGE), recipe="bf16", **ON_GPU, **switches.options
    )
    return asdict(switches) | {
        "saved": small.saved,
        "peak": _parts(small),
        "large_saved": large.saved,
        "large_peak": _parts(large),
    }


def _parts(step: Prediction) -> list[int]:
    return [step.at_peak.split[part] for part in PARTS]


def account() -> dict[str, Any]:
    """What the page has to know.

    Returns:
        ``train``: what can be trained, and whether that takes adapters;
        ``steps``: :func:`step` of each state, and the number of its
        ``tiles``; ``tiles``: lists as :func:`tiles` gives, in which a last
        word says whether a tensor is kept even in a frozen block.
    """
    anyway = {_key(tile) for tile in tiles(Switches("the embedding"))}
    lists: list[list[list]] = []
    steps = []
    for switches in states():
        own = [[*tile, _key(tile) in anyway] for tile in tiles(switches)]
        if own not in lists:
            lists.append(own)
        steps.append(step(switches) | {"tiles": lists.index(own)})
    return {
        "blocks": SHAPE.depth,
        "tokens": TOKENS,
        "train": [[name, "targets" in of] for name, of in TRAINED.items()],
        "steps": steps,
        "tiles": lists,
    }


def _key(tile: list) -> tuple[str, str]:
    """The box that a tensor lies in, and its name."""
    boxes, name, *_ = tile
    return boxes.partition(" ")[0], name


@cache
def known() -> dict[str, Any]:
    """The :func:`account`, from the file."""
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    FILE.write_text(json.dumps(account(), separators=(",", ":")) + "\n")
