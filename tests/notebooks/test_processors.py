"""Figures that are sums of rounded numbers are the same on other machines.

The other notebooks print bytes and counts, which no rounding reaches; and lab
4 prints losses of the model that lab 3 has, on ranks. `make soak` runs all of
them under each setting.
"""

import pytest
import soak
from project import notebooks

FROM_SUMS = ("03_accumulation", "06_precision", "lab3_mixed_precision")


@pytest.mark.parametrize("name", FROM_SUMS)
def test_same_outputs_on_the_oldest_processor(name):
    (path,) = (path for path in notebooks() if path.stem == name)
    assert soak.different_outputs(path, soak.OLDEST) == ""
