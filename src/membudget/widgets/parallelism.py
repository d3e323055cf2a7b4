"""The pipeline widget: PyTorch's schedules, each rank's bytes, and a game."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import traitlets

from membudget.cards import CARDS
from membudget.checks import one_of, whole
from membudget.ledger import PRESETS, block_activations, bytes_per_parameter
from membudget.parallelism import (
    SCHEDULES,
    Operation,
    Replay,
    Table,
    replay,
    table,
)
from membudget.parallelism.tables import V_SHAPED
from membudget.widgets.base import (
    Checked,
    Widget,
    checked,
    format_bytes,
    later,
)

MODEL, TOKENS, ITEMSIZE = "Llama 2 7B", 4096, 2
"""Whose blocks the ranks hold, tokens of a micro-batch, and bf16."""

RECIPE, OPTIMIZER = "master", "adam"
"""2 + 2 + 12 bytes of weights, gradients and optimizer states."""

CARD = "H100 80 GB"
"""That each rank has."""

RANKS, ROUNDS = (2, 4, 8), (2, 3, 4)
"""What can be chosen; micro-batches are the ranks times the rounds, so that
every schedule can have every choice."""

DIGITS = "0123456789abcdefghijklmnopqrstuv"
"""Of a micro-batch in a text."""


class Medal(NamedTuple):
    """It is won with at most these tapes on a rank, and in this time."""

    name: str
    tapes: float
    time: float


class Level(NamedTuple):
    """A level of the game.

    Attributes:
        schedule: whose order the player begins with.
        ranks: of the pipeline.
        micro_batches: of the step.
        split: whether backward passes are cut in two.
        medals: each asks for more than the one before, for nothing less.
    """

    schedule: str
    ranks: int
    micro_batches: int
    split: bool
    medals: tuple[Medal, ...]


def _medals(*limits: tuple[float, float]) -> tuple[Medal, ...]:
    names = (later("bronze"), later("silver"), later("gold"))
    return tuple(
        Medal(name, *limit) for name, limit in zip(names, limits, strict=True)
    )


LEVELS = {
    "level 1": Level("GPipe", 2, 4, False, _medals((3, 18), (3, 15), (2, 15))),
    "level 2": Level("GPipe", 4, 5, False, _medals((4, 30), (4, 27), (4, 24))),
    "level 3": Level("1F1B", 2, 4, True, _medals((4, 13), (3, 13), (2, 13))),
    "level 4": Level("1F1B", 4, 8, True, _medals((4, 29), (4, 28), (4, 27))),
    "level 5": Level(
        "ZBVZeroBubble", 2, 4, True, _medals((1.5, 15), (1.5, 14), (1.5, 13.5))
    ),
}
"""1F1B by hand, on two ranks and on four; a bubble filled with the weights'
part; and fewer tapes than PyTorch's schedules have, with half of 1F1B's
bubble."""

SHOWN = (*SCHEDULES, *LEVELS)


def parted(order: Table) -> Table:
    """The order with each whole backward pass as its two parts."""
    return tuple(
        tuple(
            operation._replace(kind=kind)
            for operation in row
            for kind in operation.kind.replace("B", "IW")
        )
        for row in order
    )


@cache
def board(shown: str, ranks: int, micro_batches: int) -> Table:
    """The order that one begins with: a schedule's, or a level's own."""
    if shown in SCHEDULES:
        return table(shown, ranks, micro_batches)
    level = LEVELS[shown]
    order = table(level.schedule, level.ranks, level.micro_batches)
    return parted(order) if level.split else order


def letters(row: Sequence[Operation]) -> str:
    """A rank's operations without their micro-batches: "FFBB". A small
    letter is the rank's second stage."""
    first = min(o.stage for o in row)
    return "".join(o.kind if o.stage == first else o.kind.lower() for o in row)


def written(order: Table) -> str:
    """The operations as text: "F0F1B0B1.F0B0F1B1"."""
    return ".".join(
        "".join(
            letter + DIGITS[o.micro_batch]
            for letter, o in zip(letters(row), row, strict=True)
        )
        for row in order
    )


def read(text: str, base: Table) -> Table:
    """The inverse of :func:`written`, for an order of the base's operations.

    Raises:
        ValueError: other operations than the base's, by rank.
    """
    names: dict[tuple[int, str], Operation] = {}
    for rank, (row, words) in enumerate(
        zip(base, written(base).split("."), strict=True)
    ):
        names |= {
            (rank, words[2 * i : 2 * i + 2]): o for i, o in enumerate(row)
        }
    rows = text.split(".")
    keys = [
        [(rank, row[i : i + 2]) for i in range(0, len(row), 2)]
        for rank, row in enumerate(rows)
    ]
    if sorted(key for row in keys for key in row) != sorted(names):
        raise ValueError(
            "order has not the operations of this schedule: write those of "
            f"{written(base)[:40]}…, each once and in its rank's part"
        )
    return tuple(tuple(names[key] for key in row) for row in keys)


def _sizes(name: str) -> list[tuple[int, int]]:
    """Ranks and micro-batches that a schedule is shown with: those to choose,
    and the levels' own where it can have them."""
    chosen = [(ranks, ranks * rounds) for ranks in RANKS for rounds in ROUNDS]
    levels = {(one.ranks, one.micro_batches) for one in LEVELS.values()}
    more = sorted(levels.difference(chosen))
    return chosen + [size for size in more if _runs(name, *size)]


def _runs(name: str, ranks: int, micro_batches: int) -> bool:
    try:
        board(name, ranks, micro_batches)
    except ValueError:
        return False
    return True


@cache
def _tables() -> dict[str, Any]:
    """All orders, and the model's bytes, as the module reads them."""
    model = PRESETS[MODEL]
    rule = bytes_per_parameter(RECIPE, OPTIMIZER)
    return {
        "orders": {
            name: {
                f"{ranks} {micro_batches}": list(
                    map(letters, board(name, ranks, micro_batches))
                )
                for ranks, micro_batches in _sizes(name)
            }
            for name in SCHEDULES
        },
        "levels": {
            name: {
                "schedule": level.schedule,
                "ranks": level.ranks,
                "micro": level.micro_batches,
                "rows": list(map(letters, board(name, 0, 0))),
                "medals": [medal._asdict() for medal in level.medals],
            }
            for name, level in LEVELS.items()
        },
        "chunks": SCHEDULES,
        "vshaped": list(V_SHAPED),
        "down": ["LoopedBFS"],
        "blocks": model.depth,
        "tape": block_activations(model, 1, TOKENS, ITEMSIZE),
        "input": TOKENS * model.width * ITEMSIZE,
        "states": model.block_parameters * rule.total,
        "card": CARDS[CARD].usable,
        "model": MODEL,
    }


def _shown(value: Any, name: str) -> str:
    return one_of(value, SHOWN, name)


def _ranks(value: Any, name: str) -> int:
    value = whole(value, name, RANKS[0], RANKS[-1])
    if value not in RANKS:
        raise ValueError(f"{name} is {value}: use one of {RANKS}")
    return value


class Parallelism(Widget):
    """PyTorch's schedule of a pipeline, and beneath it each rank's bytes.

    The ranks share a model's blocks. A rank keeps its blocks' weights,
    gradients and optimizer states, and a tape for each micro-batch that is in
    flight (:func:`membudget.parallelism.replay`). A forward pass of a rank
    takes as long as each part of its backward pass.

    Operations can be moved within their rank's row; in a level of the game
    that wins medals.

    Args:
        schedule: one of :data:`membudget.parallelism.SCHEDULES`, or a level
            from ``"level 1"`` to ``"level 5"``, with ranks of its own.
        ranks: of the pipeline: 2, 4 or 8.
        rounds: micro-batches for each rank, 2 to 4: a step has the ranks
            times the rounds.
        checkpointed: whether each block keeps its input alone. Where a
            backward pass comes in two parts it changes nothing: what is made
            again would have to wait for the second part.
        order: the reader's own, as text; "" is the schedule's.

    Attributes:
        tables: the orders, the levels and the model's bytes.

    Example:
        >>> pipeline = Parallelism("1F1B", ranks=4)
        >>> pipeline.run().peaks, round(pipeline.run().bubble, 3)
        ([4.0, 3.0, 2.0, 1.0], 0.273)
    """

    name = "parallelism"
    positional = ("schedule",)
    named = ("ranks", "rounds")

    schedule = Checked(_shown, "1F1B").tag(sync=True)
    ranks = Checked(_ranks, 4).tag(sync=True)
    rounds = Checked(partial(whole, least=ROUNDS[0], most=ROUNDS[-1]), 2).tag(
        sync=True
    )
    checkpointed = traitlets.Bool(False).tag(sync=True)
    order = traitlets.Unicode("").tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, schedule: str = "1F1B", **traits: Any) -> None:
        self.set_trait("tables", _tables())
        super().__init__(schedule=schedule, **traits)

    @traitlets.validate("order")
    def _check_order(self, proposal: Any) -> str:
        text = proposal["value"]
        checked(self._read, text)
        return text

    @traitlets.observe("schedule", "ranks", "rounds")
    def _follow(self, change: Any) -> None:
        """An order of other operations goes."""
        if self.order:
            try:
                self._read(self.order)
            except ValueError:
                self.order = ""

    def _read(self, text: str) -> Table:
        if not text:
            return self.board
        order = read(text, self.board)
        replay(order)
        return order

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks and micro-batches: the chosen ones, or the level's."""
        level = LEVELS.get(self.schedule)
        if level:
            return level.ranks, level.micro_batches
        return self.ranks, self.ranks * self.rounds

    @property
    def board(self) -> Table:
        """The order as it is without the reader's moves."""
        return board(self.schedule, *self.shape)

    @property
    def again(self) -> bool:
        """Whether blocks run again before their backward pass."""
        whole_ones = all(o.kind in "FB" for row in self.board for o in row)
        return self.checkpointed and whole_ones and self.schedule not in LEVELS

    def run(self) -> Replay:
        """The step; times in forward passes of a rank."""
        return replay(self._read(self.order), 1, 2 if self.again else 1, 1)

    def loads(self) -> list[list[int]]:
        """What each rank has while each of its operations runs."""
        tables, (ranks, _) = self.tables, self.shape
        blocks = tables["blocks"] // ranks
        kept = tables["input"] if self.again else tables["tape"]
        once = tables["tape"] if self.again else 0
        return [
            [
                round(blocks * (tables["states"] + held * kept))
                + (once if o.kind == "B" else 0)
                for o, held in zip(row, tapes, strict=True)
            ]
            for row, tapes in zip(
                self._read(self.order), self.run().held, strict=True
            )
        ]

    def peaks(self) -> list[int]:
        """The most bytes of each rank."""
        return [max(row) for row in self.loads()]

    def medals(self) -> list[str]:
        """Those of its level that the order wins, from bronze on."""
        if self.schedule not in LEVELS:
            return []
        run = self.run()
        return [
            medal.name
            for medal in LEVELS[self.schedule].medals
            if max(run.peaks) <= medal.tapes and run.time <= medal.time
        ]

    def sentence(self) -> str:
        """The bubble, and what the fullest rank and the emptiest have."""
        run, peaks = self.run(), self.peaks()
        ranks, micro_batches = self.shape
        name = self.schedule
        most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
        other = f"; rank {least} has {format_bytes(peaks[least])}"
        return (
            f"{name[0].upper()}{name[1:]} with {micro_batches} micro-batches "
            f"on {ranks} ranks, which share the blocks of {MODEL}: "
            f"{100 * run.bubble:.0f} % of the ranks' time is a bubble. Rank "
            f"{most} has {format_bytes(peaks[most])}, with "
            f"{max(run.peaks):g} tapes{'' if least == most else other}."
        )
