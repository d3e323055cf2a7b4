"""What tests of several rooms share."""

import browser as browsers
import project
import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("timeless", deadline=None)
settings.load_profile("timeless")


@pytest.fixture(scope="session")
def site():
    """The built book."""
    if not (project.SITE / "index.html").exists():
        pytest.fail("The book is not built: run `make book` first.")
    return project.SITE


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium or Chrome, one for each test module."""
    if browsers.find() is None:
        pytest.fail("No Chromium or Chrome: run `python tools/browser.py`.")
    with browsers.launch() as browser:
        yield browser
