"""Sizes that fit the cards that they are for, by their own predictions."""

import pytest
import torch

from membudget.cards import CARDS
from membudget_experiments import (
    accumulation,
    checkpointing,
    offloading,
    schedules,
    sizes,
)

CPU = torch.device("cpu")
CARD = {"t4": "T4", "large": "H100 80 GB"}
RUNS = {
    "segments_mlp": (checkpointing.segments_mlp, sizes.SEGMENTS_MLP),
    "micro_batch": (accumulation.micro_batch, sizes.MICRO_BATCH),
    "segments_gpt": (checkpointing.segments_gpt, sizes.SEGMENTS_GPT),
    "offload": (offloading.offload, sizes.OFFLOAD),
    "schedules_gpt": (schedules.schedules_gpt, sizes.SCHEDULES_GPT),
}
RESERVE = 0.93
"""What the blocks of an allocator and the work space of libraries leave."""


def bytes_in(prediction):
    """All that it says of a peak."""
    if isinstance(prediction, list):
        return [found for one in prediction for found in bytes_in(one)]
    if not isinstance(prediction, dict):
        return []
    here = [prediction["bytes"]] if "bytes" in prediction else []
    return here + [f for one in prediction.values() for f in bytes_in(one)]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", CARD)
@pytest.mark.parametrize("name", RUNS)
def test_every_run_of_a_size_fits_its_card(name, size):
    experiment, of = RUNS[name]
    predicted = bytes_in(next(experiment(CPU, **of[size])))
    assert predicted
    assert max(predicted) <= RESERVE * CARDS[CARD[size]].usable
