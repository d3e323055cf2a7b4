"""The rooms' tests and every notebook under other versions.

    python3.13 tools/matrix.py --torch 2.15.0
    python3.13 tools/matrix.py --torch 2.11.0 --colab

Each PyTorch has an environment of its own under `.matrix`, for the Python that
runs this, with the packages of `requirements.txt` or, with `--colab`, Colab's.
By default all is run that asks something of PyTorch; name folders for less.
It is pip that installs, for uv does not read pip's settings, which say on some
machines where PyTorch comes from.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_ROOMS = {"book", "js", "notebooks", "tools"}
PYTEST = shlex.split(
    "-m pytest --numprocesses auto --dist loadscope --no-loadscope-reorder"
    " --nbval --ignore-glob=*_browser.py"
)


def packages(name, torch, root=ROOT):
    """What a requirements file asks for, with another version of torch."""
    found = []
    for line in (root / name).read_text("utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found += packages(line.removeprefix("-r "), torch, root)
        elif re.match(r"torch\b", line):
            found.append(f"torch=={torch}")
        elif line and not line.startswith("-"):
            found.append(line)
    return found


def rooms(root=ROOT):
    """The folders of tests that are to hold under every version."""
    folders = {path.parent.name for path in root.glob("tests/*/test_*.py")}
    return [f"tests/{name}" for name in sorted(folders - NOT_ROOMS)]


def environment(folder, wanted):
    """Its Python, once everything wanted is installed in these versions."""
    interpreter, done = folder / "bin/python", folder / "installed.txt"
    versions = (ROOT / "constraints.txt").read_text("utf-8")
    text = "\n".join([*wanted, versions])
    if not done.exists() or done.read_text("utf-8") != text:
        print(f"Making {folder.relative_to(ROOT)}", flush=True)
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(interpreter, "-m", "pip", "install", "--quiet", *wanted)
        done.write_text(text, "utf-8")
    return interpreter


def run(*command):
    """Run it in the clone, with the package from there; end if it fails."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "experiments")])
    setting = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | setting)
    if done.returncode:
        sys.exit(done.returncode)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", required=True, help="2.15.0")
    parser.add_argument("--colab", action="store_true")
    parser.add_argument("tests", nargs="*")
    asked = parser.parse_args()
    major, minor = sys.version_info[:2]
    name = f"torch-{asked.torch}-python{major}.{minor}"
    if asked.colab:
        name += "-colab"
        wanted = packages("tools/colab-requirements.txt", asked.torch)
    else:
        wanted = ["-c", "constraints.txt"]
        wanted += packages("requirements.txt", asked.torch)
    python = environment(ROOT / ".matrix" / name, wanted)
    run(python, *PYTEST, *(asked.tests or [*rooms(), "chapters", "labs"]))


if __name__ == "__main__":
    main()
