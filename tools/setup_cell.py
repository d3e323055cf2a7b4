"""The first code cell of every notebook.

The sources have the short one, for the package is there. What is published
gets the long one, which fetches the package where there is none or an older
one, as on Colab, and the experiments for a notebook that runs some. Nothing
else: Colab keeps its own PyTorch. pip is silent, and tries once.
"""

import re

import address
import nbformat

SHORT = """\
import membudget

membudget.setup()"""

LONG = """\
import subprocess, sys
from importlib.metadata import version

FROM = {places}
try:
    old = [*map(int, version("{name}").split("."))] < {version}
except ModuleNotFoundError:
    old = True
if old:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries=0"]
    if subprocess.run([*pip, *FROM], capture_output=True).returncode:
        raise OSError(f"pip cannot get {{FROM}}: check the network, try again")
import membudget
membudget.setup()"""

# No blank, no quote, and nothing that means something to a shell or to
# IPython's own commands.
REQUIREMENT = re.compile(r"(git\+https|git\+file|https?)://[A-Za-z0-9_./:%-]+")


def first_code_cell(notebook):
    """The set-up cell of a notebook, or None."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return code[0] if code and "membudget.setup()" in code[0].source else None


def long(requirement, experiments=False):
    """The cell that installs what pip calls by this name.

    experiments: whether the notebook runs some.

    Raises:
        ValueError: the requirement is no plain address.
    """
    if not REQUIREMENT.fullmatch(requirement):
        raise ValueError(
            f"{requirement!r} is nothing that a notebook may install: give "
            "git+https://… or https://…, of letters, digits and _ . / : % -"
        )
    places = [requirement]
    if experiments:
        places.append(of_experiments(requirement))
    quoted = ",\n        ".join(f'"{place}"' for place in places)
    return LONG.format(
        places=f"[{quoted}]",
        name="membudget_experiments" if experiments else "membudget",
        version=list(map(int, address.version().split("."))),
    )


def of_experiments(requirement):
    """What pip calls the experiments: a part of the repository, or a wheel."""
    if requirement.startswith("git+"):
        return f"{requirement}#subdirectory=experiments"
    return requirement.replace("/membudget-", "/membudget_experiments-")


def imports_experiments(notebook):
    """Whether a cell of a notebook does."""
    return any(
        cell.cell_type == "code"
        and "from membudget_experiments" in cell.source
        for cell in notebook.cells
    )


def fill(text, requirement):
    """A notebook's text with the long cell in place of its own.

    Raises:
        ValueError: the requirement is no plain address, or the notebook does
            not begin with the set-up cell.
    """
    notebook = nbformat.reads(text, as_version=4)
    cell = first_code_cell(notebook)
    if cell is None:
        raise ValueError(
            "The notebook's first code cell is not the set-up cell: begin "
            f"with\n\n{SHORT}"
        )
    cell.source = long(requirement, imports_experiments(notebook))
    return nbformat.writes(notebook).rstrip() + "\n"
