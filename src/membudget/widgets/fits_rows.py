"""What the front page's widget sends to the page: the peak of each plan.

Five savings, each on or off, make 32 plans of a job. Their peaks and what they
have a card do stand in ``fits.json``, because to count them takes minutes;
``python -m membudget.widgets.fits_rows`` writes it.
"""

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from membudget.cards import CARDS
from membudget.ledger import PRESETS, TARGETS, Adapter
from membudget.planning import (
    Job,
    Machine,
    Plan,
    Work,
    at_peak,
    seconds,
    work,
)

FILE = Path(__file__).with_name("fits.json")

SWITCHES = ("cut", "forget", "half", "adapt", "share")
"""The savings: micro-batches of one sequence, every block checkpointed,
mixed precision, an adapter in place of all weights, several cards."""

ADAPTER = Adapter(TARGETS["llama"], rank=16, four_bits=True)
"""That of the widget: QLoRA in all linear layers, with ``peft``'s defaults."""

STATES = tuple(product((False, True), repeat=len(SWITCHES)))
"""Of the switches, in their order."""

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
)
"""Of a peak."""


class Size(NamedTuple):
    """Tokens of a sequence, sequences of a step, cards to share it over."""

    tokens: int
    batch: int
    cards: int


SIZES = {
    "Llama 3.2 1B": Size(2048, 8, 4),
    "Llama 3 8B": Size(2048, 8, 4),
    "Llama 3 70B": Size(2048, 32, 16),
}
"""The models of the widget, trained with Adam."""


def job(model: str) -> Job:
    """What is trained."""
    size = SIZES[model]
    return Job(PRESETS[model], size.tokens, size.batch)


def plan(
    model: str, cut: bool, forget: bool, half: bool, adapt: bool, share: bool
) -> Plan:
    """The way to train it with these savings.

    Mixed precision is autocast on one card, and under ZeRO-3 bf16 weights
    that are gathered from fp32 shards: autocast would keep a copy of every
    weight that is gathered. Beside an adapter the frozen weights are in bf16
    and the adapter is in fp32; several cards then share the batch alone.
    """
    size = SIZES[model]
    ranks = size.cards if share else 1
    mixed = "bf16" if adapt else "master" if share else "autocast"
    return Plan(
        1 if cut else size.batch // ranks,
        PRESETS[model].depth * forget,
        recipe=mixed if half else "fp32",
        stage="zero-3" if share and not adapt else "ddp",
        ranks=ranks,
        adapter=ADAPTER if adapt else None,
    )


def row(model: str, *savings: bool) -> list[list[int]]:
    """Bytes of the :data:`PARTS` at the peak; the work of one card."""
    one, way = job(model), plan(model, *savings)
    split = at_peak(one, way).split
    return [[split[part] for part in PARTS], list(work(one, way)[:4])]


@cache
def known() -> dict[str, list]:
    """For each model the rows of :data:`STATES`, from the file."""
    return json.loads(FILE.read_text())


def slowdowns(model: str, card: str) -> list[float]:
    """GPU time of each of the :data:`STATES`, by the card's data sheet.

    That is seconds of a step × cards, as a multiple of the first state's,
    which needs a card with more memory.
    """

    def time(savings: tuple[bool, ...], done: list[int]) -> float:
        way = plan(model, *savings)
        done, recipe = Work(*done), way.recipe
        if recipe == "bf16":  # on a card without it fp16, as autocast
            recipe = "autocast"
        return way.ranks * seconds(done, Machine.of_card(card), recipe)

    pairs = zip(STATES, known()[model], strict=True)
    times = [time(savings, done) for savings, (_, done) in pairs]
    return [round(t / times[0], 4) for t in times]


def tables() -> dict[str, dict]:
    """What the page has to know."""
    return {
        "models": {
            name: {
                **size._asdict(),
                "peaks": [split for split, _ in known()[name]],
                "times": {card: slowdowns(name, card) for card in CARDS},
            }
            for name, size in SIZES.items()
        },
        "cards": {name: card.usable for name, card in CARDS.items()},
    }


if __name__ == "__main__":
    found = {name: [row(name, *one) for one in STATES] for name in SIZES}
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")
