"""The exercises on experts over ranks."""

from math import ceil

from membudget.exercises.core import Exercise, given
from membudget.exercises.observe import answer, several

# Bytes of the worst rank


def worst_bytes(routing, experts, ranks, row):
    each = experts // ranks
    rows = [0] * ranks
    for chosen in routing:
        for expert in chosen:
            rows[expert // each] += 1
    return max(rows) * row


check_worst_bytes = Exercise(
    worst_bytes,
    cases=[
        given(
            routing=[
                (7, 3),
                (2, 3),
                (7, 3),
                (1, 2),
                (4, 5),
                (2, 7),
                (0, 7),
                (2, 5),
                (0, 7),
            ],
            experts=8,
            ranks=4,
            row=100,
        ),
        given(routing=[(0, 1), (1, 0), (0, 1)], experts=4, ranks=2, row=7),
        given(routing=[(2,), (1,), (0,)], experts=3, ranks=3, row=10),
        given(routing=[(5, 6), (6, 7)], experts=8, ranks=1, row=3),
    ],
    observe=answer,
    mistakes="""
        expert // each => expert % ranks
            the experts lie one after the other: rank 0 has the first
            experts // ranks of them.
        rows[expert // each] += 1 => rows[expert // each] += 1 / len(chosen)
            a token is computed once for each of its experts, so each is a
            row.
        for expert in chosen: => for expert in chosen[:1]:
            a token goes through all the experts that it has chosen.
        for expert in chosen: => for expert in {e // each * each for e in \
chosen}:
            two experts of one rank make two rows of a token: each has its
            own tape.
        max(rows) => sum(rows) / ranks
        or max(rows) => sum(rows) // ranks
            this is the mean. The worst rank decides whether it fits.
        max(rows) => sum(rows)
            these are the rows of all ranks.
        [0] * ranks => [0] * experts
        expert // each => expert
            this is the worst expert. A rank has several.
        max(rows) * row => max(rows)
            these are rows: a row takes `row` bytes.
    """,
    shown="No setting of the model bounds it: the routing decides.",
)

# What a capacity bounds, and what it drops


def with_capacity(counts, tokens, active, factor):
    most = ceil(factor * tokens * active / len(counts))
    return most, sum(max(count - most, 0) for count in counts)


check_with_capacity = Exercise(
    with_capacity,
    cases=[
        given(counts=[9, 0, 1, 10], tokens=10, active=2, factor=1.25),
        given(counts=[5, 5, 5, 5], tokens=20, active=1, factor=1.0),
        given(counts=[16, 0, 0], tokens=16, active=1, factor=1.5),
        given(counts=[3, 3, 4], tokens=5, active=2, factor=1.0),
    ],
    observe=several("capacity", "dropped rows"),
    mistakes="""
        factor * tokens * active / len(counts) => factor * tokens / len(counts)
            each token makes `active` rows, one for each of its experts.
        ceil(factor * tokens * active / len(counts)) => int(factor * tokens \
* active / len(counts))
            round up: a part of a row needs a place, too.
        factor * tokens * active / len(counts) => factor * max(counts)
            a capacity is known before the routing: it is a multiple of the
            even share.
        ceil(factor * tokens * active / len(counts)) => ceil(tokens * active \
/ len(counts))
            this is the even share, without the factor.
        max(count - most, 0) => count - most
            an expert with room left does not take back what another drops.
        sum(max(count - most, 0) => max(max(count - most, 0)
            this is the fullest expert's alone: add up all.
        sum(max(count - most, 0) for count in counts) => sum(count > most \
for count in counts)
            these are the experts that drop rows, not the rows.
    """,
    shown="The bytes are bounded now. What is dropped learns nothing there.",
)
