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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from membudget.ledger import OPTIMIZERS, PRESETS, PaperMoment, Transformer
from membudget.planning.counter import less
from membudget.planning.memory import (
    placed,
    sharded_of,
    states_of,
    workspace,
)
from membudget.planning.peaks import (
    Step,
    _places,
    _walked,
    at_spot,
    by_depth,
    spots,
)
from membudget.planning.plan import Plan
from membudget.planning.search import CHUNKS
from membudget.planning.work import _updates, micro_batches
from membudget.sharding import Held, Place

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

VARIANTS = ((False, False), (True, False), (False, True), (True, True))
"""Of a micro-batch: whether its loss is scaled and whether gradients are
there before."""

VARYING = ("activations", "temporaries")

Line = tuple[str, str, tuple[int, ...]]
"""A row's name, its phase, and for activations, temporaries and gradients the
coefficients c, s, c' and s'."""


def cases_of(depth: int) -> list[range]:
    """The numbers of checkpointed blocks whose moments are affine in them."""
    middle = range(2, depth - 2)
    ends = (range(at, at + 1) for at in (0, 1))
    last = (range(at, at + 1) for at in (depth - 2, depth - 1, depth))
    return [*ends, middle, *last]


def alone(step: Step, depth: int) -> list[list[list[Line]]]:
    """The rows of a micro-batch whose gradients are not reduced.

    Returns:
        For each of :data:`VARIANTS` and of :func:`cases_of` the moments that
        can be the worst.
    """
    found = []
    for scaled, kept in VARIANTS:
        variant = replace(step, scaled=scaled, kept=kept)
        found.append(
            [
                _worst(_affine(partial(_moments, variant, depth), case), case)
                for case in cases_of(depth)
            ]
        )
    return found


def under_shards(
    step: Step, depth: int
) -> list[dict[tuple[str, int], list[Line]]]:
    """For each of :func:`cases_of` the rows of each spot of a step under
    FSDP2 that can be its worst."""
    found = []
    for case in cases_of(depth):
        by_spot = {}
        for spot in spots((case[0], depth - case[0])):
            if len(case) > 1 and 1 < spot[1] < depth - 3:
                continue  # where the checkpoints end: never the worst
            lines = _affine(partial(_at, step, depth, spot), case)
            by_spot[spot] = _worst(lines, case)
        found.append(by_spot)
    return found


def _affine(lines: Callable[[int], list[Line]], case: range) -> list[Line]:
    """What is alike for all of a case, from two of it."""
    first, *more = (lines(j) for j in case[:2])
    found = []
    for (row, phase, base), further in zip(
        first, *more or [first], strict=True
    ):
        numbers = []
        for i in range(0, len(base), 2):
            steps = [further[2][k] - base[k] for k in (i, i + 1)]
            start = [
                base[k] - case[0] * by
                for k, by in zip((i, i + 1), steps, strict=True)
            ]
            numbers += [*start, *steps]
        found.append((row, phase, tuple(numbers)))
    return found


def _moments(step: Step, depth: int, j: int) -> list[Line]:
    """All moments: of activations, temporaries, gradients constant and slope
    in the sequences."""
    blocks = j, depth - j
    few = tuple(min(count, 1) for count in blocks)
    heads: list[tuple[str, str]] = []

    def numbers(few: tuple[int, int]) -> torch.Tensor:
        places: list[list] = [[] for _ in range(5)]
        for moment in _walked(step, few, MANY).moments:
            made = 0 if step.kept else moment.split["gradients"]
            for place in _places(moment.row, few):
                places[place].append((moment, _sizes(moment, made)))
        heads[:] = [(m.row, m.phase) for ms in places for m, _ in ms]
        return torch.tensor([sizes for ms in places for _, sizes in ms])

    found = by_depth(numbers, blocks)
    numbers(few)
    return [
        (*head, tuple(cells))
        for head, cells in zip(heads, found.tolist(), strict=True)
    ]


def _at(step: Step, depth: int, spot: tuple[str, int], j: int) -> list[Line]:
    """The moments at a spot, as :func:`_moments`."""
    place, number = spot
    heads: list[tuple[str, str]] = []

    def numbers(few: tuple[int, int], number: int) -> torch.Tensor:
        here = [
            (moment, _sizes(moment, made))
            for at, block, moment, made in placed(_walked(step, few, MANY))
            if (at, block) == (place, number)
        ]
        heads[:] = [(moment.row, moment.phase) for moment, _ in here]
        return torch.tensor([sizes for _, sizes in here])

    found = at_spot(numbers, (j, depth - j), place, number)
    return [
        (*head, tuple(cells))
        for head, cells in zip(heads, found.tolist(), strict=True)
    ]


def _sizes(moment: PaperMoment, made: int) -> list[int]:
    """Constant and slope of what varies, and gradients."""
    sizes = []
    for category in VARYING:
        above, under = divmod(moment.split[category], MANY)
        sizes += [under, above]
    return [*sizes, made, 0]


def _sums(line: Line, j: int) -> tuple[int, int]:
    """Constant and slope of all bytes."""
    c = line[2]
    at, by, more, steeper = (sum(c[i::4]) for i in range(4))
    return at + more * j, by + steeper * j


def _worst(lines: Sequence[Line], case: range) -> list[Line]:
    """Those that are the worst for some sizes."""
    corners = [[_sums(line, j) for j in (case[0], case[-1])] for line in lines]
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
    for j in case:
        kept |= {left[i] for i in _upper([_sums(lines[i], j) for i in left])}
    return [lines[i] for i in sorted(kept)]


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


Spot = tuple[str, int]


def sharded_table(
    network: Transformer, recipe: str, rows: Sequence[dict[Spot, list[Line]]]
) -> tuple[dict[str, Any], set[tuple[int, Spot, Line]]]:
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
    depth = network.depth
    cases = cases_of(depth)
    worst: set[tuple[int, Spot, Line]] = set()

    def here(held: Held, whole: int = 0) -> list[int]:
        weights = held.parameters + held.gathered
        return [weights, held.gradients - whole, held.buffers]

    def winners(places: dict[str, tuple[Place, ...]]) -> dict[str, Any]:
        seen: set[Spot] = set()
        for at, by_spot in enumerate(rows):
            flat = [(s, one) for s, lines in by_spot.items() for one in lines]
            held = [places[place][n].beside for (place, n), _ in flat]
            for j in cases[at % len(cases)]:
                sums = (_sums(line, j) for _, line in flat)
                lines = [
                    (base + c, slope)
                    for base, (c, slope) in zip(held, sums, strict=True)
                ]
                for i in _upper(lines):
                    worst.add((at, *flat[i]))
                    seen.add(flat[i][0])
        at_spots = {spot: places[spot[0]][spot[1]] for spot in seen}
        return {spot: here(p.held, p.whole) for spot, p in at_spots.items()}

    def one(ranks: int, stage: str) -> dict[str, Any]:
        own, found = {}, {}
        for optimizer in OPTIMIZERS:
            if optimizer == "adam-8bit":
                continue
            how = {"optimizer": optimizer, "stage": stage, "ranks": ranks}
            family = Plan(1, recipe=recipe, **how)
            for name, summed in {"held": False, "summed": True}.items():
                sharded = sharded_of(network, family, "cuda", summed)
                found[name] = sharded
            own[optimizer] = [sharded.step.optimizer, sharded.workspace]
        return {
            **{name: winners(one.places) for name, one in found.items()},
            "last": here(sharded.step),
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
    network: Transformer, found: dict[str, list[list[list[list[Line]]]]]
) -> dict[str, Any]:
    """The rows of several steps, each row and each list of rows once.

    Args:
        network: whose they are.
        found: for each step's name and each of
            :data:`membudget.planning.search.CHUNKS` groups of rows, a list
            for each of :func:`cases_of`.
    """
    names: list[str] = []
    phases: list[str] = []
    pool: dict[tuple, int] = {}
    at: dict[tuple, int] = {}  # a row by what it is where j is fixed
    lists: dict[tuple[int, ...], int] = {}
    cases = cases_of(network.depth)
    alone = [case[0] for case in cases if len(case) == 1]

    def number(things: list[str], one: str) -> int:
        if one not in things:
            things.append(one)
        return things.index(one)

    def written(row: str, phase: str, numbers: tuple[int, ...]) -> tuple:
        row = re.sub(r"^blocks\.\d+[ .]", "a block’s ", row)
        while numbers and not numbers[-1]:
            numbers = numbers[:-1]
        return number(names, row), number(phases, phase), *numbers

    def fixed(line: Line, j: int) -> tuple:
        row, phase, c = line
        where = [c[i] + c[i + 2] * j for i in (0, 1, 4, 5, 8, 9)]
        return (j, *written(row, phase, ()), *where)

    def place(line: Line, case: range) -> int:
        if len(case) > 1:
            where = pool.setdefault(written(*line), len(pool))
            for j in alone:
                at.setdefault(fixed(line, j), where)
            return where
        key = fixed(line, case[0])
        if key not in at:
            at[key] = pool.setdefault(written(*line), len(pool))
        return at[key]

    def listed(lines: Sequence[Line], case: range) -> int:
        places = tuple(place(line, case) for line in lines)
        return lists.setdefault(places, len(lists))

    # those of many numbers of blocks tell most of the others
    order = sorted(range(len(cases)), key=lambda i: len(cases[i]) == 1)
    rows: dict[str, list] = {}
    for name, steps in found.items():
        rows[name] = []
        for groups in steps:
            ordered = [
                {i: listed(group[i], cases[i]) for i in order}
                for group in groups
            ]
            rows[name].append(
                [[one[i] for i in range(len(cases))] for one in ordered]
            )
    return {
        "names": names,
        "phases": phases,
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
            replace(network, depth=1), tokens, "cuda", recipe, chunks, False
        )
        for recipe in recipes
        for chunks in CHUNKS
    }
    under = {key: under_shards(step, depth) for key, step in steps.items()}
    sharded, worst = {}, {key: [] for key in steps}
    for states, like in LIKE.items():
        keys = [key for key in steps if key[0] in like]
        rows = [case for key in keys for case in under[key]]
        sharded[states], found = sharded_table(network, states, rows)
        for at, spot, line in found:
            key, case = divmod(at, len(cases_of(depth)))
            worst[keys[key]].append((case, spot, line))
    every = sorted({spot for found in worst.values() for _, spot, _ in found})
    for by_ranks in sharded.values():
        for one in (
            s for stages in by_ranks.values() for s in stages.values()
        ):
            for name in ("held", "summed"):
                one[name] = [
                    [every.index(spot), *one[name][spot]]
                    for spot in sorted(one[name])
                ]

    def groups(key: tuple) -> list[list[list[Line]]]:
        seen = set(worst[key])
        return alone(steps[key], depth) + [
            [
                [line for line in case[spot] if (i, spot, line) in seen]
                if spot in case
                else []
                for i, case in enumerate(under[key])
            ]
            for spot in every
        ]

    found = packed(
        network,
        {
            f"{tokens} {recipe}": [groups((recipe, n)) for n in CHUNKS]
            for recipe in recipes
        },
    )
    rows = found.pop("rows")
    return {
        "parameters": network.parameters,
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
