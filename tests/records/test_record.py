"""Records: what is found to be wrong, and what a page shows of them."""

import os
import re

import pytest
from records_helpers import FILE, GOOD, NAME, current, good, on_gpu, place

from membudget.records import record as records


def test_a_good_record(tmp_path):
    path = place(tmp_path, good())
    assert path.name == FILE == records.file_name(GOOD)
    assert records.check(path) == []
    (found,) = records.load(NAME, folder=tmp_path)
    assert {**found, "digest": None} == {**GOOD, "digest": None}


def test_every_experiment_ran_on_a_cpu():
    for name in records.catalogue():
        assert records.best(name)["outcome"] in records.FINISHED
        assert records.load(name, "tiny", "cpu"), f"{name} ran on no CPU"


def test_committed_records_name_no_path_and_no_host():
    host = os.uname().nodename
    for path in records.RECORDS.glob("*.json"):
        text = path.read_text("utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users)\b|\\\\", text)
        assert len(host) < 4 or host not in text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "half-written or no JSON"),
        (b'{"schema": 1,\n "exp', "half-written or no JSON"),
        (b"[" * 200_000, "half-written or no JSON"),
        (b"\xff\xfe{}", "half-written or no JSON"),
        (b"null", "its digest is not that"),
        (b"{}", "its digest is not that"),
    ],
)
def test_no_record_at_all(tmp_path, content, sentence):
    path = tmp_path / FILE
    path.write_bytes(content)
    (found,) = records.check(path)
    assert sentence in found


def test_a_file_that_cannot_be_read(tmp_path):
    assert "cannot be read" in records.check(tmp_path / FILE)[0]


@pytest.mark.parametrize(("old", "new"), [("0.25", "0.24"), ("1,", "1.0,")])
def test_an_edit_is_found(tmp_path, old, new):
    path = place(tmp_path, good())
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    (found,) = records.check(path)
    assert "its digest is not that" in found
    with pytest.raises(ValueError, match=f"{FILE} is bad: its digest"):
        records.load(NAME, folder=tmp_path)


@pytest.mark.parametrize("key", [*GOOD, "digest"])
def test_every_field_is_in_the_digest(key):
    changed = records.digest(good(**{key: "x"}))
    assert (changed == records.digest(good())) == (key == "digest")


@pytest.mark.parametrize("name", [FILE.replace("tiny", "t4"), "copy.json"])
def test_a_name_that_disagrees_with_the_content(tmp_path, name):
    (found,) = records.check(place(tmp_path, good(), name))
    assert found == f"its content belongs into a file {FILE}"


def test_an_unknown_experiment(tmp_path):
    (found,) = records.check(place(tmp_path, good(experiment="unknown")))
    assert found == (
        "no experiment is named unknown: allowed are "
        f"{', '.join(records.catalogue())}"
    )


def test_an_interrupted_run(tmp_path):
    early = good(outcome="predicted", samples=[], utc=None)
    assert "was interrupted" in records.check(place(tmp_path, early))[0]


def test_slug():
    slugs = {
        "NVIDIA H200": "nvidia-h200",
        "Intel(R) Xeon(R) CPU @ 2.20GHz": "intel-r-xeon-r-cpu-2-20ghz",
        "../../x": "x",
        "…": "unnamed",
    }
    assert {name: records.slug(name) for name in slugs} == slugs


ERROR = "OutOfMemoryError: CUDA out of memory"
FAILED = {"outcome": "failed", "error": "ValueError: x", "samples": []}


# Loading -----------------------------------------------------------------


@pytest.fixture
def several(tmp_path):
    for record in (
        on_gpu("large"),
        on_gpu("t4", "Tesla T4"),
        on_gpu("tiny"),
        good(),
    ):
        place(tmp_path, record)
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
    assert records.load("vla_policy", folder=several) == []


def test_load_of_what_is_unknown(several):
    with pytest.raises(ValueError, match="'x': use one of batch"):
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
    with pytest.raises(LookupError, match="plan_times: Not measured"):
        records.best(NAME, several)


def test_best_is_the_newest_of_one_size_and_on_a_gpu(tmp_path):
    place(tmp_path, good(size="large"))
    for month, name in enumerate("ACB", 4):
        on = on_gpu("t4", name, utc=f"2026-{month:02}-01T00:00:00Z")
        place(tmp_path, on)
    assert records.best(NAME, tmp_path)["device"]["name"] == "B"


def test_best_leaves_out_what_was_not_measured_to_the_end(tmp_path):
    place(tmp_path, good())
    place(tmp_path, on_gpu("t4", **FAILED))
    short = {"outcome": "out of memory", "error": ERROR}
    place(tmp_path, on_gpu("large", samples=[], **short))
    assert records.best(NAME, tmp_path)["device"]["kind"] == "cpu"
    place(tmp_path, on_gpu("large", **short))
    assert records.best(NAME, tmp_path)["device"]["kind"] == "cpu"


def test_missing(tmp_path):
    def text():
        return records.missing(NAME, tmp_path)

    assert text() == "Not measured yet: tiny; t4 and large, which need a GPU."
    place(tmp_path, good())
    assert text() == "Not measured yet: t4 and large, which need a GPU."
    place(tmp_path, on_gpu("t4", **FAILED))
    assert text() == "Not measured yet: t4 and large, which need a GPU."
    place(tmp_path, on_gpu("large"))
    assert text() == "Not measured yet: t4, which needs a GPU."
    place(tmp_path, on_gpu("t4"))
    assert text() == ""


def test_an_experiment_that_needs_no_gpu(tmp_path):
    known = records.catalogue()
    (name,) = (name for name in known if not known[name].gpu)
    assert records.missing(name, tmp_path) == (
        "Not measured yet: tiny; t4; large."
    )
    place(tmp_path, good(experiment=name, size="large"))
    assert records.missing(name, tmp_path) == "Not measured yet: tiny; t4."
    place(tmp_path, on_gpu("t4", experiment=name))
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


def test_what_predicts_no_value_of_a_sample_is_not_compared():
    assert records.compared(good()) == []
