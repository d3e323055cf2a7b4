"""Figures that are sums of rounded numbers are the same on other machines.

Chapter 6 stands for those that train; most print bytes and counts, which no
rounding reaches. `make soak` runs all of them under each setting.
"""

import soak
from project import notebooks


def test_same_outputs_on_the_oldest_processor():
    (path,) = (path for path in notebooks() if path.stem == "06_precision")
    assert soak.different_outputs(path, soak.OLDEST) == ""
