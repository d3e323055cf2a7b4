"""The command ``membudget``: text for people, exit codes for scripts."""

import argparse
import sys
from typing import Never

from membudget.command import cards, fits, plan, run
from membudget.command.refused import Code, Refused

__all__ = ["Code", "Refused", "main"]

COMMANDS = {"fits": fits, "plan": plan, "run": run, "cards": cards}
"""The module of each subcommand: its first line is its help, ``add`` gives
its parser the arguments, and ``run`` does it and returns the exit code. It
imports what takes long (torch) when it runs.
"""


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence."""

    def error(self, message: str) -> Never:
        raise Refused(f"{message}: see {self.prog} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; the exit code.

    Args:
        arguments: by default those of the process.

    Raises:
        SystemExit: help was asked for.
    """
    try:
        given = _parser().parse_args(arguments)
        return given.run(given)
    except Refused as error:
        print(f"membudget: {error}", file=sys.stderr)
        return Code.WRONG


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="membudget", description="The memory of a training step."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        line = str(module.__doc__).partition("\n")[0]
        command = commands.add_parser(name, help=line, description=line)
        module.add(command)
        command.set_defaults(run=module.run)
    return parser
