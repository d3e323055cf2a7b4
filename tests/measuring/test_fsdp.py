"""The tracker on two gloo ranks with ``fully_shard``, started once.

Only what is alive between the passes is asserted: the peaks of real runs
depend on when a collective returns.
"""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from membudget.sharding import Ranks

sys.path.insert(0, str(Path(__file__).parent))

import fsdp_ranks

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this PyTorch has no gloo",
)

WORLD = 2
FULL = 4 * 4 * (16 * 16 + 16)  # bytes of all parameters: 4 layers of 16
UNIT = 4 * 8 * 16  # of one layer's output
SETTINGS = [
    f"{kind}, {when}"
    for kind in ("resharded", "kept")
    for when in ("first step", "later step")
]


@pytest.fixture(scope="module")
def ranks():
    """What each rank found."""
    with Ranks(WORLD, backend="gloo") as pool:
        return pool.run(fsdp_ranks.found)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_holds_its_share(ranks, setting):
    """Parameters, gradients and Adam's moments: exactly 1/2."""
    states = FULL + 8 * 4  # two moments of the shards, and the counts
    for found in (rank[setting] for rank in ranks):
        known = states if "later" in setting else 0
        assert found["start"] == dict.fromkeys(found["start"], 0) | {
            "parameters": FULL / WORLD,
            "optimizer": known,
            "inputs": UNIT,
        }
        for moment in ("forward", "backward", "step", "end"):
            assert found[moment]["parameters"] == FULL / WORLD
            assert found[moment]["inputs"] == UNIT
        assert found["backward"]["gradients"] == FULL / WORLD
        assert found["step"]["gradients"] == FULL / WORLD
        assert found["end"]["gradients"] == 0
        assert found["step"]["optimizer"] == states
        assert found["end"]["optimizer"] == states
        assert found["end"]["activations"] == 0
        assert found["adds up"]


@pytest.mark.parametrize("when", ["first step", "later step"])
def test_parameters_that_are_kept_after_the_forward_pass(ranks, when):
    for rank in ranks:
        resharded = sum(rank[f"resharded, {when}"]["forward"].values())
        kept = sum(rank[f"kept, {when}"]["forward"].values())
        assert kept - resharded == FULL
        # What a single process saves: the inputs of the layers but the
        # first, and the loss.
        found = rank[f"resharded, {when}"]
        held = resharded - sum(found["start"].values())
        assert held == 3 * UNIT + 4


def test_the_storages_resized_are_seen(ranks):
    """Two for each layer and time: a weight and a bias."""
    times = {
        "resharded, first step": 1 + 1 + 1,  # freed, gathered again, freed
        "resharded, later step": 1 + 1 + 1 + 1,  # gathered into the old ones
        "kept, first step": 1,
        "kept, later step": 1 + 1,
    }
    for rank in ranks:
        found = {setting: rank[setting]["resized"] for setting in SETTINGS}
        assert found == {s: 2 * 4 * count for s, count in times.items()}


def test_gradients_are_the_same_tracked_or_not(ranks):
    assert all(rank["same gradients"] for rank in ranks)
