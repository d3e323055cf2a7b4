"""Write the program of the fastest plan that fits."""

import argparse
import sys

from membudget.command import asked
from membudget.command.asked import Asked, program
from membudget.command.refused import Code, Refused


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``membudget plan``."""
    asked.add(parser)


def run(args: argparse.Namespace) -> int:
    """Print the program, and nothing else."""
    from membudget.measuring.units import format_bytes

    with asked.quiet():
        question = Asked(args)
        try:
            answer = question.answer()
            best = answer.best
            if not best or best[0].peak > question.budget:
                least = format_bytes(answer.smallest.peak)
                why = f"no plan fits, the least is {least}"
                told = f"membudget: {why}: `membudget fits` says what would"
                print(told, file=sys.stderr)
                return Code.NO
            print(program(question, best[0].plan), end="")
        except (ImportError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None
    return Code.OK
