"""Models that the course did not write: a few of the zoo, and its record."""

import sys

import pytest
import zoo

from membudget.ledger import zoo as room

RECORD = room.zoo()
ROWS = {row["name"]: row for row in RECORD["rows"]}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", zoo.CUT)
def test_a_model_is_as_recorded(name):
    row = zoo.measure(name)
    assert not row.wrong, row.notes
    assert zoo.as_recorded(row)


def test_the_record_has_every_model_and_names_its_differences():
    assert list(ROWS) == list(zoo.zoo())
    tools = [
        row[tool]
        for row in ROWS.values()
        for tool in room.TOOLS
        if tool in row
    ]
    assert {held for held in tools if held is not True} <= {*RECORD["names"]}
    _, *lines = room.summary()
    assert len(lines) == len(room.TOOLS)
    for _, cases, right, *named in lines:
        parts = ", ".join(filter(None, named)).split(", ")
        others = sum(int(part.split()[0]) for part in parts if part)
        assert int(cases) == int(right) + others


def test_a_difference_without_a_name_fails(monkeypatch, capsys):
    monkeypatch.setattr(zoo, "inner", lambda requests, kind: set())
    monkeypatch.setattr(sys, "argv", ["zoo", "NLL, bf16"])
    with pytest.raises(SystemExit, match=r"1 of 1: \['NLL, bf16'\]"):
        zoo.main()
    assert "**PeakTracker: wrong**" in capsys.readouterr().out
