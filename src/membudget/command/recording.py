"""The first training step of a script, as a page with the timeline."""

import sys
from html import escape
from pathlib import Path
from typing import Any

import traitlets
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from membudget.checks import told
from membudget.command.census import optimizer_of
from membudget.command.watch import Shape, Watch
from membudget.measuring.tracker import PeakTracker
from membudget.measuring.units import format_bytes
from membudget.stepping import parameters_of
from membudget.widgets import Timeline, bundle

STEP = "the first"


class Recording(Watch):
    """Tracks from the first training call to the optimizer's step.

    Args:
        path: of the page.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.name = path, ""
        self.tracker: PeakTracker | None = None
        self._running = False

    def training(self, module: nn.Module, args: tuple) -> None:
        """The first call begins the record."""
        if self.tracker is not None:
            return
        leaves = [x for x in told(self.call).leaves if isinstance(x, Shape)]
        batch = [x.alive for x in leaves if x.alive is not None]
        optimizer = optimizer_of(module)
        existing = [module, *batch, *([optimizer] if optimizer else [])]
        self.name = type(module).__name__
        self._mine = {id(p) for p in module.parameters()}
        self.tracker = PeakTracker(*existing)
        self._running = True
        self.tracker.__enter__()
        self.tracker.inside(module, args)
        self._step = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self._mine & set(map(id, parameters_of(optimizer))):
            self._write()

    def end(self) -> None:
        """Write the page of a step that did not end, too."""
        super().end()
        self._write()

    def _write(self) -> None:
        if self.tracker is None:
            print(
                "membudget: nothing to record, as no module with something "
                "to train was called",
                file=sys.stderr,
            )
        elif self._running:
            self._running = False
            self._step.remove()
            self.tracker.__exit__(None, None, None)
            self.path.write_text(page(self.tracker, self.name), "utf-8")
            print(
                f"membudget: recorded {len(self.tracker.operators)} "
                f"operators, {format_bytes(self.tracker.peak)} at the peak, "
                f"in {self.path}",
                file=sys.stderr,
            )


class _Recorded(Timeline):
    """The timeline of one step."""

    step = traitlets.Enum((STEP,), STEP).tag(sync=True)

    def __init__(self, tracker: PeakTracker, name: str) -> None:
        self._tracker = tracker
        super().__init__()
        self.set_trait("label", f"the first training step of {name}")

    @traitlets.default("steps")
    def _recorded(self) -> dict[str, PeakTracker]:
        return {STEP: self._tracker}

    def sentence(self) -> str:
        """The peak."""
        return f"{format_bytes(self._tracker.peak)} are alive at the peak."


def page(tracker: PeakTracker, name: str) -> str:
    """A page that needs nothing but itself.

    Args:
        tracker: has tracked the step.
        name: of the model.
    """
    widget = _Recorded(tracker, name)
    title = f"A training step of {escape(name)}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title>"
        f"<style>{STYLE}{bundle.style_text(widget.name)}</style>"
        f"<body><h1>{title}</h1>"
        f"{widget._html()}"
        f'<script type="text/x-esm" data-widget="{widget.name}">'
        f"{bundle.module_text(widget.name)}</script>"
        f"<script>{bundle.host_text()}</script>"
    )


STYLE = """
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; max-width: 60rem;
       margin: 1rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
"""
