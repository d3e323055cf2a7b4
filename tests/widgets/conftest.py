"""What the widgets' browser tests share, and the way to their helpers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import widget_pages


@pytest.fixture
def show(browser):
    """Shows widgets on a page; the console has to stay quiet."""
    problems, contexts = [], []

    def show(*widgets, width=1000, style="", **settings):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, **settings
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.set_content(widget_pages.document(*widgets, style=style))
        if settings.get("java_script_enabled", True):
            page.wait_for_selector(".mb-root svg .mb-axis", state="attached")
        return page

    yield show
    for context in contexts:
        context.close()
    assert problems == []
