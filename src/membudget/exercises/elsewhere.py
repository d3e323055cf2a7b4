"""The exercise on an optimizer that waits on the host."""

from math import ceil

from membudget.exercises.core import Exercise, given
from membudget.exercises.observe import answer

# From how many tokens on the round trip hides


def hides_from(parameters, flops, link, host):
    slowest = parameters * max(2 / link, 28 / host)
    return ceil(slowest / (6 * parameters / flops))


check_hides_from = Exercise(
    hides_from,
    cases=[
        given(parameters=8e9, flops=400e12, link=50e9, host=245e9),
        given(parameters=1e9, flops=66e12, link=2e9, host=240e9),
        given(parameters=3e9, flops=26e12, link=12.8e9, host=70e9),
    ],
    observe=answer,
    mistakes="""
        max(2 / link, 28 / host) => (2 / link + 28 / host + 2 / link)
        or max(2 / link, 28 / host) => (2 / link + 28 / host)
            out, step and back run beside each other here, so the slowest of
            the three counts, not their sum.
        max(2 / link, 28 / host) => max(4 / link, 28 / host)
            the link carries both directions at once: 2 bytes a parameter each
            way, not 4 one after the other.
        max(2 / link, 28 / host) => 2 / link
            the host's step is missing: it reads and writes 28 bytes a
            parameter.
        max(2 / link, 28 / host) => 28 / host
            the copies are missing: 2 bytes a parameter each way over the
            link.
        max(2 / link, 28 / host) => max(2 / link, 12 / host)
            12 bytes are what the host keeps; its step reads and writes 28.
        (6 * parameters / flops) => (2 * parameters / flops)
            this is the forward pass alone: with the backward pass it is 6
            FLOPs a parameter and token.
        (6 * parameters / flops) => (6 / flops)
            a token passes all parameters: 6 FLOPs for each.
        ceil(slowest / (6 * parameters / flops)) => slowest / (6 * \
parameters / flops)
            tokens are whole: round up.
    """,
    shown="The size of the model cancels: FLOP/s and bytes/s alone decide.",
)
