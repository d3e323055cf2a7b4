"""The words of a refusal, and what is taken."""

import re
from fractions import Fraction
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn

from membudget import checks


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    "value", [3, np.int8(3), np.uint64(3), torch.tensor(3), torch.tensor([3])]
)
def test_whole_numbers_of_others_become_those_of_python(value):
    assert type(checks.whole(value, "n")) is int
    assert checks.whole(value, "n", 3, 3) == 3


@pytest.mark.parametrize(
    ("value", "bounds", "error", "message"),
    [
        (0, (), ValueError, "n is 0: use a whole number of at least 1"),
        (-1, (0,), ValueError, "n is -1: use a whole number of at least 0"),
        (9, (1, 8), ValueError, "n is 9: use a whole number from 1 to 8"),
        (True, (), TypeError, "n is True: use a whole number of at least 1"),
        (3.0, (None,), TypeError, "n is 3.0: use a whole number"),
        ("3", (None, 4), TypeError, "n is '3': use a whole number up to 4"),
        (
            nn.Sequential(nn.ReLU()),
            (),
            TypeError,
            "n is a Sequential: use a whole number of at least 1",
        ),
        (
            10**60,
            (),
            ValueError,
            "n is a number of many digits: use a whole number of at most "
            "1e+50",
        ),
    ],
)
def test_no_whole_number(value, bounds, error, message):
    with refused(error, message):
        checks.whole(value, "n", *bounds)


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), Fraction(1, 2)])
def test_numbers(value):
    assert checks.number(value, "x", above=0, most=2) == value
    assert checks.number(torch.tensor(0.5), "x", 0.5) == 0.5
    assert checks.number(inf, "x", infinite=True) == inf


@pytest.mark.parametrize(
    ("value", "bounds", "error", "message"),
    [
        (nan, {}, ValueError, "x is nan: use a finite number"),
        (-inf, {}, ValueError, "x is -inf: use a finite number"),
        (nan, {"infinite": True}, ValueError, "x is nan: use a number"),
        (0, {"above": 0}, ValueError, "x is 0: use a finite number above 0"),
        (
            2.0,
            {"above": 0, "most": 1},
            ValueError,
            "x is 2.0: use a finite number above 0 and up to 1",
        ),
        (True, {}, TypeError, "x is True: use a finite number"),
        ("1", {}, TypeError, "x is '1': use a finite number"),
        (
            10**400,
            {},
            ValueError,
            "x is a number of many digits: use a finite number",
        ),
    ],
)
def test_no_number(value, bounds, error, message):
    with refused(error, message):
        checks.number(value, "x", **bounds)


def test_other_things():
    with refused(TypeError, "a is 'yes': use True or False"):
        checks.flag("yes", "a")
    with refused(ValueError, "there is no stage 'c': use one of a, b"):
        checks.one_of("c", "ab", "stage")
    with refused(TypeError, "there is no stage None: use one of a, b"):
        checks.one_of(None, "ab", "stage")
    with refused(
        ValueError,
        "device is 'gpu': use a name, such as 'cpu' or "
        "'cuda:0', or a torch.device",
    ):
        checks.device("gpu")
    with refused(TypeError, "sizes is {1}: use a list of numbers"):
        checks.listed({1}, "sizes", "numbers")
    with refused(ValueError, "sizes is empty: use 1 numbers or more"):
        checks.listed([], "sizes", "numbers")
