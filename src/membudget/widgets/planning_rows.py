"""What the planner sends to the page: the moments that can be the worst.

At each moment of a step the bytes are

    c + s·m + (c' + s'·m)·j

in the m sequences of a micro-batch and the j blocks that are checkpointed, as
:mod:`membudget.planning.peaks` says; so a few rows of coefficients hold the
peak of every plan. What the step does is affine, too
(:mod:`membudget.planning.work`). To walk through the steps takes minutes:
``python -m membudget.widgets.planning_rows`` does it and writes
``planning.json``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from membudget.ledger import OPTIMIZERS, PRESETS, Transformer
from membudget.planning.counter import less
from membudget.planning.memory import (
    held_in,
    parts_of,
    states_of,
    workspace,
)
from membudget.planning.peaks import Step, _places, _walked
from membudget.planning.plan import Plan
from membudget.planning.search import CHUNKS
from membudget.planning.work import _updates, micro_batches
from membudget.sharding import PARTS

FILE = Path(__file__).with_name("planning.json")

SHOWN = {
    "small GPT": Transformer(
        vocabulary=4096, width=256, depth=6, heads=4, context=1024, tied=True
    ),
    "GPT-2 124M": PRESETS["GPT-2 124M"],
    "Llama 3 8B": PRESETS["Llama 3 8B"],
}
"""The models of the widget."""

TOKENS = {"gpt": (1024,), "llama": (8192,)}
"""Of a sequence: what can be chosen for a family. Powers of two, so that
every number of chunks cuts them equally."""

MIXES = ("fp32", "autocast", "bf16", "master")
"""The recipes of the widget."""

RANKS = (1, 2, 4, 8, 16, 32, 64)
"""How many cards can be chosen."""

MOST = 1024
"""Sequences of a micro-batch for which the rows are kept."""

MANY = 2**64
"""A micro-batch so large that a moment's bytes show their coefficients."""

VARIANTS = ((False, False), (True, False), (True, True))
"""Of a micro-batch: whether its loss is scaled and whether gradients are
there before: the only one, the first, and one that finds gradients. Beside
gradients the two numbers of a scaled loss are never at the peak: so the last
is also that of a loss that is not scaled."""

CASES = ("none", "some", "all")
"""Of the blocks that are checkpointed."""

VARYING = ("activations", "temporaries")


def peaks_of(
    network: Transformer, tokens: int, recipe: str, chunks: int | None
) -> list:
    """The rows of a micro-batch.

    Returns:
        For each of :data:`VARIANTS` and :data:`CASES` the moments that can
        be the worst, gradients with them; then, for each of
        :data:`membudget.sharding.PARTS` and each case, those that can be the
        worst without gradients. A moment is its row's name, its phase, and
        for activations, temporaries and gradients the coefficients c, s, c'
        and s'.
    """
    step = Step(
        replace(network, depth=1), tokens, "cuda", recipe, chunks, False
    )
    found: list = []
    for scaled, kept in VARIANTS:
        variant = replace(step, scaled=scaled, kept=kept)
        found.append(
            [
                _worst(_moments(variant, case, network.depth), case, network)
                for case in CASES
            ]
        )
    for part in PARTS:
        found.append(
            [
                _worst(
                    [
                        [p, row, phase, *c[:8], 0, 0, 0, 0]
                        for p, row, phase, *c in _moments(
                            step, case, network.depth
                        )
                        if p == part
                    ],
                    case,
                    network,
                )
                for case in CASES
            ]
        )
    return found


@lru_cache(maxsize=64)
def _moments(step: Step, case: str, depth: int) -> list[list]:
    """All moments: part, row, phase and coefficients."""
    few = {"none": (0, 1), "some": (1, 1), "all": (1, 0)}[case]
    base = _cells(step, few)
    further = [
        _cells(step, tuple(n + (i == kind) for i, n in enumerate(few)))
        if few[kind]
        else None
        for kind in (0, 1)
    ]
    found = []
    for at, (head, numbers) in enumerate(base):
        again, once = (
            [b - a for a, b in zip(numbers, more[at][1], strict=True)]
            if more
            else [0] * len(numbers)
            for more in further
        )
        if case == "some":  # j checkpointed, depth - j not
            constant = [
                n - a + (depth - 1) * o
                for n, a, o in zip(numbers, again, once, strict=True)
            ]
            slope = [a - o for a, o in zip(again, once, strict=True)]
        else:
            more = again if case == "all" else once
            constant = [
                n + (depth - 1) * m for n, m in zip(numbers, more, strict=True)
            ]
            slope = [0] * len(numbers)
        coefficients = []
        for i in (0, 2, 4):
            coefficients += [*constant[i : i + 2], *slope[i : i + 2]]
        found.append([*head, *coefficients])
    return found


def _cells(step: Step, blocks: tuple[int, int]) -> list[tuple]:
    """In the order of the places: part, row and phase, and constant and
    slope of activations, temporaries and gradients."""
    places: list[list] = [[] for _ in range(5)]
    moments = _walked(step, blocks, MANY)
    for part, moment in zip(parts_of(moments), moments, strict=True):
        split = moment.split
        numbers = []
        for category in VARYING:
            above, under = divmod(split[category], MANY)
            numbers += [under, above]
        numbers += [0 if step.kept else split["gradients"], 0]
        for place in _places(moment.row, blocks):
            places[place].append(((part, moment.row, moment.phase), numbers))
    return [cell for place in places for cell in place]


def _worst(moments: Sequence[list], case: str, network: Transformer) -> list:
    """Those that are the worst for some sizes, without their part."""
    depth = network.depth
    counts = {"none": [0], "all": [0], "some": range(1, depth)}[case]
    lines = [
        (c[0] + c[4] + c[8], c[1] + c[5], c[2] + c[6] + c[10], c[3] + c[7])
        for _, _, _, *c in moments
    ]
    corners = [
        [
            (at, slope)
            for j in (counts[0], counts[-1])
            for at, slope in [(c + d * j, s + e * j)]
        ]
        if counts
        else []
        for c, s, d, e in lines
    ]
    if not counts:
        return []
    left: list[int] = []
    order = sorted(
        range(len(lines)),
        key=lambda i: [-sum(at + 64 * s for at, s in corners[i]), i],
    )
    for i in order:
        if not any(
            all(
                a + s >= b + t and s >= t
                for (a, s), (b, t) in zip(corners[k], corners[i], strict=True)
            )
            for k in left
        ):
            left.append(i)
    left.sort()
    kept: set[int] = set()
    for j in counts:
        here = [
            (c + d * j, s + e * j) for c, s, d, e in (lines[i] for i in left)
        ]
        kept |= {left[i] for i in _upper(here)}
    return [moments[i][1:] for i in sorted(kept)]


def _upper(lines: Sequence[tuple[int, int]]) -> set[int]:
    """The lines (constant, slope) that are the highest somewhere from 1 to
    :data:`MOST`. Where several are, the first."""
    at: int | None = 1
    found = set()
    while at is not None and at <= MOST:
        heights = [constant + slope * at for constant, slope in lines]
        best = heights.index(max(heights))
        found.add(best)
        constant, slope = lines[best]
        at = min(
            ((constant - c) // (s - slope) + 1 for c, s in lines if s > slope),
            default=None,
        )
    return found


def work_of(network: Transformer, tokens: int, recipe: str) -> list:
    """What a micro-batch does: FLOPs, bytes and operators of each.

    Returns:
        For the plain loss and for one in chunks: of a micro-batch without
        checkpoints and of a sequence in it; then of a checkpointed block
        more, and of a sequence in it; of adding to the gradients; of
        multiplying a loss with its share; of one more chunk.
    """
    depth = network.depth
    one, two = replace(network, depth=1), replace(network, depth=2)

    def count(shape, sequences, again=0, chunks=None, **more):
        how = sequences, tokens, again, chunks, recipe
        return micro_batches(shape, *how, **more)

    def lines(first, second):
        slope = less(second, first)
        return less(first, slope), slope

    plain = [count(one, m)[0] for m in (1, 2)]
    deeper = [count(two, m)[0] for m in (1, 2)]
    again = [count(one, m, 1)[0] for m in (1, 2)]
    chunked = [count(one, m, 0, 1)[0] for m in (1, 2)]
    blocks = [
        _times(depth - 1, less(b, a))
        for a, b in zip(plain, deeper, strict=True)
    ]
    more = [less(b, a) for a, b in zip(plain, again, strict=True)]
    first, second, shared = count(one, 1, shares=(None, None, 0.5))
    other, further = count(two, 1, shares=(None, None))
    added = less(second, first)
    deep = less(less(further, other), added)
    return [
        *lines(*[_more(a, b) for a, b in zip(plain, blocks, strict=True)]),
        *lines(*[_more(a, b) for a, b in zip(chunked, blocks, strict=True)]),
        *lines(*more),
        _more(added, _times(depth - 1, deep)),
        less(shared, second),
        less(count(one, 2, 0, 2)[0], chunked[1]),
    ]


def _more(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _times(count, a):
    return tuple(count * x for x in a)


def states_table(network: Transformer) -> dict[str, Any]:
    """Bytes of the states, of the optimizer's step, and what it does."""
    depth = network.depth
    found: dict[str, Any] = {"states": {}, "updates": {}}
    for recipe in MIXES:
        states, updates = {}, {}
        for optimizer in OPTIMIZERS:
            family = Plan(1, recipe=recipe, optimizer=optimizer)
            held = states_of(network, family)
            work = workspace(network, family, "cuda")
            states[optimizer] = [
                held.parameters,
                held.gradients,
                held.optimizer,
                work,
            ]
            shape = replace(network, depth=1)
            one, two = _updates(shape, recipe, optimizer, family.fused)
            ends = _times(2 - depth, one), _times(depth - 1, two)
            updates[optimizer] = list(_more(*ends))[1:]
        found["states"][recipe] = states
        found["updates"][recipe] = updates
    return found


def sharded_table(network: Transformer, recipe: str) -> dict[str, Any]:
    """For each number of ranks and each stage what FSDP2 holds: in each of
    its parts, and while the optimizer steps, parameters, gradients and
    buffers; in the parts, too, where gradients of earlier micro-batches are
    there (``summed``: the gradients alone, where the others are the same);
    and for each optimizer its states, and what its step allocates.
    """

    def one(ranks: int, stage: str) -> dict[str, Any]:
        own, parts, summed = {}, [], []
        for optimizer in OPTIMIZERS:
            if optimizer == "adam-8bit":
                continue
            how = {"optimizer": optimizer, "stage": stage, "ranks": ranks}
            family = Plan(1, recipe=recipe, **how)
            parts, summed = (
                held_in(network, family, "cuda", several)
                for several in (False, True)
            )
            own[optimizer] = [parts[-1][1].optimizer, parts[-1][2]]
        parts, summed = (
            [
                [h.parameters + h.gathered, h.gradients, h.buffers]
                for _, h, _ in held
            ]
            for held in (parts, summed)
        )
        same = [a[::2] == b[::2] for a, b in zip(parts, summed, strict=True)]
        return {
            "parts": parts[:-1],
            "summed": [
                b[1] if alike else b
                for alike, b in zip(same[:-1], summed, strict=False)
            ],
            "last": parts[-1],
            "own": own,
        }

    return {
        str(ranks): {
            stage: one(ranks, stage) for stage in ("zero-2", "zero-3")
        }
        for ranks in RANKS[1:]
    }


def packed(network: Transformer, found: dict[str, list]) -> dict[str, Any]:
    """The rows of several steps, each row once.

    Args:
        network: whose they are.
        found: for each step's name what :func:`peaks_of` gave for each of
            :data:`membudget.planning.search.CHUNKS`.
    """
    names: list[str] = []
    phases: list[str] = []
    pool: dict[tuple, int] = {}
    at: dict[tuple, int] = {}  # a row by what it is where j is fixed

    def number(things: list[str], one: str) -> int:
        if one not in things:
            things.append(one)
        return things.index(one)

    def written(row: str, phase: str, *numbers: int) -> tuple:
        row = re.sub(r"^blocks\.\d+[ .]", "a block’s ", row)
        while numbers and not numbers[-1]:
            numbers = numbers[:-1]
        return number(names, row), number(phases, phase), *numbers

    def fixed(row: Sequence, j: int) -> tuple:
        numbers = [*row[2:], *[0] * (14 - len(row))]
        where = [
            numbers[i + k] + numbers[i + k + 2] * j
            for i in (0, 4, 8)
            for k in (0, 1)
        ]
        return (j, *row[:2], *where)

    def place(row: Sequence, case: int) -> int:
        one = written(*row)
        j = (0, None, network.depth)[case]
        if j is None:
            where = pool.setdefault(one, len(pool))
            for end in (0, network.depth):
                at.setdefault(fixed(one, end), where)
            return where
        key = fixed(one, j)
        if key not in at:
            at[key] = pool.setdefault(one, len(pool))
        return at[key]

    rows: dict[str, list] = {}
    order = (1, 0, 2)  # those of some blocks tell most of the others
    for name, steps in found.items():
        rows[name] = []
        for groups in steps:
            numbers = []
            for cases in groups:
                cells = {
                    case: [place(row, case) for row in cases[case]]
                    for case in order
                }
                numbers.append([cells[case] for case in range(3)])
            rows[name].append(numbers)
    return {
        "names": names,
        "phases": phases,
        "pool": [list(row) for row in pool],
        "rows": rows,
    }


def table(network: Transformer) -> dict[str, Any]:
    """What the page has to know of a model."""
    steps = list(product(TOKENS[network.family], ("fp32", "autocast", "bf16")))
    peaks = {
        f"{tokens} {recipe}": [
            peaks_of(network, tokens, recipe, chunks) for chunks in CHUNKS
        ]
        for tokens, recipe in steps
    }
    works = {
        f"{tokens} {recipe}": work_of(network, tokens, recipe)
        for tokens, recipe in steps
    }
    return assembled(network, peaks, works)


def assembled(
    network: Transformer, peaks: dict[str, list], works: dict[str, list]
) -> dict[str, Any]:
    """The table, from the parts that take long."""
    found = packed(network, peaks)
    rows = found.pop("rows")
    return {
        "parameters": network.parameters,
        "depth": network.depth,
        "tokens": sorted({int(name.split()[0]) for name in rows}),
        **found,
        **states_table(network),
        "sharded": {
            recipe: sharded_table(network, recipe)
            for recipe in ("fp32", "bf16", "master")
        },
        "steps": {
            name: {"rows": rows[name], "work": works[name]} for name in rows
        },
    }


@cache
def known() -> dict[str, dict[str, Any]]:
    """The tables of :data:`SHOWN`, from the file."""
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    tables = {name: table(network) for name, network in SHOWN.items()}
    text = json.dumps(tables, separators=(",", ":"), ensure_ascii=False)
    FILE.write_text(text + "\n")
