"""Records: what was predicted and measured; where, when, by which code.

The standard library only: the book's Sphinx extension imports this file by
its path, without torch.
"""

import ast
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import runpy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
SCHEMA = 1
SIZES = ("tiny", "t4", "large")
NEED_A_GPU = ("t4", "large")
NEED_NO_GPU = ("sharded_ranks",)
FINISHED = ("measured", "out of memory")
OUTCOMES = ("predicted", *FINISHED, "failed")
UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

Record = dict[str, Any]


# The experiments, read from their source -----------------------------------


@dataclass(frozen=True)
class Experiment:
    """What is known of an experiment without running it.

    Attributes:
        name: the function's name.
        subject: the module of this package that holds it.
        summary: first line of its docstring.
        sizes: its parameters at each of :data:`SIZES`.
        units: unit of each value of a sample.
        over: the parameter, a list, that has one sample for each value.
        source: hash of its code (:func:`source_hash`).
    """

    name: str
    subject: str
    summary: str
    sizes: dict[str, dict]
    units: dict[str, str]
    over: str
    source: str

    @property
    def gpu(self) -> bool:
        """Whether its sizes :data:`NEED_A_GPU` need one."""
        return self.name not in NEED_NO_GPU


@functools.cache
def catalogue(folder: Path = HERE) -> dict[str, Experiment]:
    """Every experiment in the modules of a folder, by name.

    No module is run but ``sizes.py``, which needs no torch.

    Raises:
        ValueError: two experiments of one name, or one whose decorator has
            arguments that are neither literals nor names of ``sizes.py``.
    """
    sizes = folder / "sizes.py"
    names = runpy.run_path(str(sizes)) if sizes.is_file() else {}
    found: dict[str, Experiment] = {}
    for path in sorted(folder.glob("*.py")):
        for node in _parse(path).body:
            call = _decorator(node)
            if call is None:
                continue
            if node.name in found:
                raise ValueError(
                    f"{found[node.name].subject}.py and {path.name} both "
                    f"hold an experiment {node.name}: rename one"
                )
            try:
                given = {
                    keyword.arg: _value(keyword.value, names)
                    for keyword in call.keywords
                }
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{path.name}: write the arguments of @experiment on "
                    f"{node.name} as literals or as names of sizes.py; the "
                    "book reads them without running the module"
                ) from error
            found[node.name] = Experiment(
                name=node.name,
                subject=path.stem,
                summary=(ast.get_docstring(node) or "").partition("\n")[0],
                source=source_hash(path, node.name),
                **given,
            )
    return dict(sorted(found.items()))


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """What is written there: one of the names, or a literal."""
    if isinstance(node, ast.Name):
        return names[node.id]
    return ast.literal_eval(node)


def find(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in catalogue(HERE):
        raise ValueError(
            f"no experiment is named {name!r}: use one of "
            f"{', '.join(catalogue(HERE))}"
        )
    return catalogue(HERE)[name]


def source_hash(path: Path, name: str) -> str:
    """SHA-256 of a function's syntax tree and of all that it is made of.

    That is: the function and, transitively, the definitions that it names in
    its own module or imports from another module of the same folder.
    Docstrings, comments and layout do not count, nor does the decorator
    ``@experiment``, whose arguments a record holds as they are.
    """
    texts = sorted(set(_definitions(path, name, set())))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _definitions(path: Path, name: str, seen: set) -> Iterator[str]:
    """Canonical text of what ``name`` refers to and of what that uses."""
    if (path, name) in seen:
        return
    seen.add((path, name))
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            sibling = path.parent / f"{node.module.rpartition('.')[2]}.py"
            package = node.module.rpartition(".")[0].rpartition(".")[2]
            if package == path.parent.name and sibling.is_file():
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        yield from _definitions(sibling, alias.name, seen)
        elif name in _defines(node):
            yield f"{name} {_canonical(node)}"
            for other in sorted(_used(node)):
                yield from _definitions(path, other, seen)


def _used(node: ast.stmt) -> set[str]:
    """The names in a statement, less those given to ``@experiment``."""
    call = _decorator(node)
    given = {
        part
        for keyword in (call.keywords if call else ())
        for part in ast.walk(keyword)
    }
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and part not in given
    }


def _defines(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = getattr(node, "targets", None) or [node.target]
        return {
            name.id
            for target in targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
    return set()


def _canonical(value: object) -> str:
    """A syntax tree as text, the same in every version of Python.

    Empty fields are left out: newer versions have more of them.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_canonical, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {k: v for k, v in ast.iter_fields(value) if v not in (None, [])}
    for dropped in ("kind", "type_comment"):
        fields.pop(dropped, None)
    if isinstance(value, ast.FunctionDef | ast.ClassDef):
        if ast.get_docstring(value, clean=False) is not None:
            fields["body"] = value.body[1:]
        if (experiment := _decorator(value)) is not None:
            fields["decorator_list"] = [
                node for node in value.decorator_list if node != experiment
            ]
    inner = (f"{key}={_canonical(part)}" for key, part in fields.items())
    return f"{type(value).__name__}({', '.join(inner)})"


def _decorator(node: ast.stmt) -> ast.Call | None:
    """The call of ``@experiment(…)`` on a function, if there is one."""
    for call in getattr(node, "decorator_list", []):
        function = getattr(call, "func", None)
        if getattr(function, "id", None) == "experiment":
            return call
    return None


_tree = functools.lru_cache(maxsize=64)(ast.parse)


def _parse(path: Path) -> ast.Module:
    return _tree(path.read_text("utf-8"))


# What a record holds -------------------------------------------------------


class _Field(NamedTuple):
    """A condition that a value must fulfil, and its wording."""

    accepts: Callable[[Any], bool]
    wanted: str


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _utc(value: object) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.strptime(value, UTC_FORMAT).year >= 2025
    return False


def _or_null(field: _Field) -> _Field:
    return _Field(
        lambda value: value is None or field.accepts(value),
        f"{field.wanted} or null",
    )


def _one_of(*values: str) -> _Field:
    return _Field(lambda value: value in values, f"one of {', '.join(values)}")


def _matching(pattern: str, wanted: str) -> _Field:
    def accepts(value: object) -> bool:
        return isinstance(value, str) and bool(re.fullmatch(pattern, value))

    return _Field(accepts, wanted)


def _all(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a filled object whose values are all accepted."""
    return lambda value: (
        isinstance(value, dict)
        and value != {}
        and all(map(accepts, value.values()))
    )


def _parameters(value: object) -> bool:
    return isinstance(value, dict) and all(
        _whole(value.get(count)) for count in ("warm_up", "repeats")
    )


def _reading(value: object) -> bool:
    """Whether this may stand in a sample."""
    if isinstance(value, list):
        return value != [] and all(map(_number, value))
    return value is None or isinstance(value, str | bool) or _number(value)


_TEXT = _Field(_text, "text")
_UTC = _Field(_utc, "a UTC time such as 2026-01-31T12:00:00Z")
_HASH = _matching("[0-9a-f]{64}", "64 hexadecimal digits")

# Top to bottom as a record is written; a dictionary is a part of the record.
_FIELDS: dict[str, Any] = {
    "schema": _Field(lambda value: value == SCHEMA, f"{SCHEMA}"),
    "experiment": _matching(r"[a-z]\w*", "the name of an experiment"),
    "size": _one_of(*SIZES),
    "parameters": _Field(
        _parameters, "an object with the whole numbers warm_up and repeats"
    ),
    "prediction": {
        "utc": _UTC,
        "values": _Field(_all(lambda value: True), "an object with entries"),
    },
    "outcome": _one_of(*OUTCOMES),
    "error": _or_null(_TEXT),
    "samples": _Field(
        lambda value: (
            isinstance(value, list) and all(map(_all(_reading), value))
        ),
        "a list of objects of finite numbers, lists of them, text or null",
    ),
    "units": _Field(_all(_text), "an object of texts"),
    "device": {
        "kind": _one_of("cpu", "cuda"),
        "name": _TEXT,
        "memory": _or_null(_Field(_whole, "a number of bytes")),
        "capability": _or_null(_TEXT),
        "driver": _or_null(_TEXT),
        "cuda": _or_null(_TEXT),
        "threads": _or_null(_Field(_whole, "a number of threads")),
    },
    "software": {
        "torch": _TEXT,
        "python": _TEXT,
        "system": _TEXT,
        "matmul_precision": _TEXT,
        "allocator_settings": _or_null(_TEXT),
    },
    "utc": _or_null(_UTC),
    "commit": _or_null(
        _matching("[0-9a-f]{40}", "the 40 hexadecimal digits of a commit")
    ),
    "clean": _or_null(
        _Field(lambda value: isinstance(value, bool), "true or false")
    ),
    "source": _HASH,
    "digest": _HASH,
}


def new(**fields: Any) -> Record:
    """A record that is not yet measured, its fields in their order."""
    fields = {
        "schema": SCHEMA,
        "prediction": None,
        "outcome": "predicted",
        "error": None,
        "samples": [],
        "utc": None,
        **fields,
    }
    return {key: fields[key] for key in _FIELDS if key in fields}


def now() -> str:
    """The time in UTC, to the second, as records write it."""
    return datetime.now(UTC).strftime(UTC_FORMAT)


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


# Checking ------------------------------------------------------------------


def check(path: Path) -> list[str]:
    """What is wrong with the record in a file, as sentences.

    A record that was measured with an earlier version of its experiment is
    in order; :func:`is_current` tells.
    """
    again = "run the experiment again"
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    except UnicodeDecodeError:
        return [f"it is not text in UTF-8: {again}"]
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [f"it is half-written or no JSON ({error}): {again}"]
    if wrong := problems(record):
        return wrong
    if record["experiment"] not in catalogue(HERE):
        wrong.append(
            f"no experiment is named {record['experiment']}: allowed are "
            f"{', '.join(catalogue(HERE))}"
        )
    if path.name != file_name(record):
        wrong.append(f"its content belongs into a file {file_name(record)}")
    if record["digest"] != digest(record):
        wrong.append(
            "its digest is not that of its content, so it was changed by "
            f"hand: restore it, or {again}"
        )
    elif text != _text_of(record):
        wrong.append(f"it is not in the form that is written: {again}")
    if record["outcome"] == "predicted":
        wrong.append(f"the run was interrupted after the prediction: {again}")
    return wrong


def problems(record: object) -> list[str]:
    """What is wrong with a record's content, its digest aside."""
    if not isinstance(record, dict):
        return ["it holds no JSON object"]
    if type(record.get("schema")) is not int or record["schema"] != SCHEMA:
        return [
            f"its schema is {record.get('schema')!r}: this version reads "
            f"schema {SCHEMA}"
        ]
    fields = dict(_FIELDS)
    failed = record.get("outcome") == "failed"
    if failed and record.get("prediction") is None:
        fields["prediction"] = _or_null(_TEXT)
    wrong = list(_mismatches(fields, record))
    wrong += [f"{place} is not finite" for place in _infinite(record)]
    return wrong or list(_contradictions(record))


def _mismatches(fields: dict, record: object, at: str = "") -> Iterator[str]:
    """Missing and unknown keys, and values of a wrong type."""
    if not isinstance(record, dict):
        yield f"{at.rstrip('.')} is {_short(record)}: it must be an object"
        return
    for key in fields.keys() - record.keys():
        yield f"{at}{key} is missing"
    for key in record.keys() - fields.keys():
        yield f"{at}{key} is unknown to schema {SCHEMA}"
    for key, field in fields.items():
        if key not in record:
            continue
        value = record[key]
        if isinstance(field, dict):
            yield from _mismatches(field, value, f"{at}{key}.")
        elif not field.accepts(value):
            yield f"{at}{key} is {_short(value)}: it must be {field.wanted}"


def _infinite(value: object, place: str = "") -> Iterator[str]:
    """Where numbers stand that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield place.lstrip(".")
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, part in items:
        yield from _infinite(part, f"{place}.{key}")


def _contradictions(record: Record) -> Iterator[str]:
    """Fields that are in order one by one and not together."""
    outcome, samples = record["outcome"], record["samples"]
    if outcome == "measured" and not samples:
        yield "it is measured and has no sample"
    if outcome == "predicted" and samples:
        yield "it is only predicted and has samples"
    if (record["error"] is None) != (outcome in ("predicted", "measured")):
        yield f"its outcome is {outcome}, its error {record['error']!r}"
    if (record["utc"] is None) != (outcome == "predicted"):
        yield f"its outcome is {outcome}, its time {record['utc']!r}"
    predicted = record["prediction"] and record["prediction"]["utc"]
    if predicted and record["utc"] and predicted > record["utc"]:
        yield (
            f"its prediction was stored at {predicted}, after the "
            f"measurement at {record['utc']}"
        )
    for number, sample in enumerate(samples):
        if sample.keys() != record["units"].keys():
            yield (
                f"sample {number} has the keys {', '.join(sample)}: units "
                f"are given for {', '.join(record['units'])}"
            )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


# Reading and writing -------------------------------------------------------


def write(record: Record, folder: Path) -> Path:
    """Write a record with its digest, whole or not at all.

    Returns:
        Where it is. A record of the same experiment, size and device is
        replaced.

    Raises:
        ValueError: something is wrong with its content.
        OSError: the folder cannot be written to.
    """
    record["digest"] = "0" * 64
    if wrong := problems(record):
        raise ValueError(f"not written: {'; '.join(wrong)}")
    record["digest"] = digest(record)
    path = folder / file_name(record)
    handle, name = tempfile.mkstemp(".tmp", f".{path.stem}.", folder)
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(_text_of(record))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def _text_of(value: object, margin: int = 0) -> str:
    """JSON, a part that fits on a line on one line."""
    flat = json.dumps(value)
    parts = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list) and any(
        isinstance(part, dict | list) for part in parts
    )
    if margin and (not nested or margin + len(flat) <= 79):
        return flat
    margin += 1
    if isinstance(value, dict):
        lines = [
            f"{json.dumps(key)}: {_text_of(part, margin)}"
            for key, part in value.items()
        ]
    else:
        lines = [_text_of(part, margin) for part in value]
    inner = ",\n".join(" " * margin + line for line in lines)
    left, right = "{}" if isinstance(value, dict) else "[]"
    end = "\n" if margin == 1 else ""
    return f"{left}\n{inner}\n{' ' * (margin - 1)}{right}{end}"


def is_current(record: Record) -> bool:
    """Whether the experiment is still the one that was run."""
    experiment = catalogue(HERE).get(record["experiment"])
    return experiment is not None and (
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
    if size is not None:
        check_size(size)
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


_PEAK = {"requested": "bytes"}
_STATES = {key: key for key in ("parameters", "gradients", "optimizer")}
_CALLS = {
    key: key
    for key in ("gathers", "all_gather", "reductions", "reduce_scatter")
}
COMPARES: dict[str, dict[str, str]] = {
    "allocator": {k: k for k in ("requested", "allocated", "reserved")},
    "batch_questions": {"largest": "largest", "failures": "failures"},
    "fsdp_one_gpu": {
        **_STATES,
        "on_device": "on_device",
        "requested": "peak",
    },
    "fsdp_ranks": {**_STATES, **_CALLS},
    "largest_batch": {"batch": "batch"},
    "micro_batch": _PEAK,
    "mixed_precision": {"requested": "dry_run", "saved": "saved"},
    "schedules_gpt": _PEAK,
    "segments_gpt": _PEAK,
    "segments_mlp": _PEAK,
    "sharded_ranks": {"states": "states", **_CALLS},
    "step_peaks": {"requested": "dry_run"},
}
"""Values of a sample, each with the one of its row in the prediction that it
should be, for each experiment that predicts some."""


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

    What a run has several of, one for each rank, is summed. Empty where an
    experiment predicts something else than a value of its samples.

    Raises:
        ValueError: no experiment has the record's name.
    """
    over = find(record["experiment"]).over
    pairs = COMPARES.get(record["experiment"])
    if not pairs:
        return []
    values = record["prediction"]["values"].values()
    (rows,) = (value for value in values if isinstance(value, list))
    found = []
    for row, sample, run in zip(
        rows, record["samples"], record["parameters"][over], strict=False
    ):
        name = " ".join(map(str, run if isinstance(run, list) else [run]))
        for value, key in pairs.items():
            if row[key] is None:
                continue
            within = value in ("requested", "allocated", "reserved")
            found.append(
                Compared(
                    name,
                    value,
                    _sum(row[key]),
                    _sum(sample[value]),
                    (sample.get("workspace") or 0) * within,
                )
            )
    return found


def _sum(value: Any) -> float | None:
    return sum(value) if isinstance(value, list) else value


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


def check_experiment(record: Record, name: str) -> None:
    """Raise a ValueError unless a record is of the experiment ``name``."""
    if record["experiment"] != name:
        raise ValueError(
            f"the record is of {record['experiment']}: use one of {name}"
        )


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


def check_size(size: str) -> None:
    """Raise a ValueError for a size that is not one of :data:`SIZES`."""
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: use {', '.join(SIZES)}")
