"""Running experiments: the prediction first, then samples, then the record."""

import contextlib
import copy
import gc
import json
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from membudget.measuring.device import resolve_device
from membudget.measuring.out_of_memory import is_out_of_memory
from membudget.records.record import (
    FINISHED,
    Experiment,
    Record,
    damage,
    digest,
    file_name,
    same,
)
from membudget_experiments import machine
from membudget_experiments.progress import Progress

SCHEMA = 1


class Result(NamedTuple):
    """What became of one experiment; ``seconds`` is None if it was skipped."""

    record: Record
    path: Path
    seconds: float | None


def run(
    experiments: Iterable[Callable],
    size: str,
    device: torch.device,
    folder: Path,
    *,
    again: bool = False,
) -> Iterator[Result]:
    """Run experiments one after the other; each leaves a record.

    One that has a finished, current record of this size and device in the
    folder is skipped, unless ``again``. One that fails or runs out of memory
    leaves a record that says so, and the next one runs.

    Args:
        experiments: functions that :func:`~.definition.experiment` declares.
        size: one of :data:`membudget.records.SIZES`.
        device: where to run them.
        folder: where the records go.
        again: repeat what is there.

    Raises:
        OSError: the folder cannot be written to.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a chatty profiler
    device = resolve_device(device)  # with its number
    for function in experiments:
        known: Experiment = function.experiment
        fresh = new(known, size, device)
        path = folder / file_name(fresh)
        if not again and (done := _finished(path, known)):
            yield Result(done, path, None)
            continue
        total = len(fresh["parameters"][known.over])
        progress = Progress(f"{known.name} {size}", total)
        start, ending = time.perf_counter(), "interrupted"
        try:
            measure(function, fresh, device, folder, progress.show)
            ending = fresh["outcome"]
        finally:
            seconds = time.perf_counter() - start
            progress.end(f"{ending}, {seconds:.1f} s")
        yield Result(fresh, path, seconds)


def new(experiment: Experiment, size: str, device: torch.device) -> Record:
    """A record that is not yet measured, its fields in their order."""
    commit, clean = machine.commit()
    return {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "size": size,
        "parameters": experiment.sizes[size],
        "prediction": None,
        "outcome": "predicted",
        "error": None,
        "samples": [],
        "units": experiment.units,
        "device": machine.describe_device(device),
        "software": machine.describe_software(),
        "utc": None,
        "commit": commit,
        "clean": clean,
        "source": experiment.source,
    }


def measure(
    function: Callable,
    fresh: Record,
    device: torch.device,
    folder: Path,
    show: Callable[[int], None] = lambda count: None,
) -> None:
    """Run the experiment of a record and complete it, on disk and in place.

    It is written twice: with the prediction alone, before the experiment
    resumes, and in the end. An interruption leaves the first.

    Args:
        function: the experiment.
        fresh: a record as :func:`new` makes it.
        device: where to run it.
        folder: where the record goes.
        show: is called with the number of samples so far.

    Raises:
        OSError: the folder cannot be written to.
    """
    steps, outcome, error = _attempt(_predict, function, fresh, device)
    if steps:
        write(fresh, folder)
        _, outcome, error = _attempt(_sample, fresh, steps, show)
    else:
        outcome = "failed"  # there is nothing to compare with, whatever it was
    del steps
    _release()
    fresh["outcome"], fresh["error"] = outcome or "measured", error or None
    stored = (fresh["prediction"] or {}).get("utc", "")
    fresh["utc"] = max(now(), stored)  # a clock may be set back
    write(fresh, folder)


def _predict(
    function: Callable, fresh: Record, device: torch.device
) -> Iterator:
    """Store the prediction; the experiment, ready to measure."""
    steps = function(device, **copy.deepcopy(fresh["parameters"]))
    values = next(steps, None)
    if not isinstance(values, dict) or not values:
        raise ValueError("the experiment yields no prediction first")
    fresh["prediction"] = {"utc": now(), "values": _as_json(values)}
    return steps


def _sample(fresh: Record, steps: Iterator, show: Callable) -> None:
    """Store what the experiment measures."""
    units = fresh["units"].keys()
    for sample in steps:
        if not isinstance(sample, dict) or sample.keys() != units:
            raise ValueError(
                f"a sample is {str(sample)[:40]}: yield a dictionary with "
                f"the keys of the units, {', '.join(units)}"
            )
        fresh["samples"].append(_as_json(sample))
        show(len(fresh["samples"]))
    if not fresh["samples"]:
        raise ValueError("the experiment yields no sample")


def _as_json(value: object) -> Any:
    """A value as a record gives it back; ValueError where that cannot be."""
    return json.loads(json.dumps(value, allow_nan=False))


def _attempt(work: Callable, *args: Any) -> tuple[Any, str, str]:
    """Do something: its result, and what went wrong, in short and at length.

    The tensors of a failed attempt are freed.
    """
    try:
        return work(*args), "", ""
    except Exception as error:
        out = is_out_of_memory(error)
        if not out:
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)
        return None, "out of memory" if out else "failed", _describe(error)


def _describe(error: Exception) -> str:
    """Type and message, on one line and without paths."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"\S*[/\\]\S*", "…", text)[:400]


def _release() -> None:
    """Free what the experiment held, the allocator's cache included."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # a device that has crashed
        torch.cuda.empty_cache()


def _finished(path: Path, experiment: Experiment) -> Record | None:
    """The record at this place, if it need not be measured again."""
    if not path.is_file() or damage(path):
        return None
    found = json.loads(path.read_text("utf-8"))
    done = found["outcome"] in FINISHED and same(found, experiment)
    return found if done else None


def now() -> str:
    """The time in UTC, to the second, as records write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(record: Record, folder: Path) -> Path:
    """Write a record with its digest, whole or not at all.

    Returns:
        Where it is. A record of the same experiment, size and device is
        replaced.

    Raises:
        OSError: the folder cannot be written to.
    """
    record["digest"] = digest(record)
    path = folder / file_name(record)
    handle, name = tempfile.mkstemp(".tmp", f".{path.stem}.", folder)
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(record, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
