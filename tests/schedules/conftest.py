"""Settings of this room's tests, and chains that they share."""

import sys
from pathlib import Path

import pytest
import torch

from membudget.checkpointing import Stage

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpointing"))

torch.set_num_threads(1)

SCORES = 2 * 4 / 3
"""FLOPs of attention where tokens are 4/3 of the width, in 2·width² each."""


@pytest.fixture(scope="session")
def block():
    """A GPT block in units of its input, with fused attention."""
    return Stage(
        output=1,
        inner=15,
        holds_output=False,
        forward_workspace=8,
        record_workspace=1,
        recompute_workspace=-1,
        backward_workspace=7,
        time=12 + SCORES,
        recompute_time=8 + SCORES,
    )


@pytest.fixture(scope="session")
def halves():
    """Its attention and its MLP, as stages of their own."""
    common = dict(holds_output=False, record_workspace=1)
    return [
        Stage(
            inner=5,
            forward_workspace=5,
            recompute_workspace=-1,
            backward_workspace=3,
            time=4 + SCORES,
            recompute_time=3 + SCORES,
            **common,
        ),
        Stage(
            inner=9,
            forward_workspace=7,
            recompute_workspace=-1,
            backward_workspace=7,
            time=8,
            recompute_time=4,
            **common,
        ),
    ]
