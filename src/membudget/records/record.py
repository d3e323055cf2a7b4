"""Records: what was predicted and measured; where, when, by which code.

The standard library only: the book's Sphinx extension imports this file by
its path, without torch.
"""

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "json"
CATALOGUE = HERE / "catalogue.json"
SIZES = ("tiny", "t4", "large")
NEED_A_GPU = ("t4", "large")
FINISHED = ("measured", "out of memory")

Record = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What is known of an experiment without running it.

    Attributes:
        name: the function's name.
        subject: the module that holds it.
        summary: first line of its docstring.
        sizes: its parameters at each of :data:`SIZES`.
        units: unit of each value of a sample.
        over: the parameter, a list, that has one sample for each value.
        gpu: whether its sizes :data:`NEED_A_GPU` need one.
        compares: values of a sample, each with the one of its row in the
            prediction that it should be.
        source: hash of its code.
    """

    name: str
    subject: str
    summary: str
    sizes: dict[str, dict]
    units: dict[str, str]
    over: str
    gpu: bool
    compares: dict[str, str]
    source: str


@functools.cache
def catalogue() -> dict[str, Experiment]:
    """Every experiment, by name.

    The file is written from the definitions, by ``python -m
    membudget_experiments catalogue``.
    """
    known = json.loads(CATALOGUE.read_text("utf-8"))
    return {name: Experiment(name, **rest) for name, rest in known.items()}


def find(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in catalogue():
        raise ValueError(
            f"no experiment is named {name!r}: use one of "
            f"{', '.join(catalogue())}"
        )
    return catalogue()[name]


def digest(record: Record) -> str:
    """SHA-256 over the canonical JSON of everything but the digest itself."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def slug(device: str) -> str:
    """A device's name as a file's name holds it: ``nvidia-h200``."""
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-") or "unnamed"


def file_name(record: Record) -> str:
    """``NAME.SIZE.DEVICE.json``."""
    device = slug(record["device"]["name"])
    return f"{record['experiment']}.{record['size']}.{device}.json"


def check(path: Path) -> list[str]:
    """What is wrong with the record in a file, as sentences.

    Whether it is whole, as it was written, and of a known experiment. Its
    fields one by one are checked by ``python -m membudget_experiments
    check``. A record that was measured with an earlier version of its
    experiment is in order; :func:`is_current` tells.
    """
    if wrong := damage(path):
        return wrong
    name = json.loads(path.read_text("utf-8"))["experiment"]
    if name in catalogue():
        return []
    known = ", ".join(catalogue())
    return [f"no experiment is named {name}: allowed are {known}"]


def damage(path: Path) -> list[str]:
    """Why a file is not a record as a finished run has left it."""
    again = "run the experiment again"
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    except (ValueError, RecursionError) as error:
        return [f"it is half-written or no JSON ({error}): {again}"]
    if not isinstance(record, dict) or record.get("digest") != digest(record):
        return [
            "its digest is not that of its content, so it was changed by "
            f"hand: restore it, or {again}"
        ]
    if path.name != file_name(record):
        return [f"its content belongs into a file {file_name(record)}"]
    if record["outcome"] == "predicted":
        return [f"the run was interrupted after the prediction: {again}"]
    return []


def is_current(record: Record) -> bool:
    """Whether the experiment is still the one that was run."""
    experiment = catalogue().get(record["experiment"])
    return experiment is not None and same(record, experiment)


def same(record: Record, experiment: Experiment) -> bool:
    """Whether a record was measured by this version of an experiment."""
    return (
        record["source"] == experiment.source
        and record["parameters"] == experiment.sizes.get(record["size"])
        and record["units"] == experiment.units
    )


def load(
    name: str,
    size: str | None = None,
    device: str | None = None,
    folder: Path = RECORDS,
) -> list[Record]:
    """The records of an experiment, small sizes first.

    Args:
        name: an experiment.
        size: only this one of :data:`SIZES`.
        device: only this kind (``"cpu"``, ``"cuda"``) or this device, named
            as in :func:`slug`.
        folder: where the records are.

    Raises:
        ValueError: an unknown name or size, or a record that
            :func:`check` finds fault with.
    """
    find(name)
    if size not in (None, *SIZES):
        raise ValueError(f"unknown size {size!r}: use {', '.join(SIZES)}")
    found = []
    for path in sorted(folder.glob(f"{name}.*.json")):
        if wrong := check(path):
            raise ValueError(f"the record {path.name} is bad: {wrong[0]}")
        record = json.loads(path.read_text("utf-8"))
        own = (record["device"]["kind"], slug(record["device"]["name"]))
        if size in (None, record["size"]) and device in (None, *own):
            found.append(record)
    return sorted(found, key=lambda record: SIZES.index(record["size"]))


def best(name: str, folder: Path = RECORDS) -> Record:
    """The record that a page shows: a GPU's, the largest size, or the CPU's.

    Among several the newest. Where no size needs a GPU, the size decides. One
    that ran out of memory, and so lacks samples, is not shown.

    Raises:
        ValueError: as :func:`load`.
        LookupError: nothing was measured yet.
    """

    needs = find(name).gpu

    def rank(record: Record) -> tuple:
        on_gpu = needs and record["device"]["kind"] != "cpu"
        return on_gpu, SIZES.index(record["size"]), record["utc"]

    records = [
        record
        for record in load(name, folder=folder)
        if record["outcome"] == "measured"
    ]
    if not records:
        raise LookupError(f"{name}: {missing(name, folder)}")
    return max(records, key=rank)


class Compared(NamedTuple):
    """One value that was predicted and measured.

    Attributes:
        run: which one of the record's runs, in words.
        value: its name in a sample.
        predicted: in the sample's unit.
        measured: likewise; None where the device does not tell.
        workspace: bytes of libraries in what was measured.
    """

    run: str
    value: str
    predicted: float
    measured: float | None
    workspace: int

    @property
    def rest(self) -> float | None:
        """What was measured beyond the prediction and the libraries."""
        if self.measured is None:
            return None
        return self.measured - self.workspace - self.predicted


def compared(record: Record) -> list[Compared]:
    """The values of a record that were predicted and measured.

    Empty where an experiment predicts something else than a value of its
    samples.

    Raises:
        ValueError: no experiment has the record's name.
    """
    experiment = find(record["experiment"])
    if not experiment.compares:
        return []
    values = record["prediction"]["values"].values()
    (rows,) = (value for value in values if isinstance(value, list))
    found = []
    for row, sample, run in zip(
        rows,
        record["samples"],
        record["parameters"][experiment.over],
        strict=False,
    ):
        name = " ".join(map(str, run if isinstance(run, list) else [run]))
        for value, key in experiment.compares.items():
            if row[key] is None:
                continue
            within = value in ("requested", "allocated", "reserved")
            found.append(
                Compared(
                    name,
                    value,
                    row[key],
                    sample[value],
                    (sample.get("workspace") or 0) * within,
                )
            )
    return found


def missing(name: str, folder: Path = RECORDS) -> str:
    """A sentence that names the sizes without a record; empty if none."""
    measured = {
        record["size"]
        for record in load(name, folder=folder)
        if record["outcome"] in FINISHED
    }
    sizes = [size for size in SIZES if size not in measured]
    needed = NEED_A_GPU if find(name).gpu else ()
    on_gpu = [size for size in sizes if size in needed]
    parts = [size for size in sizes if size not in on_gpu]
    if on_gpu:
        needs = "which need" if len(on_gpu) > 1 else "which needs"
        parts.append(f"{' and '.join(on_gpu)}, {needs} a GPU")
    return f"Not measured yet: {'; '.join(parts)}." if parts else ""


def provenance(record: Record) -> str:
    """Where a record comes from, in two lines of plain text."""
    device, software = record["device"], record["software"]
    where = [device["name"]]
    if device["memory"] is not None:
        where.append(f"{device['memory'] / 2**30:.1f} GiB")
    if device["threads"] is not None:
        plural = "s" * (device["threads"] != 1)
        where.append(f"{device['threads']} thread{plural}")
    if device["driver"] is not None:
        where.append(f"driver {device['driver']}")
    where.append(f"torch {software['torch']}")
    if device["cuda"] is not None:
        where.append(f"CUDA {device['cuda']}")
    when = [f"Size {record['size']}", (record["utc"] or "not run")[:10]]
    if record["commit"] is None:
        when.append("commit unknown")
    else:
        state = {
            True: "",
            False: " with uncommitted changes",
            None: " (not checked)",
        }
        when.append(f"commit {record['commit'][:7]}{state[record['clean']]}")
    if record["outcome"] != "measured":
        when.append(record["outcome"])
    if not is_current(record):
        when.append("measured with an earlier version")
    return f"{', '.join(where)}\n{', '.join(when)}"
