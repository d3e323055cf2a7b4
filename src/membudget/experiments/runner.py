"""Running experiments: the prediction first, then samples, then the record."""

import contextlib
import copy
import gc
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from membudget.experiments import machine, record
from membudget.experiments.progress import Progress
from membudget.experiments.record import Experiment, Record
from membudget.measuring.device import resolve_device


class Result(NamedTuple):
    """What became of one experiment; ``seconds`` is None if it was skipped."""

    record: Record
    path: Path
    seconds: float | None


def run(
    experiments: Iterable[Experiment],
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
        experiments: from :func:`membudget.experiments.catalogue`.
        size: one of :data:`membudget.experiments.SIZES`.
        device: where to run them.
        folder: where the records go.
        again: repeat what is there.

    Raises:
        OSError: the folder cannot be written to.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a chatty profiler
    device = resolve_device(device)  # with its number
    commit, clean = machine.commit()
    for experiment in experiments:
        fresh = record.new(
            experiment=experiment.name,
            size=size,
            parameters=experiment.sizes[size],
            units=experiment.units,
            device=machine.describe_device(device),
            software=machine.describe_software(),
            commit=commit,
            clean=clean,
            source=experiment.source,
        )
        path = folder / record.file_name(fresh)
        if not again and (done := _finished(path)):
            yield Result(done, path, None)
            continue
        total = len(fresh["parameters"][experiment.over])
        progress = Progress(f"{experiment.name} {size}", total)
        start, ending = time.perf_counter(), "interrupted"
        try:
            measure(fresh, device, folder, progress.show)
            ending = fresh["outcome"]
        finally:
            seconds = time.perf_counter() - start
            progress.end(f"{ending}, {seconds:.1f} s")
        yield Result(fresh, path, seconds)


def measure(
    fresh: Record,
    device: torch.device,
    folder: Path,
    show: Callable[[int], None] = lambda count: None,
) -> None:
    """Run the experiment of a record and complete it, on disk and in place.

    It is written twice: with the prediction alone, before the experiment
    resumes, and in the end. An interruption leaves the first.

    Args:
        fresh: a record as :func:`membudget.experiments.record.new` makes it.
        device: where to run it.
        folder: where the record goes.
        show: is called with the number of samples so far.

    Raises:
        OSError: the folder cannot be written to.
    """
    steps, outcome, error = _attempt(_predict, fresh, device)
    if steps:
        record.write(fresh, folder)
        _, outcome, error = _attempt(_sample, fresh, steps, show)
    else:
        outcome = "failed"  # there is nothing to compare with, whatever it was
    del steps
    _release()
    fresh["outcome"], fresh["error"] = outcome or "measured", error or None
    stored = (fresh["prediction"] or {}).get("utc", "")
    fresh["utc"] = max(record.now(), stored)  # a clock may be set back
    record.write(fresh, folder)


def _predict(fresh: Record, device: torch.device) -> Iterator:
    """Store the prediction; the experiment, ready to measure."""
    found = record.find(fresh["experiment"])
    module = import_module(f"membudget.experiments.{found.subject}")
    function = getattr(module, found.name)
    steps = function(device, **copy.deepcopy(fresh["parameters"]))
    values = next(steps, None)
    if not values:
        raise ValueError("the experiment yields no prediction first")
    stored = {"utc": record.now(), "values": _as_json(values)}
    if wrong := record.problems(_trial(fresh, prediction=stored)):
        raise ValueError(wrong[0])
    fresh["prediction"] = stored
    return steps


def _sample(fresh: Record, steps: Iterator, show: Callable) -> None:
    """Store what the experiment measures."""
    done = {"outcome": "measured", "utc": fresh["prediction"]["utc"]}
    for sample in steps:
        samples = [_as_json(sample)]
        if wrong := record.problems(_trial(fresh, samples=samples, **done)):
            raise ValueError(wrong[0])
        fresh["samples"] += samples
        show(len(fresh["samples"]))
    if not fresh["samples"]:
        raise ValueError("the experiment yields no sample")


def _trial(fresh: Record, **changes: Any) -> Record:
    return {**fresh, "digest": "0" * 64, **changes}


def _as_json(value: object) -> Any:
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


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short, on a device or on the CPU."""
    signs = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and any(sign in str(error) for sign in signs)
    )


def _describe(error: Exception) -> str:
    """Type and message, on one line and without paths."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"\S*[/\\]\S*", "…", text)[:400]


def _release() -> None:
    """Free what the experiment held, the allocator's cache included."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # a device that has crashed
        torch.cuda.empty_cache()


def _finished(path: Path) -> Record | None:
    """The record at this place, if it need not be measured again."""
    if not path.is_file() or record.check(path):
        return None
    found = json.loads(path.read_text("utf-8"))
    done = found["outcome"] in record.FINISHED and record.is_current(found)
    return found if done else None
