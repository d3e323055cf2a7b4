"""The exercises on planning."""

from membudget.exercises.core import Exercise, given
from membudget.exercises.observe import answer


def fewest_cards(states, others, batch, budget):
    for cards in range(1, batch + 1):
        if batch % cards == 0 and others + states / cards <= budget:
            return cards
    raise ValueError("no number of cards fits")


check_fewest_cards = Exercise(
    fewest_cards,
    cases=[
        given(states=154, others=20, batch=60, budget=34),
        given(states=112, others=20, batch=16, budget=34),
        given(states=104, others=20, batch=8, budget=34),
        given(states=10, others=20, batch=8, budget=34),
        given(states=112, others=34, batch=64, budget=34),
    ],
    observe=answer,
    mistakes="""
        batch % cards == 0 and others => others
            the cards share the batch equally: their number must divide it.
        others + states / cards => (others + states) / cards
            only the states are divided: each card needs the others for
            itself.
        others + states / cards => states / cards
            what a card needs beside the states is missing.
        + states / cards <= budget => + states / cards < budget
            a card that is full to the last byte still fits: `<=`, not `<`.
        range(1, batch + 1) => range(1, batch)
            one card for each sequence is allowed, too.
        range(1, batch + 1) => range(2, batch + 1)
            a single card may be enough: begin with 1.
        range(1, batch + 1) => range(batch, 0, -1)
            this is the largest number of cards that fits: the smallest is
            asked.
        raise ValueError("no number of cards fits") => return batch
        or raise ValueError("no number of cards fits") => return 0
            where no number fits, a ValueError must be raised; another answer
            would go unnoticed.
        """,
    shown=(
        "Cards divide the states, and nothing else: where the others do not "
        "fit, no number of cards helps."
    ),
)


PLANS = [(9, 10), (5, 14), (4, 17), (5, 12), (7, 12), (3, 20), (6, 12)]
"""Peaks and seconds: three are equally fast, and two have equal peaks."""


def frontier(plans):
    best, kept = float("inf"), []
    for peak, seconds in sorted(plans):
        if seconds < best:
            best = seconds
            kept.append((peak, seconds))
    return kept


check_frontier = Exercise(
    frontier,
    cases=[
        given(plans=[(5, 14), *PLANS, (8, 18), (10, 11)]),
        given(plans=[(1, 9), (2, 8), (3, 7)]),
        given(plans=[(3, 7), (2, 7), (1, 7)]),
    ],
    observe=answer,
    mistakes="""
        if seconds < best => if seconds <= best
            this keeps plans that need more bytes and are no faster.
        sorted(plans) => plans
            take the plans by rising peak: sort them first.
        sorted(plans) => sorted(plans, key=lambda plan: plan[1])
            this goes by rising seconds, so only the fastest is kept: sort by
            the peak.
        sorted(plans) => sorted(plans, reverse=True)
            this begins with the largest peak: begin with the smallest.
        best = seconds => pass
        or if seconds < best => if True
            a plan must be faster than all that are kept: remember the best
            seconds, and leave out the others.
        """,
    shown=(
        "Sort once, go through once: a million plans are no trouble. The "
        "answer to every budget is on it."
    ),
)
