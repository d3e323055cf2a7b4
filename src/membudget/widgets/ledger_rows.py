"""What the ledger widget sends to the page: the moments that can be the worst.

With fused attention the bytes of every moment of a step are

    c₀ + c₁·t + c₂·b·t

in the b sequences of a micro-batch and the t tokens of each. So a few rows of
coefficients hold what :func:`membudget.ledger.predict` says of every batch.
Those of the presets stand in ``ledger.json``, because to walk through them
takes half a minute; ``python -m membudget.widgets.ledger_rows`` writes it.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from membudget.ledger import (
    PLANNED,
    PRESETS,
    RECIPES,
    PaperMoment,
    Transformer,
    optimizer_bytes,
    predict,
    rules,
    update_workspace,
)
from membudget.planning.rows import upper

FILE = Path(__file__).with_name("ledger.json")

SHOWN = (
    "GPT-2 124M",
    "GPT-2 XL 1.5B",
    "Llama 3.2 1B",
    "Llama 3 8B",
    "Llama 3 70B",
)
"""The presets of the widget."""

MIXES = ("fp32", "autocast", "bf16", "master")
"""The recipes of the widget."""

TOKENS = tuple(2**i for i in range(4, 16))
"""Of a sequence: what can be chosen."""

MANY = 2**64
"""A batch so large that a moment's bytes show their coefficients: those of
the batch above, the constant below."""

BARS = {
    "forward": ("forward",),
    "backward": ("backward", "recomputation"),
}
"""What is drawn of a micro-batch, and the phases that it is the worst of."""

VARYING = ("activations", "temporaries")
"""The categories that grow with the micro-batch; gradients are constant."""


def stops(shape: Transformer) -> list[int]:
    """The tokens of a sequence that can be chosen for a model."""
    most = shape.context if shape.family == "gpt" else TOKENS[-1]
    return [tokens for tokens in TOKENS if tokens <= most]


def table(shape: Transformer) -> dict[str, Any]:
    """What the page has to know of a model.

    Returns:
        ``parameters``, their number; ``tokens``, the :func:`stops`; ``rows``,
        the moments that can be the worst, as :func:`rows` has them, for a
        model as it is and with each block checkpointed; and for each recipe
        bytes of ``parameters`` and ``gradients``, the number of its ``rows``,
        and for each optimizer bytes of its states, and the most that its step
        allocates: one parameter after the other, and all at once.
    """
    sizes = [w.elements for w in shape.write(1, 1).parameters]

    def optimizer(recipe: str, name: str) -> list[int]:
        most = [
            max(update_workspace(sizes, recipe, name, foreach))
            for foreach in (False, True)
        ]
        return [optimizer_bytes(sizes, recipe, name), *most]

    found: list[list] = []
    recipes = {}
    for name in MIXES:
        recipe = RECIPES[name]
        both = [rows(shape, name, checkpointed) for checkpointed in (0, 1)]
        if both not in found:
            found.append(both)
        recipes[name] = {
            "parameters": recipe.parameters * shape.parameters,
            "gradients": recipe.gradients * shape.parameters,
            "rows": found.index(both),
            "optimizers": {one: optimizer(name, one) for one in PLANNED},
        }
    return {
        "parameters": shape.parameters,
        "tokens": stops(shape),
        "rows": found,
        "recipes": recipes,
    }


def rows(
    shape: Transformer, recipe: str, checkpointed: bool
) -> list[list[list[list]]]:
    """The moments of a micro-batch that can be the worst of their phase.

    A GPU's :func:`membudget.ledger.rules` count.

    Returns:
        For the one micro-batch of a step, the first of several, and a later
        one: for each of :data:`BARS` its moments. A moment is its row's name,
        the bytes of gradients, and the coefficients c₀, c₁ and c₂ of each of
        :data:`VARYING`.
    """
    high = stops(shape)[-1]
    low = high // 2

    def walk(tokens: int, parts: int) -> Sequence[PaperMoment]:
        return predict(
            shape,
            parts * MANY,
            tokens,
            recipe=recipe,
            optimizer=None,
            micro_batch=MANY,
            checkpointed=bool(checkpointed),
            **rules(shape, "cuda"),
        ).moments

    def row(one: PaperMoment, two: PaperMoment) -> list:
        found = [one.row, one.split["gradients"]]
        for category in VARYING:
            above, under = divmod(one.split[category], MANY)
            rise = (under - two.split[category] % MANY) // (high - low)
            found += [under - rise * high, rise, above // high]
        return found

    found = []
    for parts in (1, 2):
        pairs = list(zip(walk(high, parts), walk(low, parts), strict=True))
        size = len(pairs) // parts
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            bars = (
                [row(*pair) for pair in part if pair[0].phase in phases]
                for phases in BARS.values()
            )
            found.append([_worst(bar, stops(shape)) for bar in bars])
    return found


def _worst(rows: list[list], stops: list[int]) -> list[list]:
    """Those that are the worst for some sizes."""
    kept: set[int] = set()
    for t in stops:
        lines = [
            (g + c0 + d0 + (c1 + d1) * t, (c2 + d2) * t)
            for _, g, c0, c1, c2, d0, d1, d2 in rows
        ]
        kept.update(upper(lines))
    return [rows[i] for i in sorted(kept)]


def token_bytes() -> int:
    """Of the batch, for each token: its number and its target's."""
    return sum(t.bytes for t in Transformer().write(1, 1).inputs)


@cache
def known() -> dict[str, dict[str, Any]]:
    """The :func:`table` of each model, from the file."""
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    tables = {name: table(PRESETS[name]) for name in SHOWN}
    FILE.write_text(json.dumps(tables, separators=(",", ":")) + "\n")
