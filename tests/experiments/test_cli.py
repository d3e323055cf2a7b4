"""The command, in this process and as its own."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from experiments_helpers import SIMPLE, read
from records_helpers import good, place

from membudget.records import record as records
from membudget_experiments import __main__ as cli
from membudget_experiments import machine, runner


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


# list ----------------------------------------------------------------------


def test_list_names_every_experiment_first_on_its_line(capsys):
    assert cli.main(["list"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines] == list(records.catalogue())
    assert all(len(line.split()) > 3 for line in lines)


# check ---------------------------------------------------------------------


def test_check_and_list_need_no_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from membudget.records import best\n"
        "from membudget_experiments.__main__ import main\n"
        "best('micro_batch')\n"
        "assert main(['list']) == 0\n"
        "import runpy\n"
        "sys.argv[1:] = ['check']\n"
        "runpy.run_module('membudget_experiments', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True
    )
    assert done.stdout.endswith(b" records, 0 of them bad\n")


def test_check_names_every_bad_record(tmp_path, capsys):
    place(tmp_path, good())
    place(tmp_path, good(size="huge", commit="x"))  # two faults
    place(tmp_path, [], "a.json")
    (tmp_path / ".half.tmp").write_text("{")
    (tmp_path / "README.md").write_text("x")
    assert cli.main(["check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "a.json",
        *[path.name for path in tmp_path.glob("*.huge.*")] * 2,
        "3 records, 2 of them bad",
    ]


def test_check_where_there_is_nothing(tmp_path, capsys):
    assert cli.main(["check", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"no record is in {tmp_path}\n"
    missing = tmp_path / "missing"
    assert refused(capsys, "check", missing).endswith(
        f"{missing} is no folder: name one with records"
    )


# run: what is refused ------------------------------------------------------


def test_an_unknown_experiment(tmp_path, capsys):
    out = tmp_path / "out"
    last = refused(
        capsys, "run", "micro_batch", "x", "--size", "tiny", "--out", out
    )
    assert last == (
        "membudget_experiments: no experiment is named 'x': use one of "
        f"{', '.join(records.catalogue())}"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("measure", "COMMAND"),
        ("run --out x", "required: --size"),
        ("run --size tiny", "required: --out"),
        ("run --out x --size huge", "invalid choice: 'huge'"),
    ],
)
def test_a_command_that_is_none(capsys, given, words):
    last = refused(capsys, *given.split())
    assert words in last
    assert "huge" not in last or all(size in last for size in records.SIZES)


def test_a_device_that_is_not_there(tmp_path, capsys):
    for device in ("cuda:99", "gpu", "mps"):
        last = refused(
            capsys,
            *("run", "--size", "tiny", "--out", tmp_path),
            *("--device", device),
        )
        assert f"{device!r} is not here" in last
        assert "'cpu'" in last
    assert os.listdir(tmp_path) == []


def test_a_size_that_needs_a_gpu_or_none(
    tmp_path, capsys, planted, monkeypatch
):
    module = planted(a=SIMPLE, b=SIMPLE)
    module.a.experiment = replace(module.a.experiment, gpu=False)
    for size in records.NEED_A_GPU:
        given = ("--size", size, "--device", "cpu", "--out", str(tmp_path))
        assert cli.main(["run", "a", *given]) == 0
        assert "measured" in capsys.readouterr().out
        for names in (["a", "b"], []):  # none stands for all
            assert refused(capsys, "run", *names, *given).endswith(
                f"size {size} needs a GPU (--device cuda): on a CPU use "
                "--size tiny"
            )


def test_a_folder_that_cannot_be_written_to(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("x")
    for out in (file, file / "inside"):
        last = refused(capsys, "run", "--size", "tiny", "--out", out)
        assert f"cannot write to {out} (" in last
        assert last.endswith("give --out a folder that you may write to")

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    # A stand-in, because root may write everywhere.
    monkeypatch.setattr(cli.tempfile, "TemporaryFile", refuse)
    last = refused(capsys, "run", "--size", "tiny", "--out", tmp_path)
    assert f"cannot write to {tmp_path} (Permission denied)" in last


def test_a_stated_commit_that_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    monkeypatch.setenv(machine.COMMIT, "main")
    last = refused(capsys, "run", "--size", "tiny", "--out", tmp_path)
    assert "MEMBUDGET_COMMIT is 'main': set it to the output of" in last


# run: what becomes of it ---------------------------------------------------


def run(capsys, out, *arguments):
    """Exit code, the lines of the table, and what stands on stderr."""
    given = ("run", "--size", "tiny", "--device", "cpu", "--out", str(out))
    code = cli.main([*given, *arguments])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_the_table(planted, tmp_path, capsys):
    planted(
        a=SIMPLE,
        b='yield {"total": 1}\nraise ValueError("odd")',
        c='yield {"total": 1}\nyield {"value": 1}\nraise MemoryError("full")',
    )
    out = tmp_path / "new/folder"
    code, lines, _ = run(capsys, out)
    assert code == 1
    columns = [line.split() for line in lines]
    assert columns[0] == [
        *("experiment", "size", "outcome", "samples", "seconds", "record")
    ]
    assert lines[0].index("samples") == lines[1].index("3")
    assert columns[1][:4] == ["a", "tiny", "measured", "3"]
    assert columns[2][:4] == ["b", "tiny", "failed", "0"]
    assert columns[3][:6] == ["c", "tiny", "out", "of", "memory", "1"]
    assert [line.split()[-1] for line in lines[1:4]] == sorted(os.listdir(out))
    assert lines[4:] == ["b: ValueError: odd", "c: MemoryError: full"]
    # Only b runs again.
    code, lines, _ = run(capsys, out)
    assert code == 1
    assert lines[1].split()[2:6] == ["measured", "before", "3", "-"]
    assert lines[2].split()[2] == "failed"
    assert lines[3].split()[2:6] == ["out", "of", "memory", "before"]
    # Out of memory is an outcome, not a failure.
    code, lines, _ = run(capsys, out, "a", "c", "a", "--again")
    assert code == 0
    assert [line.split()[0] for line in lines[1:]] == ["a", "c", "c:"]
    assert "before" not in "".join(lines)


def test_the_profiler_is_told_to_be_silent(
    planted, tmp_path, capsys, monkeypatch
):
    body = 'yield {"total": 1}\nimport os\n'
    planted(a=f'{body}yield {{"value": os.environ["KINETO_LOG_LEVEL"]}}')
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    assert run(capsys, tmp_path)[0] == 0
    (path,) = tmp_path.glob("a.*.json")
    assert read(path)["samples"] == [{"value": "99"}]


def test_a_disk_that_is_full(planted, tmp_path, capsys, monkeypatch):
    planted(a=SIMPLE, b=SIMPLE)
    write, calls = runner.write, []

    def full(record, folder):
        calls.append(record)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return write(record, folder)

    monkeypatch.setattr(runner, "write", full)
    code, lines, err = run(capsys, tmp_path / "out")
    assert code == 2
    assert "No space left on device" in err.splitlines()[-1]
    assert [line.split()[0] for line in lines] == ["experiment", "a"]


def test_an_interrupted_command(planted, tmp_path, capsys):
    stop = 'yield {"total": 1}\nyield {"value": 1}\nraise KeyboardInterrupt'
    planted(a=SIMPLE, b=stop, c=SIMPLE)
    out = tmp_path / "out"
    code, lines, err = run(capsys, out)
    outcomes = {path.name[0]: read(path)["outcome"] for path in out.iterdir()}
    assert outcomes == {"a": "measured", "b": "predicted"}
    assert code == 130
    assert err.endswith("interrupted: run again to go on\n")
    assert "b tiny  interrupted, " in err
    assert [line.split()[0] for line in lines] == ["experiment", "a"]


NOTHING_BUT_TORCH = """
import sys
for name in ("numpy", "psutil", "matplotlib", "sklearn", "tqdm", "IPython",
             "ipywidgets", "anywidget", "traitlets"):
    sys.modules[name] = None
from membudget_experiments import accumulation, checkpointing
from membudget_experiments import ledger
from membudget_experiments.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_real_run_where_there_is_nothing_but_torch(tmp_path):
    start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    given = ("run", "micro_batch", "--size", "tiny", "--device", "cpu")
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_BUT_TORCH, *given, "--out", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    assert records.check(path) == []
    record = read(path)
    assert record["device"]["threads"] == 1
    assert records.is_current(record)
    assert start <= record["prediction"]["utc"] <= record["utc"]
    assert done.stdout.splitlines()[-1].split()[:4] == [
        *("micro_batch", "tiny", "measured", "7")
    ]
    assert "micro_batch tiny  7/7\n" in done.stderr
    assert cli.main(["check", str(tmp_path)]) == 0
