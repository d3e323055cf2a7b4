"""What the package's functions say of settings of the sharding widget."""

from itertools import islice, product
from math import ceil

from membudget.ledger import bytes_per_parameter
from membudget.sharding import zero_states, zero_traffic
from membudget.widgets import Sharding
from membudget.widgets.sharding import CARDS, HOW, MODELS, STAGE_NAMES
from tests.soak import SOAK

RANKS = tuple(2**i for i in range(11))

GRID = {
    # the last ones are numbers that few ranks divide
    "model": (*MODELS, 1, 7, 1001, 2**40 - 1),
    "ranks": RANKS,
    "recipe": tuple(HOW),
    "blocks": (1, 32, 128),
    "accumulation_steps": (1, 2, 4, 8, 16),
    "synchronise_last": (False, True),
    "card": tuple(CARDS),
}


def settings(every):
    """Each so-manieth state of the grid, and the stages in turn."""
    stages = list(STAGE_NAMES)
    chosen = islice(product(*GRID.values()), 0, None, every)
    for place, values in enumerate(chosen):
        stage = {"stage": stages[place % 4]}
        yield dict(zip(GRID, values, strict=True)) | stage


def borrowed(widget, ranks, stage):
    """Bytes of the block at work: its parameters in 2 bytes or as they are
    kept, and its gradients."""
    if ranks == 1:
        return 0
    kept, gathered, _ = HOW[widget.recipe]
    each = bytes_per_parameter(kept)
    size = 0
    if stage == "zero-3":
        size += gathered or each.parameters
    if stage in ("zero-2", "zero-3") and not widget.waiting:
        size += each.gradients
    return size * ceil(widget.parameters / widget.blocks)


def fewest(widget, stage):
    """The fewest ranks whose step fits the card, or None."""
    kept, card = HOW[widget.recipe][0], CARDS[widget.card]
    for ranks in RANKS:
        of = widget.parameters, ranks, stage, kept
        states = zero_states(*of, waiting=widget.waiting).total
        if states + borrowed(widget, ranks, stage) <= card:
            return ranks
    return None


def numbers(widget):
    """Bytes of each stage: of its parts, and sent."""
    kept, gathered, _ = HOW[widget.recipe]
    found = {}
    for stage in STAGE_NAMES:
        of = widget.parameters, widget.ranks, stage, kept
        shard, held = (
            zero_states(*of),
            zero_states(*of, waiting=widget.waiting),
        )
        found[stage] = {
            "parameters": held.parameters,
            "gradients": shard.gradients,
            "waiting": held.gradients - shard.gradients,
            "optimizer": held.optimizer,
            "borrowed": borrowed(widget, widget.ranks, stage),
            "sent": zero_traffic(
                *(widget.parameters, stage, kept),
                ranks=widget.ranks,
                gathered=gathered,
                accumulation_steps=widget.accumulation_steps,
                synchronise_last=widget.synchronise_last,
            ),
        }
    return found


def answers():
    """States of the grid, each with the numbers that Python gives."""
    cases = []
    for state in settings(17 if SOAK else 53):
        widget = Sharding(**state)
        least = {stage: fewest(widget, stage) for stage in STAGE_NAMES}
        cases.append(
            {"state": state, "numbers": numbers(widget), "fewest": least}
        )
        widget.close()
    return {"tables": Sharding().tables, "cases": cases}
