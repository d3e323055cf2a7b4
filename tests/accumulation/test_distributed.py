"""DDP on two gloo ranks, which wait for the next check."""

import accumulation_ranks
import pytest
import torch.distributed as dist

from membudget.sharding import Ranks

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this PyTorch has no gloo",
)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(accumulation_ranks.WORLD, backend="gloo") as ranks:
        yield ranks  # and they must end cleanly


@pytest.mark.parametrize("name", accumulation_ranks.CHECKS)
def test_on_two_ranks(ranks, name):
    ranks.run(accumulation_ranks.run_check, name)
