"""The tool that finds a browser for the tests."""

import browser
import pytest


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    for name in ("CHROME", "CHROMIUM"):
        monkeypatch.delenv(name, raising=False)


def test_a_browser_is_installed_where_the_path_has_a_space(
    monkeypatch, tmp_path
):
    python = tmp_path / "a b"
    python.write_text(f"#!/bin/sh\necho \"$@\" > '{tmp_path}/asked'\n")
    python.chmod(0o755)
    monkeypatch.setattr(browser.sys, "executable", str(python))
    browser.install()
    asked = (tmp_path / "asked").read_text()
    assert asked == "-m playwright install chromium\n"


@pytest.mark.parametrize("named", ["/no/such/browser", "false"])
def test_a_browser_that_does_not_start(monkeypatch, named):
    monkeypatch.setenv("CHROME", named)
    monkeypatch.setattr(browser, "install", lambda: pytest.fail("installed"))
    with pytest.raises(SystemExit, match=r"(?s)^.+CHROME=/path/to/chrome"):
        browser.main()


def test_none_can_be_had(monkeypatch):
    monkeypatch.setattr(browser, "find", lambda: None)
    monkeypatch.setattr(browser, "install", lambda: None)
    with pytest.raises(SystemExit, match=r"no browser: not found\n\n"):
        browser.main()
