"""The solution on the host's round trip, against lanes of seconds."""

from random import Random

import pytest

from membudget.exercises.elsewhere import hides_from
from tests.soak import examples


def seconds(parameters, link, host, parts=2000):
    """Of out, step and back, part after part, each lane one at a time."""
    size = parameters / parts
    lanes = [2 * size / link, 28 * size / host, 2 * size / link]
    free = [0.0, 0.0, 0.0]
    for _ in range(parts):
        now = 0.0
        for lane, takes in enumerate(lanes):
            now = free[lane] = max(now, free[lane]) + takes
    return free[-1]


@pytest.mark.parametrize("seed", range(examples(5)))
def test_from_so_many_tokens_on_computing_takes_as_long(seed):
    random = Random(seed)
    parameters = random.choice([1e9, 8e9, 70e9])
    flops = random.uniform(1e13, 5e14)
    link, host = random.uniform(2e9, 4e11), random.uniform(2e10, 5e11)
    tokens = hides_from(parameters, flops, link, host)
    took = seconds(parameters, link, host)
    computing = 6 * parameters / flops  # for a token
    assert tokens * computing >= 0.99 * took
    assert (tokens - 2) * computing <= took
    assert tokens == pytest.approx(hides_from(1e6, flops, link, host), abs=1)
