"""Figures that are sums of rounded numbers are the same on other machines.

The other notebooks print bytes and counts, which no rounding reaches; and
labs 3 and 4 train as chapter 6 does. `make soak` runs all of them under each
setting.
"""

import pytest
import soak
from project import notebooks

FROM_SUMS = ("03_accumulation", "06_precision")


@pytest.mark.parametrize("name", FROM_SUMS)
def test_same_outputs_on_the_oldest_processor(name):
    (path,) = (path for path in notebooks() if path.stem == name)
    assert soak.different_outputs(path, soak.OLDEST) == ""
