"""Pages with the records of a GPU that nobody has measured yet."""

import ast
import builtins
import contextlib
import io
import re
import shutil
from operator import eq

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from project import notebooks

from membudget.records import record as records
from membudget_experiments import runner
from tests.soak import SOAK

CARDS = {"t4": ("Made-up T4", "7.5"), "large": ("Made-up H100", "9.0")}
ABSENT = {("t4", "tf32")}
SLOW = ("lab3_mixed_precision",)
"""What shows a record beside what it takes long to measure: in a soak."""


def made_up(name, size):
    """The CPU's record of an experiment, stretched to a size of a GPU.

    It has the size's parameters, a row and a sample for each of its runs, and
    everything that only a GPU tells.
    """
    found = records.load(name, "tiny", "cpu")[0]
    experiment = records.find(name)
    old = found["parameters"][experiment.over]
    parameters = experiment.sizes[size]
    new = parameters[experiment.over]

    def stretched(rows):
        """One for each run, like that of the most similar old run."""
        for run in new:
            of = parts(run)
            like = max(
                range(len(old)),
                key=lambda i: sum(map(eq, parts(old[i]), of)),
            )
            yield {**rows[like], **dict(zip(rows[like], of, strict=False))}

    values = {
        key: list(stretched(rows)) if is_rows(rows, old) else rows
        for key, rows in found["prediction"]["values"].items()
    }
    samples = [of_a_gpu(row, size) for row in stretched(found["samples"])]
    device, capability = CARDS[size]
    return {
        **found,
        "size": size,
        "parameters": parameters,
        "prediction": {**found["prediction"], "values": values},
        "samples": samples,
        "units": experiment.units,
        "source": experiment.source,
        "device": {
            "kind": "cuda",
            "name": device,
            "memory": 16 << 30,
            "capability": capability,
            "driver": "600.1",
            "cuda": "13.0",
            "threads": None,
        },
    }


def parts(run):
    return run if isinstance(run, list) else [run]


def is_rows(value, runs):
    return (
        isinstance(value, list)
        and len(value) == len(runs)
        and all(isinstance(row, dict) for row in value)
    )


def of_a_gpu(sample, size):
    """A sample with what a CPU does not know, and without what a card has
    not."""
    known = {
        "allocated": sample.get("requested"),
        "reserved": 4 << 20,
        "workspace": 8 << 20,
        "live_before": 512,
    }
    sample = {
        key: known.get(key) if value is None else value
        for key, value in sample.items()
    }
    if (size, sample.get("format")) in ABSENT:
        lost = sample.keys() - {"network", "scenario", "format", "side"}
        sample.update(dict.fromkeys(lost), support="absent")
    return sample


def pages():
    """Every notebook that shows a record which a GPU may replace."""
    shown = re.compile(r'records\.best\(\\"(\w+)')
    return [
        path
        for path in notebooks()
        for name in shown.findall(path.read_text("utf-8"))[:1]
        if records.find(name).gpu and (SOAK or path.stem not in SLOW)
    ]


def cells(path):
    """The code of a page that a record goes into, and what that needs."""
    code = [
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    ]
    names = [names_of(source) for source in code]
    wanted, of_records = set(), set()
    for number, (made, used) in enumerate(names):
        reads = "records.best(" in code[number]
        if reads or used & of_records:
            wanted.add(number)
            of_records |= {"record"} & made if reads else set()
    needed = set()
    for number in reversed(range(len(code))):
        made, used = names[number]
        if number in wanted or made & needed:
            needed = needed - made | used
            wanted.add(number)
    return [code[number] for number in sorted(wanted)]


def names_of(source):
    """The names that a cell makes, and those that it takes from before."""
    lines = source.splitlines()
    plain = "\n".join(line for line in lines if line[:1] not in ("%", "!"))
    tree = ast.parse(plain)
    local = {
        name.id
        for loop in ast.walk(tree)
        if isinstance(loop, ast.comprehension)
        for name in ast.walk(loop.target)
        if isinstance(name, ast.Name)
    }
    made, used = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            kind = made if isinstance(node.ctx, ast.Store) else used
            kind[node.id] = min(node.lineno, kind.get(node.id, node.lineno))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made[node.name] = node.lineno
        elif isinstance(node, ast.alias):
            made[(node.asname or node.name).partition(".")[0]] = node.lineno
    first = {
        name for name, line in used.items() if line <= made.get(name, line)
    }
    return set(made), first - local - set(dir(builtins))


@pytest.fixture(scope="module")
def on_cards(tmp_path_factory):
    """A folder for each size: the committed records, and one of a GPU of
    every experiment."""
    folders = {}
    for size in CARDS:
        folders[size] = tmp_path_factory.mktemp(size)
        shutil.copytree(records.RECORDS, folders[size], dirs_exist_ok=True)
        for name, experiment in records.catalogue().items():
            if experiment.gpu:
                runner.write(made_up(name, size), folders[size])
    return folders


@pytest.mark.parametrize("size", CARDS)
@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_page_shows_the_record_of_a_gpu(path, size, on_cards, monkeypatch):
    folder = on_cards[size]
    for function in ("best", "load", "missing"):
        read = getattr(records, function)
        given = (*read.__defaults__[:-1], folder)
        monkeypatch.setattr(read, "__defaults__", given)
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent)
    matplotlib.use("agg")
    shown, space = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(shown):
        for cell in cells(path):
            exec(compile(cell, path.name, "exec"), space)
    plt.close("all")
    assert CARDS[size][0] in shown.getvalue()
