"""The repository's address, written once, in `_config.yml`.

The first code cell of every notebook (which fetches the package where there
is only the notebook, as on Colab) and the README's badges repeat it. This tool
writes them; a test checks them.

    python tools/repository.py show
    python tools/repository.py set https://github.com/you/your-fork
    python tools/repository.py check
"""

import argparse
import re
import sys

import nbformat
from project import ROOT, notebooks, read_yaml

UNSET = "https://github.com/OWNER/memory-budget"
COLAB = "https://colab.research.google.com/github/"

WITH_URL = """\
REPOSITORY = {url}
try:
    import membudget
except ModuleNotFoundError:
    %pip install --quiet --no-deps {{REPOSITORY}}
    import membudget

membudget.setup()"""

WITHOUT_URL = """\
try:
    import membudget
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "This notebook needs the course's package, and this copy of the "
        "course does not say where it is published. Install it from a clone "
        "(`pip install -e .`), or set the address there once, for every "
        "notebook: `make repository URL=https://github.com/you/your-fork`."
    ) from None

membudget.setup()"""


def url(root=ROOT):
    """The address in `_config.yml`."""
    return read_yaml("_config.yml", root)["repository"]["url"]


def setup_cell(address):
    """The source of every notebook's first code cell."""
    if address == UNSET:
        return WITHOUT_URL
    if not address.startswith("git+"):
        address = f"git+{address}"
    text = f'"{address}"'
    if len(address) > 60:
        parts = [address[i : i + 70] for i in range(0, len(address), 70)]
        text = "(\n" + "".join(f'    "{part}"\n' for part in parts) + ")"
    return WITH_URL.format(url=text)


def first_code_cell(notebook):
    """The set-up cell of a notebook, or None."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return code[0] if code and "membudget.setup()" in code[0].source else None


def colab(path, root=ROOT):
    """Where Colab opens a notebook, or "" for a host it cannot read."""
    match = re.search(r"github\.com/([\w.-]+/[\w.-]+)", url(root))
    branch = read_yaml("_config.yml", root)["repository"]["branch"]
    place = path.relative_to(root).as_posix()
    return f"{COLAB}{match[1]}/blob/{branch}/{place}" if match else ""


def badge(path, root=ROOT):
    """The Colab badge of a notebook in the README."""
    address = colab(path, root)
    image = "[![Open in Colab](book/_static/colab-badge.svg)]"
    return f"{image}({address})" if address else ""


def old_badge(path, root=ROOT):
    """A pattern for the notebook's badge, whatever address it has."""
    place = re.escape(path.relative_to(root).as_posix())
    return rf"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*/{place}\)"


def check(root=ROOT):
    """What does not agree with `_config.yml`, as a list of sentences."""
    problems = []
    wanted = setup_cell(url(root))
    readme = (root / "README.md").read_text("utf-8")
    for path in notebooks(root):
        place = path.relative_to(root)
        cell = first_code_cell(nbformat.read(path, as_version=4))
        if cell is None:
            problems.append(f"{place}: the first code cell is not the set-up")
        elif cell.source != wanted:
            problems.append(f"{place}: the set-up cell has drifted")
        if badge(path, root) not in readme:
            problems.append(f"README.md lacks {badge(path, root)}")
    return problems


def write(address, root=ROOT):
    """Write the address into `_config.yml`, the notebooks and the README."""
    address = address.rstrip("/").removesuffix(".git")
    old = url(root)
    config = root / "_config.yml"
    text = config.read_text("utf-8")
    config.write_text(text.replace(f"  url: {old}", f"  url: {address}", 1))
    readme = root / "README.md"
    text = readme.read_text("utf-8").replace(old, address)
    for path in notebooks(root):
        if new := badge(path, root):
            text = re.sub(old_badge(path, root), lambda _, new=new: new, text)
        notebook = nbformat.read(path, as_version=4)
        cell = first_code_cell(notebook)
        if cell and cell.source != setup_cell(address):
            cell.source = setup_cell(address)
            nbformat.write(notebook, path)
    readme.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show", help="print the address")
    commands.add_parser("check", help="list what does not agree with it")
    commands.add_parser("set", help="change it").add_argument("url")
    arguments = parser.parse_args()
    if arguments.command == "show":
        print(url())
        return
    if arguments.command == "set":
        write(arguments.url)
    problems = check()
    if problems:
        sys.exit("\n".join([*problems, "To mend: make repository"]))


if __name__ == "__main__":
    main()
