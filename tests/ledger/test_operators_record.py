"""PyTorch's own operators: a few of them, and the record of all."""

import sys

import operators
import pytest
import torch

from membudget.ledger import zoo

RECORD = zoo.operators()


@pytest.fixture(scope="module")
def listed():
    """PyTorch's list, with larger inputs, on one thread."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators.testing_utils, "freeze_rng_state", None)
        torch.set_num_threads(1)
        operators.enlarged()
        yield operators.operators()
    torch.set_num_threads(threads)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", operators.CUT)
def test_an_operator_is_as_recorded(name, listed):
    row = operators.measure(name, listed[name])
    assert not operators.is_wrong(row), row.notes
    assert operators.as_recorded(row)


def test_the_record_names_its_differences(listed):
    rows = RECORD["rows"]
    if RECORD["versions"]["torch"] == operators.versions()["torch"]:
        assert RECORD["tried"] == len(listed)
        assert {row["name"] for row in rows} <= {*listed}
    found = {row[of] for row in rows for of in ("tracker", "dry run")}
    assert found == {*RECORD["names"]}
    counts = zoo.operator_counts()
    assert sum(counts.values()) == RECORD["tried"]
    assert next(iter(counts)) == "equal"


def test_only_products_make_the_tracker_too_high():
    high = {row["name"] for row in RECORD["rows"] if row["off"] < 1}
    assert high == {"prod", "cumprod", "masked.cumprod", "linalg.vander"}


def test_a_difference_without_a_name_fails(monkeypatch, capsys, listed):
    monkeypatch.setattr(operators, "inner", lambda requests, kind: set())
    monkeypatch.setattr(sys, "argv", ["operators", "kthvalue"])
    with pytest.raises(SystemExit, match=r"1 of 1: \['kthvalue'\]"):
        operators.main()
    assert "'tracker': 'wrong'" in capsys.readouterr().out
