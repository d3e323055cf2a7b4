"""Layouts: the bytes of a rank, their time, and which one fits."""

import random

import pytest
from layout_helpers import simulated

from membudget.ledger import Transformer
from membudget.planning import Job
from membudget.planning.layout import Layout
from membudget.planning.ranks import need

RNG = random.Random(7)


def plan(tensor, pipeline):
    """A job, a layout and a stage, at random."""
    family = RNG.choice(("gpt", "llama"))
    batch, many = RNG.choice((1, 2)), RNG.choice((2, 3, 5))
    schedule = "GPipe" if pipeline == 64 else RNG.choice(("GPipe", "1F1B"))
    many += pipeline if schedule == "1F1B" else 0
    heads = 8 * max(1, tensor // 8)
    network = Transformer(
        RNG.choice((40, 64, 300)),
        8 * heads,
        pipeline + RNG.choice((0, 1, 2)),
        heads,
        32,
        family=family,
        **{"hidden": 2 * 8 * heads} if family == "llama" else {},
    )
    tokens = RNG.choice((8, 16))
    # a stage of a Llama takes its turns from the tokens that it is given
    whole = family == "gpt" or pipeline == 1
    layout = Layout(
        tensor=tensor,
        sequence=whole and 1 < tensor <= tokens and RNG.random() < 0.5,
        pipeline=pipeline,
        schedule=schedule,
        micro_batch=batch,
        checkpointed=RNG.choice((False, True)),
        recipe=RNG.choice(("fp32", "bf16")),
    )
    job = Job(network, tokens, batch * many, "cpu")
    stages = sorted({0, min(1, pipeline - 1), pipeline - 1})
    return job, layout, RNG.choice(stages)


SPREAD = [(2, 1), (4, 1), (8, 1), (64, 1)] * 6
SPREAD += [(1, 2), (1, 4), (1, 8), (1, 64)] * 6
SPREAD += [(2, 2), (4, 2), (2, 4), (8, 8), (64, 2)] * 4
PLANS = [plan(*ranks) for ranks in SPREAD]


@pytest.mark.few(8)
@pytest.mark.parametrize("job, layout, stage", PLANS)
def test_a_rank_needs_what_a_simulated_one_has(job, layout, stage):
    assert need(job, layout, stage).bytes == simulated(job, layout, stage).peak
