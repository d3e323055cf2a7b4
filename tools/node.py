"""Find Node for the tests of the widgets' JavaScript; prints its path.

The system's, if it is recent enough, else the one inside Playwright's package.
"""

import re
import shutil
import subprocess
from pathlib import Path

OLDEST = 20


def find():
    """The path of a Node that has `node --test`."""
    if path := shutil.which("node"):
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True
        ).stdout
        major = re.match(r"v(\d+)", version)
        if major and int(major[1]) >= OLDEST:
            return path
    import playwright

    driver = Path(playwright.__file__).parent / "driver"
    return str(next(driver.glob("node*")))


if __name__ == "__main__":
    print(find())
