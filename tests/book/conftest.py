"""The windows in which the tests open the book's pages."""

from contextlib import ExitStack

import pytest
import site_checks as checks

SETTINGS = {
    "desktop": {"viewport": checks.DESKTOP},
    "phone": {"viewport": checks.PHONE},
    "no javascript": {"java_script_enabled": False},
    "dark": {"color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def window(browser):
    """Gives the window of a name, one for all tests of a module."""
    opened = {}
    with ExitStack() as stack:

        def window(name):
            if name not in opened:
                visit = checks.visitor(browser, **SETTINGS[name])
                opened[name] = stack.enter_context(visit)
            return opened[name]

        yield window
