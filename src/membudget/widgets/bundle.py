"""Text of a widget's module and of its style: the standard library only.

The book's Sphinx extension imports this file by its path, without torch.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
SHARED = ("base", "tape")
"""Modules that are no widget's: what all share, and the tape machine."""

_IMPORT, _TAPE = (
    re.compile(rf'^import \{{[^}}]*\}} from "\./{name}\.mjs";\n', re.M)
    for name in SHARED
)


def module_text(name: str) -> str:
    """One self-contained ES module: :func:`base_text`, then :func:`own_text`.

    Raises:
        ValueError: as :func:`own_text`.
    """
    return base_text() + own_text(name)


def base_text() -> str:
    """``base.mjs`` without its ``export`` keywords."""
    return _inner_text("base")


def _inner_text(name: str) -> str:
    return re.sub(r"^export ", "", _read(f"{name}.mjs"), flags=re.M)


def own_text(name: str) -> str:
    """``NAME.mjs`` without the line that imports from ``./base.mjs``.

    What it imports from ``./tape.mjs`` stands before it.

    Raises:
        ValueError: no widget of that name, or a module that does not import
            from ``./base.mjs`` exactly once.
    """
    text, count = _IMPORT.subn("", _read(f"{_check(name)}.mjs"))
    if count != 1:
        raise ValueError(
            f"{name}.mjs imports from ./base.mjs {count} times: use one "
            'statement, import { … } from "./base.mjs";'
        )
    text, count = _TAPE.subn("", text)
    return _IMPORT.sub("", _inner_text("tape")) + text if count else text


def style_text(name: str) -> str:
    """The palette, the shared style and, where there is one, ``NAME.css``.

    Raises:
        ValueError: no widget of that name.
    """
    return base_style() + own_style(name)


def base_style() -> str:
    """The palette and the style that all widgets share."""
    return _read("palette.css") + _read("base.css")


def own_style(name: str) -> str:
    """``NAME.css``, if there is one.

    Raises:
        ValueError: no widget of that name.
    """
    file = f"{_check(name)}.css"
    return _read(file) if (HERE / file).exists() else ""


def host_text() -> str:
    """The script that runs the widgets of a page without a kernel."""
    return _read("widget-host.js")


def names() -> list[str]:
    """Every widget that has a module, in alphabetical order."""
    found = {path.stem for path in HERE.glob("*.mjs")}
    return sorted(found - set(SHARED))


def _check(name: str) -> str:
    if name not in names():
        raise ValueError(
            f"no widget is named {name!r}: use one of {', '.join(names())}"
        )
    return name


def _read(file: str) -> str:
    return (HERE / file).read_text(encoding="utf-8")
