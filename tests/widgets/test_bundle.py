"""The modules' and styles' text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from membudget.widgets import bundle

NAMES = bundle.names()


def test_names():
    assert {"accumulation", "timeline"} <= set(NAMES)
    assert not {"base", "tape"} & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_module_stands_alone(name):
    text = bundle.module_text(name)
    lines = text.splitlines()
    assert not any(line.startswith("import ") for line in lines)
    assert 'from "./base.mjs"' not in text
    assert "\nfunction fill(" in text  # base.mjs is there,
    assert "\nexport function svg(" not in text  # and exports nothing
    assert sum(line.startswith("export default") for line in lines) == 1
    # the book's rjsmin drops the blanks of a template inside a template
    assert not re.search(r"`[^`]*\$\{[^}`]*`", text)


def test_the_books_style_is_not_of_what_widgets_share():
    """A class that both style would look on a page as on no other."""
    book = Path(__file__).parents[2] / "book" / "_static" / "book.css"
    styles = bundle.base_style(), book.read_text(encoding="utf-8")
    shared, own = (set(re.findall(r"\.(mb-[\w-]+)", s)) for s in styles)
    assert shared and own and not shared & own


def test_base_replaces_the_import(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "HERE", tmp_path)
    base = 'export const a = 1;\nconst text = "export b\\\\n";\n'
    (tmp_path / "base.mjs").write_text(base)
    (tmp_path / "one.mjs").write_text(
        'import {\n  a,\n} from "./base.mjs";\nexport default a;\n'
    )
    assert bundle.module_text("one") == (
        base.removeprefix("export ") + "export default a;\n"
    )


def test_the_tape_machine_stands_before_who_imports_it(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "HERE", tmp_path)
    (tmp_path / "base.mjs").write_text("export const a = 1;\n")
    (tmp_path / "tape.mjs").write_text("export const b = 2;\n")
    first = 'import { a } from "./base.mjs";\n'
    (tmp_path / "one.mjs").write_text(first + "export default a;\n")
    more = 'import { b } from "./tape.mjs";\nexport default a + b;\n'
    (tmp_path / "two.mjs").write_text(first + more)
    assert bundle.own_text("one") == "export default a;\n"
    assert bundle.own_text("two") == "const b = 2;\nexport default a + b;\n"


@pytest.mark.parametrize("times", [0, 2])
def test_module_must_import_base_once(tmp_path, monkeypatch, times):
    monkeypatch.setattr(bundle, "HERE", tmp_path)
    (tmp_path / "base.mjs").write_text("export const a = 1;\n")
    (tmp_path / "one.mjs").write_text(
        'import { a } from "./base.mjs";\n' * times
    )
    with pytest.raises(ValueError, match=f"from ./base.mjs {times} times"):
        bundle.module_text("one")


def test_style_is_the_palette_the_base_and_the_widgets_own():
    text = bundle.style_text("accumulation")
    places = [
        text.index(mark)
        for mark in ("--mb-gradients: #", ".mb-root {", ".mb-accumulation")
    ]
    assert places == sorted(places)


def test_style_of_a_widget_without_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "HERE", tmp_path)
    (tmp_path / "plain.mjs").touch()
    (tmp_path / "palette.css").write_text(":root {}\n")
    (tmp_path / "base.css").write_text("b {}\n")
    assert bundle.style_text("plain") == ":root {}\nb {}\n"


@pytest.mark.parametrize(
    "name", ["unknown", "base", "tape", "../widgets/base"]
)
@pytest.mark.parametrize("text", [bundle.module_text, bundle.style_text])
def test_unknown_widget(text, name):
    with pytest.raises(ValueError, match="no widget is named"):
        text(name)


def test_only_the_standard_library_is_needed():
    code = (
        "import runpy, sys\n"
        f"bundle = runpy.run_path({bundle.__file__!r})\n"
        "assert bundle['module_text']('accumulation')\n"
        "assert not {'torch', 'anywidget', 'membudget'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_elsewhere(name):
    text = bundle.module_text(name) + bundle.style_text(name)
    text = text.replace("http://www.w3.org/2000/svg", "")
    for word in ("http:", "https:", "@import", "</script", "eval("):
        assert word not in text
