"""What tests of several rooms share."""

import gc
import sys

import browser as browsers
import project
import pytest
from hypothesis import settings

from tests.soak import few_cases

# How long an example takes depends on what else the machine does.
settings.register_profile("timeless", deadline=None)
settings.load_profile("timeless")


def pytest_collection_modifyitems(config, items):
    kept = few_cases(items)
    dropped = set(items).difference(kept)
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = kept


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_not_searched_for_garbage():
    """PyTorch and its company are half a million objects, and much of what is
    tested collects garbage: let it look at what the module makes only.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def devices_that_are_not_there_are_not_seeded():
    """`torch.manual_seed` seeds every kind of device. For one that is not in
    use it writes down the stack, which takes longer than most of what is
    tested; and where there is no such device nobody ever reads it.
    """
    torch = sys.modules.get("torch")
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cuda", "xpu", "mtia"):
            device = getattr(torch, kind, None)
            seeds = hasattr(device, "manual_seed_all")
            if seeds and not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="session")
def site():
    """The built book."""
    if not (project.SITE / "index.html").exists():
        pytest.fail("The book is not built: run `make book` first.")
    return project.SITE


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium or Chrome, for all tests: it takes long to start."""
    if browsers.find() is None:
        pytest.fail("No Chromium or Chrome: run `python tools/browser.py`.")
    with browsers.launch() as browser:
        yield browser
