"""Environments that have some of the packages of this one."""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution, distributions
from pathlib import Path


def make(folder, packages):
    """The Python of a new environment with links to these packages.

    Args:
        folder: for the environment; not there yet.
        packages: names in this environment's folder of packages.
    """
    command = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(command, check=True)
    links, home = folder / "packages", Path(sysconfig.get_path("purelib"))
    links.mkdir()
    for name in packages:
        (links / name).symlink_to(home / name)
    python = folder / "bin/python"
    (site_packages(python) / "linked.pth").write_text(str(links))
    return python


def site_packages(python):
    """Where an environment keeps its own packages."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", ask], text=True)[:-1])


def all_but_the_course():
    """What this environment's folder of packages holds of others."""
    names = os.listdir(sysconfig.get_path("purelib"))
    return [name for name in names if "membudget" not in name]


def needed(*wanted):
    """What the folder of packages holds of these and of what they need."""
    found, home = set(), Path(sysconfig.get_path("purelib"))
    for name in closure(*wanted):
        files = distribution(name).files or ()
        found |= {file.parts[0] for file in files} - {"..", "__pycache__"}
    return {name for name in found if (home / name).exists()}


def closure(*wanted):
    """The names of distributions, and of all that they require."""
    here = {plain(d.metadata["Name"]): d for d in distributions()}
    found, ahead = set(), list(map(plain, wanted))
    while ahead:
        name = ahead.pop()
        if name in here and name not in found:
            found.add(name)
            lines = here[name].requires or ()
            ahead += [plain(line) for line in lines if "extra ==" not in line]
    return found


def plain(requirement):
    """A requirement's name in its one form."""
    name = re.match(r"[\w.-]+", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()
