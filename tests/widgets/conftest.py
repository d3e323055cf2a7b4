"""What the widgets' browser tests share, and the way to their helpers."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from project import PATIENCE

HERE = Path(__file__).parent
FOLDERS = sorted(path.parent for path in HERE.glob("*/kind_*.py"))
sys.path[:0] = map(str, (*FOLDERS, HERE))
# So that a failure of what all widgets promise shows its difference.
pytest.register_assert_rewrite(
    "kind", *(f"kind_{folder.name}" for folder in FOLDERS)
)
widget_pages = import_module("widget_pages")


@pytest.fixture(scope="session")
def windows(browser):
    """Windows that no test has in use, by their settings.

    They are kept for the next tests: a new one takes longer than a widget.
    """
    free = {}
    yield free
    for pages in free.values():
        for page in pages:
            page.context.close()


@pytest.fixture
def open_page(show, tmp_path):
    """Shows widgets on a page that has an address of its own."""

    def open_page(*widgets):
        page = show(*widgets)
        file = tmp_path / "widget.html"
        file.write_text(widget_pages.document(*widgets))
        page.goto(file.as_uri())
        page.wait_for_selector(".mb-root svg .mb-axis", state="attached")
        page.evaluate(widget_pages.IMMEDIATE)
        return page

    return open_page


@pytest.fixture
def show(browser, windows):
    """Shows widgets on a page; the console has to stay quiet."""
    problems, used = [], []
    seen = {
        "console": lambda message: problems.append(message.text),
        "pageerror": lambda error: problems.append(str(error)),
    }

    def show(*widgets, width=1000, style="", **settings):
        free = windows.setdefault(str(settings), [])
        page = (
            free.pop() if free else browser.new_context(**settings).new_page()
        )
        used.append((free, page))
        page.set_default_timeout(1000 * PATIENCE)
        for event, see in seen.items():
            page.on(event, see)
        page.set_viewport_size({"width": width, "height": 900})
        page.set_content(widget_pages.document(*widgets, style=style))
        if settings.get("java_script_enabled", True):
            page.wait_for_selector(".mb-root svg .mb-axis", state="attached")
            page.evaluate(widget_pages.IMMEDIATE)
        return page

    yield show
    for free, page in used:
        page.goto("about:blank")  # of which nothing stays: a new document
        page.mouse.move(0, 0)
        for event, see in seen.items():
            page.remove_listener(event, see)
        free.append(page)
    assert problems == []
