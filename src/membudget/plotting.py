"""One figure style, one colour for each consumer of memory."""

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from membudget.checkpointing import Moment, Run
    from membudget.measuring import MemoryMonitor

_PALETTE = Path(__file__).parent / "widgets" / "palette.css"


def palette() -> dict[str, str]:
    """Colour of each consumer, from the style sheet that widgets use too."""
    return dict(
        re.findall(r"--mb-([\w-]+):\s*(#[0-9A-Fa-f]{6})", _PALETTE.read_text())
    )


def use_style() -> None:
    """Set matplotlib's defaults: legible at phone width, on a light card."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(
        {
            "figure.figsize": (4.6, 3.0),
            "figure.dpi": 150,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            # for what is not a consumer of memory
            "axes.prop_cycle": cycler(
                color=["#24364b", "#b0307a", "#4f8a3c", "#7a7a7a"]
            ),
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "savefig.facecolor": "white",
        }
    )


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
        import matplotlib.pyplot as plt

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
            f" {name}",
            (1, height),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize="small",
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


def _shown(moment: "Moment", part: str) -> int:
    """Bytes of a part; recomputed tapes are one of their own."""
    if part == "recomputed":
        return moment.recomputed
    again = moment.recomputed if part == "tapes" else 0
    return moment.part(part) - again
