"""One figure style, one colour for each consumer of memory."""

import re
from pathlib import Path

_PALETTE = Path(__file__).parent / "widgets" / "palette.css"


def palette() -> dict[str, str]:
    """Colour of each consumer, from the style sheet that widgets use too."""
    return dict(
        re.findall(r"--mb-([\w-]+):\s*(#[0-9A-Fa-f]{6})", _PALETTE.read_text())
    )


def use_style() -> None:
    """Set matplotlib's defaults: legible at phone width, on a light card."""
    import matplotlib as mpl

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
            "axes.prop_cycle": mpl.cycler(
                color=["#24364b", "#b0307a", "#4f8a3c", "#7a7a7a"]
            ),
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "savefig.facecolor": "white",
        }
    )
