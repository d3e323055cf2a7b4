"""Known mistakes: small edits of a solution's source, each with a hint."""

import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

ARROW = " =>"
"""Between what stands in the solution and what the mistake has there."""


@dataclass(frozen=True)
class Edit:
    """The characters ``start`` to ``end`` of a source become ``text``."""

    start: int
    end: int
    text: str

    def touches(self, other: "Edit") -> bool:
        """Whether the two are at the same place, or side by side."""
        return self.start <= other.end and other.start <= self.end


Known = tuple[str, Callable]
"""A hint, and a function that is wrong in that way."""


def mistakes(solution: Callable, text: str) -> list[Known]:
    """The mistakes that a text declares, each alone.

    A mistake is lines ``old => new``, then its hint. ``old`` stands once in
    the solution's source, and several such lines are one mistake. Without
    ``new`` it is left out; a whole line becomes ``pass``. With a line
    ``or old => new`` begin the edits of another function, with the same hint.

    Raises:
        ValueError: an edit that cannot be made, or one without a hint.
    """
    every = read(source(solution), text)
    return [(hint, edited(solution, edits)) for hint, edits in every]


def pairs(solution: Callable, text: str) -> Iterator[Known]:
    """Two mistakes at once, with the hint of the first."""
    every = read(source(solution), text)
    for (hint, first), (_, second) in combinations(every, 2):
        if not any(a.touches(b) for a in first for b in second):
            yield hint, edited(solution, first + second)


@cache
def source(solution: Callable) -> str:
    """A function's text, as the page shows it."""
    return textwrap.dedent(inspect.getsource(solution))


@cache
def read(source: str, text: str) -> list[tuple[str, tuple[Edit, ...]]]:
    """The hints and edits of a text (see :func:`mistakes`)."""
    found: list[tuple[str, tuple[Edit, ...]]] = []
    ways: list[list[Edit]] = [[]]
    hint: list[str] = []

    def end() -> None:
        if not hint or not all(ways):
            raise ValueError(
                f"{' '.join(hint) or ways}: a mistake is lines "
                "`old => new`, and a hint after them."
            )
        found.extend((" ".join(hint), tuple(edits)) for edits in ways)

    for line in map(str.strip, text.strip().splitlines()):
        if ARROW in line and hint:
            end()
            ways, hint = [[]], []
        if ARROW in line:
            if line.startswith("or "):
                ways.append([])
            ways[-1].append(edit(source, line.removeprefix("or ")))
        elif line:
            hint.append(line)
    if text.strip():
        end()
    return found


def edit(source: str, line: str) -> Edit:
    """The edit that a line ``old => new`` declares, as short as it can be.

    Raises:
        ValueError: ``old`` does not stand exactly once in the source.
    """
    old, new = (side.strip() for side in line.split(ARROW))
    if source.count(old) != 1:
        raise ValueError(
            f"{line!r}: {old!r} stands {source.count(old)} times in\n{source}"
            "\nan edit needs a text that stands there once."
        )
    if not new and old in map(str.strip, source.splitlines()):
        new = "pass"
    start = source.index(old)
    while old and old[:1] == new[:1]:
        old, new, start = old[1:], new[1:], start + 1
    while old and old[-1:] == new[-1:]:
        old, new = old[:-1], new[:-1]
    return Edit(start, start + len(old), new)


@cache
def edited(solution: Callable, edits: Sequence[Edit]) -> Callable:
    """The function that the edited source defines, with the same globals.

    Raises:
        ValueError: the edited source is no Python.
    """
    text = source(solution)
    for change in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: change.start] + change.text + text[change.end :]
    name = f"<{solution.__name__} with {edits}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    names = dict(solution.__globals__)
    try:
        exec(compile(text, name, "exec"), names)
    except SyntaxError as error:
        raise ValueError(f"{error} in\n{text}") from error
    return names[solution.__name__]
