"""A progress bar of one line; plain lines where there is no terminal."""

import sys
from typing import TextIO

WIDTH = 24


class Progress:
    """Show how many samples of an experiment are there.

    Args:
        label: what is measured.
        total: samples that are expected.
        stream: where it is shown.
    """

    def __init__(
        self, label: str, total: int, stream: TextIO | None = None
    ) -> None:
        self.label, self.total = label, total
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.show(0)

    def show(self, count: int) -> None:
        """Draw the bar with ``count`` samples done."""
        text = f"{self.label}  {count}/{self.total}"
        if self.terminal:
            full = min(WIDTH, WIDTH * count // max(1, self.total))
            bar = "#" * full + "." * (WIDTH - full)
            self.stream.write(f"\r\x1b[K{text}  {bar}")
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def end(self, text: str) -> None:
        """Replace the bar by its outcome."""
        start = "\r\x1b[K" if self.terminal else ""
        self.stream.write(f"{start}{self.label}  {text}\n")
        self.stream.flush()
