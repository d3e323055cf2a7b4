"""Which cases CI tries."""

import pytest

from tests import soak


class Case:
    def __init__(self, nodeid, few=None):
        self.nodeid = nodeid
        self.few = few

    def get_closest_marker(self, name):
        if name == "few" and self.few is not None:
            return pytest.mark.few(self.few).mark


def test_few_are_left_of_each_and_all_in_a_soak(monkeypatch):
    several = [Case(f"a[{k}]", 3) for k in range(11)]
    next_ = [Case(f"b[{k}]", 3) for k in range(11)]
    others = [Case("c", 0), Case("d[0]", 2), Case("e[0]"), Case("e[1]")]
    items = [*several, *next_, *others]
    monkeypatch.setattr(soak, "SOAK", False)
    left = [case.nodeid for case in soak.few_cases(items)]
    assert left == [
        *("a[0]", "a[3]", "a[7]"),
        *("b[1]", "b[4]", "b[8]"),
        *("d[0]", "e[0]", "e[1]"),
    ]
    monkeypatch.setattr(soak, "SOAK", True)
    assert soak.few_cases(items) == items
