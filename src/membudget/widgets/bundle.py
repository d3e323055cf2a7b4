"""Text of a widget's module and of its style: the standard library only.

The book's Sphinx extension imports this file by its path, without torch.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./base\.mjs";\n', re.M)


def module_text(name: str) -> str:
    """One self-contained ES module: ``base.mjs`` and ``NAME.mjs`` as one.

    The line in ``NAME.mjs`` that imports from ``./base.mjs`` gives way to
    the text of ``base.mjs`` without its ``export`` keywords.

    Raises:
        ValueError: no widget of that name, or a module that does not import
            from ``./base.mjs`` exactly once.
    """
    base = re.sub(r"^export ", "", _read("base.mjs"), flags=re.M)
    text, count = _IMPORT.subn(lambda _: base, _read(f"{_check(name)}.mjs"))
    if count != 1:
        raise ValueError(
            f"{name}.mjs imports from ./base.mjs {count} times: use one "
            'statement, import { … } from "./base.mjs";'
        )
    return text


def style_text(name: str) -> str:
    """The palette, the shared style and, where there is one, ``NAME.css``.

    Raises:
        ValueError: no widget of that name.
    """
    files = ["palette.css", "base.css", f"{_check(name)}.css"]
    return "".join(_read(file) for file in files if (HERE / file).exists())


def names() -> list[str]:
    """Every widget that has a module, in alphabetical order."""
    found = {path.stem for path in HERE.glob("*.mjs")}
    return sorted(found - {"base"})


def _check(name: str) -> str:
    if name not in names():
        raise ValueError(
            f"no widget is named {name!r}: use one of {', '.join(names())}"
        )
    return name


def _read(file: str) -> str:
    return (HERE / file).read_text(encoding="utf-8")
