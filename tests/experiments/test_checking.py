"""The schema: what each field of a record may be."""

import pytest
from records_helpers import GOOD, good, place

from membudget.records import RECORDS
from membudget_experiments.checking import problems


def test_every_committed_record_is_in_order():
    paths = sorted(RECORDS.glob("*"))
    assert paths
    assert {path.name: problems(path) for path in paths} == {
        path.name: [] for path in paths
    }


def changed(value, *keys):
    """A good record with another value at a place; ``...`` takes it away."""
    record = part = good()
    for key in keys[:-1]:
        part = part[key]
    if value is ...:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    return record


INSIDE = [(a, b) for a in ("device", "software") for b in GOOD[a]]
# The checks of digest and name see these first.
PLAIN = GOOD.keys() - {"experiment", "size", "device"}


@pytest.mark.parametrize(
    "keys",
    [(key,) for key in sorted(PLAIN)]
    + [keys for keys in INSIDE if keys != ("device", "name")],
    ids=".".join,
)
def test_every_field_is_needed_and_refuses_a_list_of_lists(tmp_path, keys):
    name = ".".join(keys)
    found = problems(place(tmp_path, changed([["x"]], *keys)))
    assert any(sentence.startswith(name) for sentence in found), found
    if name != "outcome":
        found = problems(place(tmp_path, changed(..., *keys)))
        assert any("is a required property" in text for text in found), found


WRONG = [
    (2, "schema"),
    ("x", "host"),
    ("x", "device", "host"),
    ("huge", "size"),
    ({"warm_up": 1}, "parameters"),
    ({"warm_up": -1, "repeats": 1}, "parameters"),
    ({"warm_up": 1.5, "repeats": 1}, "parameters"),
    (None, "prediction"),
    ("2026-03-01T10:00:00+00:00", "prediction", "utc"),
    ({}, "prediction", "values"),
    ("success", "outcome"),
    ([{}], "samples"),
    ([1, "2"], "samples", 0, "synchronised"),
    ([], "samples", 0, "synchronised"),
    ({"x": 1}, "samples", 0, "synchronised"),
    ("", "units", "side"),
    ("gpu", "device", "kind"),
    (-1, "device", "memory"),
    ("1", "device", "threads"),
    ("1970-01-01T00:00:00Z", "utc"),
    ("A" * 40, "commit"),
    (1, "clean"),
    ("ab" * 31, "source"),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_one_thing_wrong_with_the_right_digest(tmp_path, wrong):
    value, *keys = wrong
    found = problems(place(tmp_path, changed(value, *keys)))
    assert any(keys[0] in sentence for sentence in found), found


ERROR = "OutOfMemoryError: CUDA out of memory"
FAILED = {"outcome": "failed", "error": "ValueError: x", "samples": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": []},
        {"error": ERROR},
        {"outcome": "failed"},
        {"outcome": "out of memory"},
        {"utc": None},
        {"utc": "2026-03-01T09:00:00Z"},  # before the prediction
        {"units": {"side": "rows"}},
    ],
)
def test_fields_that_contradict_each_other(tmp_path, changes):
    assert problems(place(tmp_path, good(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "out of memory", "error": ERROR},
        {"outcome": "out of memory", "error": ERROR, "samples": []},
        FAILED,
        {**FAILED, "prediction": None},
        {"commit": None, "clean": None},
        {"utc": GOOD["prediction"]["utc"]},  # in the same second
    ],
)
def test_what_else_is_in_order(tmp_path, changes):
    assert problems(place(tmp_path, good(**changes))) == []
