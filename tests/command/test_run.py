"""A script runs as under Python, and where memory ends it says why."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from membudget import command
from membudget.command import run

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "membudget", "run"]
LIMITED = [*RUN, "--limit", "1GiB"]
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits of a process' data are Linux'"
)


def done(*command, cwd=None):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **QUIET},
        timeout=300,
    )


# As under Python -----------------------------------------------------------

ENDS = {
    "a script that prints": (
        "import sys, __main__\n"
        "print(sys.argv, sys.path[0], __name__, __file__)\n"
        "print(__main__.__file__, sorted(vars(__main__)) == sorted(vars()))\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
    ),
    "one that raises": "def f(): 1 / 0\nprint('before')\nf()\n",
    "from another error": (
        "try: {}[0]\nexcept KeyError as e: raise ValueError('no') from e\n"
    ),
    "with its own hook": (
        "import sys, traceback\n"
        "def hook(kind, error, trace): print(traceback.extract_tb(trace))\n"
        "sys.excepthook = hook\n1 / 0\n"
    ),
    "one that exits": "print('bye')\nraise SystemExit(7)\n",
    "with a sentence": "import sys\nsys.exit('no data')\n",
    "without a word": "import sys\nsys.exit()\n",
    "interrupted": (
        "import os, signal, atexit\natexit.register(print, 'left')\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "while True: pass\n"
    ),
    "not Python": "train: {lr: 3e-4}\n  batch 4\n",
    "not even text": b"\x00\x80PNG\r\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_under_python(name, tmp_path):
    text = ENDS[name]
    text = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "train.py").write_bytes(text)
    words = "train.py", "--lr", "1", "--", "-m", "--record"
    plain = done(sys.executable, *words, cwd=tmp_path)
    ours = done(*RUN, *words, cwd=tmp_path)
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    if name != "not even text":
        assert ours.stderr == plain.stderr
    else:  # compile() has other words for it
        assert ours.stderr.startswith("SyntaxError: source code")
    if name == "interrupted":
        assert plain.returncode == -signal.SIGINT and "left" in plain.stdout


def test_a_module_runs_as_under_python(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "train.py").write_text(
        "import sys\nfrom . import __name__ as name\n"
        "print(sys.argv, sys.path[0], name, __name__, __spec__.name)\n"
    )
    words = "-m", "room.train", "--lr"
    plain = done(sys.executable, *words, cwd=tmp_path)
    ours = done(*RUN, *words, cwd=tmp_path)
    assert plain.returncode == 0 and "room.train" in plain.stdout
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "there is no train.py"),
        (["--limit", "2GB", __file__], "such as 2GiB"),
        (["--limit", "-2GiB", __file__], "--limit"),
        (["--record", "no/where.html", __file__], "there is no folder no"),
        ([], "SCRIPT"),
    ],
)
def test_wrong_use_runs_nothing(words, said, capsys):
    assert command.main(["run", *words]) == command.Code.WRONG
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1
    assert error.startswith("membudget: ") and said in error


def test_what_waits_for_a_module_is_called_once_it_is_there(monkeypatch):
    called = []
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    run.after_import("this", lambda: called.append(sys.modules["this"].d))
    import json  # noqa: F401

    assert not called
    import this

    assert called == [this.d]
    run.after_import("this", lambda: called.append("at once"))
    assert called[1:] == ["at once"]


# Out of memory -------------------------------------------------------------


def check_report(error, rank=""):
    """The parts of a report; the traceback stands before it."""
    trace, _, report = error.partition(f"\n{rank}Out of memory: ")
    assert "Traceback (most recent call last)" in trace
    assert "can't allocate memory" in trace.splitlines()[-1]
    assert report.count("Out of memory") == 0
    assert "of 1.00 GiB in use:" in report
    for part in ("parameters", "inputs", "others"):
        assert f"  {part}\n" in report
    return report


def test_a_plain_loop():
    ended = done(*LIMITED, SCRIPTS / "looped.py", "1000000")
    assert (ended.returncode, ended.stdout) == (1, "")
    report = check_report(ended.stderr)
    assert report.split(" (forward)")[0].endswith(("in 1.0", "in 1.1"))
    assert "\nasked for 244 MiB, with " in report
    assert "   244 MiB  inputs\n" in report
    assert "computes its loss outside of the model" in report


def test_what_fits_only_runs():
    ended = done(*LIMITED, SCRIPTS / "looped.py", "10")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "step 0\nstep 1\n"


@pytest.mark.few(1)
@pytest.mark.parametrize("script", ["trained.py", "accelerated.py"])
def test_a_script_of_transformers_is_told_what_fits(script):
    ended = done(*LIMITED, SCRIPTS / script, "256", "once")
    assert ended.returncode == 1 and "trained" not in ended.stdout
    report = check_report(ended.stderr)
    assert " in lm_head (forward)\nasked for 500 MiB" in report
    _, _, said = report.partition("peaks of a step of 256 samples")
    for change in ("as it is", "checkpointed blocks"):
        (line,) = (x for x in said.splitlines() if x.startswith(f"  {change}"))
        found = re.search(r"GiB; micro-batches of (\d+) fit: ", line)
        # with what the process has beside tensors, by machine
        assert found and 32 <= int(found[1]) <= 86, line
    assert ("  fused Adam: " in said) == (script == "accelerated.py")


@pytest.mark.few(0)
@pytest.mark.parametrize("batch", ["64"])
def test_what_is_said_to_fit_does(batch):
    """The micro-batch of the test before."""
    ended = done(*LIMITED, SCRIPTS / "accelerated.py", batch, "once")
    assert ended.returncode == 0 and ended.stdout.endswith("trained\n")


@pytest.mark.few(0)
@pytest.mark.parametrize("start", [256])
def test_a_script_that_catches_the_error_goes_on(start):
    ended = done(*LIMITED, SCRIPTS / "accelerated.py", str(start), "search")
    assert ended.returncode == 0 and "trained" in ended.stdout
    assert len(ended.stdout.splitlines()) > 3
    assert "Out of memory" not in ended.stderr


@pytest.mark.few(0)
@pytest.mark.parametrize("rank", [1])
def test_the_rank_that_ran_out_says_so_once(rank):
    launch = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    script = *RUN[1:], "--limit", "1GiB", SCRIPTS / "sharded.py"
    ended = done(sys.executable, "-m", *launch, *script, "10", "3000000")
    assert ended.returncode == 1
    error = ended.stderr.replace("[rank1]: ", "")
    report = check_report(error, rank=f"rank {rank}: ")
    assert "shared by several processes" in report
