"""The rule of the reactive controller."""

import pytest

from membudget.accumulation import Controller


@pytest.mark.parametrize(
    ("size", "peak", "after"),
    [
        (50, 81, 40),  # too full
        (50, 80, 50),  # the range's ends belong to it
        (50, 60, 50),
        (50, 59, 60),  # room
        (50, 200, 40),
        (99, 0, 100),  # no more than the most
        (1, 99, 1),  # no less than one
        (4, 10, 5),  # 4.8 rounded down would stay for ever
        (4, 90, 3),
    ],
)
def test_the_rule(size, peak, after):
    controller = Controller(size, budget=100, most=100)
    assert controller(peak) == controller.micro_batch == after


def test_it_goes_on_from_what_ran():
    controller = Controller(64, budget=100, most=64)
    assert controller(70, micro_batch=16) == 16
    assert controller(10) == 19
