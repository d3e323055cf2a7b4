"""What tests of the exercises share."""

import pytest

from membudget.exercises import on_ranks


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_the_module():
    yield
    for pool in on_ranks._pools.values():
        pool.kill()
