"""The plot of a memory monitor, outside of a notebook and in one."""

import base64

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbclient import NotebookClient
from project import PATIENCE

from membudget import plotting
from membudget.measuring import MemoryMonitor
from membudget.plotting import MonitorPlot

MIB = 2**20


def monitor(values, **options):
    values = iter(values)
    options = {"budget": 4 * MIB} | options
    return MemoryMonitor(read=lambda: next(values), **options)


def line(plot, label):
    (axes,) = plot.figure.axes
    (found,) = [a for a in axes.lines if a.get_label().startswith(label)]
    return found


def drawn(plot):
    return len(line(plot, "reading").get_xdata())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6 * MIB), max_size=24), st.integers(1, 5))
def test_what_is_drawn_is_what_was_read(values, window):
    """Whenever it is drawn, and however often before."""
    m = monitor(values, window=window)
    plot = MonitorPlot(m)
    for n in range(len(values)):
        m(10 * n)
        plot.update()
        assert drawn(plot) == n - n % 10 + 1
    plot.draw()
    steps = [10 * n for n in range(len(values))]
    peaks = [
        max(values[max(0, n - window + 1) : n + 1]) for n in range(len(steps))
    ]
    for label, expected in (("reading", values), ("peak", peaks)):
        found = line(plot, label)
        assert list(found.get_xdata()) == steps
        assert np.array_equal(found.get_ydata(), np.array(expected) / MIB)


def test_the_limits_are_dashed_lines_with_names():
    plot = MonitorPlot(monitor([], warning=0.5, critical=0.75))
    (axes,) = plot.figure.axes
    dashed = [a for a in axes.lines if a.get_linestyle() == "--"]
    heights = {a.get_ydata()[0] for a in dashed}
    assert heights == {4, 3, 2}
    names = {t.get_text().strip(): t.xy[1] for t in axes.texts}
    assert names == {"budget": 4, "critical": 3, "warning": 2}
    colour = plt.rcParams["text.color"]
    assert all(a.get_color() == colour for a in dashed)


def test_labels_and_legend():
    plot = MonitorPlot(monitor([], window=7))
    (axes,) = plot.figure.axes
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel() == "memory (MiB)"
    texts = [t.get_text() for t in axes.get_legend().get_texts()]
    assert texts == ["peak of the last 7", "reading"]


@pytest.mark.parametrize(
    ("budget", "unit"),
    [(1023, "B"), (1024, "KiB"), (3 * 2**30, "GiB"), (2**52, "TiB")],
)
def test_the_axis_has_the_budgets_unit(budget, unit):
    m = monitor([budget // 2], budget=budget)
    plot = MonitorPlot(m)
    m()
    plot.update()
    (axes,) = plot.figure.axes
    assert axes.get_ylabel() == f"memory ({unit})"
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert line(plot, "reading").get_ydata() == [budget // 2 / scale]


def test_all_readings_and_the_budget_are_in_sight():
    m = monitor([MIB, 9 * MIB, 2 * MIB], budget=4 * MIB)
    plot = MonitorPlot(m)
    (axes,) = plot.figure.axes
    for step, top in ((3, 4), (40, 9), (50, 9)):
        m(step)
        plot.draw()
        low, high = axes.get_ylim()
        assert low == 0
        assert top < high < 1.2 * top
        left, right = axes.get_xlim()
        assert left < 3 and step < right


def test_no_page_no_display(monkeypatch):
    """In a terminal IPython there is no page either."""
    IPython = pytest.importorskip("IPython")
    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    assert not plotting._in_notebook()
    MonitorPlot(monitor([])).draw()
    monkeypatch.setattr(IPython, "get_ipython", lambda: object())
    assert not plotting._in_notebook()
    MonitorPlot(monitor([])).draw()
    assert shown == []


SOURCE = """\
from membudget.measuring import MemoryMonitor
from membudget.plotting import MonitorPlot
values = iter(range(0, 10_000, 10))
monitor = MemoryMonitor(read=lambda: next(values), budget=1000)
plot = MonitorPlot(monitor)
for step in range(90):
    monitor(step)
    plot.update()
print(monitor.line())"""


def test_in_a_notebook_there_is_one_picture_and_it_changes_in_place():
    cells = [
        SOURCE,
        "plot.update()",
        "import matplotlib.pyplot as plt\nplt.get_fignums()",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    messages = []

    class Client(NotebookClient):
        def process_message(self, msg, cell, cell_index):
            messages.append((cell_index, msg["msg_type"], msg["content"]))
            return super().process_message(msg, cell, cell_index)

    limits = {"timeout": PATIENCE, "startup_timeout": PATIENCE}
    Client(notebook, kernel_name="python3", **limits).execute()
    of_display = [m for m in messages if "display_data" in m[1]]
    kinds = [(cell, kind) for cell, kind, _ in of_display]
    update = "update_display_data"
    assert kinds == [(0, "display_data"), *[(0, update)] * 8, (1, update)]
    pictures = [content["data"]["image/png"] for *_, content in of_display]
    assert len(set(pictures)) == len(pictures) == 10
    texts = {content["data"]["text/plain"] for *_, content in of_display}
    assert len(texts) == 1  # strict nbval compares them
    first, second, third = (cell.outputs for cell in notebook.cells)
    assert [o.output_type for o in first] == ["display_data", "stream"]
    assert base64.b64decode(first[0].data["image/png"])[1:4] == b"PNG"
    assert first[0].data["image/png"] == pictures[-1]
    assert second == []
    assert third[0].data["text/plain"] == "[]"
