"""Ten times each: strict nbval finds the same outputs, ranks end cleanly."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from project import ROOT, notebooks

from membudget.sharding import torchrun

TIMES = 10

SCRIPT = ROOT / "labs/fsdp_train.py"

CLEAN_EXIT = """
from membudget.sharding import Ranks


def total():
    import torch
    import torch.distributed as dist

    x = torch.ones(1000)
    dist.all_reduce(x)
    return x.sum().item()


with Ranks(4) as pool:  # an error if a rank's exit code is not 0
    assert pool.run(total) == [4000.0] * 4
"""


def same_outputs(path):
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0


def clean_exit():
    """Four ranks, a collective, the end: nothing said, no process left."""
    mark = f"SOAK_{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ranks.py")
        script.write_text(CLEAN_EXIT)
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, mark: "1"},
            capture_output=True,
            text=True,
        )
    end = time.monotonic() + 10  # helpers end when they see the parent gone
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    said = done.stdout + done.stderr
    if left or said:
        print(f"left: {left}\n{said}")
    return done.returncode == 0 and not left and not said


def kill_and_resume():
    """Agent and ranks die at any moment; a new start ends as if not."""
    mark = f"SOAK_KILL_{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        saves = ("--checkpoint-dir", folder, "--save-every", "1")
        command = ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", SCRIPT, "--cpu", "--steps=100000"]
        agent = subprocess.Popen(
            [sys.executable, *command, *saves],
            env={**os.environ, mark: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        agent.stdout.readline()  # it trains
        time.sleep(random.uniform(0, 2))
        while left := marked(mark):
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            agent.poll()
        agent.wait()
        agent.stdout.close()
        done = [int(p.name[5:]) for p in Path(folder).glob("step-*")]
        steps = ("--cpu", "--steps", max(done, default=0) + 2)
        resumed = weights(*steps, *saves, "--resume")
    return len(resumed) == 1 and resumed == weights(*steps)


def weights(*options):
    """The digests that two ranks of the lab's script end with."""
    done = torchrun(SCRIPT, *options, ranks=2, show=None)
    lines = map(json.loads, done.lines)
    return {line["digest"] for line in lines if "digest" in line}


def marked(mark):
    """Processes with this in their environment (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def main():
    checks = {path.stem: partial(same_outputs, path) for path in notebooks()}
    checks["clean exit"] = clean_exit
    checks["kill and resume"] = kill_and_resume
    failed = 0
    for name, check in checks.items():
        green = sum(check() for _ in range(TIMES))
        print(f"{name}: {green} of {TIMES}", flush=True)
        failed += TIMES - green
    sys.exit(f"{failed} runs failed" if failed else None)


if __name__ == "__main__":
    main()
