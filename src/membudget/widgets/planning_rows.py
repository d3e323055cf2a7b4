"""What the planner sends to the page: the moments that can be the worst.

At each moment of a step the bytes are

    c + s·m + (c' + s'·m)·j

in the m sequences of a micro-batch and the j blocks that are checkpointed
(:class:`membudget.planning.rows.Row`); so a few rows of coefficients hold the
peak of every plan. What the step does is affine, too
(:mod:`membudget.planning.work`). To walk through the steps takes minutes:
``python -m membudget.widgets.planning_rows`` does it and writes
``planning.json``.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from membudget.ledger import (
    OPTIMIZERS,
    PLANNED,
    PRESETS,
    RECIPES,
    TARGETS,
    Adapter,
    Transformer,
)
from membudget.planning.counter import Counts, added, less
from membudget.planning.memory import (
    Beside,
    sharded_of,
    states_of,
    workspace,
)
from membudget.planning.plan import Plan
from membudget.planning.rows import FEW, Row, Step, rows_of, upper
from membudget.planning.search import CHUNKS
from membudget.planning.work import (
    _dequantised,
    _trained,
    _updates,
    micro_batches,
)
from membudget.widgets import fits_rows

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

ADAPTERS = ("lora", "qlora")
"""What can be trained in place of all weights."""

UNDER = "bf16"
"""The recipe beside an adapter: frozen weights in bf16, the adapter fp32."""

RANKS = (1, 2, 4, 8, 16, 32, 64)
"""How many cards can be chosen."""

MOST = 1024
"""Sequences of a micro-batch for which the rows are kept."""

CASES = range(FEW + 1)
"""As :func:`membudget.planning.rows.case_of` numbers them."""

VARIANTS = ((False, False), (True, False), (False, True), (True, True))
"""Of a micro-batch: whether its loss is scaled and whether gradients are
there before."""

Spot = tuple[str, int]
"""A place of a step under FSDP2, and a block's number."""


def adapter_of(network: Transformer, name: str) -> Adapter:
    """The front page's adapter, over 16 bits or 4."""
    targets, packed = TARGETS[network.family], name == "qlora"
    return replace(fits_rows.ADAPTER, targets=targets, four_bits=packed)


def way_of(network: Transformer, way: str) -> tuple[str, Adapter | None]:
    """The recipe and the adapter of a way to train: the name of a recipe, for
    all weights, or one of :data:`ADAPTERS`."""
    if way in ADAPTERS:
        return UNDER, adapter_of(network, way)
    return way, None


def counts_of(case: int, depth: int) -> range:
    """The numbers of checkpointed blocks of a case."""
    if case == 2:
        return range(2, depth - 2)
    first = case if case < 2 else depth - FEW + case
    return range(first, first + 1)


def alone(step: Step, depth: int) -> list[list[list[Row]]]:
    """The rows of a micro-batch whose gradients are not sharded.

    Returns:
        For each of :data:`VARIANTS` and of :data:`CASES` the moments that
        can be the worst, those outside the blocks first.
    """

    def place(row: Row) -> tuple[bool, int]:
        return row.name.startswith("blocks."), row.block

    variants = [replace(step, scaled=s, kept=k) for s, k in VARIANTS]
    return [
        [
            _worst(sorted(rows_of(one, depth, case), key=place), case, depth)
            for case in CASES
        ]
        for one in variants
    ]


def under_shards(step: Step, depth: int) -> list[dict[Spot, list[Row]]]:
    """For each of :data:`CASES` the rows of each spot of a step under FSDP2
    that can be its worst."""
    sharded, found = replace(step, sharded=True), []
    for case in CASES:
        spots: dict[Spot, list[Row]] = {}
        for row in rows_of(sharded, depth, case):
            spots.setdefault((row.place, row.block), []).append(row)
        found.append({s: _worst(spots[s], case, depth) for s in spots})
    return found


def _worst(rows: Sequence[Row], case: int, depth: int) -> list[Row]:
    """Those that are the worst for some sizes."""
    kept: set[int] = set()
    for j in counts_of(case, depth):
        kept |= set(upper([row.line(j) for row in rows], MOST))
    return [rows[i] for i in sorted(kept)]


def work_of(network: Transformer, tokens: int, way: str) -> list:
    """What a micro-batch does: FLOPs, bytes and operators of each.

    Args:
        network: that is trained.
        tokens: of a sequence.
        way: as for :func:`way_of`.

    Returns:
        For the plain loss and for one in chunks: of a micro-batch without
        checkpoints and of a sequence in it; then of a checkpointed block
        more, and of a sequence in it; of adding to the gradients; of
        multiplying a loss with its share; of one more chunk.
    """
    depth, (recipe, adapter) = network.depth, way_of(network, way)
    one, two = replace(network, depth=1), replace(network, depth=2)
    packed: Counts = (0, 0, 0)  # 4 bits made 16, of a block
    if adapter and adapter.four_bits:
        packed = _dequantised(one, RECIPES[recipe].parameters)

    def count(shape, sequences, again=0, chunks=None, **more):
        how = sequences, tokens, again, chunks, recipe
        found = micro_batches(shape, *how, adapter=adapter, **more)
        times = 2 * shape.depth + again
        return [added([(1, counts), (times, packed)]) for counts in found]

    def lines(first, second):
        slope = less(second, first)
        return less(first, slope), slope

    plain = [count(one, m)[0] for m in (1, 2)]
    deeper = [count(two, m)[0] for m in (1, 2)]
    again = [count(one, m, 1)[0] for m in (1, 2)]
    chunked = [count(one, m, 0, 1)[0] for m in (1, 2)]
    more = [less(b, a) for a, b in zip(plain, again, strict=True)]
    first, second, shared = count(one, 1, shares=(None, None, 0.5))
    other, further = count(two, 1, shares=(None, None))
    sums = [
        (2 - depth, less(second, first)),
        (depth - 1, less(further, other)),
    ]

    def whole(counts):
        """With all blocks, of one sequence and of two."""
        return [
            added([(1, one), (depth - 1, b), (1 - depth, a)])
            for one, a, b in zip(counts, plain, deeper, strict=True)
        ]

    return [
        *lines(*whole(plain)),
        *lines(*whole(chunked)),
        *lines(*more),
        added(sums),
        less(shared, second),
        less(count(one, 2, 0, 2)[0], chunked[1]),
    ]


def states_table(network: Transformer) -> dict[str, Any]:
    """Bytes of the states, of the optimizer's step, and what it does."""
    depth = network.depth
    found: dict[str, Any] = {"states": {}, "updates": {}}
    for way in (*MIXES, *ADAPTERS):
        states, updates = {}, {}
        recipe, adapter = way_of(network, way)
        for optimizer in PLANNED:
            family = Plan(
                1, recipe=recipe, optimizer=optimizer, adapter=adapter
            )
            held = states_of(network, family)
            work = workspace(network, family, "cuda")
            states[optimizer] = [
                held.parameters,
                held.gradients,
                held.optimizer,
                work,
            ]
            shape = replace(network, depth=1)
            one, two = _updates(shape, recipe, optimizer, True, adapter)
            ends = [(2 - depth, one), (depth - 1, two)]
            updates[optimizer] = list(added(ends))[1:]
        found["states"][way] = states
        found["updates"][way] = updates
    return found


def sharded_table(
    network: Transformer, recipe: str, rows: Sequence[dict[Spot, list[Row]]]
) -> tuple[dict[str, Any], set[tuple[int, Row]]]:
    """For each number of ranks and each stage what FSDP2 holds.

    Args:
        network: whose states they are.
        recipe: of precision.
        rows: of :func:`under_shards`, for every number of tokens and chunks.

    Returns:
        What is held: at the spots where a micro-batch can be at its worst,
        in ``"summed"`` where shards of gradients are there, parameters,
        gradients and buffers of each; ``"last"`` while the
        optimizer steps; and for each optimizer its states, and what its step
        allocates. Then the rows that can be the worst, and their places.
    """
    worst: set[tuple[int, Row]] = set()

    def here(beside: Beside) -> list[int]:
        return [beside.parameters, beside.gradients, beside.temporaries]

    def winners(places: dict[str, tuple[Beside, ...]]) -> dict[Spot, Any]:
        seen: set[Spot] = set()
        for at, by_spot in enumerate(rows):
            flat = [row for found in by_spot.values() for row in found]
            held = [sum(places[row.place][row.block]) for row in flat]
            for j in counts_of(at % len(CASES), network.depth):
                lines = [row.line(j) for row in flat]
                above = [
                    (base + constant, slope)
                    for base, (constant, slope) in zip(
                        held, lines, strict=True
                    )
                ]
                for i in upper(above, MOST):
                    worst.add((at, flat[i]))
                    seen.add((flat[i].place, flat[i].block))
        return {spot: here(places[spot[0]][spot[1]]) for spot in seen}

    def one(ranks: int, stage: str) -> dict[str, Any]:
        own = {}
        for optimizer in PLANNED:
            if OPTIMIZERS[optimizer].block:
                continue
            how = {"optimizer": optimizer, "stage": stage, "ranks": ranks}
            family = Plan(1, recipe=recipe, **how)
            step = sharded_of(network, family, False).step
            work = workspace(network, family, "cuda")
            own[optimizer] = [step.optimizer, work]
        return {
            **{
                name: winners(sharded_of(network, family, summed).places)
                for name, summed in {"held": False, "summed": True}.items()
            },
            "last": here(step),
            "own": own,
        }

    table = {
        str(ranks): {
            stage: one(ranks, stage) for stage in ("zero-2", "zero-3")
        }
        for ranks in RANKS[1:]
    }
    return table, worst


def packed(
    network: Transformer, found: dict[str, list[list[list[list[Row]]]]]
) -> dict[str, Any]:
    """The rows of several steps, each row and each list of rows once.

    Args:
        network: whose they are.
        found: for each step's name and each of
            :data:`membudget.planning.search.CHUNKS` groups of rows, a list
            for each of :data:`CASES`.
    """
    names: dict[str, int] = {}
    phases: dict[str, int] = {}
    pool: dict[tuple, int] = {}
    at: dict[tuple, int] = {}  # a row by what it is where j is fixed
    lists: dict[tuple[int, ...], int] = {}
    alone = [counts_of(case, network.depth)[0] for case in CASES if case != 2]

    def head(row: Row) -> tuple[int, int]:
        name = re.sub(r"^blocks\.\d+[ .]", "a block’s ", row.name)
        number = names.setdefault(name, len(names))
        return number, phases.setdefault(row.phase, len(phases))

    def written(row: Row) -> tuple[int, ...]:
        numbers = [number for need in row.needs for number in need]
        while numbers and not numbers[-1]:
            numbers.pop()
        return *head(row), *numbers

    def fixed(row: Row, j: int) -> tuple:
        where = (
            (need.constant + need.more * j, need.slope + need.steeper * j)
            for need in row.needs
        )
        return j, *head(row), *where

    def place(row: Row, case: int) -> int:
        if case == 2:
            where = pool.setdefault(written(row), len(pool))
            for j in alone:
                at.setdefault(fixed(row, j), where)
            return where
        key = fixed(row, counts_of(case, network.depth)[0])
        if key not in at:
            at[key] = pool.setdefault(written(row), len(pool))
        return at[key]

    def listed(rows: Iterable[Row], case: int) -> int:
        places = tuple(place(row, case) for row in rows)
        return lists.setdefault(places, len(lists))

    def numbered(group: list[list[Row]]) -> list[int]:
        # the case of many numbers of blocks tells most of the others
        order = sorted(CASES, key=lambda case: case != 2)
        by_case = {case: listed(group[case], case) for case in order}
        return [by_case[case] for case in CASES]

    rows = {
        name: [[numbered(group) for group in groups] for groups in steps]
        for name, steps in found.items()
    }
    return {
        "names": list(names),
        "phases": list(phases),
        "pool": [list(row) for row in pool],
        "lists": [list(places) for places in lists],
        "rows": rows,
    }


LIKE = {"fp32": ("fp32", "autocast"), "bf16": ("bf16",), "master": ("bf16",)}
"""Recipes whose states are alike, by that of the states; and the recipes of
the rows that go with them."""


def table(network: Transformer) -> dict[str, Any]:
    """What the page has to know of a model."""
    depth, (tokens, *_) = network.depth, TOKENS[network.family]
    recipes = ("fp32", "autocast", "bf16")
    steps = {
        (recipe, chunks): Step(
            replace(network, depth=1), tokens, "cuda", recipe, chunks
        )
        for recipe in recipes
        for chunks in CHUNKS
    }
    under = {key: under_shards(step, depth) for key, step in steps.items()}
    sharded, worst = {}, {key: set() for key in steps}
    for states, like in LIKE.items():
        keys = [key for key in steps if key[0] in like]
        rows = [case for key in keys for case in under[key]]
        sharded[states], found = sharded_table(network, states, rows)
        for at, row in found:
            key, case = divmod(at, len(CASES))
            worst[keys[key]].add((case, row))
    every = sorted(
        {
            (row.place, row.block)
            for found in worst.values()
            for _, row in found
        }
    )
    for by_ranks in sharded.values():
        for one in (
            s for stages in by_ranks.values() for s in stages.values()
        ):
            for name in ("held", "summed"):
                one[name] = [
                    [every.index(spot), *one[name][spot]]
                    for spot in sorted(one[name])
                ]

    def groups(key: tuple) -> list[list[list[Row]]]:
        return alone(steps[key], depth) + [
            [
                [row for row in case.get(spot, ()) if (i, row) in worst[key]]
                for i, case in enumerate(under[key])
            ]
            for spot in every
        ]

    written = {
        f"{tokens} {recipe}": [groups((recipe, n)) for n in CHUNKS]
        for recipe in recipes
    }
    for way in ADAPTERS:
        adapter = adapter_of(network, way)
        written[f"{tokens} {way}"] = [
            alone(replace(steps[UNDER, n], adapter=adapter), depth)
            for n in CHUNKS
        ]
    found = packed(network, written)
    rows = found.pop("rows")
    return {
        "parameters": network.parameters,
        "adapted": _trained(network, adapter_of(network, "lora")),
        "depth": depth,
        "tokens": [tokens],
        **found,
        **states_table(network),
        "sharded": sharded,
        "steps": {
            name: {
                "rows": rows[name],
                "work": work_of(network, tokens, name.split()[1]),
            }
            for name in rows
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
