"""Write the program of the fastest plan that fits."""

import argparse

from membudget.command import asked
from membudget.command.asked import Asked, program
from membudget.command.refused import Code, Refused


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``membudget plan``."""
    asked.add(parser)


def run(args: argparse.Namespace) -> int:
    """Print the program, and nothing else."""
    with asked.quiet():
        question = Asked(args)
        try:
            best = question.answer().best
            if not best or best[0].peak > question.budget:
                return Code.NO
            print(program(question, best[0].plan), end="")
        except (ImportError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None
    return Code.OK
