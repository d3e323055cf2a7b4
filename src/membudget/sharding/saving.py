"""Checkpoints of a sharded model that survive a crash, whole or not at all."""

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from membudget.checks import instance, module, plain_step, whole
from membudget.stepping import parameters_of

T = TypeVar("T")

MANIFEST = "complete.json"
"""The file that is written last: size and CRC-32 of every other one, and
what the checkpoint is of."""


class CheckpointError(RuntimeError):
    """A checkpoint of another model or optimizer, or none to be read."""


@dataclass(frozen=True)
class Loaded:
    """What :func:`load_checkpoint` found.

    Attributes:
        step: of the checkpoint that was loaded; None without any.
        skipped: why newer ones were not used, in words.
    """

    step: int | None
    skipped: tuple[str, ...] = ()


def save_checkpoint(
    folder: str | os.PathLike,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int = 2,
) -> Path:
    """Write the model and the optimizer, each rank its shards.

    The files go into a folder of another name, which gets its own,
    ``step-00000010``, when all of them are on the disk. Whatever interrupts
    this, the checkpoints before are there. Model and optimizer stay as they
    are. All ranks call it, and all see the same file system. The model may
    differ from rank to rank: a stage of a pipeline writes its own parameters,
    under the whole model's names.

    Args:
        folder: for all checkpoints of the run; made if it is missing.
        step: after which step this is.
        model, optimizer: sharded or not.
        keep: how many checkpoints stay, this one and those of the steps
            before; older ones are deleted.

    Returns:
        The checkpoint's own folder.

    Raises:
        ValueError: an optimizer that cannot be loaded again (``LBFGS``,
            ``SparseAdam``), or is another model's.
    """
    step, keep = whole(step, "step", 0), whole(keep, "keep")
    _check(folder, model, optimizer)
    final = Path(folder, f"step-{step:08d}")
    partial = Path(folder, f"saving-{step:08d}")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for old in Path(folder).glob("saving-*"):
            shutil.rmtree(old)
    _wait()
    fresh = not optimizer.state
    state = _state(model, optimizer)
    if fresh:  # what PyTorch made is of no step
        optimizer.state.clear()
        state["optimizer"]["state"] = {}
    of = _together(_described(optimizer, state))
    with _quiet():
        dcp.save(state, checkpoint_id=partial)
    if first:
        files = {f.name: _size_and_sum(f) for f in partial.iterdir()}
        with open(partial / MANIFEST, "w") as file:
            json.dump({"files": files, **of}, file)
            file.flush()
            os.fsync(file.fileno())
        earlier = Path(folder, f"saving-{step:08d}-earlier")
        if final.exists():
            final.rename(earlier)
        partial.rename(final)
        shutil.rmtree(earlier, ignore_errors=True)
        before = [path for path in _all(folder) if _step(path) < step]
        for old in before[keep - 1 :]:
            shutil.rmtree(old)
    _wait()
    return final


def load_checkpoint(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Loaded:
    """Read the newest whole checkpoint, on any number of ranks.

    One that is not whole, because a file is missing, cut short, changed or
    cannot be read, is left where it is, and the one before is read instead.

    Args:
        folder: as for :func:`save_checkpoint`.
        model, optimizer: get its values, the optimizer's learning rate and
            other options among them; sharded or not.

    Raises:
        CheckpointError: the checkpoint is another model's, by name, shape or
            dtype of a tensor, or another optimizer's, by class, states or
            groups of parameters; model and optimizer keep their values. Or
            there are checkpoints and none of them can be read; the model's
            values may then be mixed, so do not use them.
        ValueError: an optimizer that :func:`save_checkpoint` refuses.
    """
    _check(folder, model, optimizer)
    fresh = not optimizer.state
    skipped: list[str] = []
    for path in _share(lambda: _all(folder)):
        if problem := _share(lambda: missing(path)):  # noqa: B023
            skipped.append(f"{path.name}: {problem}")
            continue
        try:
            state, manifest = _state(model, optimizer), _manifest(path)
            of = _together(_described(optimizer, state))
            _compare_models(path, manifest["model"], of["model"])
            _compare_optimizers(path, manifest, of)
            own = state["optimizer"]
            for name in own["state"].keys() - manifest["states"].keys():
                del own["state"][name]  # it had no gradient
            names = [group["params"] for group in own["param_groups"]]
            with _quiet():
                dcp.load(state, checkpoint_id=path)
            for group, params in zip(own["param_groups"], names, strict=True):
                group["params"] = params  # not those of the first rank
        except CheckpointError:
            if fresh:
                optimizer.state.clear()
            raise
        except (Exception, dcp.CheckpointException) as error:
            skipped.append(f"{path.name}: {_reason(error)}")
            continue
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # the names are equal
        )
        return Loaded(_step(path), tuple(skipped))
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read: {'; '.join(skipped)}. "
            "Start without --resume, or from another folder"
        )
    return Loaded(None)


def missing(path: Path) -> str:
    """What a checkpoint lacks, in words; empty if it is whole."""
    try:
        files = _manifest(path)["files"]
    except (OSError, ValueError, LookupError):
        return f"{MANIFEST} is missing or cut short"
    for name, (size, checksum) in files.items():
        file = path / name
        try:
            if not file.is_file():
                return f"{name} is missing"
            found = _size_and_sum(file)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found[0] != size:
            return f"{name} has {found[0]} of {size} bytes"
        if found[1] != checksum:
            return f"{name} is not what was written"
    return ""


def _manifest(path: Path) -> dict[str, dict]:
    return json.loads((path / MANIFEST).read_text())


def _size_and_sum(file: Path) -> tuple[int, int]:
    """Bytes, and their CRC-32: PyTorch reads changed numbers as they are."""
    size = checksum = 0
    with open(file, "rb") as content:
        while part := content.read(2**20):
            size += len(part)
            checksum = zlib.crc32(part, checksum)
    return size, checksum


def _all(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints, newest first."""
    found = Path(folder).glob("step-*")
    whole_names = (p for p in found if p.name[5:].isdecimal() and p.is_dir())
    return sorted(whole_names, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name[5:])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Both as dictionaries, with the optimizer's states in any case.

    Where there are none yet, PyTorch makes them by a step with gradients of
    zero; it does not if there are gradients.
    """
    fresh = not optimizer.state
    parameters = parameters_of(optimizer)
    gradients = [p.grad for p in parameters]
    if fresh:
        for p in parameters:
            p.grad = None
    states = get_state_dict(model, optimizer)
    if fresh:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    return dict(zip(("model", "optimizer"), states, strict=True))


def _check(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse an optimizer before its steps are in vain."""
    instance(folder, str | os.PathLike, "folder", "a path")
    module(model), plain_step(optimizer)
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "to load an optimizer's states PyTorch makes a step with dense "
            f"gradients, which {name} cannot: use another one"
        )
    own = set(model.parameters())
    if strangers := sum(p not in own for p in parameters_of(optimizer)):
        raise ValueError(
            f"{name} has {strangers} parameters that the model has not: make "
            "it from model.parameters(), after fully_shard"
        )


def _described(optimizer: torch.optim.Optimizer, state: dict) -> dict:
    """What a checkpoint is of: tensors, and the optimizer's kind."""
    of = state["optimizer"]
    return {
        "model": {
            name: f"{tuple(value.shape)} {str(value.dtype)[6:]}"
            for name, value in state["model"].items()
            if isinstance(value, torch.Tensor)
        },
        "class": type(optimizer).__name__,
        "groups": [sorted(group["params"]) for group in of["param_groups"]],
        "states": {name: sorted(held) for name, held in of["state"].items()},
    }


def _together(of: dict) -> dict:
    """What all ranks have, where each has a part of the model's names."""
    if not dist.is_initialized():
        return of
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, of)
    groups = zip(*(each["groups"] for each in every), strict=True)
    return {
        "model": _united(each["model"] for each in every),
        "class": of["class"],
        "groups": [sorted(set().union(*parts)) for parts in groups],
        "states": _united(each["states"] for each in every),
    }


def _united(parts: Iterable[dict]) -> dict:
    return {name: value for part in parts for name, value in part.items()}


def _compare_models(path: Path, there: dict, here: dict) -> None:
    """Refuse the checkpoint of a model with other parameters or dtypes."""
    differences = [
        f"{name} is {there.get(name, 'missing')} in the checkpoint and "
        f"{here.get(name, 'missing')} in the model"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{path} is the checkpoint of another model, "
            f"{len(differences)} tensors differ: "
            f"{'; '.join(differences[:3])}. Build the model with the sizes "
            "and dtypes it was saved with, or use another folder"
        )


def _compare_optimizers(path: Path, there: dict, here: dict) -> None:
    """Refuse the checkpoint of an optimizer with other groups or states."""
    was, now = (
        {name: group for group in of["groups"] for name in group}
        for of in (there, here)
    )
    names = sorted(was.keys() | now.keys())
    others = [n for n in names if was.get(n) != now.get(n)]
    kept, made = there["states"], here["states"]
    changed = [n for n in kept if kept[n] != made.get(n)]
    if there["class"] != here["class"]:
        problem = f"{there['class']}, not of {here['class']}"
    elif others:
        problem = (
            f"an optimizer with other groups of parameters, {len(others)} "
            f"differ: {', '.join(others[:3])}"
        )
    elif changed:
        name = changed[0]
        problem = (
            f"an optimizer with other states: those of {name} are "
            f"{', '.join(kept[name])} in the checkpoint and "
            f"{', '.join(made.get(name, ())) or 'none'} here"
        )
    else:
        return
    raise CheckpointError(
        f"{path} is the checkpoint of {problem}. Make the optimizer as it was "
        "when it was saved, or use another folder"
    )


def _reason(error: BaseException) -> str:
    """In a line; PyTorch's has a traceback of every rank."""
    for rank, (cause, _) in getattr(error, "failures", {}).items():
        said = str(cause).splitlines()[:1]
        return ": ".join([f"rank {rank} met a {type(cause).__name__}", *said])
    return f"{type(error).__name__}: {error}"


def _share(find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank."""
    if not dist.is_initialized():
        return find()
    box = [find()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    return cast("T", box[0])


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _quiet() -> warnings.catch_warnings:
    """Without the remarks on a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
