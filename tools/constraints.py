"""Write constraints.txt: the versions of everything in .venv but torch.

What requirements.txt pins itself, it pins alone. torch stays out: its version
carries a local tag (+cpu, +cu128) that differs between machines.
"""

import re
import subprocess
import sys

from project import ROOT

HEADER = "# Versions of what the requirements pull in. `make constraints`.\n"


def direct():
    """The names that the requirement files pin."""
    names = {"torch"}
    for path in ("requirements.txt", "book/requirements.txt"):
        for line in (ROOT / path).read_text("utf-8").splitlines():
            if match := re.match(r"([\w.-]+)==", line):
                names.add(normal(match[1]))
    return names


def normal(name):
    """A package's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main():
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    skip = direct()
    lines = [
        line
        for line in frozen
        if "==" in line
        and normal(line.split("==")[0]) not in skip
        # What a CUDA build of torch brings is torch's own business.
        and not re.match("nvidia|cuda|triton", line)
    ]
    text = HEADER + "\n".join(sorted(lines, key=str.lower)) + "\n"
    (ROOT / "constraints.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
