"""The style of all figures, and what a notebook makes of it."""

import re

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import notebooks
import pytest
from nbclient import NotebookClient
from project import PATIENCE, ROOT

from membudget import plotting


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        plotting.use_style()
        yield
    plt.close("all")


def test_what_is_no_consumer_has_the_accent_and_its_own_dashes():
    css = (ROOT / "book/_static/book.css").read_text("utf-8")
    assert f"--mb-accent: {plotting.ACCENT};" in css
    looks = list(mpl.rcParams["axes.prop_cycle"])
    assert looks[0]["color"] == plotting.ACCENT
    assert len({look["linestyle"] for look in looks}) == len(looks)
    assert not {look["color"] for look in looks} & {
        *plotting.palette().values()
    }


SOURCE = """\
import membudget, matplotlib.pyplot as plt
membudget.setup()
figure, axes = plt.subplots()
axes.fill_between([0, 1, 2], [1, 3, 2], hatch="//", label="0.12345")
axes.legend()
plt.show()"""


def test_a_notebook_has_svg_the_same_one_each_time():
    cells = [nbformat.v4.new_code_cell(SOURCE) for _ in range(2)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    limits = {"timeout": PATIENCE, "startup_timeout": PATIENCE}
    NotebookClient(notebook, kernel_name="python3", **limits).execute()
    first, second = (cell.outputs[0].data for cell in notebook.cells)
    assert sorted(first) == ["image/svg+xml", "text/plain"]
    assert first == second
    svg = first["image/svg+xml"]
    assert "date" not in svg and 'style="fill: #ffffff"' in svg
    assert re.findall(r"<text[^>]*>([^<]*)", svg)[-1] == "0.12345"
    check_smaller(svg)


def check_smaller(svg):
    """What is committed is the same picture."""
    small = notebooks.smaller(svg)
    assert len(small) < 0.7 * len(svg)
    assert notebooks.smaller(small).count("<text") == svg.count("<text")
    assert "0.12345" in small and "sans-serif" in small
    used = set(re.findall(r"(?:url\(|href=\")#(\w+)", svg))
    assert used and set(re.findall(r' id="(\w+)"', small)) == used
    colour = r"(?:fill|stroke): #\w+"
    assert svg.count("<use") == small.count("<use")
    assert set(re.findall(colour, svg)) == set(re.findall(colour, small))
    assert corners(svg) == corners(small)


LINE = r"([MLHV])\s*(-?\d+\.?\d?\d?)\d*(?: (-?\d+\.?\d?\d?))?"


def corners(svg):
    """Where the lines of all outlines lead, to a hundredth of a point."""
    found, at = [], {}
    for outline in re.findall(r' d="([^"CQ]*)"', svg):
        for letter, *numbers in re.findall(LINE, outline):
            names = {"H": "x", "V": "y"}.get(letter, "xy")
            at |= dict(
                zip(names, map(float, filter(None, numbers)), strict=False)
            )
            if found[-1:] != [tuple(at.values())]:
                found.append(tuple(at.values()))
    return found
