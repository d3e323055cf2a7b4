"""The windows in which the tests open the book's pages."""

from contextlib import ExitStack

import pytest
import site_checks as checks

SETTINGS = {
    "desktop": {"viewport": checks.DESKTOP},
    "phone": {"viewport": checks.PHONE},
    "chinese": {"viewport": checks.PHONE, "locale": "zh-CN"},
    "no javascript": {"java_script_enabled": False},
    "dark": {"color_scheme": "dark"},
}
# What a Chinese page asks for in words and does not have.
MISSING = """(() => {
  let words;
  window.mbMissing = [];
  Object.defineProperty(window, "mbWords", {
    get: () => words,
    set: (own) => (words = new Proxy(own, {
      get(all, key) {
        if (!(key in all) && /[a-z]{3}/.test(key)) mbMissing.push(key);
        return all[key];
      },
    })),
  });
})()"""


@pytest.fixture(scope="module")
def window(browser):
    """Gives the window of a name, one for all tests of a module."""
    opened = {}
    with ExitStack() as stack:

        def window(name):
            if name not in opened:
                visit = checks.visitor(browser, **SETTINGS[name])
                opened[name] = stack.enter_context(visit)
                opened[name].add_init_script(MISSING)
            return opened[name]

        yield window
