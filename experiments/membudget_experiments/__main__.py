"""``python -m membudget_experiments list | run | check | catalogue``."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from membudget.records import record

OK, BAD, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m membudget_experiments",
        description="Experiments and the records they leave.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="list the experiments")
    command.set_defaults(main=list_experiments)

    command = commands.add_parser("run", help="run experiments")
    command.add_argument(
        "names", nargs="*", metavar="NAME", help="all if none"
    )
    command.add_argument("--size", required=True, choices=record.SIZES)
    command.add_argument(
        "--out", required=True, type=Path, help="folder for the records"
    )
    command.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU)")
    command.add_argument(
        "--again", action="store_true", help="repeat what is there"
    )
    command.set_defaults(main=run_experiments)

    command = commands.add_parser("check", help="check records")
    command.add_argument(
        "folder", nargs="?", type=Path, default=record.RECORDS, metavar="DIR"
    )
    command.set_defaults(main=check_records)

    command = commands.add_parser(
        "catalogue", help="write what the package knows of the experiments"
    )
    command.set_defaults(main=write_catalogue)

    given = parser.parse_args(arguments)
    try:
        return given.main(given)
    except Refused as error:
        print(f"membudget_experiments: {error}", file=sys.stderr)
        return USAGE


class Refused(Exception):
    """A command that cannot be carried out as it was given."""


def list_experiments(given: argparse.Namespace) -> int:
    """One experiment a line, its name first."""
    known = record.catalogue()
    width = max(map(len, known))
    for name, experiment in known.items():
        print(f"{name:{width}}  {experiment.summary}")
    return OK


def write_catalogue(given: argparse.Namespace) -> int:
    """The definitions as the package and the book read them."""
    record.CATALOGUE.write_text(catalogue_text(), "utf-8")
    print(f"written: {record.CATALOGUE.name}")
    return OK


def catalogue_text() -> str:
    """The content of the catalogue, from the definitions."""
    from membudget_experiments.definition import definitions

    known = {
        name: asdict(function.experiment)
        for name, function in definitions().items()
    }
    for values in known.values():
        del values["name"]
    return json.dumps(known, indent=1, ensure_ascii=False) + "\n"


def check_records(given: argparse.Namespace) -> int:
    """Every record of a folder; exit code 1 if one is bad."""
    if not given.folder.is_dir():
        raise Refused(f"{given.folder} is no folder: name one with records")
    from membudget_experiments.checking import problems

    paths = sorted(given.folder.glob("*.json"))
    bad = 0
    for path in paths:
        wrong = problems(path)
        bad += bool(wrong)
        for sentence in wrong:
            print(f"{path.name}: {sentence}")
    if not paths:
        print(f"no record is in {given.folder}")
    else:
        print(f"{len(paths)} records, {bad} of them bad")
    return BAD if bad or not paths else OK


def run_experiments(given: argparse.Namespace) -> int:
    """Run experiments and print what became of each."""
    try:
        known = [record.find(name) for name in dict.fromkeys(given.names)]
    except ValueError as error:
        raise Refused(error) from None
    known = known or list(record.catalogue().values())
    _prepare(given.out)

    # They need torch.
    from membudget_experiments import definition, machine, runner

    experiments = [definition.of(experiment) for experiment in known]
    needs = any(experiment.gpu for experiment in known)
    device = _device(given.device, given.size, needs)
    try:
        machine.commit()
    except ValueError as error:
        raise Refused(error) from None
    results: list[runner.Result] = []
    code = OK
    try:
        for result in runner.run(
            experiments, given.size, device, given.out, again=given.again
        ):
            results.append(result)
    except KeyboardInterrupt:
        print("interrupted: run again to go on", file=sys.stderr)
        code = INTERRUPTED
    except OSError as error:
        code = USAGE
        print(f"cannot write to {given.out}: {error}", file=sys.stderr)
    failed = [r for r in results if r.record["outcome"] == "failed"]
    print(_table(results))
    return code or (BAD if failed else OK)


def _prepare(folder: Path) -> None:
    """Make the folder, and make sure that it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Refused(
            f"cannot write to {folder} ({error.strerror}): give --out a "
            "folder that you may write to"
        ) from None


def _device(name: str | None, size: str, needs: bool):
    """The device to run on; without a name a GPU if there is one."""
    from membudget.measuring.device import resolve_device

    try:
        device = resolve_device(name)
    except ValueError as error:
        raise Refused(error) from None
    if needs and device.type == "cpu" and size in record.NEED_A_GPU:
        raise Refused(
            f"size {size} needs a GPU (--device cuda): on a CPU use "
            "--size tiny"
        )
    return device


def _table(results: list) -> str:
    """What became of each experiment, as text."""
    rows = [("experiment", "size", "outcome", "samples", "seconds", "record")]
    for result in results:
        skipped = result.seconds is None
        outcome = result.record["outcome"]
        rows.append(
            (
                result.record["experiment"],
                result.record["size"],
                f"{outcome} before" if skipped else outcome,
                str(len(result.record["samples"])),
                "-" if skipped else f"{result.seconds:.1f}",
                result.path.name,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    errors = [
        f"{result.record['experiment']}: {result.record['error']}"
        for result in results
        if result.record["error"]
    ]
    return "\n".join(lines + errors)


if __name__ == "__main__":
    sys.exit(main())
