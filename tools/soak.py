"""Run every notebook ten times: strict nbval must find the same outputs."""

import subprocess
import sys

from project import ROOT, notebooks

TIMES = 10


def main():
    failed = 0
    for path in notebooks():
        command = [sys.executable, "-m", "pytest", "--nbval", "-q", path]
        green = 0
        for _ in range(TIMES):
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True
            )
            green += done.returncode == 0
            if done.returncode:
                print(done.stdout)
        print(f"{path.stem}: {green} of {TIMES}", flush=True)
        failed += TIMES - green
    sys.exit(f"{failed} runs differed" if failed else None)


if __name__ == "__main__":
    main()
