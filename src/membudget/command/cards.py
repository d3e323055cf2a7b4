"""List the cards that the course knows."""

import argparse
import json

from membudget.cards import CARDS, GIB
from membudget.command.refused import Code

TITLES = "card", "memory, GiB", "usable, GiB", "bf16"


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``membudget cards``."""
    parser.add_argument(
        "--json", action="store_true", help="as JSON, memory in bytes"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table of :data:`membudget.cards.CARDS`."""
    print(_json() if args.json else _table())
    return Code.OK


def _json() -> str:
    rows = [
        {
            "name": name,
            "memory": card.capacity,
            "usable": card.usable,
            "bf16": card.bf16,
        }
        for name, card in CARDS.items()
    ]
    return json.dumps(rows, indent=2)


def _table() -> str:
    width = max(map(len, CARDS))
    name, *others = TITLES
    lines = ["  ".join([f"{name:{width}}", *others])]
    for name, card in CARDS.items():
        native = "native" if card.bf16 else "emulated"
        lines.append(
            f"{name:{width}}  {card.capacity / GIB:11.2f}"
            f"  {card.usable / GIB:11.2f}  {native}"
        )
    return "\n".join(lines)
