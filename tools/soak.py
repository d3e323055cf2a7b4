"""The same outputs on every processor; ten clean ends; ten kills survived."""

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
from itertools import product
from pathlib import Path

import torch
from project import PATIENCE, ROOT, notebooks

from membudget.sharding import torchrun

TIMES = 10

SCRIPTS = {
    "fsdp_train.py": (),
    "parallel_train.py": ("--layout", "pp"),
}
"""The labs' scripts on two ranks, and their options."""

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


def processors():
    """Settings that make this machine round like others, as far as it can."""
    known = ("default", "avx2", "avx512")
    best = torch.backends.cpu.get_cpu_capability().lower()
    here = known[: known.index(best) + 1] if best in known else known[:1]
    for capability, threads in product(here, "124"):
        setting = {
            "ATEN_CPU_CAPABILITY": capability,
            "OMP_NUM_THREADS": threads,
        }
        yield setting
        yield setting | {"MKL_CBWR": "COMPATIBLE"}


def different_outputs(path, setting):
    """What strict nbval says of a notebook that runs so; else nothing."""
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", path]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | setting,
        capture_output=True,
        text=True,
    )
    return done.stdout if done.returncode else ""


def same_everywhere(path):
    """The number of settings with other outputs than the committed ones."""
    different = 0
    for setting in processors():
        if said := different_outputs(path, setting):
            print(setting, said, sep="\n")
            different += 1
    return different


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
    end = time.monotonic() + PATIENCE  # helpers see the parent gone and end
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    said = done.stdout + done.stderr
    if left or said:
        print(f"left: {left}\n{said}")
    return done.returncode == 0 and not left and not said


def kill_and_resume(name):
    """Agent and ranks die at any moment; a new start ends as if not."""
    script = ROOT / "labs" / name
    options = ("--cpu", *SCRIPTS[name])
    mark = f"SOAK_KILL_{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        saves = ("--checkpoint-dir", folder, "--save-every", "1")
        command = ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", script, "--steps=100000", *options]
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
        steps = (*options, "--steps", max(done, default=0) + 2)
        resumed = weights(script, *steps, *saves, "--resume")
    return len(resumed) == 2 and resumed == weights(script, *steps)


def weights(script, *options):
    """By rank the digests that two ranks of a lab's script end with."""
    done = torchrun(script, *options, ranks=2, show=None)
    lines = map(json.loads, done.lines)
    return {line["rank"]: line["digest"] for line in lines if "rank" in line}


def marked(mark):
    """Processes with this in their environment (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def main():
    failed = 0
    for path in notebooks():
        different = same_everywhere(path)
        print(f"{path.stem}: {different} settings differ", flush=True)
        failed += different
    for name, check in {
        "clean exit": clean_exit,
        **{
            f"kill and resume {name}": partial(kill_and_resume, name)
            for name in SCRIPTS
        },
    }.items():
        green = sum(check() for _ in range(TIMES))
        print(f"{name}: {green} of {TIMES}", flush=True)
        failed += TIMES - green
    sys.exit(f"{failed} runs failed" if failed else None)


if __name__ == "__main__":
    main()
