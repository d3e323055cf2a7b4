"""How a command ends."""

from enum import IntEnum


class Code(IntEnum):
    """Exit codes."""

    OK = 0
    NO = 1
    """The answer is no."""
    WRONG = 2
    """The command was used wrongly; a sentence says how."""


class Refused(Exception):
    """A command that cannot be carried out as it was given.

    Its text is one sentence for stderr: what was wrong, what is allowed.
    """
