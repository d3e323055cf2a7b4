"""Where the labs' training scripts are, and what they share."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from membudget.checks import one_of
from membudget.sharding.launching import joined
from membudget.sharding.saving import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)

SCRIPTS = "fsdp_train.py", "parallel_train.py"

RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # torchrun's --max-restarts


class ScriptError(RuntimeError):
    """A mistake that shows only when the ranks are together."""


def training_script(name: str = "fsdp_train.py") -> Path:
    """The path of a lab's script.

    In a clone it is the file in ``labs``. Where only the package is
    installed, as on Colab, it is the copy that came with it (``data-files``
    in ``pyproject.toml``).

    Args:
        name: ``"fsdp_train.py"`` or ``"parallel_train.py"``.

    Raises:
        FileNotFoundError: neither is there.
    """
    one_of(name, SCRIPTS, "the script's name")
    here = Path(__file__).parents[3] / "labs" / name
    if here.is_file():
        return here
    try:
        installed = metadata.files("membudget") or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == name and Path(file.locate()).is_file():
            return Path(file.locate()).resolve()
    raise FileNotFoundError(
        f"{name} came neither with a clone nor with the package: install "
        "the package again, or copy the file from the course's folder labs"
    )


class ScriptParser(argparse.ArgumentParser):
    """The options that every training script has; a mistake ends it.

    Args:
        name: of the script.
        text: what it does, in a line.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(prog=name, description=text, allow_abbrev=False)
        add = self.add_argument
        add(
            "--steps",
            type=int,
            default=10,
            help="optimizer steps in all (default: 10)",
        )
        add(
            "--cpu",
            action="store_true",
            help="use the CPU even where there are GPUs",
        )
        add(
            "--checkpoint-dir",
            help="folder for this run's checkpoints alone; two are kept",
        )
        add(
            "--save-every",
            type=int,
            help="steps between checkpoints, and at the end (default: 2)",
        )
        add(
            "--resume",
            action="store_true",
            help="go on from the last whole checkpoint of --checkpoint-dir",
        )
        add(
            "--die",
            metavar="RANK:STEP",
            help="kill this rank in this step, to see what happens; both "
            "from 0",
        )

    def error(self, message: str) -> NoReturn:
        """Said by the first rank of a node, as a rule."""
        leave_to_first()
        super().error(message)

    def read(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options, and what ``torchrun`` says of this rank.

        Adds ``sharded``, ``rank``, ``ranks`` and ``device``.
        """
        args = self.parse_args(arguments)
        args.sharded = "RANK" in os.environ  # torchrun sets it
        args.rank = int(os.environ.get("RANK", 0))
        args.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.least_one(args, "steps")
        self._check_checkpoints(args)
        if args.die:
            args.die = self._death(args)
        args.device = device(args)
        return args

    def least_one(self, args: argparse.Namespace, *names: str) -> None:
        """Refuse options that are below 1."""
        for name in names:
            if getattr(args, name) < 1:
                self.error(f"--{name.replace('_', '-')} must be at least 1")

    def _check_checkpoints(self, args: argparse.Namespace) -> None:
        given = bool(args.checkpoint_dir)
        default_or_note(args, "save_every", 2, "--checkpoint-dir", given)
        self.least_one(args, "save_every")
        if args.resume and not given:
            self.error("--resume needs --checkpoint-dir")
        if not given:
            return
        folder = Path(args.checkpoint_dir)
        if folder.exists() and not folder.is_dir():
            self.error(f"--checkpoint-dir {folder} is a file: name a folder")
        if not args.resume and any(folder.glob("step-*")):
            self.error(
                f"{folder} has checkpoints: use --resume or another folder"
            )
        if not args.resume and os.environ.get(RESTARTS, "0") != "0":
            note(args, "restarts need --resume: they will find checkpoints")

    def _death(self, args: argparse.Namespace) -> tuple[int, int]:
        try:
            rank, step = map(int, args.die.split(":"))
        except ValueError:
            self.error(f"--die is {args.die!r}: write RANK:STEP, as 1:3")
        if not (0 <= rank < args.ranks and 0 <= step < args.steps):
            self.error(
                f"--die {rank}:{step} never happens: this run has ranks 0 to "
                f"{args.ranks - 1} and steps 0 to {args.steps - 1}"
            )
        return rank, step


def leave_to_first() -> None:
    """Wait: ``torchrun`` ends this rank as soon as the node's first ends.

    If it does not, the mistake is of this rank alone, which must say it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)


def default_or_note(
    args: argparse.Namespace,
    name: str,
    default: object,
    needed: str,
    there: bool,
) -> None:
    """An option's default, or a word on one that has no effect."""
    if getattr(args, name) is None:
        setattr(args, name, default)
    elif not there:
        option = f"--{name.replace('_', '-')}"
        note(args, f"{option} has no effect without {needed}")


def device(args: argparse.Namespace) -> torch.device:
    """This rank's GPU, if each rank of the machine has one."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = 0 if args.cpu else torch.cuda.device_count()
    if 0 < gpus < here:
        note(args, f"{gpus} GPU(s) for {here} ranks: all ranks use the CPU")
    return torch.device(f"cuda:{local}" if gpus >= here else "cpu")


def drawn(
    data: torch.Tensor, step: int, sequences: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's whole batch, which depends on the step alone.

    Args:
        data: tokens, one dimension.
        step: seeds what is drawn.
        sequences, length: of the batch, in tokens.

    Returns:
        Inputs and targets, sequences × length each.
    """
    starts = torch.randint(
        len(data) - length,
        (sequences,),
        generator=torch.Generator().manual_seed(step),
    ).tolist()
    rows = torch.stack([data[s : s + length + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def note(args: argparse.Namespace, text: str) -> None:
    """A line for the reader, once for all ranks."""
    if args.rank == 0:
        print(text, file=sys.stderr, flush=True)


def say(**values: object) -> None:
    """A line of JSON, in one piece even where ranks share the output."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def die_if_told(step: int, args: argparse.Namespace) -> None:
    """What a crash does, once: this process is gone in the middle."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if args.die == (args.rank, step) and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def resumed(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """The step to begin with, and its values in model and optimizer."""
    if not args.resume:
        return 0
    loaded = load_checkpoint(args.checkpoint_dir, model, optimizer)
    first = loaded.step or 0
    for problem in loaded.skipped:
        note(args, f"skipped {problem}")
    begin = f"begin at step {first}"
    if first >= args.steps:
        begin = f"nothing to do: the checkpoint has {first} steps, "
        begin += f"--steps is {args.steps}"
    note(args, begin)
    return first


def save_if_due(
    args: argparse.Namespace,
    done: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """A checkpoint after every so many steps, and after the last."""
    due = done % args.save_every == 0 or done == args.steps
    if args.checkpoint_dir and due:
        save_checkpoint(args.checkpoint_dir, done, model, optimizer)


def run_script(
    name: str,
    args: argparse.Namespace,
    train: Callable[[argparse.Namespace], Any],
) -> None:
    """Train in ``torchrun``'s group, if there is one.

    A mistake that the reader can mend ends the script with its sentence: a
    ``CheckpointError`` and a :class:`ScriptError`.
    """
    try:  # `joined` also sets the GPU of this rank
        with joined() if args.sharded else nullcontext():
            train(args)
    except (CheckpointError, ScriptError) as error:
        leave_to_first()
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)
