"""Build the book in both languages at once."""

import subprocess
import sys
from pathlib import Path

from project import ROOT

ENGLISH = "build", ".", "-W", "-n", "--keep-going", "-q"
COMMANDS = (
    (str(Path(sys.executable).with_name("jupyter-book")), *ENGLISH),
    (sys.executable, "tools/translations.py", "build"),
)

if __name__ == "__main__":
    builds = [subprocess.Popen(command, cwd=ROOT) for command in COMMANDS]
    sys.exit(max(build.wait() for build in builds))
