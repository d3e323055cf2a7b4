"""Records: what is found to be wrong, and what is written."""

import os
import re

import pytest
from experiments_helpers import (
    FILE,
    GOOD,
    NAME,
    current,
    good,
    on_gpu,
    place,
    read,
)

from membudget.experiments import record as records

# A record without fault --------------------------------------------------


def test_a_good_record(tmp_path):
    path = records.write(good(), tmp_path)
    assert path.name == FILE == records.file_name(GOOD)
    assert records.check(path) == []
    back = read(path)
    assert list(back) == list(records._FIELDS)
    assert {**back, "digest": None} == {**GOOD, "digest": None}
    assert os.listdir(tmp_path) == [FILE]
    lines = path.read_text("utf-8").splitlines()
    assert ' "outcome": "measured",' in lines
    sample = (
        '"side": 64, "synchronised": [0.25, 0.5], "unsynchronised": [1, 2]'
    )
    assert any(line.endswith(f"{{{sample}}},") for line in lines)
    again = good(clean=False)
    assert records.write(again, tmp_path) == path
    assert read(path)["clean"] is False
    again.pop("digest")
    assert again == good(clean=False)
    assert os.listdir(tmp_path) == [FILE]


def test_every_committed_record_is_in_order():
    paths = sorted(records.RECORDS.glob("*"))
    assert {path.name: records.check(path) for path in paths} == {
        path.name: [] for path in paths
    }
    for name in records.catalogue():
        record = records.best(name)
        assert record["outcome"] in records.FINISHED
        assert records.load(name, "tiny", "cpu"), f"{name} ran on no CPU"


def test_committed_records_name_no_path_and_no_host():
    host = os.uname().nodename
    for path in records.RECORDS.glob("*.json"):
        text = path.read_text("utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users)\b|\\\\", text)
        assert len(host) < 4 or host not in text


# Files that are no record ------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "half-written or no JSON"),
        (b'{"schema": 1,\n "exp', "half-written or no JSON"),
        (b"[" * 200_000, "half-written or no JSON"),
        (b"\xff\xfe{}", "not text in UTF-8"),
        (b"null", "no JSON object"),
        (b"{}", "schema is None"),
    ],
)
def test_no_record_at_all(tmp_path, content, sentence):
    path = tmp_path / FILE
    path.write_bytes(content)
    (found,) = records.check(path)
    assert sentence in found


def test_a_file_that_cannot_be_read(tmp_path):
    assert "cannot be read" in records.check(tmp_path / FILE)[0]


# Edited by hand ----------------------------------------------------------

OTHER_DIGEST, OTHER_FORM = "its digest is not that", "not in the form that is"
EDITS = [
    ("0.25", "0.24", OTHER_DIGEST),
    ("[1, 2]", "[1.0, 2]", OTHER_DIGEST),
    ('"digest": "', '"digest": "0" ,"digest": "', OTHER_FORM),
    ("0.25", "0.250", OTHER_FORM),
    ("4e-05", "0.00004", OTHER_FORM),
]


@pytest.mark.parametrize(("old", "new", "words"), EDITS)
def test_an_edit_is_found(tmp_path, old, new, words):
    path = records.write(good(), tmp_path)
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    (found,) = records.check(path)
    assert words in found
    with pytest.raises(ValueError, match=f"{FILE} is bad: its? "):
        records.load(NAME, folder=tmp_path)


@pytest.mark.parametrize("key", records._FIELDS)
def test_every_field_is_in_the_digest(key):
    changed = records.digest(good(**{key: "x"}))
    assert (changed == records.digest(good())) == (key == "digest")


# Edited, with the digest that fits ---------------------------------------


def changed(value, *keys):
    """A good record with another value at a place."""
    record = part = good(digest="0" * 64)
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return record


ALL_KEYS = [
    (key,) for key in records._FIELDS if key not in ("schema", "digest")
] + [
    (key, inner)
    for key, part in records._FIELDS.items()
    if isinstance(part, dict)
    for inner in part
]


@pytest.mark.parametrize("keys", ALL_KEYS, ids=".".join)
def test_every_field_is_needed_and_refuses_a_list_of_lists(keys):
    name = ".".join(keys)
    found = records.problems(changed([["x"]], *keys))
    assert any(s.startswith(f"{name} is [[") for s in found), found
    record = part = good(digest="0" * 64)
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    assert records.problems(record) == [f"{name} is missing"]


NAN, INFINITE = float("nan"), float("-inf")
WRONG = [
    ("its schema is 2: this version reads schema 1", 2, "schema"),
    ("its schema is True: this version", True, "schema"),
    ("host is unknown to schema 1", "x", "host"),
    ("device.host is unknown to schema 1", "x", "device", "host"),
    ("synchronised.1 is not finite", NAN, "samples", 0, "synchronised", 1),
    ("parameters.sides.0 is not finite", INFINITE, "parameters", "sides", 0),
    ("name of an experiment", "../x", "experiment"),
    ("one of tiny, t4, large", "huge", "size"),
    ("warm_up and repeats", {"warm_up": 1}, "parameters"),
    ("warm_up and repeats", {"warm_up": -1, "repeats": 1}, "parameters"),
    ("warm_up and repeats", {"warm_up": 1, "repeats": True}, "parameters"),
    ("an object", None, "prediction"),
    ("a UTC time", "2026-03-01T10:00:00+00:00", "prediction", "utc"),
    ("object with entries", {}, "prediction", "values"),
    ("one of predicted", "success", "outcome"),
    ("a list of objects", [{}], "samples"),
    ("a list of objects", [1, "2"], "samples", 0, "synchronised"),
    ("a list of objects", [], "samples", 0, "synchronised"),
    ("object of texts", "", "units", "side"),
    ("one of cpu, cuda", "gpu", "device", "kind"),
    ("text", "", "device", "name"),
    ("number of bytes or null", -1, "device", "memory"),
    ("number of threads", "1", "device", "threads"),
    ("a UTC time", "1970-01-01T00:00:00Z", "utc"),
    ("hexadecimal digits of a commit", "A" * 40, "commit"),
    ("true or false or null", 1, "clean"),
    ("64 hexadecimal digits", "ab" * 31, "source"),
]


@pytest.mark.parametrize(
    ("wanted", "value", "keys"),
    [(wanted, value, keys) for wanted, value, *keys in WRONG],
)
def test_one_thing_wrong_with_the_right_digest(tmp_path, wanted, value, keys):
    (found,) = records.check(place(tmp_path, changed(value, *keys)))
    assert wanted in found
    assert keys[0] in found


ERROR = "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("sentence", "changes"),
    [
        ("has no sample", {"samples": []}),
        (
            "is only predicted and has samples",
            {"outcome": "predicted", "utc": None},
        ),
        ("its outcome is measured, its error 'OutOf", {"error": ERROR}),
        ("its outcome is failed, its error None", {"outcome": "failed"}),
        (
            "its outcome is out of memory, its error None",
            {"outcome": "out of memory"},
        ),
        ("its outcome is measured, its time None", {"utc": None}),
        (
            "its outcome is predicted, its time '2026",
            {"outcome": "predicted", "samples": []},
        ),
        (
            "at 2026-03-01T10:00:00Z, after the measurement at 2026-03-01T09",
            {"utc": "2026-03-01T09:00:00Z"},
        ),
        ("units are given for side", {"units": {"side": "rows"}}),
    ],
)
def test_fields_that_contradict_each_other(tmp_path, sentence, changes):
    found = records.check(place(tmp_path, good(**changes)))
    assert any(sentence in text for text in found), found


FAILED = {"outcome": "failed", "error": "ValueError: x", "samples": []}


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
    assert records.check(place(tmp_path, good(**changes))) == []


@pytest.mark.parametrize("name", [FILE.replace("tiny", "t4"), "copy.json"])
def test_a_name_that_disagrees_with_the_content(tmp_path, name):
    (found,) = records.check(place(tmp_path, good(), name))
    assert found == f"its content belongs into a file {FILE}"


def test_an_unknown_experiment(tmp_path):
    path = place(
        tmp_path,
        good(experiment="unknown"),
        FILE.replace(NAME, "unknown"),
    )
    (found,) = records.check(path)
    assert found == (
        "no experiment is named unknown: allowed are "
        f"{', '.join(records.catalogue())}"
    )


# Writing -----------------------------------------------------------------


def test_nothing_wrong_is_written(tmp_path):
    with pytest.raises(ValueError, match="not written: size is"):
        records.write(good(size="huge"), tmp_path)
    assert os.listdir(tmp_path) == []


def test_killed_in_the_middle_of_writing(tmp_path, monkeypatch):
    path = records.write(good(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)
        records.write(good(clean=False), tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    (found,) = records.load(NAME, folder=tmp_path)  # the rest is no record
    assert found["clean"] is read(path)["clean"] is True
    records.write(good(clean=False), tmp_path)
    assert read(path)["clean"] is False


@pytest.mark.parametrize("moment", ["fsync", "chmod", "replace"])
def test_an_error_while_writing_leaves_nothing(tmp_path, monkeypatch, moment):
    before = records.write(good(), tmp_path).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, moment, full)
    with pytest.raises(OSError, match="No space"):
        records.write(good(clean=False), tmp_path)
    assert os.listdir(tmp_path) == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


def test_slug():
    slugs = {
        "NVIDIA H200": "nvidia-h200",
        "Intel(R) Xeon(R) CPU @ 2.20GHz": "intel-r-xeon-r-cpu-2-20ghz",
        "../../x": "x",
        "…": "unnamed",
    }
    assert {name: records.slug(name) for name in slugs} == slugs


# Loading -----------------------------------------------------------------


@pytest.fixture
def several(tmp_path):
    for record in (
        on_gpu("large"),
        on_gpu("t4", "Tesla T4"),
        on_gpu("tiny"),
        good(),
    ):
        records.write(record, tmp_path)
    return tmp_path


def kinds(found):
    return [(r["size"], records.slug(r["device"]["name"])) for r in found]


def test_load(several):
    assert kinds(records.load(NAME, folder=several)) == [
        ("tiny", "a-cpu-8-cores-3-0"),
        ("tiny", "nvidia-h200"),
        ("t4", "tesla-t4"),
        ("large", "nvidia-h200"),
    ]
    assert kinds(records.load(NAME, "t4", folder=several)) == [
        ("t4", "tesla-t4")
    ]
    by_kind = records.load(NAME, device="cuda", folder=several)
    assert len(by_kind) == 3
    h200 = records.load(NAME, "large", "nvidia-h200", several)
    assert kinds(h200) == [("large", "nvidia-h200")]
    assert records.load(NAME, "large", "cpu", several) == []
    assert records.load("allocator", folder=several) == []


def test_load_of_what_is_unknown(several):
    with pytest.raises(ValueError, match="'x': use one of allocator, batch"):
        records.load("x", folder=several)
    with pytest.raises(ValueError, match="'huge': use tiny, t4, large"):
        records.load(NAME, "huge", folder=several)


def test_best_is_the_largest_on_a_gpu(several):
    for size, kind, name in (
        ("large", "cuda", "nvidia-h200"),
        ("t4", "cuda", "tesla-t4"),
        ("tiny", "cuda", "nvidia-h200"),
        ("tiny", "cpu", "a-cpu-8-cores-3-0"),
    ):
        found = records.best(NAME, several)
        assert (found["size"], found["device"]["kind"]) == (size, kind)
        (several / f"{NAME}.{size}.{name}.json").unlink()
    with pytest.raises(LookupError, match="synchronisation: Not measured"):
        records.best(NAME, several)


def test_best_is_the_newest_of_one_size_and_on_a_gpu(tmp_path):
    records.write(good(size="large"), tmp_path)
    for month, name in enumerate("ACB", 4):
        on = on_gpu("t4", name, utc=f"2026-{month:02}-01T00:00:00Z")
        records.write(on, tmp_path)
    assert records.best(NAME, tmp_path)["device"]["name"] == "B"


def test_best_leaves_out_what_was_not_measured_to_the_end(tmp_path):
    records.write(good(), tmp_path)
    records.write(on_gpu("t4", **FAILED), tmp_path)
    short = {"outcome": "out of memory", "error": ERROR}
    records.write(on_gpu("large", samples=[], **short), tmp_path)
    assert records.best(NAME, tmp_path)["device"]["kind"] == "cpu"
    records.write(on_gpu("large", **short), tmp_path)
    assert records.best(NAME, tmp_path)["device"]["kind"] == "cpu"


def test_missing(tmp_path):
    def text():
        return records.missing(NAME, tmp_path)

    assert text() == "Not measured yet: tiny; t4 and large, which need a GPU."
    records.write(good(), tmp_path)
    assert text() == "Not measured yet: t4 and large, which need a GPU."
    records.write(on_gpu("t4", **FAILED), tmp_path)
    assert text() == "Not measured yet: t4 and large, which need a GPU."
    records.write(on_gpu("large"), tmp_path)
    assert text() == "Not measured yet: t4, which needs a GPU."
    records.write(on_gpu("t4"), tmp_path)
    assert text() == ""


def test_an_experiment_that_needs_no_gpu(tmp_path):
    assert set(records.NEED_NO_GPU) < records.catalogue().keys()
    (name,) = records.NEED_NO_GPU
    assert records.missing(name, tmp_path) == (
        "Not measured yet: tiny; t4; large."
    )
    records.write(good(experiment=name, size="large"), tmp_path)
    assert records.missing(name, tmp_path) == "Not measured yet: tiny; t4."
    records.write(on_gpu("t4", experiment=name), tmp_path)
    assert records.best(name, tmp_path)["size"] == "large"


def test_provenance_of_a_cpu():
    assert records.provenance(good(**current())) == (
        "A CPU (8 cores) @ 3.0, 8.0 GiB, 1 thread, torch 2.13.0+cpu\n"
        "Size tiny, 2026-03-01, commit 0123456"
    )


def test_provenance_of_a_gpu():
    record = on_gpu("large", outcome="out of memory", error=ERROR, clean=False)
    assert records.provenance({**record, **current(size="large")}) == (
        "NVIDIA H200, 140.0 GiB, driver 580.1, torch 2.13.0+cpu, CUDA 13.0\n"
        "Size large, 2026-03-01, commit 0123456 with uncommitted changes, "
        "out of memory"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"commit": None, "clean": None}, ", commit unknown"),
        ({"clean": None}, ", commit 0123456 (not checked)"),
        ({"source": "ab" * 32}, ", measured with an earlier version"),
        ({"units": {"side": "m"}}, ", measured with an earlier version"),
        ({"parameters": {}}, ", measured with an earlier version"),
    ],
)
def test_provenance_says_what_is_uncertain(change, words):
    record = good(**{**current(), **change})
    assert records.provenance(record).endswith(words)
    assert records.is_current(record) == ("earlier" not in words)


def test_compared():
    """Three runs; the second has a library's bytes in it, the third is not
    there: the card was full."""
    rows = [{"micro_batch": n, "bytes": 100 * n} for n in (1, 2, 4)]
    samples = [
        {"micro_batch": 1, "requested": 100, "workspace": None},
        {"micro_batch": 2, "requested": 250, "workspace": 30},
    ]
    record = good(
        experiment="micro_batch",
        parameters={"micro_batches": [1, 2, 4], "warm_up": 0, "repeats": 1},
        prediction={"utc": GOOD["utc"], "values": {"of": 7, "peak": rows}},
        samples=samples,
    )
    found = records.compared(record)
    assert [(row.run, row.predicted, row.rest) for row in found] == [
        ("1", 100, 0),
        ("2", 200, 20),
    ]
    samples[0]["requested"] = rows[1]["bytes"] = None
    record.update(samples=samples, prediction={"values": {"peak": rows}})
    (row,) = records.compared(record)
    assert (row.measured, row.rest) == (None, None)


def test_the_values_of_each_rank_are_compared_as_a_sum():
    row = {"parameters": [4, 4], "gradients": None, "optimizer": None}
    calls = dict.fromkeys(
        ("gathers", "all_gather", "reductions", "reduce_scatter")
    )
    record = good(
        experiment="fsdp_ranks",
        parameters={"runs": [[2, "zero-2"]]},
        prediction={"values": {"runs": [row | calls]}},
        samples=[{"parameters": [4, 5]}],
    )
    (found,) = records.compared(record)
    assert (found.run, found.predicted, found.rest) == ("2 zero-2", 8, 1)


def test_what_predicts_no_value_of_a_sample_is_not_compared():
    assert records.compared(good()) == []
