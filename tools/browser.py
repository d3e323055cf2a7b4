"""Find a Chromium or Chrome for the browser tests, else install one.

Prints its path. CHROME or CHROMIUM in the environment names one explicitly.
"""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

from playwright.sync_api import Error, sync_playwright
from project import PATIENCE

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "%ProgramFiles%/Google/Chrome/Application/chrome.exe",
    "%ProgramFiles(x86)%/Google/Chrome/Application/chrome.exe",
    "%LOCALAPPDATA%/Google/Chrome/Application/chrome.exe",
)
# Beyond Playwright's own: what would contact other hosts by itself.
FLAGS = (
    "--no-sandbox",
    "--disable-component-update",
    "--disable-domain-reliability",
)


def find():
    """The path of a browser on this machine, or None."""
    for variable in ("CHROME", "CHROMIUM"):
        if path := os.environ.get(variable):
            return shutil.which(path)
    for name in NAMES:
        if path := shutil.which(name):
            return path
    for place in PLACES:
        if os.path.exists(path := os.path.expandvars(place)):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.path.exists(path) else None


def install():
    """Install Playwright's Chromium, or as root the distribution's."""
    commands = [[sys.executable, "-m", "playwright", "install", "chromium"]]
    if shutil.which("apt-get") and os.geteuid() == 0:
        apt = "apt-get -qy update && apt-get -qy install chromium"
        commands += [["sh", "-c", apt]]
    for command in commands:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if done.returncode == 0:
            return


@contextmanager
def launch():
    """A running headless browser, closed at the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find(), args=list(FLAGS), timeout=1000 * PATIENCE
        )
        yield browser
        browser.close()


def main():
    named = os.environ.get("CHROME") or os.environ.get("CHROMIUM")
    if find() is None and not named:
        install()
    path = find()
    try:
        if path is None:
            raise FileNotFoundError(f"{named or 'no browser'}: not found")
        with launch():
            print(path)
    except (FileNotFoundError, Error) as error:
        sys.exit(
            f"{error}\n\nThe browser tests need a Chromium or Chrome that "
            "starts: install one with your package manager, or name it: "
            "CHROME=/path/to/chrome make test"
        )


if __name__ == "__main__":
    main()
