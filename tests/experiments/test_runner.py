"""Running: prediction first, resuming, failing, running out of memory."""

import io
import itertools
import json
import os
import re

import pytest
import torch
from experiments_helpers import SIMPLE, read
from records_helpers import FILE, NAME, good

from membudget.records import record as records
from membudget_experiments import definition, machine, runner
from membudget_experiments.progress import Progress

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, planted, monkeypatch):
    """Plant experiments and run all; gives the results by name."""
    monkeypatch.setattr(machine, "commit", lambda: (None, None))
    out = tmp_path / "out"
    out.mkdir()

    def make(again=False, **bodies):
        if bodies:
            make.module = planted(**bodies)
        known = definition.definitions().values()
        results = runner.run(known, "tiny", CPU, out, again=again)
        return {result.record["experiment"]: result for result in results}

    make.out = out
    return make


def test_a_record_holds_what_was_run(run, capsys):
    (result,) = run(one=SIMPLE).values()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "one tiny  3/3\n" in captured.err
    assert re.search(r"one tiny  measured, \d+\.\d s\n$", captured.err)
    record = read(result.path)
    assert records.damage(result.path) == []
    assert record == result.record
    assert record["outcome"] == "measured"
    assert record["error"] is None
    assert record["prediction"]["values"] == {"total": 6}
    assert record["samples"] == [{"value": 1}, {"value": 2}, {"value": 3}]
    assert record["units"] == {"value": "things"}
    assert record["parameters"] == {
        "values": [1, 2, 3],
        "warm_up": 0,
        "repeats": 1,
    }
    assert record["software"]["torch"] == torch.__version__
    assert record["device"]["kind"] == "cpu"
    assert record["device"]["threads"] == torch.get_num_threads()
    assert records.same(record, run.module.one.experiment)
    assert result.path == run.out / records.file_name(record)
    assert result.seconds > 0


def test_the_prediction_is_on_disk_before_anything_is_measured(run):
    body = """\
yield {"total": 6}
(path,) = Path(OUT).glob("*.json")
SEEN["text"] = path.read_text("utf-8")
yield {"value": 1}
SEEN["after a sample"] = path.read_text("utf-8")
""".replace("OUT", repr(str(run.out)))
    (result,) = run(one=body).values()
    assert result.record["outcome"] == "measured", result.record["error"]
    seen = run.module.SEEN
    early = json.loads(seen["text"])
    assert early["outcome"] == "predicted"
    assert early["samples"] == []
    assert early["utc"] is None
    assert early["prediction"] == result.record["prediction"]
    assert early["digest"] == records.digest(early)
    assert seen["after a sample"] == seen["text"]


def test_a_failing_experiment_among_others(run, capsys):
    broken = 'yield {"total": 1}\nyield {"value": 1}\nraise KeyError("lost")'
    results = run(a=SIMPLE, b=broken, c=SIMPLE)
    assert [found.record["outcome"] for found in results.values()] == [
        *("measured", "failed", "measured")
    ]
    record = results["b"].record
    assert record["error"] == "KeyError: 'lost'"
    assert record["samples"] == [{"value": 1}]
    assert record["prediction"]["values"] == {"total": 1}
    assert [records.damage(r.path) for r in results.values()] == [[], [], []]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return\nyield", "no prediction first"),
        ("yield [1]", "no prediction first"),
        ('yield {"x": torch.ones(1)}', "TypeError: Object of type Tensor"),
        ('yield {"x": float("nan")}', "ValueError: Out of range float"),
        ("raise MemoryError('early')\nyield", "MemoryError: early"),
    ],
)
def test_without_a_prediction_nothing_is_measured(run, body, error):
    tail = '\nSEEN["resumed"] = True\nyield {"value": 1}'
    (result,) = run(one=body + tail).values()
    assert result.record["outcome"] == "failed"
    assert result.record["prediction"] is None
    assert error in result.record["error"]
    assert result.record["samples"] == []
    assert run.module.SEEN == {}
    assert records.damage(result.path) == []


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        ("3", "a sample is 3: yield a dictionary with the keys of the units"),
        ('{"value": float("inf")}', "Out of range float"),
        ('{"other": 1}', "a sample is {'other': 1}: yield"),
    ],
)
def test_a_sample_that_is_none(run, sample, error):
    body = f'yield {{"total": 1}}\nyield {{"value": 1}}\nyield {sample}'
    (result,) = run(one=body).values()
    assert result.record["outcome"] == "failed"
    assert error in result.record["error"]
    assert result.record["samples"] == [{"value": 1}]
    assert records.damage(result.path) == []


def test_no_sample_at_all(run):
    (result,) = run(one='yield {"total": 1}').values()
    assert result.record["outcome"] == "failed"
    assert "yields no sample" in result.record["error"]


def test_out_of_memory_keeps_the_samples_and_frees_the_tensors(run):
    short = """\
def step():
    big = torch.ones(1000)
    SEEN["big"] = weakref.ref(big)
    cycle = [big]
    cycle.append(cycle)
    held.append(big)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")

yield {"total": 1}
held = [torch.ones(1000)]
SEEN["held"] = weakref.ref(held[0])
yield {"value": 1}
yield {"value": 2}
step()
"""
    look = """\
yield {"total": 1}
yield {"value": SEEN["big"]() is None and SEEN["held"]() is None}
"""
    results = run(a=short, b=look)
    record = results["a"].record
    assert record["outcome"] == "out of memory"
    assert record["samples"] == [{"value": 1}, {"value": 2}]
    assert record["error"].startswith("OutOfMemoryError: CUDA out of")
    assert records.damage(results["a"].path) == []
    assert results["b"].record["samples"] == [{"value": True}]


def test_an_error_is_stored_without_paths():
    stored = {
        "no file /home/ann/x.txt here": "ValueError: no file … here",
        r"C:\Users\ann\x is bad": "ValueError: … is bad",
        "two\n  lines": "ValueError: two lines",
        "": "ValueError:",
        "x" * 999: f"ValueError: {'x' * 388}",
    }
    for message, text in stored.items():
        assert runner._describe(ValueError(message)) == text


# Resuming ----------------------------------------------------------------

COUNT = SIMPLE.replace(
    "yield", 'SEEN["runs"] = 1 + SEEN.get("runs", 0)\nyield', 1
)


def runs(run):
    return run.module.SEEN.pop("runs", 0)


def test_what_is_finished_and_current_is_skipped(run):
    first = run(one=COUNT)["one"]
    before = first.path.read_bytes()
    assert runs(run) == 1
    second = run()["one"]
    assert runs(run) == 0
    assert second.seconds is None
    assert second.record == first.record
    assert first.path.read_bytes() == before
    third = run(again=True)["one"]
    assert runs(run) == 1
    assert third.seconds is not None


def test_what_runs_again(run):
    failing = f"{COUNT}\nraise ValueError('x')"
    assert run(one=failing)["one"].record["outcome"] == "failed"
    assert run()["one"].seconds is not None
    assert runs(run) == 2
    full = f"{COUNT}\nraise torch.OutOfMemoryError('x')"  # another version
    assert run(one=full)["one"].record["outcome"] == "out of memory"
    assert runs(run) == 1
    assert run()["one"].seconds is None  # it is finished
    assert runs(run) == 0


@pytest.mark.parametrize("harm", ["edited", "interrupted"])
def test_a_bad_record_runs_again(run, harm):
    path = run(one=COUNT)["one"].path
    if harm == "edited":
        text = path.read_text("utf-8").replace('"value": 2', '"value": 7')
        path.write_text(text, "utf-8")
    else:
        early = {"outcome": "predicted", "samples": [], "utc": None}
        runner.write({**read(path), **early}, path.parent)
        assert "interrupted" in records.damage(path)[0]
    assert records.damage(path)
    assert run()["one"].seconds is not None
    assert runs(run) == 2
    assert records.damage(path) == []


def test_a_folder_that_vanishes_is_no_failure_of_the_experiment(run):
    body = f"import shutil\nshutil.rmtree({str(run.out)!r})\n{SIMPLE}"
    with pytest.raises(OSError):
        run(one=body)


def test_a_clock_that_is_set_back(run, monkeypatch):
    times = itertools.chain(
        ["2026-03-01T10:00:09Z"], itertools.repeat("2026-03-01T10:00:00Z")
    )
    monkeypatch.setattr(runner, "now", lambda: next(times))
    (result,) = run(one=SIMPLE).values()
    assert result.record["outcome"] == "measured"
    assert result.record["utc"] == "2026-03-01T10:00:09Z"
    assert records.damage(result.path) == []


def test_parameters_cannot_be_changed_by_the_experiment(run):
    (result,) = run(one=f"values.append(4)\n{SIMPLE}").values()
    assert len(result.record["samples"]) == 4
    assert result.record["parameters"]["values"] == [1, 2, 3]


# Writing -----------------------------------------------------------------


def test_killed_in_the_middle_of_writing(tmp_path, monkeypatch):
    path = runner.write(good(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)
        runner.write(good(clean=False), tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    (found,) = records.load(NAME, folder=tmp_path)  # the rest is no record
    assert found["clean"] is read(path)["clean"] is True
    runner.write(good(clean=False), tmp_path)
    assert read(path)["clean"] is False


@pytest.mark.parametrize("moment", ["fsync", "chmod", "replace"])
def test_an_error_while_writing_leaves_nothing(tmp_path, monkeypatch, moment):
    before = runner.write(good(), tmp_path).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, moment, full)
    with pytest.raises(OSError, match="No space"):
        runner.write(good(clean=False), tmp_path)
    assert os.listdir(tmp_path) == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


# The progress bar --------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_line_on_a_terminal():
    stream = Terminal()
    Progress("nothing expected", 0, stream).show(0)
    progress = Progress("one tiny", 4, stream)
    progress.show(1)
    progress.show(9)  # more than were expected
    progress.end("measured")
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert shown.endswith("one tiny  measured\n")
    bars = re.findall(r"[#.]{2,}", shown)
    assert {len(bar) for bar in bars} == {24}
    assert [bar.count("#") for bar in bars] == [0, 0, 0, 6, 24]


def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    progress = Progress("one tiny", 2, stream)
    progress.show(2)
    progress.end("measured, 0.1 s")
    assert stream.getvalue() == (
        "one tiny  0/2\none tiny  2/2\none tiny  measured, 0.1 s\n"
    )
