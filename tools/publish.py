"""Write what is published beside the book.

    python tools/publish.py FOLDER

fills a folder that is not there yet with the branch `published`, whose
notebooks the Colab buttons open.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import address
import setup_cell
from project import ROOT, notebooks

BESIDE = (
    "LICENSE",
    "LICENSE-TEXT",
    "book/measurements.md",
    "book/start.md",
    "book/your_script.md",
    "labs/fsdp_train.py",
    "labs/parallel_train.py",
)
"""What the notebooks name."""

PACKAGED = (
    "LICENSE",
    "LICENSE-TEXT",
    "README.md",
    "experiments",
    "labs/fsdp_train.py",
    "labs/parallel_train.py",
    "pyproject.toml",
    "src/membudget",
)
"""What the wheels are made of."""

README = """\
# The Memory Budget: its notebooks

The Colab buttons of the book open the notebooks of this branch. It is written
anew whenever `main` changes, so change nothing here. The first code cell of a
notebook installs the course's package. To install it by hand:

```bash
{installs}
```

- The sources: {repository}
"""


def copy(names, out):
    """Copy files and folders to where they are in the project."""
    built = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, out / name, ignore=built)
        else:
            shutil.copyfile(ROOT / name, out / name)


def branch(out):
    """Write the branch `published` into a new folder.

    Raises:
        ValueError: the repository's address is not known, or one is wrong.
    """
    repository, site = address.repository(), address.site()
    if not repository:
        raise ValueError(
            "The repository's address is not known: set MEMBUDGET_REPOSITORY "
            "to https://github.com/OWNER/NAME"
        )
    requirement = address.requirement()
    out.mkdir(parents=True)
    copy(BESIDE, out)
    for path in notebooks():
        text = setup_cell.fill(path.read_text("utf-8"), requirement)
        target = out / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, "utf-8")
    installs = "\n".join(address.installs())
    readme = README.format(repository=repository, installs=installs)
    if site:
        readme += f"- The book: {site}/\n"
    (out / "README.md").write_text(readme, "utf-8")


def wheels(out):
    """Build the wheels of package and experiments, without a network.

    The same sources and setuptools give the same bytes. Sources are copied
    first: setuptools leaves beside them what it builds, and packs it again.

    Raises:
        RuntimeError: setuptools cannot build it, and says why.
    """
    with TemporaryDirectory() as folder:
        sources = Path(folder)
        copy(PACKAGED, sources)
        for path in sources.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        build = "import sys; from setuptools import build_meta\n"
        build += "build_meta.build_wheel(sys.argv[1])"
        for project in (sources, sources / "experiments"):
            done = subprocess.run(
                [sys.executable, "-c", build, Path(out).resolve()],
                cwd=project,
                env={**os.environ, "SOURCE_DATE_EPOCH": "1000000000"},
                umask=0o022,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"No wheel can be built: {done.stderr}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    if out.exists():
        sys.exit(f"{out} is there already: name a folder that is not")
    try:
        branch(out)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
