"""One figure style, one colour for each consumer of memory."""

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from membudget.checks import installed

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

    from membudget.checkpointing import Moment, Run
    from membudget.measuring import MemoryMonitor
    from membudget.parallelism import Replay, Table

_PALETTE = Path(__file__).parent / "widgets" / "palette.css"
ACCENT = "#00618f"
"""The book's accent; what is no consumer of memory is drawn in it."""


def palette() -> dict[str, str]:
    """Colour of each consumer, from the style sheet that widgets use too."""
    return dict(
        re.findall(r"--mb-([\w-]+):\s*(#[0-9A-Fa-f]{6})", _PALETTE.read_text())
    )


def use_style() -> None:
    """Set matplotlib's defaults: SVG, legible at phone width.

    Pictures have a light ground, so that every notebook can show them. Black
    is the text's colour and white the ground's: the book takes its own.
    """
    mpl = installed("matplotlib", "a figure")
    from cycler import cycler

    mpl.rcParams.update(
        {
            "figure.figsize": (4.6, 3.0),
            "figure.dpi": 150,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.titlesize": "medium",
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            # for what is not a consumer of memory
            "axes.prop_cycle": cycler(color=[ACCENT, "black", "#767676"])
            + cycler(linestyle=["-", "--", "-."]),
            "grid.color": "black",
            "grid.alpha": 0.15,
            "legend.frameon": False,
            "legend.fontsize": "medium",
            "lines.linewidth": 1.8,
            "svg.fonttype": "none",
            "svg.hashsalt": "membudget",
        }
    )
    if _in_notebook():
        _show_svg()


def _show_svg() -> None:
    """Let the notebook take SVG, the same one each time."""
    from IPython import get_ipython
    from matplotlib_inline.config import InlineBackend

    options: dict[str, Any] = {
        "bbox_inches": "tight",
        "metadata": dict.fromkeys(("Creator", "Date", "Format", "Type")),
    }
    inline = InlineBackend.instance(parent=get_ipython())
    inline.print_figure_kwargs = options
    inline.figure_formats = {"svg"}


def name_areas(*pictures: "Axes", ncols: int = 2) -> None:
    """Write the names of areas and bars on them.

    A name stands in the largest piece that has room for it. A legend above
    the figure has the names that fit nowhere, and those of lines.

    Args:
        pictures: axes of one figure with all that is to be drawn, and their
            limits.
        ncols: columns of the legend.
    """
    figure = cast("Figure", pictures[0].figure)
    figure.draw_without_rendering()  # now the layout is known
    named: dict[str, Artist] = {}
    written = set()
    for axes in pictures:
        found = axes.get_legend_handles_labels()
        for artist, name in zip(*found, strict=True):
            named.setdefault(name, artist)
            if _write_on(axes, artist, name):
                written.add(name)
    if left := [name for name in named if name not in written]:
        artists = [named[name] for name in left]
        figure.legend(artists, left, loc="outside upper left", ncols=ncols)


def _write_on(axes: "Axes", artist: "Artist", name: str) -> bool:
    """Whether a piece of the artist had room for its name."""
    text = axes.text(0, 0, name, ha="center", va="center")
    box = text.get_window_extent()
    for piece in _pieces(axes, artist):
        place = _room(piece, 1.1 * box.width + 8, box.height + 4)
        if place is not None:
            x, y = axes.transData.inverted().transform(place)
            text.set_position((x, y))
            return True
    text.remove()
    return False


def _pieces(axes: "Axes", artist: "Artist") -> "list[Outline]":
    """Outlines of an area, or of bars, on the screen; the largest first."""
    from matplotlib.collections import PolyCollection
    from matplotlib.container import BarContainer

    found = []
    if isinstance(artist, PolyCollection):
        to_screen = axes.transData
        found = [to_screen.transform_path(path) for path in artist.get_paths()]
    elif isinstance(artist, BarContainer):
        found = [
            bar.get_transform().transform_path(bar.get_path())
            for bar in artist.patches
        ]
    return sorted(found, key=_size, reverse=True)


def _size(outline: "Outline") -> int:
    box = outline.get_extents()
    return round(box.width * box.height)


def _room(
    outline: "Outline", width: float, height: float
) -> tuple[float, float] | None:
    """Where in an outline a box has most air above and below; its centre."""
    import numpy as np

    box = outline.get_extents()
    if box.width < width or box.height < height:
        return None
    x, y, dx = np.meshgrid(
        np.linspace(box.x0 + width / 2, box.x1 - width / 2, 60),
        np.linspace(box.y0, box.y1, 80),
        np.linspace(-width / 2, width / 2, 9),
        indexing="ij",
    )
    points = np.stack([(x + dx).ravel(), y.ravel()], axis=1)
    inside = np.reshape(outline.contains_points(points), x.shape)
    free = np.all(inside, axis=2)
    middle = (box.x0 + box.x1) / 2
    most, place = (height, -box.width), None
    for column, here in zip(x[:, 0, 0], [*free], strict=True):
        rows = zip(here, y[0, :, 0], strict=True)
        for is_free, run in groupby(rows, lambda row: row[0]):
            low, *_, high = [row[1] for row in run] * 2
            air = (round(high - low), -abs(column - middle))
            if is_free and air > most:
                most, place = air, (column, (low + high) / 2)
    return place


class MonitorPlot:
    """A picture of a memory monitor that grows while training runs.

    Points are the readings, the line is the largest of the window, and
    dashed lines are the budget and the shares of it where a warning begins.
    In a notebook the picture is shown where it is first drawn, and changes in
    its place; elsewhere only ``figure`` changes.

    Args:
        monitor: what is drawn.

    Attributes:
        figure: the matplotlib figure, closed for pyplot, so that a notebook
            does not show it twice.

    Example:
        >>> plot = MonitorPlot(monitor)
        >>> for step, batch in enumerate(loader):
        ...     monitor(step, loss=train(batch))
        ...     plot.update()
        >>> plot.draw()
    """

    def __init__(self, monitor: "MemoryMonitor") -> None:
        plt = installed("matplotlib.pyplot", "a figure")
        from membudget.measuring.units import UNITS, format_bytes

        self.monitor, self._calls = monitor, 0
        self._peaks: list[int] = []
        self._handle = None  # of the picture on the page
        unit = format_bytes(monitor.budget).split()[1]
        self._unit = 1024 ** UNITS.index(unit)

        self.figure, self._axes = plt.subplots()
        plt.close(self.figure)
        self._axes.set(xlabel="step", ylabel=f"memory ({unit})")
        self._axes.locator_params("x", integer=True)
        (self._window,) = self._axes.plot(
            [], [], label=f"peak of the last {monitor.window}"
        )
        (self._points,) = self._axes.plot([], [], "o", ms=3, label="reading")
        self._axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0
        )
        for share, name in (
            (1, "budget"),
            (monitor.critical, "critical"),
            (monitor.warning, "warning"),
        ):
            self._limit(share * monitor.budget / self._unit, name)

    def _limit(self, height: float, name: str) -> None:
        import matplotlib as mpl

        colour = mpl.rcParams["text.color"]
        width = 1.8 if name == "budget" else 0.9
        self._axes.axhline(height, color=colour, ls="--", lw=width)
        self._axes.annotate(
            name,
            (1, height),
            xytext=(4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )

    def update(self) -> None:
        """Draw at every tenth call: call it after each of the monitor's.

        Drawing takes a tenth of a second.
        """
        if self._calls % 10 == 0:
            self.draw()
        self._calls += 1

    def draw(self) -> None:
        """Draw what the monitor has read by now."""
        readings, window = self.monitor.readings, self.monitor.window
        for end in range(len(self._peaks) + 1, len(readings) + 1):
            last = readings[max(0, end - window) : end]
            self._peaks.append(max(r.bytes for r in last))
        steps = [r.step for r in readings]
        self._points.set_data(steps, [r.bytes / self._unit for r in readings])
        self._window.set_data(steps, [p / self._unit for p in self._peaks])
        self._axes.relim()
        self._axes.autoscale_view(scaley=False)
        most = max(self.monitor.budget, self.monitor.peak) / self._unit
        self._axes.set_ylim(0, 1.05 * most)
        self._show()

    def _show(self) -> None:
        if self._handle is not None:
            self._handle.update(self.figure)
        elif _in_notebook():
            from IPython.display import display

            self._handle = display(self.figure, display_id=True)


def _in_notebook() -> bool:
    """Whether there is a page to show pictures on."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return hasattr(shell, "kernel")


def plot_pipeline(axes: "Axes", order: "Table", run: "Replay") -> None:
    """Draw a pipeline's step: a row for each rank, a box for each operation.

    A box has the number of its micro-batch, if it has room. The stages beside
    a rank's first are paler, and backward passes' parts for weights hatched.

    Args:
        axes: an ``Axes`` of matplotlib.
        order: of the operations, by rank.
        run: what :func:`membudget.parallelism.replay` made of it.
    """
    names = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
    for rank, row in enumerate(order):
        first = min(o.stage for o in row)
        for o, start, end in zip(
            row, run.starts[rank], run.ends[rank], strict=True
        ):
            axes.barh(
                rank,
                end - start,
                left=start,
                height=0.8,
                color="C0" if o.kind == "F" else "C2",
                alpha=0.6 if o.stage == first else 0.3,
                edgecolor="white",
                hatch="////" if o.kind == "W" else None,
                label=names.pop(o.kind, None),
            )
            if end - start >= run.time / 40:
                at = (start + end) / 2, rank
                axes.text(*at, str(o.micro_batch), ha="center", va="center")
    axes.set_yticks(
        range(len(order)), [f"rank {r}" for r in range(len(order))]
    )
    axes.set(xlim=(0, run.time), ylim=(len(order) - 0.5, -0.5))


def plot_run(axes: "Axes", run: "Run") -> None:
    """Draw what the tape machine counted, action by action.

    Stacked steps from below: checkpoints, tapes, recomputed tapes, the value
    at work, the gradient on its way back (with the gradients that stay),
    workspace. A band behind them says where stages run again, and a dot
    marks the peak.

    Args:
        axes: matplotlib's, to draw on.
        run: from :func:`membudget.checkpointing.simulate`.
    """
    colour = palette()
    looks = {
        "kept": ("checkpoints", colour["activations"], "////"),
        "tapes": ("tapes", colour["activations"], ""),
        "recomputed": ("recomputed tapes", colour["recomputation"], ""),
        "value": ("value at work", colour["inputs"], ""),
        "gradients": ("gradient on its way back", colour["gradients"], ""),
        "workspace": ("workspace", colour["temporaries"], ""),
    }
    count = len(run.moments)
    floor = [0.0] * count
    for part, (label, face, hatch) in looks.items():
        sizes = [_shown(moment, part) for moment in run.moments]
        top = [low + size for low, size in zip(floor, sizes, strict=True)]
        if any(sizes):
            axes.fill_between(
                range(count + 1),
                [*floor, floor[-1]],
                [*top, top[-1]],
                step="post",
                facecolor=face,
                edgecolor="white",
                hatch=hatch,
                linewidth=0.3,
                label=label,
            )
        floor = top
    label, end = "recomputation", 0
    for extra, group in groupby(run.moments, lambda moment: moment.extra):
        start, end = end, end + len(list(group))
        if extra:
            shade = colour["recomputation"]
            axes.axvspan(
                start, end, zorder=0, label=label, color=shade, alpha=0.2, lw=0
            )
            label = ""
    axes.plot(run.peak_moment + 0.5, run.peak, "ko", markersize=4)
    axes.set(xlabel="action", xlim=(0, count), ylim=(0, None))
    axes.locator_params("y", integer=True)


def _shown(moment: "Moment", part: str) -> int:
    """Bytes of a part; recomputed tapes are one of their own."""
    if part == "recomputed":
        return moment.recomputed
    again = moment.recomputed if part == "tapes" else 0
    return moment.part(part) - again
